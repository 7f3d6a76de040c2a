"""The inner half of the attention kernel: a few rows of an item against a span of keys.

``attention_kernel`` draws the loops. From here on inward, with the sizes of a model of 128 elements
a head, in bfloat16. The rows of an item are taken in *passes* of 6 rows (16 with the tile unit)::

    attend_split        512 keys, all rows of the item
      attend_rows       256 keys, one pass. The rows' states are [6, 128 outputs + maximum, sum]
        multiply_keys     scores [6, 256]   = queries [6, 128] x keys      4 groups at a time
        weigh_rows        weights [6, 256]  = 2**(scores - maximum)        each row by itself
        multiply_values   outputs [6, 128] += weights [6, 256] x values    64 elements at a time

Scores and weights stay in the first-level cache. Outputs are part of the rows' states (``softmax``)
and are read and written once for each span.

``keys`` and ``values`` are lists of groups (``cache_blocks``): what is passed is the address of the
list's entry for the first group in question. ``first_key`` is that group's first position.

A cache of bytes is widened before products read it. If an item takes several passes, a span is
widened as a whole, once for all of them. If it takes one pass, groups are widened a few at a time,
just before they are multiplied: so they stay in the first-level cache.

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
from jitney.kernels.cpu.emit import F32_BYTES, I64_BYTES, LANES, UNIT_BYTES, VECTOR_BYTES
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

SCORES_STRIDE = SPAN_TOKENS * F32_BYTES
"""Bytes from one row's scores to the next row's."""

# The micro-kernels: see ``make_micro_kernel`` for their arguments.
multiply_key_groups = make_micro_kernel(
    PRODUCT_VECTORS, source_per_vector=True, ahead=PREFETCH_GROUPS
)
"""Scores = queries x keys. Each of PRODUCT_VECTORS groups gives 16 scores, which are a vector."""
multiply_values_wide = make_micro_kernel(
    PRODUCT_VECTORS, source_per_vector=False, ahead=PREFETCH_GROUPS
)
"""Outputs += weights x values, of PRODUCT_VECTORS times 16 elements of the head, over all groups
that are listed."""
multiply_values_narrow = make_micro_kernel(1, source_per_vector=False, ahead=PREFETCH_GROUPS)
"""The same, of 16 elements of the head."""


# --------------------------------------------------------------------------- spans


@inner
def attend_split(cache_tag, product_tag, call, entry, split_begin, rows, scratch):
    """Add the keys of one split to the states of all rows of the item: those of positions
    split_begin to split_begin + SPLIT_TOKENS - 1, as far as the entry has them."""
    use_tiles = call.use_tiles != 0
    rows_at_once = MAX_ROWS_AMX if use_tiles else MAX_ROWS
    passes = -(-rows // rows_at_once)
    # Spans begin at multiples of SPAN_TOKENS, whatever the entry is, so that a row's sums are
    # always added up in the same order.
    first_span = max(split_begin, entry.keys_begin // SPAN_TOKENS * SPAN_TOKENS)
    end = min(split_begin + SPLIT_TOKENS, entry.keys_end)
    for span_begin in range(first_span, end, SPAN_TOKENS):
        # The entry may begin within its first span. The keys before are hidden from all its rows:
        # they would add zeros.
        first_key = max(span_begin, entry.keys_begin)
        num_keys = min(span_begin + SPAN_TOKENS, entry.keys_end) - first_key
        first_group = (first_key - entry.keys_begin) // GROUP_TOKENS
        keys = scratch.key_groups + first_group * I64_BYTES
        values = scratch.value_groups + first_group * I64_BYTES
        if has_scales(cache_tag):
            read_scales(call.padded, keys, values, num_keys, scratch)
            if passes > 1:
                widen_span(
                    product_tag, call.padded, keys, values, num_keys=num_keys, scratch=scratch
                )
        elif use_tiles and rows >= MAX_ROWS and passes == 1:
            # Not in other cases. Vectors, and tiles of fewer rows, prefetch while they multiply.
            # With several passes the first one alone waits for memory: the others find the span in
            # the second-level cache.
            prefetch_span(cache_tag, call, entry, span_begin + SPAN_TOKENS, scratch)
        for number in range(passes):
            if use_tiles:
                # 16 rows in each pass, and in the last one what is left.
                first = number * MAX_ROWS_AMX
                last = min(rows, first + MAX_ROWS_AMX)
            else:
                # The same number of rows in each pass, or one more: 7 are 3 and 4, not 6 and 1.
                first = rows * number // passes
                last = rows * (number + 1) // passes
            attend_rows(
                cache_tag,
                product_tag,
                call,
                entry,
                first,
                rows=last - first,
                first_key=first_key,
                num_keys=num_keys,
                span_is_wide=passes > 1,
                keys=keys,
                values=values,
                scratch=scratch,
            )


@inlined
def widen_span(product_tag, padded, keys, values, num_keys, scratch):
    """Widen all groups of a span of bytes."""
    count = -(-num_keys // GROUP_TOKENS)
    widen_groups(product_tag, keys, count, scratch.wide_keys, padded=padded, row_bytes=LANES)
    widen_groups(product_tag, values, count, scratch.wide_values, padded=padded, row_bytes=padded)


@inner
def prefetch_span(cache_tag, call, entry, span_begin, scratch):
    """Prefetch keys and values of the span that begins at this position. Behind the entry's last
    group the lists go on with groups of the thread's next item: these are prefetched, too."""
    own_groups = -(-(entry.keys_end - entry.keys_begin) // GROUP_TOKENS)
    listed_groups = own_groups + PREFETCH_GROUPS
    first = min((span_begin - entry.keys_begin) // GROUP_TOKENS, own_groups)
    size = GROUP_TOKENS * call.padded * element_bytes(cache_tag)
    for g in range(first, min(first + SPAN_GROUPS, listed_groups)):
        keys = load_i64(scratch.key_groups + g * I64_BYTES)
        values = load_i64(scratch.value_groups + g * I64_BYTES)
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
    first_key,
    num_keys,
    span_is_wide,
    keys,
    values,
    scratch,
):
    """Add the ``num_keys`` keys of a span, from position ``first_key`` on, to the states of so many
    ``rows`` of the item, from row ``first`` on.

    ``span_is_wide`` matters for a cache of bytes alone: whether the whole span has been widened.
    """
    first_position = entry.position + first // call.heads_per_kv
    last_position = entry.position + (first + rows - 1) // call.heads_per_kv
    # Groups that none of these rows sees are left out: at the end those behind the last row, at the
    # beginning those before the first row's window, which is the earliest one.
    groups_up_to_last = (last_position - first_key) // GROUP_TOKENS + 1
    groups = min(-(-num_keys // GROUP_TOKENS), groups_up_to_last)
    left_out = np.int64(0)
    if call.window > 0:
        window_begin = first_position - call.window + 1
        left_out = max(0, window_begin - first_key) // GROUP_TOKENS
        first_key += left_out * GROUP_TOKENS
        groups -= left_out
    if groups <= 0:
        return
    keys += left_out * I64_BYTES
    values += left_out * I64_BYTES
    if has_scales(cache_tag) and span_is_wide:
        keys = scratch.wide_key_groups + left_out * I64_BYTES
        values = scratch.wide_value_groups + left_out * I64_BYTES
    # From here on: whether ``keys`` and ``values`` list groups of bytes.
    widens_here = has_scales(cache_tag) and not span_is_wide
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
        first_key=first_key,
        groups=groups,
        states=states,
        scales_offset=left_out * VECTOR_BYTES,
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
    """Scores of so many rows and groups of keys, PRODUCT_VECTORS groups at a time.

    The last product may take in groups that stand behind these in the list. Nobody reads their
    scores.
    """
    query_bytes = call.padded * element_bytes(product_tag)
    key_units = call.padded * second_bytes(product_tag) // UNIT_BYTES
    for g in range(0, groups, PRODUCT_VECTORS):
        sources = keys + g * I64_BYTES
        if widens_here:
            widen_groups(
                product_tag,
                sources,
                count=min(PRODUCT_VECTORS, groups - g),
                target=scratch.wide_keys,
                padded=call.padded,
                row_bytes=LANES,
            )
            sources = scratch.wide_key_groups
        multiply_key_groups(
            product_tag,
            call.use_tiles != 0,
            rows,
            left=queries,
            left_stride=query_bytes,
            sources=sources,
            num_sources=1,  # a vector of scores comes from one group
            units=key_units,
            # Between two units of a token are those of the other 15 tokens.
            unit_stride=VECTOR_BYTES,
            offset=0,
            out=scratch.scores + g * VECTOR_BYTES,
            out_stride=SCORES_STRIDE,
        )


@inlined
def weigh_rows(
    cache_tag,
    product_tag,
    call,
    entry,
    first,
    rows,
    first_key,
    groups,
    states,
    scales_offset,
    scratch,
):
    """Turn the scores of so many rows and groups into weights, and rescale the rows' outputs.

    The scales of these keys and values stand ``scales_offset`` bytes behind those of the span's
    first keys.
    """
    # With a softcap ``raise_maximum`` makes exponents of the scores.
    factor = ONE if call.softcap != ZERO else call.scale * LOG2_E
    # Two loops: in the first one the processor can work on several rows at once.
    for r in range(rows):
        position = entry.position + (first + r) // call.heads_per_kv
        window_begin = position - call.window + 1
        raise_maximum(
            cache_tag,
            scores=scratch.scores + r * SCORES_STRIDE,
            groups=groups,
            first_seen=window_begin - first_key if call.window > 0 else 0,
            seen_end=position + 1 - first_key,
            scale=call.scale,
            softcap=call.softcap,
            factor=factor,
            outputs_end=states + r * state_bytes(call.padded) + call.padded * F32_BYTES,
            key_scales=scratch.key_scales + scales_offset,
        )
    for r in range(rows):
        state = states + r * state_bytes(call.padded)
        rescale = weigh_row(
            cache_tag,
            product_tag,
            scores=scratch.scores + r * SCORES_STRIDE,
            weights=scratch.weights + r * SPAN_TOKENS * element_bytes(product_tag),
            groups=groups,
            factor=factor,
            outputs_end=state + call.padded * F32_BYTES,
            value_scales=scratch.value_scales + scales_offset,
        )
        if rescale != ONE:
            scale_row(state, call.padded, rescale)


@inlined
def multiply_values(product_tag, call, rows, values, groups, widens_here, states, scratch):
    """Outputs += weights x values, of so many rows and groups."""
    if not widens_here:
        add_values(product_tag, call, rows, scratch.weights, values, groups=groups, states=states)
        return
    for g in range(0, groups, PRODUCT_VECTORS):
        count = min(PRODUCT_VECTORS, groups - g)
        widen_groups(
            product_tag,
            values + g * I64_BYTES,
            count,
            scratch.wide_values,
            padded=call.padded,
            row_bytes=call.padded,
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
    """Outputs += weights x values, for all elements of the head. The groups of values are in the
    form that products read."""
    use_tiles = call.use_tiles != 0
    weights_stride = SPAN_TOKENS * element_bytes(product_tag)
    outputs_stride = state_bytes(call.padded)
    # A group of values has so many unit rows, which are ``unit_row_bytes`` long.
    unit_rows = GROUP_TOKENS * second_bytes(product_tag) // UNIT_BYTES
    unit_row_bytes = call.padded * UNIT_BYTES
    # As many elements as possible 64 at once, the others 16 at once. The two calls are alike but
    # for the function: Numba must know it when it compiles the call, so ``d`` cannot choose it.
    wide_elements = PRODUCT_VECTORS * LANES
    wide_end = call.padded // wide_elements * wide_elements
    for d in range(0, wide_end, wide_elements):
        multiply_values_wide(
            product_tag,
            use_tiles,
            rows,
            left=weights,
            left_stride=weights_stride,
            sources=values,
            num_sources=groups,
            units=unit_rows,
            unit_stride=unit_row_bytes,
            offset=d * UNIT_BYTES,
            out=states + d * F32_BYTES,
            out_stride=outputs_stride,
        )
    for d in range(wide_end, call.padded, LANES):
        multiply_values_narrow(
            product_tag,
            use_tiles,
            rows,
            left=weights,
            left_stride=weights_stride,
            sources=values,
            num_sources=groups,
            units=unit_rows,
            unit_stride=unit_row_bytes,
            offset=d * UNIT_BYTES,
            out=states + d * F32_BYTES,
            out_stride=outputs_stride,
        )
