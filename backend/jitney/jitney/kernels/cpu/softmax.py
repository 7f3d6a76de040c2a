"""The online softmax of attention, row by row (Milakov and Gimelshein 2018), in base 2.

For the keys i that a row sees, with exponents x_i and values v_i, the result is::

    outputs / sum        outputs = sum over i of 2**(x_i - maximum) * v_i
                         sum     = sum over i of 2**(x_i - maximum)

whatever ``maximum`` is. It is the largest x_i so far, so that no weight 2**(x_i - maximum) is over
1. Where later keys raise it, outputs and sum are multiplied by 2**(maximum before - maximum).

A row's state, over the keys so far, is float32 at one address::

    | outputs: [padded] | maximum | sum | maximum before | (13 unused) |
                        ^ "outputs_end"

A *score* is the product of a query and a key. ``exponent = score * factor``, where ``factor`` is
the model's scale times log2(e). With a softcap :func:`cap_row` turns scores into exponents, and
``factor`` is 1.

A span of keys is added to a state in four steps, of which the first three are here:

1. :func:`prepare_scores` multiplies the scores by the keys' scales, if the cache has any, and caps
   them, if there is a softcap.
2. :func:`hide_and_raise_maximum` hides the keys that the row does not see, and raises the maximum
   to the largest exponent.
3. :func:`weigh_row` turns the scores into weights, adds these to the sum, and returns what the
   outputs so far must be multiplied by.
4. The product of weights and values is added to the outputs (``attention_rows``).

If a key that the row sees has a NaN score, that key's weight is NaN, and so are the row's sum and
its result: as in torch. The maximum leaves a NaN out.

States over different keys are joined by :func:`merge_states`. A row's arithmetic and its order
depend on nothing but the row and its keys.

Called by ``attention_kernel`` and ``attention_rows``.
"""

import numpy as np

from jitney.kernels.cpu.attention_records import STATE_EXTRA
from jitney.kernels.cpu.cache_groups import GROUP_TOKENS
from jitney.kernels.cpu.emit import F32_BYTES, LANES, VECTOR_BYTES
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ONE,
    ZERO,
    element_bytes,
    exp2,
    first_lane,
    fma,
    has_scales,
    inlined,
    inner,
    keep_between,
    lane_max,
    lane_sum,
    larger,
    load,
    load_f32,
    sigmoid,
    splat,
    store,
    store_as,
    store_f32,
)

_NEGATIVE_INFINITY = np.float32(-np.inf)
_LOWEST = np.float32(-1e30)
"""The maximum before any key. It is finite: minus infinity less minus infinity would be a NaN."""
_TWO = np.float32(2.0)

# Fields of a state, in bytes from ``outputs_end``.
_MAXIMUM = 0
_SUM = 4
_BEFORE = 8


@inner
def state_bytes(padded):
    """Bytes of a row's state."""
    return (padded + STATE_EXTRA) * F32_BYTES


@inner
def power_of_two(x):
    """2**x of one number, as ``exp2``."""
    return first_lane(exp2(splat(x)))


# --------------------------------------------------------------------------- whole states


@inner
def begin_states(call, kv_head, rows, states, sinks):
    """Set the states of so many rows of an item to those before the first key.

    ``sinks`` is the address of all heads' sinks, or 0. A sink counts as a key that every row of its
    head sees, and whose value is zero.
    """
    for r in range(rows):
        state = states + r * state_bytes(call.padded)
        maximum = _LOWEST
        sum_of_weights = ZERO
        if sinks != 0:
            head = kv_head * call.heads_per_kv + r % call.heads_per_kv
            maximum = load_f32(sinks + head * F32_BYTES) * LOG2_E
            sum_of_weights = ONE  # the sink's own weight: 2**(maximum - maximum)
        for d in range(0, call.padded, LANES):
            store(state + d * F32_BYTES, splat(ZERO))
        outputs_end = state + call.padded * F32_BYTES
        store_f32(outputs_end + _MAXIMUM, maximum)
        store_f32(outputs_end + _SUM, sum_of_weights)


@inner
def merge_states(call, rows, totals, states):
    """Add each row's state over one split, at ``states``, to its state over the splits before, at
    ``totals``.

    A split of which a row sees no key changes nothing: its outputs and its sum are 0, and its
    maximum is _LOWEST.
    """
    for r in range(rows):
        before = totals + r * state_bytes(call.padded)
        added = states + r * state_bytes(call.padded)
        before_end = before + call.padded * F32_BYTES
        added_end = added + call.padded * F32_BYTES
        before_maximum = load_f32(before_end + _MAXIMUM)
        added_maximum = load_f32(added_end + _MAXIMUM)
        maximum = max(before_maximum, added_maximum)
        # Both are brought to the larger maximum, and then added.
        before_factor = power_of_two(before_maximum - maximum)
        added_factor = power_of_two(added_maximum - maximum)
        for d in range(0, call.padded, LANES):
            added_outputs = load(added + d * F32_BYTES) * splat(added_factor)
            before_outputs = load(before + d * F32_BYTES)
            outputs = fma(before_outputs, splat(before_factor), added_outputs)
            store(before + d * F32_BYTES, outputs)
        before_sum = load_f32(before_end + _SUM)
        added_sum = load_f32(added_end + _SUM)
        store_f32(before_end + _SUM, before_sum * before_factor + added_sum * added_factor)
        store_f32(before_end + _MAXIMUM, maximum)


