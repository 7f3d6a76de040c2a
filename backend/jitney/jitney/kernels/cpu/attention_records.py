"""The arguments of the attention kernel and its scratch memory. Strides are in bytes.

The host fills an :class:`AttentionArguments` for each layer and step, and a :class:`Scratch` for
each thread; kernels read them by :data:`read_call` and :data:`read_scratch`.

Called by ``paged_attention`` and ``program``, which fill them, and by ``cache_blocks`` and
``attention_kernel``, which read them.
"""

import ctypes

from jitney.kernels.cpu.attention_plan import PlanPiece
from jitney.kernels.cpu.cache_groups import GROUP_TOKENS, PREFETCH_GROUPS
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import (
    F32_BYTES,
    I64_BYTES,
    LANES,
    VECTOR_BYTES,
    ceil_div,
    round_up,
)
from jitney.kernels.cpu.micro_kernel import MAX_ROWS_AMX

SPAN_GROUPS = 16
"""Groups of a span: the softmax takes in the keys of so many groups at once."""
SPAN_TOKENS = SPAN_GROUPS * GROUP_TOKENS
"""Keys of a span: 256."""
SPLIT_TOKENS = 512
"""Keys of a split, two spans. Behind it the softmax begins anew."""
ITEM_ROWS = 96
"""Rows of an item, at most. A row is one token and one query head. With more than 96 query heads to
a KV head, an item is one token, and has more rows."""
WRITE_TOKENS = 16
"""Tokens of an item of ``cache_blocks.write_body``, at most."""
PRODUCT_VECTORS = 4
"""Vectors that one call of the micro-kernel computes for each row. Each vector is the scores of one
group of keys, or 16 elements of the outputs."""
LIST_MARGIN = PREFETCH_GROUPS + PRODUCT_VECTORS
"""How many addresses a list of groups has behind the groups in use. Kernels read what is there:
groups PREFETCH_GROUPS further on are prefetched, and a product of keys always takes PRODUCT_VECTORS
groups, of which the last may not be in use."""
STATE_EXTRA = LANES
"""Behind its outputs, a row's state has so many float32 more: its maximum, its sum and unused ones
(``softmax``)."""


@record
class AttentionArguments(KernelCall):
    """The arguments of ``attend_body`` or ``write_body``; ``count`` is in items of that one.

    First stand those of one layer. From ``plan`` on they are the same for all layers of a kind in
    one step: ``program`` copies that part as a whole.
    """

    # Of a layer.
    query: int
    """Address of the queries, [T, heads, head size]. The two fields behind it are their strides. In
    query, key and value the elements of a head are neighbours."""
    query_token_stride: int
    query_head_stride: int
    key: int
    """Address of [T, KV heads, head size]: the new keys, which are written to the cache."""
    key_token_stride: int
    key_head_stride: int
    value: int
    value_token_stride: int
    value_head_stride: int
    key_cache: int
    """Address of the layer's cache of keys: see ``cache_blocks``."""
    value_cache: int
    sinks: int
    """Address of float32 [heads]. 0: there are none."""
    out: int
    """Address of [T, heads, head size], contiguous."""

    # Of a step.
    plan: int
    """Address of an array of PlanPiece."""
    scratch: int
    """Address of an array of Scratch, one for each thread."""
    split_states: int
    """Address of float32 [splits, KV heads, heads_per_kv, padded + STATE_EXTRA]: the states over
    each split of the rows that have several. ``PlanPiece.first_split`` says where a row's begin."""
    splits_done: int
    """Address of int64 [split rows, KV heads]: how many splits of a row have ended so far. All are
    0 at the start and at the end."""
    heads: int
    """Query heads."""
    kv_heads: int
    heads_per_kv: int
    """Query heads for each KV head."""
    head_size: int
    padded: int
    """Head size in the cache: a multiple of 16."""
    block_size: int
    """Tokens of a block."""
    table: int
    """Address of int32 [R, table_width]: the block table."""
    table_width: int
    slots: int
    """Address of int64 [T]: where each new token is written."""
    tokens: int
    """T."""
    only_decodes: int
    """1 if every row has one token. Then the item that attends to a token's key and value writes
    them first, and ``write_body`` need not run."""
    use_tiles: int
    """1 if products are computed by the processor's tile unit."""
    scale: float
    """What scores are multiplied by."""
    window: int
    """How many keys a token sees. 0: all up to its own."""
    softcap: float
    """0: there is none."""


