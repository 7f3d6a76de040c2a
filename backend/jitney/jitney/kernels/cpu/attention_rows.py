"""The inner half of the attention kernel: a few rows of an item against a span of keys.

``attention_kernel`` draws the loops, and ``attention_spans`` calls :func:`attend_rows`. From here
on inward, with the sizes of a model of 128 elements a head, in bfloat16, for 6 rows::

    attend_rows         256 keys, 6 rows. Their states are [6, 128 outputs + maximum, sum]
      multiply_keys     scores [6, 256]   = queries [6, 128] x keys      4 groups at a time
      weigh_rows        weights [6, 256]  = 2**(scores - maximum)        each row by itself
      multiply_values   outputs [6, 128] += weights [6, 256] x values    64 elements at a time

Scores and weights stay in the first-level cache. Outputs are part of the rows' states (``softmax``)
and are read and written once for each span.

``key_list`` and ``value_list`` point into lists of groups (``cache_blocks``), at the entry of the
first group in question. ``first_key`` is that group's first position.

A cache of bytes is widened before products read it: here a few groups at a time, just before they
are multiplied, unless ``attention_spans`` has widened the whole span.

Called by ``attention_spans``.
"""

import numpy as np

from jitney.kernels.cpu.attention_records import PRODUCT_VECTORS, SPAN_TOKENS
from jitney.kernels.cpu.cache_groups import GROUP_TOKENS, PREFETCH_GROUPS, widen_groups
from jitney.kernels.cpu.emit import (
    F32_BYTES,
    I64_BYTES,
    LANES,
    UNIT_BYTES,
    VECTOR_BYTES,
    ceil_div,
)
from jitney.kernels.cpu.micro_kernel import make_micro_kernel
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ONE,
    ZERO,
    has_scales,
    inlined,
    inner,
    left_bytes,
    right_bytes,
)
from jitney.kernels.cpu.softmax import (
    hide_and_raise_maximum,
    prepare_scores,
    scale_outputs,
    state_bytes,
    weigh_row,
)

SCORES_STRIDE = SPAN_TOKENS * F32_BYTES
"""Bytes from one row's scores to the next row's."""

# The micro-kernels: see ``make_micro_kernel`` for their arguments.
multiply_key_groups = make_micro_kernel(
    PRODUCT_VECTORS, source_per_vector=True, ahead=PREFETCH_GROUPS
)
"""Scores = queries x keys. Each of PRODUCT_VECTORS groups gives 16 scores, which are a vector."""
multiply_64_values = make_micro_kernel(
    PRODUCT_VECTORS, source_per_vector=False, ahead=PREFETCH_GROUPS
)
"""Outputs += weights x values, of PRODUCT_VECTORS times 16 elements of the head, over all groups
that are listed."""
multiply_16_values = make_micro_kernel(1, source_per_vector=False, ahead=PREFETCH_GROUPS)
"""The same, of 16 elements of the head."""


# --------------------------------------------------------------------------- a few rows


@inner
def attend_rows(
    cache_tag,
    product_tag,
    call,
    piece,
    first,
    rows,
    first_key,
    num_keys,
    span_is_widened,
    key_list,
    value_list,
    scratch,
):
    """Add the ``num_keys`` keys of a span, from position ``first_key`` on, to the states of so many
    ``rows`` of the item, from row ``first`` on.

    ``span_is_widened`` matters for a cache of bytes alone: whether the whole span has been widened.
    """
    first_position = piece.position + first // call.heads_per_kv
    last_position = piece.position + (first + rows - 1) // call.heads_per_kv
    # Groups that none of these rows sees are left out. At the end of the span these are the groups
    # behind the last row's own key; at its beginning, those before the window of the first row,
    # which begins before the windows of the other rows.
    groups_up_to_last = (last_position - first_key) // GROUP_TOKENS + 1
    groups_end = min(ceil_div(num_keys, GROUP_TOKENS), groups_up_to_last)
    left_out = np.int64(0)
    if call.window > 0:
        window_begin = first_position - call.window + 1
        left_out = max(0, window_begin - first_key) // GROUP_TOKENS
    groups = groups_end - left_out
    if groups <= 0:
        return
    first_seen_key = first_key + left_out * GROUP_TOKENS
    # The lists of the groups that are left: of the widened ones, if the whole span is widened.
    if has_scales(cache_tag) and span_is_widened:
        seen_key_list = scratch.widened_key_groups + left_out * I64_BYTES
        seen_value_list = scratch.widened_value_groups + left_out * I64_BYTES
    else:
        seen_key_list = key_list + left_out * I64_BYTES
        seen_value_list = value_list + left_out * I64_BYTES
    # Whether these are lists of groups of bytes, which are widened just before each product.
    widens_here = has_scales(cache_tag) and not span_is_widened
    queries = scratch.queries + first * call.padded * left_bytes(product_tag)
    states = scratch.states + first * state_bytes(call.padded)
    multiply_keys(
        product_tag,
        call,
        rows,
        queries,
        seen_key_list,
        groups=groups,
        widens_here=widens_here,
        scratch=scratch,
    )
    weigh_rows(
        cache_tag,
        product_tag,
        call,
        piece,
        first,
        rows=rows,
        first_key=first_seen_key,
        groups=groups,
        states=states,
        scales_offset=left_out * VECTOR_BYTES,
        scratch=scratch,
    )
    multiply_values(
        product_tag,
        call,
        rows,
        seen_value_list,
        groups=groups,
        widens_here=widens_here,
        states=states,
        scratch=scratch,
    )


