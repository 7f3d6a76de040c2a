"""What the attention kernel is told and where it keeps things: arguments, scratch memory, the works
that a step is cut into, and the tokens inside a block of the cache. Addresses are integers, strides
and sizes are in bytes.

A head's tokens lie in groups of 16: keys as [units of the head, 16 tokens], values as
[units of 16 tokens, head], where a unit is four bytes (``simd``), that is two neighbouring head
elements of a key, or one head element of two neighbouring tokens' values, if elements have two
bytes. So one vector load feeds the scores of 16 tokens, or 16 head elements of the output, and
nothing is summed across lanes. Block sizes are multiples of 16.

``byte_groups`` says what a group of an int8 cache has.
"""

import ctypes

import numpy as np

from jitney.kernels.cpu.byte_groups import group_bytes, round_vector
from jitney.kernels.cpu.compiled import Call, compile_function, reader, record
from jitney.kernels.cpu.products import (
    COLUMNS,
    GROUP_TOKENS,
    MAX_ROWS_AMX,
    PREFETCH_GROUPS,
    VECTOR_BYTES,
)
from jitney.kernels.cpu.simd import (
    LANES,
    UNIT_BYTES,
    ZERO,
    copy_element,
    element_bytes,
    fetch_add,
    has_scales,
    inner,
    load_i32,
    load_i64,
    second_bytes,
    store_i32,
    store_i64,
    store_one,
)

SPAN_GROUPS = 16
SPAN_TOKENS = SPAN_GROUPS * GROUP_TOKENS
"""Keys per turn of the online softmax."""
PART_TOKENS = 512
"""Keys of one part of a row: a whole number of spans."""
STATE_EXTRA = LANES
"""Of a row's state, float32 behind its outputs: running maximum (base 2), running sum, filling."""
TILE_ROWS = 96
"""Query heads times tokens of one item, at most, unless one token has more."""
WRITE_TOKENS = 16
"""Tokens of one item that writes to the cache."""
LIST_MARGIN = PREFETCH_GROUPS + COLUMNS
"""Entries behind the groups in use that may be read: to prefetch, and to fill up a tile."""


@record
class AttentionArguments(Call):
    """The arguments: first those of one layer, then those of one step for layers of one kind."""

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

    works: int
    """Address of an array of Work. From here on: what is of the step."""
    scratch: int
    """Address of an array of Scratch, one per thread."""
    parts: int
    """States of split rows: per part and KV head, float32 [heads of the group, padded +
    STATE_EXTRA]."""
    parts_done: int
    """int64 [split rows, KV heads], all 0 at the start and at the end."""
    heads: int
    kv_heads: int
    group: int
    """Query heads for each KV head."""
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
    :func:`write_body` need not run."""
    tiles: int
    """Whether the processor's tile unit is used: 0 or 1."""
    scale: float
    window: int
    """0: none."""
    softcap: float
    """0: none."""


@record
class Work(ctypes.Structure):
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
    """Of the row's part 0 among the parts of all split rows."""
    split_row: int


@record
class Scratch(ctypes.Structure):
    """Where one thread keeps what it works on; see :func:`scratch_sizes`."""

    queries: int
    scores: int
    weights: int
    states: int
    """Of each row of the tile, over the keys of one part so far."""
    totals: int
    """Of each row, over the parts so far."""
    last_values: int
    """A row's last group of values."""
    key_groups: int
    """Addresses of the item's groups, and LIST_MARGIN more."""
    value_groups: int
    wide_keys: int
    """From here on, of a cache of bytes: a span's groups as products read them."""
    wide_values: int
    wide_key_groups: int
    """Their addresses; of all that follow them, the first one's."""
    wide_value_groups: int
    key_scales: int
    """float32 of each token of the span."""
    value_scales: int


