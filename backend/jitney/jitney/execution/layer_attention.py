"""Which attention function a layer has in plain torch. Called by the proof at load (``probe``), and
by ``acceleration`` for layers that no kernel takes."""

import torch

from jitney.errors import ConfigError
from jitney.execution.alibi import AlibiAttention
from jitney.execution.chunked import ChunkedAttention
from jitney.execution.interface import AttentionFunction, LayerSpec
from jitney.execution.latents import LatentAttention
from jitney.execution.reference import ReferenceAttention


def needs_torch(spec: LayerSpec, dtype: torch.dtype) -> bool:
    """Whether no kernel attends as this layer does over a cache of ``dtype``."""
    # The 8-bit numbers of a token have one scale: beside a key they cannot hold its position, as
    # ``alibi`` needs it.
    return spec.has_latents or (spec.has_slopes and dtype.itemsize == 1)


def torch_attention(spec: LayerSpec, *, batch_invariant: bool = False) -> AttentionFunction:
    """The layer's function. Raises ConfigError if it cannot be batch invariant."""
    if spec.has_latents:
        return in_chunks(LatentAttention(batch_invariant), spec)
    if batch_invariant:
        bound = "False for a model that attends with ALiBi"
        raise ConfigError.of("batch_invariant", True, bound)
    return in_chunks(ReferenceAttention(), spec)


def in_chunks(attend: AttentionFunction, spec: LayerSpec) -> AttentionFunction:
    """``attend``, in chunks if the layer has them."""
    return attend if spec.chunk is None else ChunkedAttention(attend, spec.chunk)


def by_kernel(attend: AttentionFunction, spec: LayerSpec) -> AttentionFunction:
    """The layer's function, of a kernel's ``attend`` for its head size."""
    if spec.has_slopes:
        attend = AlibiAttention(attend)
    return in_chunks(attend, spec)
