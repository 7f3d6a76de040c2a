"""Attention over the paged KV cache: one attention function per device, and the choice among them.

The runner builds an :class:`AttentionMetadata` once per step, and every layer of the model calls
the selected function with it.
"""

import logging
from typing import Protocol

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


def select(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    num_heads: int,
    num_kv_heads: int,
) -> AttentionFunction:
    """The attention function of option ``attention``, compiled and ready to be called.

    ``dtype`` is the cache's. Each call makes an object of its own: two engines share none. ``auto``
    takes the fast kernel of the device and falls back to the reference, saying why in the log.
    Raises ConfigError if a kernel asked for by name cannot run.
    """
    if name not in ("auto", "reference", "cpu"):
        raise ConfigError.of("attention", name, "auto, reference or cpu")
    if name == "reference":
        return ReferenceAttention()
    reason = _why_not_cpu(device, dtype)
    if reason is None:
        from jitney.execution.attention.cpu import CpuAttention

        return CpuAttention(dtype)
    if name == "cpu":
        raise ConfigError(f"option attention is 'cpu', but {reason}")
    _log.warning("attention runs in plain torch, which is slow: %s", reason)
    return ReferenceAttention()


def _why_not_cpu(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the CPU kernel cannot run, or None if it can."""
    if device.type != "cpu":
        return f"the CPU kernel does not run on {device.type}"
    try:
        from jitney.execution.attention.cpu import supported_dtypes
    except ImportError as error:
        return f"the CPU kernel needs numba (pip install 'triton-jitney[cpu]'): {error}"
    known = supported_dtypes()
    if dtype not in known:
        names = ", ".join(str(d).removeprefix("torch.") for d in known)
        return f"the CPU kernel has caches of {names}, not {str(dtype).removeprefix('torch.')}"
    return None