# --------------------------------------------------------------------------- a span of keys


@inlined
def prepare_scores(cache_tag, scores, groups, scale, softcap, key_scales):
    """Prepare a row's ``scores`` of so many groups of keys: see the module's docstring. With a
    softcap the scores become exponents."""
    if has_scales(cache_tag):
        # So far the scores are products with bytes.
        for offset in range(0, groups * VECTOR_BYTES, VECTOR_BYTES):
            store(scores + offset, load(scores + offset) * load(key_scales + offset))
    if softcap != ZERO:
        cap_row(scores, groups, scale, softcap)


@inner
def hide_and_raise_maximum(scores, groups, first_seen, seen_end, factor, outputs_end):
    """Hide the keys that a row does not see, and raise its maximum to the largest exponent of its
    ``scores`` of so many groups of keys. (One loop does both.) The maximum that the row had is kept
    beside it as the maximum before.

    The row sees keys [first_seen, seen_end), counted from the first key of these groups. The scores
    of all other keys become -inf. ``outputs_end`` is where the outputs of the row's state end.
    """
    largest = splat(_NEGATIVE_INFINITY)
    # A row sees all keys of most spans. Not of the span where its window begins, and not of the one
    # that it stands in itself.
    some_hidden = first_seen > 0 or seen_end < groups * GROUP_TOKENS
    for g in range(groups):
        group_scores = scores + g * VECTOR_BYTES
        if some_hidden:
            group_begin = g * GROUP_TOKENS
            seen = keep_between(
                load(group_scores),
                first_seen - group_begin,
                seen_end - group_begin,
                _NEGATIVE_INFINITY,
            )
            store(group_scores, seen)
        # (The order matters: ``larger`` drops a NaN score.)
        largest = larger(load(group_scores), largest)
    before = load_f32(outputs_end + _MAXIMUM)
    # The factor is positive: the largest score is that of the largest exponent.
    store_f32(outputs_end + _MAXIMUM, max(before, lane_max(largest) * factor))
    store_f32(outputs_end + _BEFORE, before)


@inner
def weigh_row(
    cache_tag,
    product_tag,
    scores,
    weights,
    groups,
    factor,
    outputs_end,
    value_scales,
):
    """Turn a row's scores into weights 2**(score * factor - maximum), and add these to its sum.
    ``outputs_end`` is where the outputs of its state end.

    Returns what the outputs must be multiplied by: so far they are relative to the maximum before.
    """
    maximum = load_f32(outputs_end + _MAXIMUM)
    before = load_f32(outputs_end + _BEFORE)
    factors = splat(factor)
    minus_maximum = splat(-maximum)
    added = splat(ZERO)
    for g in range(groups):
        weight = exp2(fma(load(scores + g * VECTOR_BYTES), factors, minus_maximum))
        added = added + weight
        if has_scales(cache_tag):
            # The product that follows is with values as bytes. The sum above needs no scales.
            weight = weight * load(value_scales + g * VECTOR_BYTES)
        store_as(product_tag, weights + g * LANES * element_bytes(product_tag), weight)
    # Most spans do not raise the maximum. The caller skips a multiplication by 1.
    rescale = ONE if maximum == before else power_of_two(before - maximum)
    store_f32(outputs_end + _SUM, load_f32(outputs_end + _SUM) * rescale + lane_sum(added))
    return rescale


@inner
def cap_row(scores, groups, scale, softcap):
    """Turn scores into exponents: softcap * tanh(score * scale / softcap) * log2(e)."""
    two = splat(_TWO)
    for g in range(groups):
        group_scores = scores + g * VECTOR_BYTES
        # tanh(y) = 2 * sigmoid(2 * y) - 1
        y_twice = load(group_scores) * splat(_TWO * scale / softcap)
        tanh = two * sigmoid(y_twice) - splat(ONE)
        store(group_scores, tanh * splat(softcap * LOG2_E))


@inner
def scale_outputs(state, padded, factor):
    """Multiply the outputs of a row's state by ``factor``."""
    for d in range(0, padded, LANES):
        store(state + d * F32_BYTES, load(state + d * F32_BYTES) * splat(factor))


@inner
def one_over_sum(state, padded):
    """What a row's outputs are multiplied by at the very end."""
    return ONE / load_f32(state + padded * F32_BYTES + _SUM)
