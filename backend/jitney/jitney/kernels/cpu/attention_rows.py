"""The inner half of the attention kernel: a few rows of an item against a span of keys.

``attention_kernel`` draws the loops. From here on inward, with the sizes of a model of 128 elements
a head, in bfloat16::

    attend_split    512 keys, all rows of the item
      attend_rows   256 keys, 6 rows (16 of the tile unit)
        multiply_keys     queries [6, 128] x 4 groups of keys at a time     -> scores [6, 256]
        weigh_rows        each row: maximum, then 2**(score - maximum)      -> weights [6, 256]
        multiply_values   weights x all groups of values, 64 elements of the head at a time
                                                                            -> outputs [6, 128]

Scores and weights stay in the first-level cache. Outputs are part of the rows' states (``softmax``)
and are read and written once for each span.

Called by ``attention_kernel``.
"""

import numpy as np

from jitney.kernels.cpu.attention_records import (
    PRODUCT_VECTORS,
    SPAN_GROUPS,
    SPAN_TOKENS,
    SPLIT_TOKENS,
)
from jitney.kernels.cpu.cache_groups import GROUP_TOKENS, PREFETCH_GROUPS, read_scales, widen_groups
from jitney.kernels.cpu.emit import LANES, UNIT_BYTES, VECTOR_BYTES
from jitney.kernels.cpu.micro_kernel import MAX_ROWS, MAX_ROWS_AMX, make_micro_kernel
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ONE,
    ZERO,
    element_bytes,
    has_scales,
    inlined,
    inner,
    load_i64,
    prefetch,
    second_bytes,
)
from jitney.kernels.cpu.softmax import raise_maximum, scale_row, state_bytes, weigh_row

multiply_key_groups = make_micro_kernel(PRODUCT_VECTORS, across=True, ahead=PREFETCH_GROUPS)
"""Scores: queries times PRODUCT_VECTORS groups of keys, each of which gives 16 scores, a vector."""
multiply_values_wide = make_micro_kernel(PRODUCT_VECTORS, across=False, ahead=PREFETCH_GROUPS)
"""Outputs: weights times all groups of values, PRODUCT_VECTORS times 16 elements of the head."""
multiply_values_narrow = make_micro_kernel(1, across=False, ahead=PREFETCH_GROUPS)
"""The same of 16 elements."""


# --------------------------------------------------------------------------- spans