@inlined
def multiply_keys(product_tag, call, rows, queries, key_list, groups, widens_here, scratch):
    """Scores of so many rows and groups of keys, PRODUCT_VECTORS groups at a time.

    The last product may take in groups that stand behind these in the list. Nobody reads their
    scores.
    """
    query_bytes = call.padded * left_bytes(product_tag)
    key_units = call.padded * right_bytes(product_tag) // UNIT_BYTES
    for g in range(0, groups, PRODUCT_VECTORS):
        sources = key_list + g * I64_BYTES
        if widens_here:
            widen_groups(
                product_tag,
                sources,
                count=min(PRODUCT_VECTORS, groups - g),
                target=scratch.widened_keys,
                padded=call.padded,
                line_bytes=GROUP_TOKENS,
            )
            sources = scratch.widened_key_groups
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
    piece,
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
    # With a softcap ``prepare_scores`` makes exponents of the scores.
    factor = ONE if call.softcap != ZERO else call.scale * LOG2_E
    # Two loops, as a row's weights must wait for its maximum. In the first loop the processor can
    # find the maxima of several rows at once: none waits for another.
    for r in range(rows):
        position = piece.position + (first + r) // call.heads_per_kv
        window_begin = position - call.window + 1
        scores = scratch.scores + r * SCORES_STRIDE
        prepare_scores(
            cache_tag,
            scores,
            groups=groups,
            scale=call.scale,
            softcap=call.softcap,
            key_scales=scratch.key_scales + scales_offset,
        )
        hide_and_raise_maximum(
            scores,
            groups=groups,
            first_seen=window_begin - first_key if call.window > 0 else 0,
            seen_end=position + 1 - first_key,
            factor=factor,
            outputs_end=states + r * state_bytes(call.padded) + call.padded * F32_BYTES,
        )
    for r in range(rows):
        state = states + r * state_bytes(call.padded)
        rescale = weigh_row(
            cache_tag,
            product_tag,
            scores=scratch.scores + r * SCORES_STRIDE,
            weights=scratch.weights + r * SPAN_TOKENS * left_bytes(product_tag),
            groups=groups,
            factor=factor,
            outputs_end=state + call.padded * F32_BYTES,
            value_scales=scratch.value_scales + scales_offset,
        )
        if rescale != ONE:
            scale_outputs(state, call.padded, rescale)


@inlined
def multiply_values(product_tag, call, rows, value_list, groups, widens_here, states, scratch):
    """Outputs += weights x values, of so many rows and groups."""
    if not widens_here:
        add_values(
            product_tag, call, rows, scratch.weights, value_list, groups=groups, states=states
        )
        return
    for g in range(0, groups, PRODUCT_VECTORS):
        count = min(PRODUCT_VECTORS, groups - g)
        widen_groups(
            product_tag,
            value_list + g * I64_BYTES,
            count,
            scratch.widened_values,
            padded=call.padded,
            line_bytes=call.padded,
        )
        add_values(
            product_tag,
            call,
            rows,
            scratch.weights + g * GROUP_TOKENS * left_bytes(product_tag),
            scratch.widened_value_groups,
            groups=count,
            states=states,
        )


@inner
def add_values(product_tag, call, rows, weights, value_list, groups, states):
    """Outputs += weights x values, for all elements of the head. The groups of values are in the
    form that products read."""
    use_tiles = call.use_tiles != 0
    weights_stride = SPAN_TOKENS * left_bytes(product_tag)
    outputs_stride = state_bytes(call.padded)
    # A group of values has so many lines of units, which are ``unit_line_bytes`` long.
    unit_lines = GROUP_TOKENS * right_bytes(product_tag) // UNIT_BYTES
    unit_line_bytes = call.padded * UNIT_BYTES
    # As many elements as possible 64 at once, the others 16 at once. The two calls are alike but
    # for the function: Numba must know it when it compiles the call, so ``d`` cannot choose it.
    elements_at_once = PRODUCT_VECTORS * LANES
    end_of_64s = call.padded // elements_at_once * elements_at_once
    for d in range(0, end_of_64s, elements_at_once):
        multiply_64_values(
            product_tag,
            use_tiles,
            rows,
            left=weights,
            left_stride=weights_stride,
            sources=value_list,
            num_sources=groups,
            units=unit_lines,
            unit_stride=unit_line_bytes,
            offset=d * UNIT_BYTES,
            out=states + d * F32_BYTES,
            out_stride=outputs_stride,
        )
    for d in range(end_of_64s, call.padded, LANES):
        multiply_16_values(
            product_tag,
            use_tiles,
            rows,
            left=weights,
            left_stride=weights_stride,
            sources=value_list,
            num_sources=groups,
            units=unit_lines,
            unit_stride=unit_line_bytes,
            offset=d * UNIT_BYTES,
            out=states + d * F32_BYTES,
            out_stride=outputs_stride,
        )
