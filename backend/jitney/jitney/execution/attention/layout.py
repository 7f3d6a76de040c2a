# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""What the CPU kernel is told and where it keeps things: its arguments, works and scratch memory.

``cpu`` writes the arguments and works as int64 arrays in the order of the fields below; the kernel
reads them once into named tuples. Addresses are integers, strides and sizes are in bytes.
"""

from typing import NamedTuple

from jitney.execution.attention.products import (
    COLUMNS,
    GROUP_TOKENS,
    MAX_ROWS_AMX,
    PREFETCH_GROUPS,
)
from jitney.execution.attention.simd import LANES, inner, load_f32, load_i64

SPAN_GROUPS = 16
SPAN_TOKENS = SPAN_GROUPS * GROUP_TOKENS
"""Keys per turn of the online softmax."""
SPLIT_TOKENS = 512
"""Keys per item of a decode row."""
TILE_ROWS = 48
"""Query heads times tokens of one item, at most, unless one token has more."""
WRITE_TOKENS = 16
"""Tokens of one item that writes to the cache."""
LIST_MARGIN = PREFETCH_GROUPS + COLUMNS
"""Entries behind the groups in use that may be read: to prefetch, and to fill up a tile."""
COUNTER, THREADS = 0, 1
"""Positions of the only arguments that the kernel changes."""


class Call(NamedTuple):
    """The arguments."""

    # -- of one layer: NUM_LAYER_FIELDS that are written anew at each call
    counter: int
    """Address of the number of items taken so far; 0 at the start."""
    threads: int
    """Address of the number of threads that have begun; 0 at the start."""
    num_items: int
    """An item is a work for one KV head."""
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

    # -- of one step, for layers of one kind
    works: int
    """Address of int64 [works, fields of Work]."""
    scratch: int
    scratch_bytes: int
    """Per thread."""
    parts: int
    """Records of split rows: per part and KV head, float32 outputs [heads of the group, padded],
    running maxima and running sums [heads of the group]."""
    parts_done: int
    """int64 [split rows, KV heads], all 0 at the start and at the end."""
    heads: int
    kv_heads: int
    head_size: int
    padded: int
    """Head size in the cache."""
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
    :func:`kernel.write_body` need not run."""
    tiles: int
    """Whether the processor's tile unit is used: 0 or 1."""
    window: int
    """0: none."""
    scale: float
    softcap: float
    """float32; 0: none."""


NUM_LAYER_FIELDS = Call._fields.index("out") + 1


class Work(NamedTuple):
    """A tile of one row's queries and the keys they are to see."""

    row: int
    first_token: int
    """Of the flattened T."""
    num_tokens: int
    position: int
    """Of the first token."""
    keys_begin: int
    """A multiple of 16."""
    keys_end: int
    part: int
    """Index among the parts of a split row."""
    num_parts: int
    first_part: int
    """Record of the row's part 0, counted over all split rows."""
    split_row: int


class Scratch(NamedTuple):
    """Addresses of one thread's areas, for tiles of ``rows``; all lengths in elements."""

    queries: int
    """[rows, padded], of the cache's type."""
    scores: int
    """float32 [MAX_ROWS_AMX, SPAN_TOKENS]"""
    weights: int
    """[MAX_ROWS_AMX, SPAN_TOKENS], of the cache's type."""
    outputs: int
    """float32 [rows, padded]"""
    maxima: int
    """float32 [rows], in base 2."""
    sums: int
    """float32 [rows]"""
    last_values: int
    """One group."""
    staged_keys: int
    """Groups of one span, if blocks do not hold groups."""
    staged_values: int
    key_groups: int
    """int64 addresses of the item's groups, and LIST_MARGIN more."""
    value_groups: int
    end: int
    """Behind all of them."""


def scratch_bytes(size: int, rows: int, padded: int, longest: int) -> int:
    """Bytes that :func:`place_scratch` asks for."""
    return place_scratch.py_func(0, size, rows, padded, longest).end


@inner
def place_scratch(base, size, rows, padded, longest):
    """Lay out one thread's areas from address ``base`` on.

    ``size`` is that of an element in the cache, ``longest`` the longest context in tokens.
    """
    rows = -(-rows // LANES) * LANES
    queries = base
    scores = queries + rows * padded * size
    weights = scores + MAX_ROWS_AMX * SPAN_TOKENS * 4
    outputs = weights + MAX_ROWS_AMX * SPAN_TOKENS * size
    maxima = outputs + rows * padded * 4
    sums = maxima + rows * 4
    last_values = sums + rows * 4
    staged_keys = last_values + GROUP_TOKENS * padded * size
    staged_values = staged_keys + SPAN_TOKENS * padded * size
    key_groups = staged_values + SPAN_TOKENS * padded * size
    list_bytes = (-(-longest // GROUP_TOKENS) + 1 + LIST_MARGIN) * 8
    value_groups = key_groups + list_bytes
    return Scratch(
        queries,
        scores,
        weights,
        outputs,
        maxima,
        sums,
        last_values,
        staged_keys,
        staged_values,
        key_groups,
        value_groups,
        value_groups + list_bytes,
    )


@inner
def read_call(address):
    """The arguments at ``address``, an int64 array in the order of Call's fields."""
    return Call(
        address + 8 * COUNTER,
        address + 8 * THREADS,
        load_i64(address + 16),
        load_i64(address + 24),
        load_i64(address + 32),
        load_i64(address + 40),
        load_i64(address + 48),
        load_i64(address + 56),
        load_i64(address + 64),
        load_i64(address + 72),
        load_i64(address + 80),
        load_i64(address + 88),
        load_i64(address + 96),
        load_i64(address + 104),
        load_i64(address + 112),
        load_i64(address + 120),
        load_i64(address + 128),
        load_i64(address + 136),
        load_i64(address + 144),
        load_i64(address + 152),
        load_i64(address + 160),
        load_i64(address + 168),
        load_i64(address + 176),
        load_i64(address + 184),
        load_i64(address + 192),
        load_i64(address + 200),
        load_i64(address + 208),
        load_i64(address + 216),
        load_i64(address + 224),
        load_i64(address + 232),
        load_i64(address + 240),
        load_i64(address + 248),
        load_i64(address + 256),
        load_f32(address + 264),
        load_f32(address + 272),
    )


WORK_FIELDS = len(Work._fields)


@inner
def read_work(call, index):
    """Work ``index``."""
    address = call.works + index * WORK_FIELDS * 8
    return Work(
        load_i64(address),
        load_i64(address + 8),
        load_i64(address + 16),
        load_i64(address + 24),
        load_i64(address + 32),
        load_i64(address + 40),
        load_i64(address + 48),
        load_i64(address + 56),
        load_i64(address + 64),
        load_i64(address + 72),
    )
