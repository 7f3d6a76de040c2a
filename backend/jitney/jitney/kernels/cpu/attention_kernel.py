"""The paged attention kernel for the CPU, as Numba functions over raw addresses.

``attention`` calls ``layout.write_body``, unless all rows decode, and then :func:`attend_body` on
every thread of a team, with the address of ``layout.AttentionArguments``; the threads take items
from a counter until none is left. ``tag`` is the element type of the cache (``simd``).

An item is a tile of one row's queries and one KV head, all query heads of its group together, so
that K and V are read once for them; a tile's rows are (token, head of the group), token by token.
It walks over the keys in spans of 256 with an online softmax (Milakov and Gimelshein 2018; Dao et
al. 2022) in base 2. Decode rows of long contexts are split into items of SPLIT_TOKENS keys, and
whichever ends last combines the parts in order. Neither tiles nor splits depend on the other rows
of a batch, and so neither does a row's result.
"""

import numpy as np

from jitney.kernels.cpu.compiled import THREADS_OFFSET
from jitney.kernels.cpu.layout import (
    SCRATCH_BYTES,
    SPAN_GROUPS,
    SPAN_TOKENS,
    WORK_BYTES,
    copy_vector,
    find_groups,
    read_call,
    read_scratch,
    read_work,
    write_token,
)
from jitney.kernels.cpu.products import (
    COLUMNS,
    GROUP_TOKENS,
    MAX_ROWS,
    MAX_ROWS_AMX,
    PREFETCH_GROUPS,
    VECTOR_BYTES,
    amx_begin,
    amx_end,
    score_tile,
    value_tile_narrow,
    value_tile_wide,
)
from jitney.kernels.cpu.simd import (
    LANES,
    LOG2_E,
    ONE,
    UNIT_BYTES,
    ZERO,
    copy_element,
    element_bytes,
    exp2,
    fetch_add,
    fma,
    inner,
    keep_between,
    lane_max,
    lane_sum,
    larger,
    load,
    load_f32,
    load_i64,
    prefetch,
    sigmoid,
    splat,
    store,
    store_as,
    store_f32,
    store_i64,
)

NEGATIVE_INFINITY = np.float32(-np.inf)
LOWEST = np.float32(-1e30)
"""The running maximum before any key: finite, so that no difference is infinity less infinity."""
AMX_LEAST_ROWS = 4
"""Tiles of fewer rows are computed with vectors: the tile unit always computes 16."""


@inner
def attend_body(tag, arguments):
    """Take items until none is left. A thread knows its next item while it works on one."""
    call = read_call(arguments)
    at = read_scratch(call.scratch + fetch_add(arguments + THREADS_OFFSET) * SCRATCH_BYTES)
    if call.tiles != 0:
        amx_begin()
    item = fetch_add(arguments)
    while item < call.count:
        upcoming = fetch_add(arguments)
        attend_item(tag, call, item, upcoming if upcoming < call.count else item, at)
        item = upcoming
    if call.tiles != 0:
        amx_end()


