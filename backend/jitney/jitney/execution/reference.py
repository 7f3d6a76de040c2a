"""Paged attention in plain torch: obviously right, for any device, and slow.

Fast kernels are tested against it, and it runs where there is no kernel. Inside a block its caches
are [tokens, head elements], as the last two dimensions of :func:`attention.cache_shape`. In a cache
of int8 the last bytes of a token are its scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.byte_cache import LEAST_SCALE, SCALE_BYTES
from jitney.execution.interface import AttentionCall, LayerCache

# Scores that are computed at once. The queries of a row with more are taken in slices, which bounds
# the memory of a long prompt.
_SLICE_SCORES = 1 << 24


class ReferenceAttention:
    """The attention function ``reference``; see :class:`interface.AttentionFunction`."""

    name = "reference"

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write K and V to their slots, then attend; scores and sums in float32."""
        write(call.key, cache.keys, meta, cache.key_scale)
        write(call.value, cache.values, meta, cache.value_scale)
        out = torch.empty_like(call.query)
        for row in rows_of(meta):
            out[row.tokens] = _attend_row(call, row, cache)
        return out


class StepRow(NamedTuple):
    """A row of a step."""

    tokens: slice
    """Its tokens in the step, which are the last of its context."""
    context: int
    blocks: Tensor
    """int64: the blocks that its context is in."""

    @property
    def num_tokens(self) -> int:
        """Its tokens in the step."""
        return int(self.tokens.stop - self.tokens.start)


def rows_of(meta: AttentionMetadata) -> list[StepRow]:
    """The rows of a step, in order."""
    query_start = meta.query_start.tolist()
    rows = []
    for r, context in enumerate(meta.context_len.tolist()):
        num_blocks = (context + meta.block_size - 1) // meta.block_size
        blocks = meta.block_table[r, :num_blocks].long()
        rows.append(StepRow(slice(query_start[r], query_start[r + 1]), context, blocks))
    return rows


def write(new: Tensor, cache: Tensor, meta: AttentionMetadata, scale: Tensor | None) -> None:
    """:func:`write_slots` for all tokens of a step."""
    write_slots(new, cache, meta.slot_mapping, meta.block_size, scale)


def write_slots(
    new: Tensor, cache: Tensor, slots: Tensor, block_size: int, scale: Tensor | None
) -> None:
    """Put ``new`` [T, KV heads, head] into ``slots`` [T], converted to the cache's dtype.

    ``scale`` [KV heads], if given, is that of a float8 cache. A cache of int8 gets a scale for each
    token and head, by which the largest element becomes 127.
    """
    block = torch.div(slots, block_size, rounding_mode="floor")
    offset = slots % block_size
    elements = cache[..., : new.shape[-1]]  # without the padding, and without the scale of int8
    # Below, a slice stands between two index tensors. torch puts the dimension of index tensors
    # first then: ``elements[block, :, offset]`` is [T, KV heads, head], as ``new`` is.
    if cache.dtype == torch.int8:
        new_scales = (new.float().abs().amax(-1) / 127).clamp_min(LEAST_SCALE)
        _scales(cache)[block, :, offset] = new_scales
        # Times the reciprocal, as the kernels do: a division would give other bits.
        new = (new.float() * (1 / new_scales)[..., None]).round()
    elif scale is not None:
        largest = torch.finfo(cache.dtype).max
        new = (new.float() / scale[None, :, None]).clamp(-largest, largest)
    elements[block, :, offset] = new.to(cache.dtype)


def gather(cache: Tensor, blocks: Tensor, scale: Tensor | None) -> Tensor:
    """What was written to these blocks, one after the other: float32 [KV heads, tokens, head]."""
    return dequantized(cache[blocks].transpose(0, 1).flatten(1, 2), scale)


def dequantized(stored: Tensor, scale: Tensor | None) -> Tensor:
    """What a cache holds [KV heads, …, head] as float32."""
    if stored.dtype == torch.int8:
        return stored[..., :-SCALE_BYTES] * _scales(stored)[..., None]
    if scale is not None:
        return stored.float() * scale.view(-1, *[1] * (stored.dim() - 1))
    return stored.float()


def _scales(cache: Tensor) -> Tensor:
    """The scales in an int8 cache [..., head and scale], as a view: float32 [...]."""
    return cache[..., -SCALE_BYTES:].view(torch.float32).squeeze(-1)


def _attend_row(call: AttentionCall, row: StepRow, cache: LayerCache) -> Tensor:
    """Attention of one row over what it has in the cache. Returns [its tokens, heads, head]."""
    query = call.query[row.tokens].float()
    head_size = query.shape[-1]
    keys = gather(cache.keys, row.blocks, cache.key_scale)[:, : row.context, :head_size]
    values = gather(cache.values, row.blocks, cache.value_scale)[:, : row.context, :head_size]
    return attend_in_slices(query, keys, values, call)


def attend_in_slices(
    query: Tensor, keys: Tensor, values: Tensor, call: AttentionCall, chosen: Tensor | None = None
) -> Tensor:
    """:func:`_attend`, for some queries at a time, so that memory has a bound. ``chosen`` int64
    [n, k], if given, are the only keys that each query may see."""
    num_tokens, num_heads, _ = query.shape
    context = keys.shape[1]
    before = context - num_tokens  # tokens that earlier steps computed
    slice_len = max(1, _SLICE_SCORES // (num_heads * context))
    parts = []
    for begin in range(0, num_tokens, slice_len):
        part = query[begin : begin + slice_len]
        # No query of the slice sees what comes behind the slice's last one.
        seen = before + begin + len(part)
        hidden = None
        if chosen is not None:
            hidden = torch.ones((len(part), context), dtype=torch.bool, device=query.device)
            hidden.scatter_(1, chosen[begin : begin + slice_len], False)
            hidden = hidden[:, :seen]
        parts.append(_attend(part, keys[:, :seen], values[:, :seen], call, hidden))
    return torch.cat(parts)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, call: AttentionCall, hidden: Tensor | None
) -> Tensor:
    """Attention of the last n of c positions, with the scale, window, softcap, sinks and slopes of
    ``call``: ``query`` [n, heads, head] over ``keys`` [KV heads, c, head] and ``values`` [KV heads,
    c, value]. ``hidden`` bool [n, c]: keys that a query does not see although they are before it.
    Returns [n, heads, value].
    """
    n, num_heads, head_size = query.shape
    num_kv_heads, context, _ = keys.shape
    # The query heads of one KV head read the same keys: one product for all of them.
    grouped = query.transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    scores = grouped @ keys.transpose(-1, -2) * call.scale
    scores = scores.view(num_kv_heads, -1, n, context)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)

    positions = torch.arange(context, device=query.device)
    distance = positions[-n:, None] - positions  # [n, c]: how far each key is behind the query
    if call.slopes is not None:
        slopes = call.slopes.view(num_kv_heads, -1, 1, 1)
        scores = scores - slopes * distance
    unseen = distance < 0
    if call.window is not None:
        unseen |= distance >= call.window
    if hidden is not None:
        unseen |= hidden
    scores = scores.masked_fill(unseen, float("-inf")).reshape(num_heads, n, context)

    if call.sinks is not None:
        # A sink takes its share of the softmax, and that share is dropped: it has no value.
        sink_scores = call.sinks.to(scores.dtype)[:, None, None].expand(num_heads, n, 1)
        scores = torch.cat([scores, sink_scores], -1)
    weights = torch.softmax(scores, -1)[..., :context]
    weights = weights.reshape(num_kv_heads, -1, context)
    return (weights @ values).reshape(num_heads, n, -1).transpose(0, 1)
