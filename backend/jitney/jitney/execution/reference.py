"""Paged attention in plain torch: obviously right, for any device, and slow.

It is what the fast kernels are tested against and what runs where none of them does. Inside a block
of the cache it keeps [token, head element], as :func:`attention.cache_shape` says; the last bytes
of a token are its scale, if it is int8.
"""

import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.byte_cache import LEAST_SCALE, SCALE_BYTES
from jitney.execution.interface import AttentionCall, LayerCache

# Scores that are computed at once. A row with more of them is cut into slices of its queries, which
# bounds the memory of a long prompt.
_SLICE_SCORES = 1 << 24


class ReferenceAttention:
    """The attention function ``reference``; see :class:`interface.AttentionFunction`."""

    name = "reference"

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write K and V to their slots, then attend; scores and sums in float32."""
        write(call.key, cache.keys, meta, cache.key_scale)
        write(call.value, cache.values, meta, cache.value_scale)
        query = call.query
        head_size = query.shape[-1]
        out = torch.empty_like(query)
        query_start = meta.query_start.tolist()
        for r, context in enumerate(meta.context_len.tolist()):
            first = query_start[r]
            last = query_start[r + 1]
            blocks = meta.block_table[r, : -(-context // meta.block_size)].long()
            keys = _gather(cache.keys, blocks, cache.key_scale)[:, :context, :head_size]
            values = _gather(cache.values, blocks, cache.value_scale)[:, :context, :head_size]
            slice_len = max(1, _SLICE_SCORES // (query.shape[1] * context))
            for begin in range(first, last, slice_len):
                end = min(begin + slice_len, last)
                num_seen = context - (last - end)  # by the slice's last query
                part = query[begin:end].float()
                out[begin:end] = _attend(part, keys[:, :num_seen], values[:, :num_seen], call)
        return out


def write(new: Tensor, cache: Tensor, meta: AttentionMetadata, scale: Tensor | None) -> None:
    """Put ``new`` [T, KV heads, head] into its slots. A float8 cache gets it divided by ``scale``
    [KV heads], if given; an int8 cache divided by a scale for each token and head, which makes the
    largest element 127 and is stored beside it."""
    block = torch.div(meta.slot_mapping, meta.block_size, rounding_mode="floor")
    offset = meta.slot_mapping % meta.block_size
    view = cache[..., : new.shape[-1]]
    if cache.dtype == torch.int8:
        scales = (new.float().abs().amax(-1) / 127).clamp_min(LEAST_SCALE)
        _scales(cache)[block, :, offset] = scales
        new = (new.float() * (1 / scales)[..., None]).round()
    elif scale is not None:
        most = torch.finfo(cache.dtype).max
        new = (new.float() / scale[None, :, None]).clamp(-most, most)
    view[block, :, offset] = new.to(cache.dtype)


def _gather(cache: Tensor, blocks: Tensor, scale: Tensor | None) -> Tensor:
    """The contents of these blocks, one after the other: float32 [KV heads, tokens, head]."""
    gathered = cache[blocks].transpose(0, 1).flatten(1, 2)
    if cache.dtype == torch.int8:
        return gathered[..., :-SCALE_BYTES] * _scales(gathered)[..., None]
    return gathered.float() if scale is None else gathered.float() * scale[:, None, None]


def _scales(cache: Tensor) -> Tensor:
    """The scales in an int8 cache [..., head and scale], as a view: float32 [...]."""
    return cache[..., -SCALE_BYTES:].view(torch.float32).squeeze(-1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor:
    """Attention of the last n of c positions: ``q`` [n, heads, head] over keys and values
    [KV heads, c, head], with the scale, window, softcap and sinks of ``call``. Returns
    [n, heads, head].
    """
    n, num_heads, head_size = q.shape
    num_kv_heads, context, _ = keys.shape
    grouped = q.transpose(0, 1).reshape(num_kv_heads, -1, n, head_size)
    scores = grouped @ keys[:, None].transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    positions = torch.arange(context, device=q.device)
    distance = positions[-n:, None] - positions
    unseen = distance < 0
    if call.window is not None:
        unseen |= distance >= call.window
    scores = scores.masked_fill(unseen, float("-inf")).reshape(num_heads, n, context)
    if call.sinks is not None:
        # One more logit per head, which takes part in the denominator and carries no value.
        column = call.sinks.to(scores.dtype)[:, None, None].expand(num_heads, n, 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., :context].reshape(num_kv_heads, -1, n, context)
    return (weights @ values[:, None]).reshape(num_heads, n, -1).transpose(0, 1)
