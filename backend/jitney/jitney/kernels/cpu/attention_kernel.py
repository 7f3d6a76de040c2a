"""The paged attention kernel for the CPU, as Numba functions over raw addresses.

``attention`` calls ``layout.write_body``, unless all rows decode, and then :func:`attend_body` on
every thread of a team, with the address of ``layout.AttentionArguments``; the threads take items
from a counter until none is left. ``tag`` is the element type of queries, keys, values and results
(``simd``), ``kept`` that of the cache, ``dot`` that of the products: queries and weights are WIDE
where the processor multiplies no bfloat16.

A cache of bytes is widened, exactly, to what products read: bfloat16, or float32 where the
processor multiplies none. A key's scale multiplies its scores, and a value's its weights before
they are rounded.

An item is a tile of one row's queries and one KV head, all query heads of its group together, so
that K and V are read once for them; a tile's rows are (token, head of the group), token by token.
It walks over the keys in spans of 256 with an online softmax (Milakov and Gimelshein 2018; Dao et
al. 2022) in base 2, which begins anew at every multiple of PART_TOKENS; the results of these parts
are merged in order. The parts of a decode row are items of their own, and whichever ends last
merges them.

A row's result is bitwise the same from a prefill, a chunk and a decode, whatever else is in the
batch: spans and parts lie on one grid for all, keys that are hidden from a row add exact zeros to
its sums, and an item computes each row as it would alone.
"""

from typing import Any

import numpy as np
import torch

from jitney.kernels.cpu.byte_groups import load_part, read_scales, spare_vector, widen_groups
from jitney.kernels.cpu.compiled import THREADS_OFFSET, Kernel, source_version
from jitney.kernels.cpu.layout import (
    PART_TOKENS,
    SCRATCH_BYTES,
    SPAN_GROUPS,
    SPAN_TOKENS,
    STATE_EXTRA,
    WORK_BYTES,
    find_groups,
    list_wide,
    read_call,
    read_scratch,
    read_work,
    write_body,
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
    widens,
)
from jitney.kernels.cpu.simd import (
    BF16,
    F32,
    I8,
    LANES,
    LOG2_E,
    ONE,
    UNIT_BYTES,
    WIDE,
    ZERO,
    copy_element,
    element_bytes,
    exp2,
    fetch_add,
    first_lane,
    fma,
    has_scales,
    inner,
    keep_between,
    lane_max,
    lane_sum,
    larger,
    load,
    load_f32,
    load_i64,
    prefetch,
    second_bytes,
    sigmoid,
    splat,
    store,
    store_as,
    store_f32,
    store_i64,
)

TAGS: dict[torch.dtype, Any] = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: I8}
"""By cache type."""


def attention_kernels(dtype: torch.dtype, model_dtype: torch.dtype) -> tuple[Kernel, Kernel]:
    """:func:`attend_body` and ``write_body`` for caches of ``dtype``, compiled or found so."""
    tag, kept, version = TAGS[model_dtype], TAGS[dtype], source_version()
    dot = tag
    if model_dtype == torch.bfloat16 and widens():
        dot = F32 if dtype == torch.int8 else WIDE
    return (
        Kernel(lambda address: attend_body(tag, kept, dot, address) if version else None),
        Kernel(lambda address: write_body(tag, kept, address) if version else None),
    )


NEGATIVE_INFINITY = np.float32(-np.inf)
LOWEST = np.float32(-1e30)
"""The running maximum before any key: finite, so that no difference is infinity less infinity."""


@inner
def attend_body(tag, kept, dot, arguments):
    """Take items until none is left. A thread knows its next item while it works on one."""
    call = read_call(arguments)
    at = read_scratch(call.scratch + fetch_add(arguments + THREADS_OFFSET) * SCRATCH_BYTES)
    shaped = np.int64(0)
    if has_scales(kept):
        list_wide(dot, call.padded, at)
    item = fetch_add(arguments)
    while item < call.count:
        upcoming = fetch_add(arguments)
        following = upcoming if upcoming < call.count else item
        shaped = attend_item(tag, kept, dot, call, item, following, at, shaped)
        item = upcoming
    if call.tiles != 0:
        amx_end()


