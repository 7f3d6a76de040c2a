# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""The paged attention kernel for the CPU, as Numba functions over raw addresses.

``cpu`` calls the two bodies here on every thread of a team: :func:`write_body` puts the new K and V
into the cache, :func:`attend_body` computes. Both take one address, that of the int64 arguments
listed below, and take work items from a counter until none is left.

Inside a block, a head's tokens lie in groups of 16 of ``[units, 16 tokens]`` for K and
``[token units, head]`` for V, where a unit is four bytes (``simd``): one vector load feeds 16
tokens' scores, or 16 head elements of the output, and no sum across lanes is needed. If the block
size is not a multiple of 16, blocks hold plain ``[token, head]`` and are packed into such groups as
they are read: right, and slower.

An item is a tile of queries of one row and one KV head, all query heads of the group together, so
that K and V are read once for them. It walks over the keys in spans of 128 with an online softmax
(Milakov and Gimelshein 2018; Dao et al. 2022) in base 2. Decode rows of long contexts are split
into items of SPLIT_TOKENS keys; whichever ends last combines the parts in order. Neither tiles nor
splits depend on the other rows of a batch, and so neither does a row's result.
"""

import numpy as np
from numba import njit

from jitney.execution.attention.products import (
    COLUMNS,
    GROUP_TOKENS,
    MAX_ROWS,
    VECTOR_BYTES,
    score_tile,
    value_tile_narrow,
    value_tile_wide,
)
from jitney.execution.attention.simd import (
    LANES,
    UNIT_BYTES,
    element_bytes,
    exp2,
    fetch_add,
    fma,
    keep_between,
    lane_max,
    lane_sum,
    larger,
    load,
    load_f32,
    load_i32,
    load_i64,
    load_u16,
    splat,
    store,
    store_as,
    store_f32,
    store_i32,
    store_i64,
    store_u16,
)

SPAN_GROUPS = 8
SPAN_TOKENS = SPAN_GROUPS * GROUP_TOKENS
"""Keys per turn of the online softmax."""
SPLIT_TOKENS = 512
"""Keys per item of a decode row."""
TILE_ROWS = 48
"""Query heads times tokens of one item, at most, unless one token has more."""

# Arguments of both bodies, in units of 8 bytes.
COUNTER = 0  # items taken so far; 0 at the start
NUM_ITEMS = 1
ITEMS = 2  # address of int64 [works, ITEM_FIELDS]; an item is (work, KV head)
THREADS = 3  # threads that have begun; 0 at the start
SCRATCH = 4
SCRATCH_BYTES = 5  # per thread
QUERY = 6
QUERY_TOKEN_STRIDE = 7  # strides are in bytes
QUERY_HEAD_STRIDE = 8
OUT = 9  # [T, heads, head], contiguous
HEADS = 10
KV_HEADS = 11
HEAD_SIZE = 12
PADDED = 13  # head size in the cache
KEY_CACHE = 14
VALUE_CACHE = 15
BLOCK_SIZE = 16
TABLE = 17  # int32 [R, TABLE_WIDTH]
TABLE_WIDTH = 18
WINDOW = 19  # 0: none
SCALE = 20  # float32
SOFTCAP = 21  # float32; 0: none
SINKS = 22  # address of float32 [heads]; 0: none
PARTS = 23  # float32 records of split rows
PARTS_DONE = 24  # int64 [split rows, KV heads], 0 at the start and at the end
KEY = 25
KEY_TOKEN_STRIDE = 26
KEY_HEAD_STRIDE = 27
VALUE = 28
VALUE_TOKEN_STRIDE = 29
VALUE_HEAD_STRIDE = 30
SLOTS = 31  # int64 [T]
TOKENS = 32
ARGUMENTS = 33

# Fields of one work.
ROW = 0
FIRST_TOKEN = 1  # of the flattened T
NUM_TOKENS = 2
POSITION = 3  # of the first token
KEYS_BEGIN = 4  # a multiple of 16
KEYS_END = 5
PART = 6  # index among the row's parts
NUM_PARTS = 7
FIRST_PART = 8  # record of part 0, counted over all split rows
SPLIT_ROW = 9
ITEM_FIELDS = 10

WRITE_TOKENS = 16
"""Tokens of one item of ``write_body``."""

LOG2_E = np.float32(1.4426950408889634)
NEGATIVE_INFINITY = np.float32(-np.inf)
LOWEST = np.float32(-1e30)
"""The running maximum before any key: finite, so that no difference is infinity less infinity."""


# --------------------------------------------------------------------------- writing


@njit
def copy_element(tag, source, target):
    """One element, as bits."""
    if element_bytes(tag) == 4:
        store_i32(target, load_i32(source))
    else:
        store_u16(target, load_u16(source))


@njit
def zero_element(tag, target):
    """One element."""
    if element_bytes(tag) == 4:
        store_i32(target, np.int32(0))
    else:
        store_u16(target, np.uint16(0))


@njit
def pack_key(tag, source, head, padded, group, lane):
    """One token's key into lane ``lane`` of a group [units, 16 tokens]."""
    size = element_bytes(tag)
    pairs = UNIT_BYTES // size
    target = group + lane * UNIT_BYTES
    for unit in range(padded // pairs):
        where = target + unit * VECTOR_BYTES
        if (unit + 1) * pairs <= head:
            store_i32(where, load_i32(source + unit * UNIT_BYTES))
        else:
            for e in range(pairs):
                if unit * pairs + e < head:
                    copy_element(tag, source + (unit * pairs + e) * size, where + e * size)
                else:
                    zero_element(tag, where + e * size)


@njit
def pack_value(tag, source, head, padded, group, lane):
    """One token's value into a group [token units, head]."""
    size = element_bytes(tag)
    pairs = UNIT_BYTES // size
    target = group + (lane // pairs) * padded * UNIT_BYTES + (lane % pairs) * size
    for d in range(head):
        copy_element(tag, source + d * size, target + d * UNIT_BYTES)
    for d in range(head, padded):
        zero_element(tag, target + d * UNIT_BYTES)


@njit
def copy_plain(tag, source, head, padded, target):
    """One token's key or value into a plain block."""
    size = element_bytes(tag)
    for d in range(head):
        copy_element(tag, source + d * size, target + d * size)
    for d in range(head, padded):
        zero_element(tag, target + d * size)


@njit
def write_token(tag, args, t, head_index):
    """K and V of flattened token ``t``, one KV head."""
    size = element_bytes(tag)
    head, padded = load_i64(args + 8 * HEAD_SIZE), load_i64(args + 8 * PADDED)
    block_size = load_i64(args + 8 * BLOCK_SIZE)
    slot = load_i64(load_i64(args + 8 * SLOTS) + 8 * t)
    block, offset = slot // block_size, slot % block_size
    plane = (block * load_i64(args + 8 * KV_HEADS) + head_index) * block_size * padded * size
    key = (
        load_i64(args + 8 * KEY)
        + t * load_i64(args + 8 * KEY_TOKEN_STRIDE)
        + head_index * load_i64(args + 8 * KEY_HEAD_STRIDE)
    )
    value = (
        load_i64(args + 8 * VALUE)
        + t * load_i64(args + 8 * VALUE_TOKEN_STRIDE)
        + head_index * load_i64(args + 8 * VALUE_HEAD_STRIDE)
    )
    key_plane = load_i64(args + 8 * KEY_CACHE) + plane
    value_plane = load_i64(args + 8 * VALUE_CACHE) + plane
    if block_size % GROUP_TOKENS == 0:
        group = (offset // GROUP_TOKENS) * GROUP_TOKENS * padded * size
        lane = offset % GROUP_TOKENS
        pack_key(tag, key, head, padded, key_plane + group, lane)
        pack_value(tag, value, head, padded, value_plane + group, lane)
    else:
        copy_plain(tag, key, head, padded, key_plane + offset * padded * size)
        copy_plain(tag, value, head, padded, value_plane + offset * padded * size)


@njit
def write_body(tag, args):
    """Write the new K and V; an item is WRITE_TOKENS tokens of one KV head."""
    tokens, kv_heads = load_i64(args + 8 * TOKENS), load_i64(args + 8 * KV_HEADS)
    while True:
        item = fetch_add(args + 8 * COUNTER)
        if item >= load_i64(args + 8 * NUM_ITEMS):
            return
        first = item // kv_heads * WRITE_TOKENS
        for t in range(first, min(first + WRITE_TOKENS, tokens)):
            write_token(tag, args, t, item % kv_heads)


# --------------------------------------------------------------------------- scratch


@njit
def scratch_layout(size, rows, padded):
    """Byte offsets of one thread's scratch areas, and their total, for tiles of ``rows``.

    In order: queries [rows, padded], scores [MAX_ROWS, span], weights [MAX_ROWS, span], outputs
    [rows, padded] float32, running maxima and sums [rows] float32, addresses of the span's
    groups of K and of V, the last V group, and packed copies of the span's K and V.
    """
    queries = 0
    scores = queries + rows * padded * size
    weights = scores + MAX_ROWS * SPAN_TOKENS * 4
    outputs = weights + MAX_ROWS * SPAN_TOKENS * size
    maxima = outputs + rows * padded * 4
    sums = maxima + rows * 64
    key_groups = sums + rows * 64
    value_groups = key_groups + SPAN_GROUPS * 8
    last = value_groups + SPAN_GROUPS * 8
    keys = last + GROUP_TOKENS * padded * size
    values = keys + SPAN_TOKENS * padded * size
    total = values + SPAN_TOKENS * padded * size
    return (
        queries,
        scores,
        weights,
        outputs,
        maxima,
        sums,
        key_groups,
        value_groups,
        last,
        keys,
        values,
        total,
    )


# --------------------------------------------------------------------------- attending


@njit
def load_queries(tag, args, work, kv_head, queries, rows):
    """The tile's queries as [tokens * heads of the group, padded], zeros beyond the head."""
    size = element_bytes(tag)
    head, padded = load_i64(args + 8 * HEAD_SIZE), load_i64(args + 8 * PADDED)
    group = load_i64(args + 8 * HEADS) // load_i64(args + 8 * KV_HEADS)
    first = load_i64(work + 8 * FIRST_TOKEN)
    for r in range(rows):
        source = (
            load_i64(args + 8 * QUERY)
            + (first + r // group) * load_i64(args + 8 * QUERY_TOKEN_STRIDE)
            + (kv_head * group + r % group) * load_i64(args + 8 * QUERY_HEAD_STRIDE)
        )
        copy_plain(tag, source, head, padded, queries + r * padded * size)


@njit
def find_groups(tag, args, work, kv_head, base, width, scratch, layout):
    """Addresses of the K and V groups of the ``width`` keys from ``base`` on.

    The last V group is copied with zeros for the slots beyond the last key: a weight of zero does
    not cancel what an unwritten slot may hold. (K needs no such care: lanes do not mix.)
    """
    size = element_bytes(tag)
    _, _, _, _, _, _, key_groups, value_groups, last, keys, values, _ = layout
    padded, block_size = load_i64(args + 8 * PADDED), load_i64(args + 8 * BLOCK_SIZE)
    kv_heads = load_i64(args + 8 * KV_HEADS)
    key_cache, value_cache = load_i64(args + 8 * KEY_CACHE), load_i64(args + 8 * VALUE_CACHE)
    table = (
        load_i64(args + 8 * TABLE) + load_i64(work + 8 * ROW) * load_i64(args + 8 * TABLE_WIDTH) * 4
    )
    group_bytes = GROUP_TOKENS * padded * size
    plane = block_size * padded * size
    count = -(-width // GROUP_TOKENS)
    for g in range(count):
        position = base + g * GROUP_TOKENS
        if block_size % GROUP_TOKENS == 0:
            block = np.int64(load_i32(table + position // block_size * 4))
            inside = position % block_size // GROUP_TOKENS * group_bytes
            key = key_cache + (block * kv_heads + kv_head) * plane + inside
            value = value_cache + (block * kv_heads + kv_head) * plane + inside
        else:
            key = scratch + keys + g * group_bytes
            value = scratch + values + g * group_bytes
            for lane in range(min(GROUP_TOKENS, base + width - position)):
                p = position + lane
                block = np.int64(load_i32(table + p // block_size * 4))
                slot = (block * kv_heads + kv_head) * plane + p % block_size * padded * size
                pack_key(tag, key_cache + slot, padded, padded, key, lane)
                pack_value(tag, value_cache + slot, padded, padded, value, lane)
        store_i64(scratch + key_groups + 8 * g, key)
        store_i64(scratch + value_groups + 8 * g, value)
    for g in range(count, SPAN_GROUPS):
        store_i64(scratch + key_groups + 8 * g, load_i64(scratch + key_groups))
    if width % GROUP_TOKENS != 0:
        source = load_i64(scratch + value_groups + 8 * (count - 1))
        copy_last_values(tag, source, padded, width % GROUP_TOKENS, scratch + last)
        store_i64(scratch + value_groups + 8 * (count - 1), scratch + last)
    return count


@njit
def copy_last_values(tag, source, padded, tokens, target):
    """The first ``tokens`` of a V group, and zeros for the rest."""
    size = element_bytes(tag)
    pairs = UNIT_BYTES // size
    full = tokens // pairs
    step = padded * UNIT_BYTES
    for i in range(full * padded):
        store_i32(target + i * 4, load_i32(source + i * 4))
    for i in range(full * padded, GROUP_TOKENS // pairs * padded):
        store_i32(target + i * 4, np.int32(0))
    if tokens % pairs != 0:
        for d in range(padded):
            where = full * step + d * UNIT_BYTES
            store_u16(target + where, load_u16(source + where))


@njit
def power_of_two(x):
    """2**x of one number, as ``exp2``."""
    return lane_max(exp2(splat(x)))


@njit
def cap(x, softcap):
    """softcap * tanh(x / softcap) * log2(e), with tanh(y) = 1 - 2 / (1 + e**2y)."""
    y = x * splat(np.float32(2.0) * LOG2_E / softcap)
    # Beyond 40 in base 2 the hyperbolic tangent is 1 in float32.
    y = splat(np.float32(0.0)) - larger(splat(np.float32(-40.0)), splat(np.float32(0.0)) - y)
    one = splat(np.float32(1.0))
    tanh = one - splat(np.float32(2.0)) / (one + exp2(y))
    return tanh * splat(softcap * LOG2_E)


@njit
def weigh_row(tag, scores, weights, groups, low, high, scale, softcap, maximum, total):
    """Turn a row's scores into weights; keys outside [low, high) of the span are hidden.

    ``maximum`` and ``total`` are addresses of the row's running maximum and sum, in base 2.
    Returns the factor for what was added up under the old maximum.
    """
    best = splat(NEGATIVE_INFINITY)
    whole = low <= 0 and high >= groups * GROUP_TOKENS
    factor = splat(scale if softcap != np.float32(0.0) else scale * LOG2_E)
    for g in range(groups):
        at = scores + g * VECTOR_BYTES
        s = load(at) * factor
        if softcap != np.float32(0.0):
            s = cap(s, softcap)
        if not whole:
            s = keep_between(s, low - g * LANES, high - g * LANES, NEGATIVE_INFINITY)
        store(at, s)
        best = larger(s, best)
    before = load_f32(maximum)
    after = max(before, lane_max(best))
    shift = splat(after)
    added = splat(np.float32(0.0))
    for g in range(groups):
        w = exp2(load(scores + g * VECTOR_BYTES) - shift)
        added = added + w
        store_as(tag, weights + g * LANES * element_bytes(tag), w)
    rescale = np.float32(1.0) if after == before else power_of_two(before - after)
    store_f32(total, load_f32(total) * rescale + lane_sum(added))
    store_f32(maximum, after)
    return rescale


@njit
def add_values(tag, rows, weights, value_groups, groups, padded, outputs):
    """outputs += weights times values, for all head elements."""
    stride = SPAN_TOKENS * element_bytes(tag)
    wide = COLUMNS * LANES
    step = padded * UNIT_BYTES
    d = 0
    while d + wide <= padded:
        value_tile_wide(
            tag, rows, weights, stride, value_groups, groups, step,
            d * UNIT_BYTES, outputs + d * 4, padded * 4,
        )  # fmt: skip
        d += wide
    while d < padded:
        value_tile_narrow(
            tag, rows, weights, stride, value_groups, groups, step,
            d * UNIT_BYTES, outputs + d * 4, padded * 4,
        )  # fmt: skip
        d += LANES


@njit
def attend_rows(tag, args, work, first, rows, base, groups, scratch, layout):
    """At most MAX_ROWS rows of the tile, from ``first`` on, against one span of keys."""
    size = element_bytes(tag)
    queries, scores, weights, outputs, maxima, sums, key_groups, value_groups, _, _, _, _ = layout
    padded = load_i64(args + 8 * PADDED)
    heads = load_i64(args + 8 * HEADS) // load_i64(args + 8 * KV_HEADS)
    window = load_i64(args + 8 * WINDOW)
    scale, softcap = load_f32(args + 8 * SCALE), load_f32(args + 8 * SOFTCAP)
    position = load_i64(work + 8 * POSITION)
    newest = position + (first + rows - 1) // heads
    oldest = position + first // heads
    # Groups that no row here may see are left out: later ones, and those before the window.
    groups = min(groups, (newest - base) // GROUP_TOKENS + 1)
    if groups <= 0 or (window > 0 and oldest - window >= base + groups * GROUP_TOKENS - 1):
        return
    units = padded * size // UNIT_BYTES
    for g in range(0, groups, COLUMNS):
        score_tile(
            tag, rows, scratch + queries + first * padded * size, padded * size,
            scratch + key_groups + 8 * g, units,
            scratch + scores + g * VECTOR_BYTES, SPAN_TOKENS * 4,
        )  # fmt: skip
    for r in range(rows):
        p = position + (first + r) // heads
        low = p - window + 1 - base if window > 0 else 0
        rescale = weigh_row(
            tag, scratch + scores + r * SPAN_TOKENS * 4, scratch + weights + r * SPAN_TOKENS * size,
            groups, low, p + 1 - base, scale, softcap,
            scratch + maxima + 4 * (first + r), scratch + sums + 4 * (first + r),
        )  # fmt: skip
        if rescale != np.float32(1.0):
            scale_row(scratch + outputs + (first + r) * padded * 4, padded, rescale)
    add_values(
        tag, rows, scratch + weights, scratch + value_groups, groups, padded,
        scratch + outputs + first * padded * 4,
    )  # fmt: skip


@njit
def scale_row(row, padded, factor):
    """float32 [padded] times ``factor``."""
    for d in range(0, padded, LANES):
        store(row + d * 4, load(row + d * 4) * splat(factor))


@njit
def begin_rows(args, work, kv_head, rows, scratch, layout):
    """Running maximum, sum and output before the first key; a sink counts as a key of no value."""
    _, _, _, outputs, maxima, sums, _, _, _, _, _, _ = layout
    padded = load_i64(args + 8 * PADDED)
    heads = load_i64(args + 8 * HEADS) // load_i64(args + 8 * KV_HEADS)
    sinks = load_i64(args + 8 * SINKS)
    for r in range(rows):
        maximum, total = LOWEST, np.float32(0.0)
        if sinks != 0 and load_i64(work + 8 * PART) == 0:
            maximum = load_f32(sinks + 4 * (kv_head * heads + r % heads)) * LOG2_E
            total = np.float32(1.0)
        store_f32(scratch + maxima + 4 * r, maximum)
        store_f32(scratch + sums + 4 * r, total)
        for d in range(0, padded, LANES):
            store(scratch + outputs + (r * padded + d) * 4, splat(np.float32(0.0)))


@njit
def emit_row(tag, args, token, head_index, row, total, spare):
    """One query head's output: the accumulated ``row`` over ``total``. ``spare`` is overwritten."""
    size = element_bytes(tag)
    head = load_i64(args + 8 * HEAD_SIZE)
    target = (
        load_i64(args + 8 * OUT) + (token * load_i64(args + 8 * HEADS) + head_index) * head * size
    )
    share = splat(np.float32(1.0) / total)
    d = 0
    while d + LANES <= head:
        store_as(tag, target + d * size, load(row + d * 4) * share)
        d += LANES
    if d < head:
        store_as(tag, spare, load(row + d * 4) * share)
        for e in range(head - d):
            copy_element(tag, spare + e * size, target + (d + e) * size)


@njit
def finish_split(tag, args, work, kv_head, rows, scratch, layout):
    """Keep this part's sums; the last part of the row to end combines them all, in order."""
    _, scores, _, outputs, maxima, sums, _, _, _, _, _, _ = layout
    padded, kv_heads = load_i64(args + 8 * PADDED), load_i64(args + 8 * KV_HEADS)
    record = rows * (padded + 2) * 4
    parts = load_i64(work + 8 * NUM_PARTS)
    base = load_i64(args + 8 * PARTS)
    first = load_i64(work + 8 * FIRST_PART)
    mine = base + ((first + load_i64(work + 8 * PART)) * kv_heads + kv_head) * record
    for i in range(rows * padded):
        store_f32(mine + 4 * i, load_f32(scratch + outputs + 4 * i))
    for r in range(rows):
        store_f32(mine + 4 * (rows * padded + r), load_f32(scratch + maxima + 4 * r))
        store_f32(mine + 4 * (rows * (padded + 1) + r), load_f32(scratch + sums + 4 * r))
    done = (
        load_i64(args + 8 * PARTS_DONE) + (load_i64(work + 8 * SPLIT_ROW) * kv_heads + kv_head) * 8
    )
    if fetch_add(done) != parts - 1:
        return
    store_i64(done, 0)
    for r in range(rows):
        best = LOWEST
        for i in range(parts):
            theirs = base + ((first + i) * kv_heads + kv_head) * record
            best = max(best, load_f32(theirs + 4 * (rows * padded + r)))
        total = np.float32(0.0)
        row = scratch + outputs + r * padded * 4
        for i in range(parts):
            theirs = base + ((first + i) * kv_heads + kv_head) * record
            factor = power_of_two(load_f32(theirs + 4 * (rows * padded + r)) - best)
            total += factor * load_f32(theirs + 4 * (rows * (padded + 1) + r))
            for d in range(0, padded, LANES):
                sofar = splat(np.float32(0.0)) if i == 0 else load(row + d * 4)
                store(row + d * 4, fma(load(theirs + (r * padded + d) * 4), splat(factor), sofar))
        token = load_i64(work + 8 * FIRST_TOKEN)
        emit_row(tag, args, token, kv_head * rows + r, row, total, scratch + scores)


@njit
def attend_item(tag, args, work, kv_head, scratch):
    """One tile of queries against all keys of its work."""
    padded = load_i64(args + 8 * PADDED)
    heads = load_i64(args + 8 * HEADS) // load_i64(args + 8 * KV_HEADS)
    layout = scratch_layout(element_bytes(tag), max(TILE_ROWS, heads), padded)
    queries, scores, _, outputs, _, sums, _, _, _, _, _, _ = layout
    rows = load_i64(work + 8 * NUM_TOKENS) * heads
    load_queries(tag, args, work, kv_head, scratch + queries, rows)
    begin_rows(args, work, kv_head, rows, scratch, layout)
    end = load_i64(work + 8 * KEYS_END)
    slices = -(-rows // MAX_ROWS)
    for base in range(load_i64(work + 8 * KEYS_BEGIN), end, SPAN_TOKENS):
        width = min(SPAN_TOKENS, end - base)
        groups = find_groups(tag, args, work, kv_head, base, width, scratch, layout)
        for i in range(slices):
            first = rows * i // slices
            count = rows * (i + 1) // slices - first
            attend_rows(tag, args, work, first, count, base, groups, scratch, layout)
    if load_i64(work + 8 * NUM_PARTS) > 1:
        finish_split(tag, args, work, kv_head, rows, scratch, layout)
        return
    for r in range(rows):
        token = load_i64(work + 8 * FIRST_TOKEN) + r // heads
        row = scratch + outputs + r * padded * 4
        total = load_f32(scratch + sums + 4 * r)
        emit_row(tag, args, token, kv_head * heads + r % heads, row, total, scratch + scores)


@njit
def attend_body(tag, args):
    """Take items until none is left."""
    thread = fetch_add(args + 8 * THREADS)
    scratch = load_i64(args + 8 * SCRATCH) + thread * load_i64(args + 8 * SCRATCH_BYTES)
    kv_heads = load_i64(args + 8 * KV_HEADS)
    while True:
        item = fetch_add(args + 8 * COUNTER)
        if item >= load_i64(args + 8 * NUM_ITEMS):
            return
        work = load_i64(args + 8 * ITEMS) + item // kv_heads * ITEM_FIELDS * 8
        attend_item(tag, args, work, item % kv_heads, scratch)
