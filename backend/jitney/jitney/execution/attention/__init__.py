"""Attention over the paged KV cache: one attention function per device, and the choice among them.

The runner builds an :class:`AttentionMetadata` once per step, and every layer of the model calls
the selected function with it.
"""

import logging
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jitney.errors import ConfigError
from jitney.execution.attention.metadata import (
    AttentionMetadata,
    BlockTables,
    build_metadata,
    cache_shape,
)
from jitney.execution.attention.reference import ReferenceAttention

__all__ = [
    "AttentionFunction",
    "AttentionMetadata",
    "BlockTables",
    "build_metadata",
    "cache_shape",
    "select",
]

_log = logging.getLogger(__name__)


class AttentionFunction(Protocol):
    """Writes the new K and V to their slots, then attends causally over each row's block table.

    q is [T, heads, head], k and v are [T, KV heads, head], of any strides; query head h reads KV
    head ``h // (heads // KV heads)``. The caches have :func:`cache_shape`; k and v are converted to
    their dtype. The query at position p sees keys max(0, p - window + 1) to p. ``softcap`` maps
    scores to ``cap * tanh(score / cap)``. ``sinks`` [heads] is one more logit per head in the
    denominator of the softmax. Returns [T, heads, head] of q's dtype.
    """

    name: str

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class Layer(NamedTuple):
    """What the choice of a layer's attention function depends on."""

    device: torch.device
    dtype: torch.dtype
    """The cache's."""
    head_size: int
    num_heads: int
    num_kv_heads: int
    batch_invariant: bool


def select(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    batch_invariant: bool = False,
) -> AttentionFunction:
    """The attention function of option ``attention``, compiled and ready to be called.

    ``dtype`` is the cache's. Each call makes an object of its own: two engines share none. ``auto``
    takes the fast kernel of the device and falls back to the reference, saying why in the log.
    Raises ConfigError if a kernel asked for by name cannot run, or if ``batch_invariant`` is asked
    of another than ``gpu``.
    """
    makers = {"cpu": _cpu, "gpu": _gpu, "flashinfer": _flashinfer}
    if name not in ("auto", "reference", *makers):
        raise ConfigError.of("attention", name, "auto, reference, cpu, gpu or flashinfer")
    layer = Layer(device, dtype, head_size, num_heads, num_kv_heads, batch_invariant)
    wanted = name
    if name == "auto":
        wanted = "cpu" if device.type == "cpu" else "gpu"
    reason: str | None = None
    if wanted != "reference":
        made = makers[wanted](layer)
        if not isinstance(made, str):
            return made
        reason = made
        if name != "auto":
            raise ConfigError(f"option attention is {name!r}, but {reason}")
    if batch_invariant:
        raise ConfigError(f"option batch_invariant needs the attention kernels of a GPU: {reason}")
    if reason is not None:
        _log.warning("attention runs in plain torch, which is slow: %s", reason)
    return ReferenceAttention()


def _cpu(layer: Layer) -> AttentionFunction | str:
    """The CPU kernel, or why it cannot run."""
    if layer.device.type != "cpu":
        return f"the CPU kernel does not run on {layer.device.type}"
    if layer.batch_invariant:
        return "option batch_invariant needs the attention kernels of a GPU"
    try:
        from jitney.execution.attention.cpu import CpuAttention, supported_dtypes
    except ImportError as error:
        return f"the CPU kernel needs numba (pip install 'triton-jitney[cpu]'): {error}"
    known = supported_dtypes()
    if layer.dtype not in known:
        names = ", ".join(map(_short, known))
        return f"the CPU kernel has caches of {names}, not {_short(layer.dtype)}"
    return CpuAttention(layer.dtype)


def _gpu(layer: Layer) -> AttentionFunction | str:
    """The GPU's kernels, or why they cannot run."""
    try:
        import triton
    except ImportError as error:
        return (
            "the GPU's kernels need the Triton language "
            f"(pip install 'triton-jitney[gpu]'): {error}"
        )
    interpreted = layer.device.type == "cpu" and triton.knobs.runtime.interpret
    if layer.device.type != "cuda" and not interpreted:
        return f"the GPU's kernels need a CUDA device, not {layer.device.type}"
    from jitney.execution.attention.gpu import GpuAttention
    from jitney.execution.attention.gpu_tiles import why_not

    device, dtype, head_size, num_heads, num_kv_heads, batch_invariant = layer
    reason = why_not(device, dtype, head_size, num_heads, num_kv_heads)
    if reason is not None:
        return reason
    return GpuAttention(
        device, dtype, head_size, num_heads, num_kv_heads, batch_invariant=batch_invariant
    )


def _flashinfer(layer: Layer) -> AttentionFunction | str:
    """FlashInfer's kernels, or why they cannot run."""
    device, dtype, head_size, num_heads, num_kv_heads, batch_invariant = layer
    if batch_invariant:
        return "option batch_invariant needs attention 'gpu'"
    try:
        from jitney.execution.attention.flashinfer import FlashInferAttention, why_not
    except ImportError as error:
        return f"the library is not there (pip install flashinfer-python): {error}"
    reason = why_not(device, dtype, head_size, num_heads, num_kv_heads)
    return FlashInferAttention(device, dtype) if reason is None else reason


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
