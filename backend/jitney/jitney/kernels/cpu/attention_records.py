"""The arguments of the attention kernel and its scratch memory. Strides are in bytes.

The host fills an :class:`AttentionArguments` for each layer and step, and a :class:`Scratch` for
each thread; kernels read them by :data:`read_call` and :data:`read_scratch`.

Called by ``paged_attention`` and ``program``, which fill them, and by ``cache_blocks`` and
``attention_kernel``, which read them.
"""

import ctypes

from jitney.kernels.cpu.attention_plan import PlanEntry
from jitney.kernels.cpu.cache_groups import GROUP_TOKENS, PREFETCH_GROUPS
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import LANES, VECTOR_BYTES
from jitney.kernels.cpu.micro_kernel import MAX_ROWS_AMX

SPAN_GROUPS = 16
SPAN_TOKENS = SPAN_GROUPS * GROUP_TOKENS
"""Keys per turn of the online softmax."""
SPLIT_TOKENS = 512
"""Keys after which the online softmax begins anew: a whole number of spans."""
ITEM_ROWS = 96
"""Query heads times tokens of one item, at most, unless one token has more."""
WRITE_TOKENS = 16
"""Tokens of one item that writes to the cache."""
PRODUCT_VECTORS = 4
"""Groups of keys, or vectors of 16 elements of values, that one product has at once."""
LIST_MARGIN = PREFETCH_GROUPS + PRODUCT_VECTORS
"""Entries behind the groups in use that may be read: to prefetch, and to fill up a product."""
STATE_EXTRA = LANES
"""A row's state has so many float32 behind its outputs: see ``softmax``."""


@record
class AttentionArguments(KernelCall):
    """The arguments: first those of one layer, then, from ``plan`` on, those of one step, which are
    the same for all layers of a kind (``program`` copies them as a whole)."""

    # Of a layer.
    query: int
    query_token_stride: int
    query_head_stride: int
    key: int
    key_token_stride: int
    key_head_stride: int
    value: int
    value_token_stride: int
    value_head_stride: int
    key_cache: int
    value_cache: int
    sinks: int
    """Address of float32 [heads]; 0: none."""
    out: int
    """[T, heads, head size], contiguous."""

    # Of a step.
    plan: int
    """Address of an array of PlanEntry."""
    scratch: int
    """Address of an array of Scratch, one per thread."""
    states: int
    """States of split rows: per split and KV head, float32 [heads_per_kv, padded + STATE_EXTRA]."""
    splits_done: int
    """int64 [split rows, KV heads], all 0 at the start and at the end."""
    heads: int
    kv_heads: int
    heads_per_kv: int
    """Query heads for each KV head."""
    head_size: int
    padded: int
    """Head size in the cache: a multiple of 16."""
    block_size: int
    table: int
    """int32 [R, table_width]"""
    table_width: int
    slots: int
    """int64 [T]"""
    tokens: int
    """T."""
    decode: int
    """1 if every row has one token: then the item that reads a token's slot writes it first, and
    ``cache_blocks.write_body`` need not run."""
    tiles: int
    """Whether the processor's tile unit is used: 0 or 1."""
    scale: float
    window: int
    """0: none."""
    softcap: float
    """0: none."""


@record
class Scratch(ctypes.Structure):
    """Where one thread keeps what it works on; see :func:`scratch_sizes`."""

    queries: int
    scores: int
    weights: int
    states: int
    """Of each row of the item, over the keys of one split so far."""
    totals: int
    """Of each row, over the splits so far."""
    last_values: int
    """A copy of the entry's last group of values, with zeros behind its last key."""
    key_groups: int
    """Addresses of the item's groups, and LIST_MARGIN more."""
    value_groups: int

    # Only for a cache of bytes.
    wide_keys: int
    """A span's groups, widened to what products read."""
    wide_values: int
    wide_key_groups: int
    """Addresses of these groups, and LIST_MARGIN times that of the first one."""
    wide_value_groups: int
    key_scales: int
    """float32 of each token of the span."""
    value_scales: int


def scratch_sizes(element_size: int, rows: int, padded: int, longest: int) -> list[int]:
    """Bytes of each area of a :class:`Scratch`, for items of ``rows``.

    ``element_size`` is the bytes of an element in the cache, ``longest`` the longest context in
    tokens. Queries, weights and widened groups get memory for float32, the widest that they may be.
    """
    rows = -(-rows // LANES) * LANES
    scores = MAX_ROWS_AMX * SPAN_TOKENS * 4
    states = rows * (padded + STATE_EXTRA) * 4
    groups = -(-longest // GROUP_TOKENS) + 1 + LIST_MARGIN
    wide_tokens = SPAN_TOKENS if element_size == 1 else 0
    wide = wide_tokens * padded * 4
    wide_list = (SPAN_GROUPS + LIST_MARGIN) * 8
    by_area = {
        "queries": rows * padded * 4,
        "scores": scores,
        "weights": scores,
        "states": states,
        "totals": states,
        "last_values": GROUP_TOKENS * padded * element_size,
        "key_groups": groups * 8,
        "value_groups": groups * 8,
        "wide_keys": wide,
        "wide_values": wide,
        "wide_key_groups": wide_list,
        "wide_value_groups": wide_list,
        "key_scales": wide_tokens * 4,
        "value_scales": wide_tokens * 4,
    }
    areas = [by_area[name] for name in Scratch.__annotations__]
    return [-(-area // VECTOR_BYTES) * VECTOR_BYTES for area in areas]


read_call = reader(AttentionArguments)
read_entry = reader(PlanEntry)
read_scratch = reader(Scratch)
SCRATCH_BYTES = ctypes.sizeof(Scratch)