@inner
def attend_item(tag, kept, dot, call, item, upcoming, at, shaped):
    """One tile of queries against all keys of its work. The tile unit is set for slices of
    ``shaped`` rows; returns for how many it is set afterwards."""
    kv_head = item % call.kv_heads
    work = read_work(call.works + item // call.kv_heads * WORK_BYTES)
    following = read_work(call.works + upcoming // call.kv_heads * WORK_BYTES)
    rows = work.num_tokens * call.group
    if call.tiles != 0 and min(rows, MAX_ROWS_AMX) != shaped:
        shaped = min(rows, MAX_ROWS_AMX)
        amx_begin(shaped)
    if call.decode != 0 and work.part == work.num_parts - 1:
        write_token(tag, kept, call, work.first_token, kv_head)
    begin_queries(tag, dot, call, work, kv_head, rows, at)
    find_groups(kept, call, work, kv_head, following, upcoming % call.kv_heads, at)
    first_part = work.keys_begin // PART_TOKENS * PART_TOKENS
    # The only part of rows without sinks is their total.
    merges = work.num_parts == 1 and (work.keys_end > first_part + PART_TOKENS or call.sinks != 0)
    if merges:
        begin_states(call, work, kv_head, rows, at.totals, call.sinks)
    for part in range(first_part, work.keys_end, PART_TOKENS):
        begin_states(call, work, kv_head, rows, at.states, 0)
        attend_part(kept, dot, call, work, part, rows, at)
        if merges:
            merge_states(call, rows, at.totals, at.states)
    if work.num_parts > 1:
        finish_part(tag, call, work, kv_head, rows, at)
    else:
        emit_rows(tag, call, work, kv_head, rows, at.totals if merges else at.states, at.scores)
    return shaped


@inner
def attend_part(kept, dot, call, work, part, rows, at):
    """The tile's states over those keys of the work that are in the part that begins at ``part``.

    A span begins at a multiple of SPAN_TOKENS, or where the work does: keys before that are hidden
    from all rows, and so no row's sums are added up in another order."""
    tiles = call.tiles != 0
    slices = -(-rows // (MAX_ROWS_AMX if tiles else MAX_ROWS))
    begin = max(part, work.keys_begin // SPAN_TOKENS * SPAN_TOKENS)
    for span in range(begin, min(part + PART_TOKENS, work.keys_end), SPAN_TOKENS):
        base, end = max(span, work.keys_begin), min(span + SPAN_TOKENS, work.keys_end)
        entry = (base - work.keys_begin) // GROUP_TOKENS * 8
        keys, values = at.key_groups + entry, at.value_groups + entry
        if has_scales(kept):
            read_scales(call.padded, keys, values, end - base, at)
            if slices > 1:
                count = -(-(end - base) // GROUP_TOKENS)
                widen_groups(dot, keys, count, at.wide_keys, call.padded, LANES)
                widen_groups(dot, values, count, at.wide_values, call.padded, call.padded)
        elif tiles and rows >= MAX_ROWS and slices == 1:
            prefetch_span(kept, call, work, span + SPAN_TOKENS, at)
        for i in range(slices):
            first = i * MAX_ROWS_AMX if tiles else rows * i // slices
            last = min(rows, first + MAX_ROWS_AMX) if tiles else rows * (i + 1) // slices
            attend_rows(
                kept, dot, call, work, first, last - first, base, end - base, tiles, slices > 1,
                keys, values, at,
            )  # fmt: skip


@inner
def prefetch_span(kept, call, work, base, at):
    """Ask for the K and V of the span at ``base``, or of the thread's next item: the products of
    few rows do so as they go, and several slices find most of them in the second-level cache."""
    count = -(-(work.keys_end - work.keys_begin) // GROUP_TOKENS)
    begin = min((base - work.keys_begin) // GROUP_TOKENS, count)
    for g in range(begin, min(begin + SPAN_GROUPS, count + PREFETCH_GROUPS)):
        keys, values = load_i64(at.key_groups + 8 * g), load_i64(at.value_groups + 8 * g)
        for line in range(0, GROUP_TOKENS * call.padded * element_bytes(kept), VECTOR_BYTES):
            prefetch(keys + line)
            prefetch(values + line)


@inner
def begin_queries(tag, dot, call, work, kv_head, rows, at):
    """The tile's queries, zeros beyond the head and up to a multiple of 16 rows."""
    size, made, spare = element_bytes(tag), element_bytes(dot), spare_vector()
    for r in range(-(-rows // LANES) * LANES):
        token, head = work.first_token + r // call.group, kv_head * call.group + r % call.group
        source = call.query + token * call.query_token_stride + head * call.query_head_stride
        there, target = call.head_size if r < rows else 0, at.queries + r * call.padded * made
        for d in range(0, call.padded, LANES):
            x = load_part(tag, source + d * size, there - d, spare)
            store_as(dot, target + d * made, x)


@inner
def begin_states(call, work, kv_head, rows, states, sinks):
    """Running maximum, sum and output of each row before the first key; a sink, if the address of
    ``sinks`` is not 0, counts as a key of no value."""
    stride = (call.padded + STATE_EXTRA) * 4
    for r in range(rows):
        state = states + r * stride
        maximum, total = LOWEST, ZERO
        if sinks != 0:
            head = kv_head * call.group + r % call.group
            maximum, total = load_f32(sinks + 4 * head) * LOG2_E, ONE
        for d in range(0, call.padded, LANES):
            store(state + 4 * d, splat(ZERO))
        store_f32(state + 4 * call.padded, maximum)
        store_f32(state + 4 * call.padded + 4, total)


@inner
def merge_states(call, rows, totals, states):
    """Add each row's state over one part to its state over all parts before. A part of which a row
    sees no key changes nothing."""
    stride = (call.padded + STATE_EXTRA) * 4
    for r in range(rows):
        total, part = totals + r * stride, states + r * stride
        before, theirs = load_f32(total + 4 * call.padded), load_f32(part + 4 * call.padded)
        best = max(before, theirs)
        kept, share = power_of_two(before - best), power_of_two(theirs - best)
        for d in range(0, call.padded, LANES):
            value = load(part + 4 * d) * splat(share)
            store(total + 4 * d, fma(load(total + 4 * d), splat(kept), value))
        where, other = total + 4 * call.padded + 4, part + 4 * call.padded + 4
        store_f32(where, load_f32(where) * kept + load_f32(other) * share)
        store_f32(where - 4, best)


@inner
def attend_rows(
    kept, dot, call, work, first, rows, base, width, tiles, wide, keys, values, at
):  # fmt: skip
    """A slice of the tile, ``rows`` from ``first`` on, against the span of keys at ``base``, whose
    groups are listed at ``keys`` and ``values``. Those of bytes are widened here, a few at a time,
    unless they were before, for several slices (``wide``)."""
    size = element_bytes(dot)
    oldest = work.position + first // call.group
    newest = work.position + (first + rows - 1) // call.group
    # Groups that no row here may see are left out: those after it, and those before the window.
    groups = min(-(-width // GROUP_TOKENS), (newest - base) // GROUP_TOKENS + 1)
    hidden = np.int64(0)
    if call.window > 0:
        hidden = max(0, oldest - call.window + 1 - base) // GROUP_TOKENS
        base += hidden * GROUP_TOKENS
        groups -= hidden
    if groups <= 0:
        return
    keys, values, scales = keys + hidden * 8, values + hidden * 8, hidden * VECTOR_BYTES
    if has_scales(kept) and wide:
        keys, values = at.wide_key_groups + hidden * 8, at.wide_value_groups + hidden * 8
    here = has_scales(kept) and not wide
    stride, state_stride = call.padded * size, (call.padded + STATE_EXTRA) * 4
    states, units = at.states + first * state_stride, call.padded * second_bytes(dot) // UNIT_BYTES
    for g in range(0, groups, COLUMNS):  # of the last ones, more than are asked for
        entry = keys + 8 * g
        if here:
            count, entry = min(COLUMNS, groups - g), at.wide_key_groups
            widen_groups(dot, keys + 8 * g, count, at.wide_keys, call.padded, LANES)
        score_tile(
            dot, tiles, rows, at.queries + first * stride, stride, entry, 1,
            units, VECTOR_BYTES, 0, at.scores + g * VECTOR_BYTES, SPAN_TOKENS * 4,
        )  # fmt: skip
    factor = ONE if call.softcap != ZERO else call.scale * LOG2_E
    # In two turns, so that the processor has several rows under way at once in the first one.
    for r in range(rows):
        p = work.position + (first + r) // call.group
        scores, low = at.scores + r * SPAN_TOKENS * 4, p - call.window + 1 - base
        find_largest(
            kept, scores, groups, low if call.window > 0 else 0, p + 1 - base, call.scale,
            call.softcap, factor, states + r * state_stride + 4 * call.padded,
            at.key_scales + scales,
        )  # fmt: skip
    for r in range(rows):
        state, weights = states + r * state_stride, at.weights + r * SPAN_TOKENS * size
        scores = at.scores + r * SPAN_TOKENS * 4
        rescale = weigh_row(
            kept, dot, scores, weights, groups, factor, state + 4 * call.padded,
            at.value_scales + scales,
        )  # fmt: skip
        if rescale != ONE:
            scale_row(state, call.padded, rescale)
    if not here:
        add_values(dot, tiles, rows, at.weights, values, groups, call.padded, states)
        return
    for g in range(0, groups, COLUMNS):
        count, weights = min(COLUMNS, groups - g), at.weights + g * LANES * size
        widen_groups(dot, values + 8 * g, count, at.wide_values, call.padded, call.padded)
        add_values(
            dot, tiles, rows, weights, at.wide_value_groups, count, call.padded, states
        )  # fmt: skip


@inner
def add_values(dot, tiles, rows, weights, value_groups, groups, padded, states):
    """Outputs += weights times values, for all head elements."""
    stride, step = SPAN_TOKENS * element_bytes(dot), padded * UNIT_BYTES
    state_stride = (padded + STATE_EXTRA) * 4
    units = GROUP_TOKENS * second_bytes(dot) // UNIT_BYTES
    wide = padded // (COLUMNS * LANES) * COLUMNS * LANES
    for d in range(0, wide, COLUMNS * LANES):
        value_tile_wide(
            dot, tiles, rows, weights, stride, value_groups, groups, units, step, d * UNIT_BYTES,
            states + d * 4, state_stride,
        )  # fmt: skip
    for d in range(wide, padded, LANES):
        value_tile_narrow(
            dot, tiles, rows, weights, stride, value_groups, groups, units, step, d * UNIT_BYTES,
            states + d * 4, state_stride,
        )  # fmt: skip


@inner
def find_largest(
    kept, scores, groups, low, high, scale, softcap, factor, state, key_scales
):  # fmt: skip
    """Raise the running maximum of a row, in base 2, at address ``state``; what it was is kept
    behind the running sum. Scores of keys outside [low, high) of the span become -inf."""
    if has_scales(kept):
        for where in range(0, groups * VECTOR_BYTES, VECTOR_BYTES):
            store(scores + where, load(scores + where) * load(key_scales + where))
    if softcap != ZERO:
        cap_row(scores, groups, scale, softcap)
    best = splat(NEGATIVE_INFINITY)
    hides = low > 0 or high < groups * GROUP_TOKENS
    for g in range(groups):
        where = scores + g * VECTOR_BYTES
        if hides:
            first = g * LANES
            store(where, keep_between(load(where), low - first, high - first, NEGATIVE_INFINITY))
        best = larger(load(where), best)
    before = load_f32(state)
    store_f32(state, max(before, lane_max(best) * factor))
    store_f32(state + 8, before)


@inner
def weigh_row(kept, dot, scores, weights, groups, factor, state, value_scales):
    """Turn a row's scores into weights and add these to its running sum.

    Returns the factor for what was added up under the maximum before."""
    after, before = load_f32(state), load_f32(state + 8)
    steep, shift = splat(factor), splat(-after)
    added = splat(ZERO)
    for g in range(groups):
        w = exp2(fma(load(scores + g * VECTOR_BYTES), steep, shift))
        added = added + w
        if has_scales(kept):
            w = w * load(value_scales + g * VECTOR_BYTES)
        store_as(dot, weights + g * LANES * element_bytes(dot), w)
    rescale = ONE if after == before else power_of_two(before - after)
    store_f32(state + 4, load_f32(state + 4) * rescale + lane_sum(added))
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
    return first_lane(exp2(splat(x)))


@inner
def scale_row(row, padded, factor):
    """float32 [padded] times ``factor``."""
    for d in range(0, padded, LANES):
        store(row + d * 4, load(row + d * 4) * splat(factor))


@inner
def emit_rows(tag, call, work, kv_head, rows, states, spare):
    """Each row's output: what it added up over its sum. ``spare`` is overwritten."""
    size = element_bytes(tag)
    whole = call.head_size // LANES * LANES
    for r in range(rows):
        token, head = work.first_token + r // call.group, kv_head * call.group + r % call.group
        target = call.out + (token * call.heads + head) * call.head_size * size
        state = states + r * (call.padded + STATE_EXTRA) * 4
        share = splat(ONE / load_f32(state + 4 * call.padded + 4))
        for d in range(0, whole, LANES):
            store_as(tag, target + d * size, load(state + d * 4) * share)
        if whole < call.head_size:
            store_as(tag, spare, load(state + whole * 4) * share)
            for e in range(call.head_size - whole):
                copy_element(tag, spare + e * size, target + (whole + e) * size)


@inner
def finish_part(tag, call, work, kv_head, rows, at):
    """Keep this part's states; the last part of the row to end merges them all, in order."""
    size = rows * (call.padded + STATE_EXTRA) * 4
    first = call.parts + (work.first_part * call.kv_heads + kv_head) * size
    stride = call.kv_heads * size
    for i in range(0, size, VECTOR_BYTES):
        store(first + work.part * stride + i, load(at.states + i))
    done = call.parts_done + (work.split_row * call.kv_heads + kv_head) * 8
    if fetch_add(done) != work.num_parts - 1:
        return
    store_i64(done, 0)
    begin_states(call, work, kv_head, rows, at.totals, call.sinks)
    for i in range(work.num_parts):
        merge_states(call, rows, at.totals, first + i * stride)
    emit_rows(tag, call, work, kv_head, rows, at.totals, at.scores)