def scratch_sizes(size: int, rows: int, padded: int, longest: int) -> list[int]:
    """Bytes of each area of a :class:`Scratch`, for tiles of ``rows``.

    ``size`` is that of an element in the cache, ``longest`` the longest context in tokens. Queries
    and weights may be float32, as may widened groups.
    """
    rows = -(-rows // LANES) * LANES
    groups = -(-longest // GROUP_TOKENS) + 1 + LIST_MARGIN
    wide = SPAN_TOKENS if size == 1 else 0
    lists = (SPAN_GROUPS + LIST_MARGIN) * 8
    sizes = [
        rows * padded * 4,
        MAX_ROWS_AMX * SPAN_TOKENS * 4,
        MAX_ROWS_AMX * SPAN_TOKENS * 4,
        rows * (padded + STATE_EXTRA) * 4,
        rows * (padded + STATE_EXTRA) * 4,
        GROUP_TOKENS * padded * size,
        groups * 8,
        groups * 8,
        *[wide * padded * 4] * 2,
        *[lists] * 2,
        *[wide * 4] * 2,
    ]
    return [-(-each // VECTOR_BYTES) * VECTOR_BYTES for each in sizes]


read_call, read_work, read_scratch = map(reader, (AttentionArguments, Work, Scratch))
WORK_BYTES, SCRATCH_BYTES = ctypes.sizeof(Work), ctypes.sizeof(Scratch)


# --------------------------------------------------------------------------- plan


def cut_works(
    query_start: np.ndarray,
    context_len: np.ndarray,
    tile: int,
    reach: int,
    part_tokens: int,
    group_tokens: int,
) -> tuple[np.ndarray, int, int]:
    """Cut a step, whose queries see ``reach`` keys at most, into works.

    A row of one token is split by its keys at every multiple of ``part_tokens``, a longer one by
    its tokens into tiles of ``tile`` tokens. Neither looks at any other row. The first two arrays
    are int32. Returns int64 [works, fields of ``Work``], the longest first, the number of parts of
    all split rows, and the number of these.
    """
    works, parts, split_rows = _cut(
        query_start, context_len, tile, reach, part_tokens, group_tokens
    )
    if len(works) > 1:
        cost = works[:, 2] * (works[:, 5] - works[:, 4])
        works = works[np.argsort(-cost, kind="stable")]
    return works, parts, split_rows


@compile_function
def _cut(query_start, context_len, tile, reach, part_tokens, group_tokens):
    """See :func:`cut_works`; the works in their rows' order.

    Done for every step, so it is compiled: that takes a tenth of the time of NumPy's calls. To sort
    here, or to assign a whole row, would cost the first start three seconds of compiling.
    """
    most = query_start[-1] // tile
    for context in context_len:
        most += context // part_tokens + 2
    works = np.empty((most, WORK_BYTES // 8), np.int64)
    done = parts = split_rows = 0
    for row in range(len(context_len)):
        start, context = np.int64(query_start[row]), np.int64(context_len[row])
        length = np.int64(query_start[row + 1]) - start
        size = part_tokens if length == 1 else context
        for offset in range(0, length, tile):
            position = context - length + offset
            begin = max(position + 1 - reach, 0) // group_tokens * group_tokens
            end = min(position + tile, context)
            tokens, first = end - position, begin // size
            count = (end - 1) // size + 1 - first
            for part in range(count):
                fields = (
                    row, start + offset, tokens, position, max(begin, (first + part) * size),
                    min((first + part + 1) * size, end), part, count, parts, split_rows,
                )  # fmt: skip
                for field, value in enumerate(fields):
                    works[done, field] = value
                done += 1
            if count > 1:
                parts += count
                split_rows += 1
    return works[:done], parts, split_rows


# --------------------------------------------------------------------------- blocks of the cache


@inner
def pack_key(tag, source, head, padded, group, lane):
    """One token's key into lane ``lane`` of a group; zeros beyond the head."""
    size = element_bytes(tag)
    pairs = UNIT_BYTES // size
    target = group + lane * UNIT_BYTES
    full = head // pairs
    for unit in range(full):
        store_i32(target + unit * VECTOR_BYTES, load_i32(source + unit * UNIT_BYTES))
    for unit in range(full, padded // pairs):
        store_i32(target + unit * VECTOR_BYTES, np.int32(0))
    if head % pairs != 0:
        copy_element(tag, source + (head - 1) * size, target + full * VECTOR_BYTES)


@inner
def pack_value(tag, source, head, padded, group, lane):
    """One token's value into lane ``lane`` of a group; zeros beyond the head."""
    size = element_bytes(tag)
    pairs = UNIT_BYTES // size
    target = group + (lane // pairs) * padded * UNIT_BYTES + (lane % pairs) * size
    for d in range(head):
        copy_element(tag, source + d * size, target + d * UNIT_BYTES)
    for d in range(head, padded):
        store_one(tag, target + d * UNIT_BYTES, ZERO)


@inner
def write_token(tag, kept, call, t, kv_head):
    """Put K and V of flattened token ``t`` into its slot."""
    slot = load_i64(call.slots + 8 * t)
    block, offset = slot // call.block_size, slot % call.block_size
    lane, head, padded = offset % GROUP_TOKENS, call.head_size, call.padded
    first = (block * call.kv_heads + kv_head) * call.block_size + offset
    group = first // GROUP_TOKENS * group_bytes(kept, padded)
    keys, values = call.key_cache + group, call.value_cache + group
    key = call.key + t * call.key_token_stride + kv_head * call.key_head_stride
    value = call.value + t * call.value_token_stride + kv_head * call.value_head_stride
    if has_scales(kept):
        round_vector(tag, key, head, padded, keys, lane, lane, GROUP_TOKENS)
        round_vector(tag, value, head, padded, values, lane, lane * padded, 1)
    else:
        pack_key(tag, key, head, padded, keys, lane)
        pack_value(tag, value, head, padded, values, lane)


@inner
def write_body(tag, kept, arguments):
    """Write the new K and V; an item is WRITE_TOKENS tokens of one KV head."""
    call = read_call(arguments)
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        first = item // call.kv_heads * WRITE_TOKENS
        for t in range(first, min(first + WRITE_TOKENS, call.tokens)):
            write_token(tag, kept, call, t, item % call.kv_heads)


@inner
def list_groups(kept, call, row, kv_head, first, limit, keys, values):
    """List the addresses of the K and V groups of positions [first, limit) of a row.

    ``first`` is a multiple of 16, ``keys`` and ``values`` the addresses of two int64 lists. Returns
    the number of groups.
    """
    entry = call.table + (row * call.table_width + first // call.block_size) * 4
    size = group_bytes(kept, call.padded)
    plane = call.block_size // GROUP_TOKENS * size
    block_bytes = call.kv_heads * plane
    inside = first % call.block_size // GROUP_TOKENS * size
    count = -(-(limit - first) // GROUP_TOKENS)
    for g in range(count):
        at = np.int64(load_i32(entry)) * block_bytes + kv_head * plane + inside
        store_i64(keys + 8 * g, call.key_cache + at)
        store_i64(values + 8 * g, call.value_cache + at)
        inside += size
        if inside == plane:
            inside = 0
            entry += 4
    return count


@inner
def find_groups(kept, call, work, kv_head, upcoming, upcoming_head, at):
    """List the work's groups in ``at``, and after them the first ones of the thread's next item.

    What follows the groups in use is prefetched; it must be readable, and is not used. The last V
    group is copied with zeros for the slots beyond the last key: a weight of zero does not cancel
    what an unwritten slot may hold. (K needs no such care: its lanes do not mix. Nor do bytes: it
    is their scales that may hold anything.)
    """
    keys, values = at.key_groups, at.value_groups
    width = work.keys_end - work.keys_begin
    n = list_groups(
        kept, call, work.row, kv_head, work.keys_begin, work.keys_end, keys, values
    )  # fmt: skip
    if width % GROUP_TOKENS != 0 and not has_scales(kept):
        source = load_i64(values + 8 * (n - 1))
        copy_last_values(kept, source, call.padded, width % GROUP_TOKENS, at.last_values)
        store_i64(values + 8 * (n - 1), at.last_values)
    begin = upcoming.keys_begin
    end = min(upcoming.keys_end, begin + PREFETCH_GROUPS * GROUP_TOKENS)
    more = list_groups(
        kept, call, upcoming.row, upcoming_head, begin, end, keys + 8 * n, values + 8 * n
    )  # fmt: skip
    for g in range(n + more, n + LIST_MARGIN):
        store_i64(keys + 8 * g, load_i64(keys + 8 * n))
        store_i64(values + 8 * g, load_i64(values + 8 * n))


@inner
def copy_last_values(tag, source, padded, tokens, target):
    """The first ``tokens`` of a V group, and zeros for the rest."""
    pairs = UNIT_BYTES // element_bytes(tag)
    full = tokens // pairs * padded
    for i in range(full):
        store_i32(target + i * UNIT_BYTES, load_i32(source + i * UNIT_BYTES))
    for i in range(full, GROUP_TOKENS // pairs * padded):
        store_i32(target + i * UNIT_BYTES, np.int32(0))
    if tokens % pairs != 0:
        for d in range(padded):
            where = (full + d) * UNIT_BYTES
            copy_element(tag, source + where, target + where)


@inner
def list_wide(dot, padded, at):
    """List the addresses of a thread's widened groups."""
    size = GROUP_TOKENS * padded * second_bytes(dot)
    for g in range(SPAN_GROUPS + LIST_MARGIN):
        offset = g * size if g < SPAN_GROUPS else 0
        store_i64(at.wide_key_groups + 8 * g, at.wide_keys + offset)
        store_i64(at.wide_value_groups + 8 * g, at.wide_values + offset)