@record
class Scratch(ctypes.Structure):
    """Where one thread keeps what it works on: the addresses of areas, whose sizes are
    :func:`scratch_sizes`. "Row" is a row of the item."""

    queries: int
    """[rows, padded]: the item's queries, in the type of products."""
    scores: int
    """float32 [rows of one pass, SPAN_TOKENS]"""
    weights: int
    """As the scores, in the type of products."""
    states: int
    """The state of each row over the keys of the current split (``softmax``)."""
    totals: int
    """The state of each row over all splits that the item has completed."""
    last_values: int
    """A copy of the piece's last group of values, with zeros behind its last key."""
    key_groups: int
    """A list of groups: int64 addresses of the piece's groups of keys, and LIST_MARGIN more."""
    value_groups: int
    """The same of values."""

    # Only for a cache of bytes.
    widened_keys: int
    """The groups of keys of a span, widened to what products read."""
    widened_values: int
    widened_key_groups: int
    """A list of groups: the addresses of those at ``widened_keys``, and then LIST_MARGIN times that
    of the first one."""
    widened_value_groups: int
    key_scales: int
    """float32 [SPAN_TOKENS]: the scales of a span's keys."""
    value_scales: int


def scratch_sizes(*, element_size: int, rows: int, padded: int, longest: int) -> list[int]:
    """Bytes of each area of a :class:`Scratch`, in the order of its fields, in whole vectors.

    ``element_size`` is the bytes of an element in the cache, ``rows`` the most rows of an item,
    ``longest`` the longest context in tokens.
    """
    filled_rows = round_up(rows, MAX_ROWS_AMX)  # see ``copy_queries``
    # One group more than a context can have. Native code writes the list without a check: if its
    # count were ever wrong by one, it would overwrite the list behind this one.
    most_groups = ceil_div(longest, GROUP_TOKENS) + 1
    list_of_groups = (most_groups + LIST_MARGIN) * I64_BYTES
    # Products read float32 or bfloat16. Memory is reserved for the larger one.
    queries = filled_rows * padded * F32_BYTES
    scores = MAX_ROWS_AMX * SPAN_TOKENS * F32_BYTES
    states = filled_rows * (padded + STATE_EXTRA) * F32_BYTES
    # Only bytes are widened, and only they have scales.
    widened_tokens = SPAN_TOKENS if element_size == 1 else 0
    widened_groups = widened_tokens * padded * F32_BYTES
    list_of_widened_groups = (SPAN_GROUPS + LIST_MARGIN) * I64_BYTES
    by_area = {
        "queries": queries,
        "scores": scores,
        "weights": scores,
        "states": states,
        "totals": states,
        "last_values": GROUP_TOKENS * padded * element_size,
        "key_groups": list_of_groups,
        "value_groups": list_of_groups,
        "widened_keys": widened_groups,
        "widened_values": widened_groups,
        "widened_key_groups": list_of_widened_groups,
        "widened_value_groups": list_of_widened_groups,
        "key_scales": widened_tokens * F32_BYTES,
        "value_scales": widened_tokens * F32_BYTES,
    }
    sizes = []
    for name in Scratch.__annotations__:
        sizes.append(round_up(by_area[name], VECTOR_BYTES))
    return sizes


read_call = reader(AttentionArguments)
read_piece = reader(PlanPiece)
read_scratch = reader(Scratch)
SCRATCH_BYTES = ctypes.sizeof(Scratch)
