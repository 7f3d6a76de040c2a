"""Scales of a float8 KV cache. Called by ``gpu_accelerator``, once while a runner loads.

The magnitudes of float8_e4m3 reach from 2^-9 to 448. Each KV head of a layer gets one scale for its
keys and one for its values; the cache holds each number divided by its scale. The scales are found
by a run of a few hundred tokens over a cache of the model's own dtype, which notes the largest
magnitudes.
"""

import torch
from torch import Tensor

from jitney.execution.attention import build_metadata
from jitney.execution.interface import AttentionCall, KvScales, LoadedModel, PagedStep
from jitney.execution.memory import make_layer_caches
from jitney.execution.probe import probe_row
from jitney.execution.reference import ReferenceAttention

_TOKENS = 256
"""How many tokens are run, at most."""
_MARGIN = 2.0
"""A scale leaves room for numbers so many times the largest that was seen: other texts may have
larger ones. That costs no precision: a float8 has as many bits for smaller numbers."""
_LARGEST_E4M3 = 448.0
_SMALLEST = 1e-6
"""The least scale. A head that gave only zeros needs one, too, as its numbers are divided by it."""


@torch.inference_mode()
def find_kv_scales(model: LoadedModel, block_size: int) -> list[KvScales]:
    """The scales of every layer, float32 [KV heads] on the model's device."""
    count = min(_TOKENS, model.max_model_len)
    blocks = -(-count // block_size)
    attention = [ReferenceAttention()] * len(model.layers)
    caches = make_layer_caches(
        model.layers, attention, block_size, model.dtype, model.device, blocks
    )
    row = probe_row(
        prompt=[0] * count,  # not used: the model gets the ids below
        start=0,
        count=count,
        block_table=list(range(blocks)),
    )
    meta = build_metadata([row], block_size, model.device)
    step = PagedStep(caches, meta)
    scales: dict[int, KvScales] = {}

    def attend(call: AttentionCall) -> Tensor:
        scales[call.layer] = KvScales(_scale(call.key), _scale(call.value))
        return step(call)

    ids = _spread_ids(count, model)
    last = torch.tensor([count - 1], device=model.device)
    model.forward(ids, meta.positions, last, attend)
    return [scales[layer] for layer in range(len(caches))]


def _spread_ids(count: int, model: LoadedModel) -> Tensor:
    """Token ids far apart in the vocabulary, all different if it has that many."""
    # Multiples of a stride, modulo the vocabulary's size, repeat early only if the two have a
    # common divisor. As the stride is a prime, that is so only if it divides the size.
    stride = 7919
    if model.vocab_size % stride == 0:
        stride = 1
    return (torch.arange(count, device=model.device) * stride + 1) % model.vocab_size


def _scale(x: Tensor) -> Tensor:
    """The scale of each KV head, for keys or values [T, KV heads, head size]."""
    largest = x.float().abs().amax((0, 2))
    return (largest * (_MARGIN / _LARGEST_E4M3)).clamp_(min=_SMALLEST)