@inner
def attend_split(cache_tag, product_tag, call, entry, split, rows, scratch):
    """The states of all rows over those keys of the entry that are in the split that begins at
    ``split``.

    Spans lie on a grid of SPAN_TOKENS whatever the entry is, so a row's sums are always added up in
    the same order. Only the first span may begin later, where the entry does: the keys before that
    are hidden from all its rows, and would add zeros."""
    tiles = call.tiles != 0
    turns = -(-rows // (MAX_ROWS_AMX if tiles else MAX_ROWS))
    begin = max(split, entry.keys_begin // SPAN_TOKENS * SPAN_TOKENS)
    limit = min(split + SPLIT_TOKENS, entry.keys_end)
    for span in range(begin, limit, SPAN_TOKENS):
        base = max(span, entry.keys_begin)
        width = min(span + SPAN_TOKENS, entry.keys_end) - base
        at = (base - entry.keys_begin) // GROUP_TOKENS * 8
        keys = scratch.key_groups + at
        values = scratch.value_groups + at
        if has_scales(cache_tag):
            read_scales(call.padded, keys, values, width, scratch)
            if turns > 1:
                # Once for all rows, not again in each turn.
                widen_span(product_tag, call.padded, keys, values, width=width, scratch=scratch)
        elif tiles and rows >= MAX_ROWS and turns == 1:
            # Otherwise there is no need: vectors, and tiles of few rows, prefetch as they multiply;
            # with several turns, all but the first find the span in the second-level cache.
            prefetch_span(cache_tag, call, entry, span + SPAN_TOKENS, scratch)
        for i in range(turns):
            if tiles:
                # 16 rows each time, and in the last turn what is left.
                first = i * MAX_ROWS_AMX
                last = min(rows, first + MAX_ROWS_AMX)
            else:
                # The rows shared out evenly.
                first = rows * i // turns
                last = rows * (i + 1) // turns
            attend_rows(
                cache_tag,
                product_tag,
                call,
                entry,
                first,
                rows=last - first,
                base=base,
                width=width,
                is_wide=turns > 1,
                keys=keys,
                values=values,
                scratch=scratch,
            )


@inlined
def widen_span(product_tag, padded, keys, values, width, scratch):
    """Widen all groups of a span of bytes, which are listed at ``keys`` and ``values``."""
    count = -(-width // GROUP_TOKENS)
    widen_groups(product_tag, keys, count, scratch.wide_keys, padded=padded, width=LANES)
    widen_groups(product_tag, values, count, scratch.wide_values, padded=padded, width=padded)


@inner
def prefetch_span(cache_tag, call, entry, base, scratch):
    """Prefetch K and V of the span at ``base``; if that is behind the entry's last key, those
    of the thread's next item, which follow in the list."""
    count = -(-(entry.keys_end - entry.keys_begin) // GROUP_TOKENS)
    begin = min((base - entry.keys_begin) // GROUP_TOKENS, count)
    size = GROUP_TOKENS * call.padded * element_bytes(cache_tag)
    for g in range(begin, min(begin + SPAN_GROUPS, count + PREFETCH_GROUPS)):
        keys = load_i64(scratch.key_groups + 8 * g)
        values = load_i64(scratch.value_groups + 8 * g)
        for line in range(0, size, VECTOR_BYTES):
            prefetch(keys + line)
            prefetch(values + line)


# --------------------------------------------------------------------------- a few rows


@inner
def attend_rows(
    cache_tag,
    product_tag,
    call,
    entry,
    first,
    rows,
    base,
    width,
    is_wide,
    keys,
    values,
    scratch,
):
    """So many ``rows`` of an item, from row ``first`` on, against the span of ``width`` keys from
    position ``base`` on, whose groups are listed at ``keys`` and ``values``.

    Groups of bytes are widened here, a few at a time, unless they are already (``is_wide``)."""
    oldest = entry.position + first // call.heads_per_kv
    newest = entry.position + (first + rows - 1) // call.heads_per_kv
    # Groups that no row here may see are left out: those behind the newest row, and the ``hidden``
    # ones before the oldest row's window.
    groups = min(-(-width // GROUP_TOKENS), (newest - base) // GROUP_TOKENS + 1)
    hidden = np.int64(0)
    if call.window > 0:
        hidden = max(0, oldest - call.window + 1 - base) // GROUP_TOKENS
        base += hidden * GROUP_TOKENS
        groups -= hidden
    if groups <= 0:
        return
    keys += hidden * 8
    values += hidden * 8
    if has_scales(cache_tag) and is_wide:
        keys = scratch.wide_key_groups + hidden * 8
        values = scratch.wide_value_groups + hidden * 8
    widens_here = has_scales(cache_tag) and not is_wide
    queries = scratch.queries + first * call.padded * element_bytes(product_tag)
    states = scratch.states + first * state_bytes(call.padded)
    multiply_keys(
        product_tag,
        call,
        rows,
        queries,
        keys,
        groups=groups,
        widens_here=widens_here,
        scratch=scratch,
    )
    weigh_rows(
        cache_tag,
        product_tag,
        call,
        entry,
        first,
        rows=rows,
        base=base,
        groups=groups,
        states=states,
        scales=hidden * VECTOR_BYTES,
        scratch=scratch,
    )
    multiply_values(
        product_tag,
        call,
        rows,
        values,
        groups=groups,
        widens_here=widens_here,
        states=states,
        scratch=scratch,
    )


@inlined
def multiply_keys(product_tag, call, rows, queries, keys, groups, widens_here, scratch):
    """Scores of so many rows and groups of keys, PRODUCT_VECTORS groups at a time. The last product
    may take in groups from the margin behind the list; nobody reads their scores."""
    stride = call.padded * element_bytes(product_tag)
    units = call.padded * second_bytes(product_tag) // UNIT_BYTES
    for g in range(0, groups, PRODUCT_VECTORS):
        sources = keys + 8 * g
        if widens_here:
            count = min(PRODUCT_VECTORS, groups - g)
            widen_groups(
                product_tag,
                sources,
                count,
                scratch.wide_keys,
                padded=call.padded,
                width=LANES,
            )
            sources = scratch.wide_key_groups
        multiply_key_groups(
            product_tag,
            call.tiles != 0,
            rows,
            left=queries,
            left_stride=stride,
            sources=sources,
            count=1,
            units=units,
            step=VECTOR_BYTES,
            offset=0,
            out=scratch.scores + g * VECTOR_BYTES,
            out_stride=SPAN_TOKENS * 4,
        )


@inlined
def weigh_rows(
    cache_tag,
    product_tag,
    call,
    entry,
    first,
    rows,
    base,
    groups,
    states,
    scales,
    scratch,
):
    """Turn the scores of so many rows and groups, from position ``base`` on, into weights.

    The scales of these keys and values are ``scales`` bytes behind those of the span's first
    keys."""
    # Capped scores are in base 2 already.
    factor = ONE if call.softcap != ZERO else call.scale * LOG2_E
    # Two loops: in the first one the processor can work on several rows at once.
    for r in range(rows):
        position = entry.position + (first + r) // call.heads_per_kv
        low = position - call.window + 1 - base
        raise_maximum(
            cache_tag,
            scores=scratch.scores + r * SPAN_TOKENS * 4,
            groups=groups,
            low=low if call.window > 0 else 0,
            high=position + 1 - base,
            scale=call.scale,
            softcap=call.softcap,
            factor=factor,
            outputs_end=states + r * state_bytes(call.padded) + 4 * call.padded,
            key_scales=scratch.key_scales + scales,
        )
    for r in range(rows):
        state = states + r * state_bytes(call.padded)
        rescale = weigh_row(
            cache_tag,
            product_tag,
            scores=scratch.scores + r * SPAN_TOKENS * 4,
            weights=scratch.weights + r * SPAN_TOKENS * element_bytes(product_tag),
            groups=groups,
            factor=factor,
            outputs_end=state + 4 * call.padded,
            value_scales=scratch.value_scales + scales,
        )
        if rescale != ONE:
            scale_row(state, call.padded, rescale)


@inlined
def multiply_values(product_tag, call, rows, values, groups, widens_here, states, scratch):
    """Outputs += weights times values, of so many rows and groups."""
    if not widens_here:
        add_values(product_tag, call, rows, scratch.weights, values, groups=groups, states=states)
        return
    for g in range(0, groups, PRODUCT_VECTORS):
        count = min(PRODUCT_VECTORS, groups - g)
        widen_groups(
            product_tag,
            values + 8 * g,
            count,
            scratch.wide_values,
            padded=call.padded,
            width=call.padded,
        )
        add_values(
            product_tag,
            call,
            rows,
            scratch.weights + g * LANES * element_bytes(product_tag),
            scratch.wide_value_groups,
            groups=count,
            states=states,
        )


@inner
def add_values(product_tag, call, rows, weights, values, groups, states):
    """Outputs += weights times values that are as products read them, for all head elements."""
    tiles = call.tiles != 0
    stride = SPAN_TOKENS * element_bytes(product_tag)
    step = call.padded * UNIT_BYTES
    units = GROUP_TOKENS * second_bytes(product_tag) // UNIT_BYTES
    at_once = PRODUCT_VECTORS * LANES
    wide = call.padded // at_once * at_once
    for d in range(0, wide, at_once):
        multiply_values_wide(
            product_tag,
            tiles,
            rows,
            left=weights,
            left_stride=stride,
            sources=values,
            count=groups,
            units=units,
            step=step,
            offset=d * UNIT_BYTES,
            out=states + d * 4,
            out_stride=state_bytes(call.padded),
        )
    for d in range(wide, call.padded, LANES):
        multiply_values_narrow(
            product_tag,
            tiles,
            rows,
            left=weights,
            left_stride=stride,
            sources=values,
            count=groups,
            units=units,
            step=step,
            offset=d * UNIT_BYTES,
            out=states + d * 4,
            out_stride=state_bytes(call.padded),
        )