@inner
def attend_item(tag, call, item, upcoming, at):
    """One tile of queries against all keys of its work."""
    kv_head = item % call.kv_heads
    work = read_work(call.works + item // call.kv_heads * WORK_BYTES)
    following = read_work(call.works + upcoming // call.kv_heads * WORK_BYTES)
    rows = work.num_tokens * call.group
    if call.decode != 0 and work.part == work.num_parts - 1:
        write_token(tag, call, work.first_token, kv_head)
    begin_rows(tag, call, work, kv_head, rows, at)
    find_groups(tag, call, work, kv_head, following, upcoming % call.kv_heads, at)
    tiles = call.tiles != 0 and rows >= AMX_LEAST_ROWS
    slices = -(-rows // (MAX_ROWS_AMX if tiles else MAX_ROWS))
    for base in range(work.keys_begin, work.keys_end, SPAN_TOKENS):
        width = min(SPAN_TOKENS, work.keys_end - base)
        if tiles:
            prefetch_span(tag, call, work, base + SPAN_TOKENS, at)
        for i in range(slices):
            first = i * MAX_ROWS_AMX if tiles else rows * i // slices
            end = min(rows, first + MAX_ROWS_AMX) if tiles else rows * (i + 1) // slices
            attend_rows(tag, call, work, first, end - first, base, width, tiles, at)
    if work.num_parts > 1:
        finish_part(tag, call, work, kv_head, rows, at)
        return
    for r in range(rows):
        emit_row(
            tag, call, work.first_token + r // call.group, kv_head * call.group + r % call.group,
            at.outputs + r * call.padded * 4, load_f32(at.sums + 4 * r), at.scores,
        )  # fmt: skip


@inner
def prefetch_span(tag, call, work, base, at):
    """Ask for the K and V of the span at ``base``, or of the thread's next item: the vector
    products do so as they go, the tile unit's do not."""
    count = -(-(work.keys_end - work.keys_begin) // GROUP_TOKENS)
    begin = min((base - work.keys_begin) // GROUP_TOKENS, count)
    for g in range(begin, min(begin + SPAN_GROUPS, count + PREFETCH_GROUPS)):
        keys, values = load_i64(at.key_groups + 8 * g), load_i64(at.value_groups + 8 * g)
        for line in range(0, GROUP_TOKENS * call.padded * element_bytes(tag), VECTOR_BYTES):
            prefetch(keys + line)
            prefetch(values + line)


@inner
def begin_rows(tag, call, work, kv_head, rows, at):
    """The tile's queries, zeros beyond the head and up to a multiple of 16 rows, and running
    maximum, sum and output before the first key; a sink counts as a key of no value."""
    size, all_rows = element_bytes(tag), -(-rows // LANES) * LANES
    stride = call.padded * size
    for r in range(rows):
        token, head = work.first_token + r // call.group, kv_head * call.group + r % call.group
        source = call.query + token * call.query_token_stride + head * call.query_head_stride
        copy_vector(tag, source, call.head_size, call.padded, at.queries + r * stride, size)
        maximum, total = LOWEST, ZERO
        if call.sinks != 0 and work.part == 0:
            maximum, total = load_f32(call.sinks + 4 * head) * LOG2_E, ONE
        store_f32(at.maxima + 4 * r, maximum)
        store_f32(at.sums + 4 * r, total)
    for r in range(rows, all_rows):
        copy_vector(tag, at.queries, 0, call.padded, at.queries + r * stride, size)
    for i in range(0, all_rows * call.padded, LANES):
        store(at.outputs + i * 4, splat(ZERO))


@inner
def attend_rows(tag, call, work, first, rows, base, width, tiles, at):
    """A slice of the tile, ``rows`` from ``first`` on, against the span of keys at ``base``."""
    size = element_bytes(tag)
    oldest = work.position + first // call.group
    newest = work.position + (first + rows - 1) // call.group
    # Groups that no row here may see are left out: those after it, and a span before the window.
    groups = min(-(-width // GROUP_TOKENS), (newest - base) // GROUP_TOKENS + 1)
    if groups <= 0 or (call.window > 0 and base + SPAN_TOKENS <= oldest - call.window + 1):
        return
    begin = (base - work.keys_begin) // GROUP_TOKENS * 8
    stride = call.padded * size
    for g in range(0, groups, COLUMNS):  # of the last ones, more than are asked for
        score_tile(
            tag, tiles, rows, at.queries + first * stride, stride, at.key_groups + begin + 8 * g, 1,
            stride // UNIT_BYTES, VECTOR_BYTES, 0, at.scores + g * VECTOR_BYTES, SPAN_TOKENS * 4,
        )  # fmt: skip
    for r in range(rows):
        p = work.position + (first + r) // call.group
        rescale = weigh_row(
            tag, at.scores + r * SPAN_TOKENS * 4, at.weights + r * SPAN_TOKENS * size, groups,
            p - call.window + 1 - base if call.window > 0 else 0, p + 1 - base,
            call.scale, call.softcap, at.maxima + 4 * (first + r), at.sums + 4 * (first + r),
        )  # fmt: skip
        if rescale != ONE:
            scale_row(at.outputs + (first + r) * call.padded * 4, call.padded, rescale)
    outputs = at.outputs + first * call.padded * 4
    add_values(tag, tiles, rows, at.weights, at.value_groups + begin, groups, call.padded, outputs)


@inner
def add_values(tag, tiles, rows, weights, value_groups, groups, padded, outputs):
    """outputs += weights times values, for all head elements."""
    stride, step = SPAN_TOKENS * element_bytes(tag), padded * UNIT_BYTES
    units = GROUP_TOKENS * element_bytes(tag) // UNIT_BYTES
    wide = padded // (COLUMNS * LANES) * COLUMNS * LANES
    for d in range(0, wide, COLUMNS * LANES):
        value_tile_wide(
            tag, tiles, rows, weights, stride, value_groups, groups, units, step, d * UNIT_BYTES,
            outputs + d * 4, padded * 4,
        )  # fmt: skip
    for d in range(wide, padded, LANES):
        value_tile_narrow(
            tag, tiles, rows, weights, stride, value_groups, groups, units, step, d * UNIT_BYTES,
            outputs + d * 4, padded * 4,
        )  # fmt: skip


@inner
def weigh_row(tag, scores, weights, groups, low, high, scale, softcap, maximum, total):
    """Turn a row's scores into weights; keys outside [low, high) of the span are hidden.

    ``maximum`` and ``total`` are addresses of the row's running maximum and sum, in base 2.
    Returns the factor for what was added up under the old maximum.
    """
    best = splat(NEGATIVE_INFINITY)
    factor = scale * LOG2_E
    if softcap != ZERO:
        cap_row(scores, groups, scale, softcap)
        factor = ONE
    hides = low > 0 or high < groups * GROUP_TOKENS
    for g in range(groups):
        where = scores + g * VECTOR_BYTES
        if hides:
            first = g * LANES
            store(where, keep_between(load(where), low - first, high - first, NEGATIVE_INFINITY))
        best = larger(load(where), best)
    before = load_f32(maximum)
    after = max(before, lane_max(best) * factor)
    steep, shift = splat(factor), splat(-after)
    added = splat(ZERO)
    for g in range(groups):
        w = exp2(fma(load(scores + g * VECTOR_BYTES), steep, shift))
        added = added + w
        store_as(tag, weights + g * LANES * element_bytes(tag), w)
    rescale = ONE if after == before else power_of_two(before - after)
    store_f32(total, load_f32(total) * rescale + lane_sum(added))
    store_f32(maximum, after)
    return rescale


@inner
def cap_row(scores, groups, scale, softcap):
    """score -> softcap * tanh(score * scale / softcap) * log2(e), tanh(y) = 2 sigmoid(2y) - 1."""
    two = splat(np.float32(2.0))
    for g in range(groups):
        where = scores + g * VECTOR_BYTES
        tanh = two * sigmoid(load(where) * splat(np.float32(2.0) * scale / softcap)) - splat(ONE)
        store(where, tanh * splat(softcap * LOG2_E))


@inner
def power_of_two(x):
    """2**x of one number, as ``exp2``."""
    return lane_max(exp2(splat(x)))


@inner
def scale_row(row, padded, factor):
    """float32 [padded] times ``factor``."""
    for d in range(0, padded, LANES):
        store(row + d * 4, load(row + d * 4) * splat(factor))


@inner
def emit_row(tag, call, token, head, row, total, spare):
    """One query head's output: the accumulated ``row`` over ``total``. ``spare`` is overwritten."""
    size = element_bytes(tag)
    target = call.out + (token * call.heads + head) * call.head_size * size
    share = splat(ONE / total)
    whole = call.head_size // LANES * LANES
    for d in range(0, whole, LANES):
        store_as(tag, target + d * size, load(row + d * 4) * share)
    if whole < call.head_size:
        store_as(tag, spare, load(row + whole * 4) * share)
        for e in range(call.head_size - whole):
            copy_element(tag, spare + e * size, target + (whole + e) * size)


@inner
def finish_part(tag, call, work, kv_head, rows, at):
    """Keep this part's sums; the last part of the row to end combines them all, in order."""
    record = rows * (call.padded + 2) * 4
    maxima, sums = rows * call.padded * 4, rows * (call.padded + 1) * 4
    first = call.parts + (work.first_part * call.kv_heads + kv_head) * record
    stride = call.kv_heads * record
    mine = first + work.part * stride
    for i in range(0, rows * call.padded, LANES):
        store(mine + 4 * i, load(at.outputs + 4 * i))
    for r in range(rows):
        store_f32(mine + maxima + 4 * r, load_f32(at.maxima + 4 * r))
        store_f32(mine + sums + 4 * r, load_f32(at.sums + 4 * r))
    done = call.parts_done + (work.split_row * call.kv_heads + kv_head) * 8
    if fetch_add(done) != work.num_parts - 1:
        return
    store_i64(done, 0)
    for r in range(rows):
        best = LOWEST
        for i in range(work.num_parts):
            best = max(best, load_f32(first + i * stride + maxima + 4 * r))
        total = ZERO
        row = at.outputs + r * call.padded * 4
        scale_row(row, call.padded, ZERO)
        for i in range(work.num_parts):
            theirs = first + i * stride
            factor = power_of_two(load_f32(theirs + maxima + 4 * r) - best)
            total += factor * load_f32(theirs + sums + 4 * r)
            for d in range(0, call.padded, LANES):
                value = load(theirs + (r * call.padded + d) * 4)
                store(row + d * 4, fma(value, splat(factor), load(row + d * 4)))
        emit_row(tag, call, work.first_token, kv_head * rows + r, row, total, at.scores)
