"""The online softmax of attention, row by row (Milakov and Gimelshein 2018), in base 2.

A row's state, over the keys seen so far, is float32 at one address::

    | outputs, not yet divided: [padded] | maximum | sum | maximum before | (13 unused) |
                                         ^ "outputs_end"

Scores are products of a query and keys; times ``factor`` (scale and log2(e), or 1 where a softcap
has brought them in already) they are exponents of 2. The maximum is of these exponents.

A span of keys is added in three steps: :func:`raise_maximum` looks at its scores,
:func:`weigh_row` turns them into weights 2**(score - maximum) and says by what the outputs so far
are to be multiplied, and the product of weights and values is added to the outputs. States over
different keys are joined by :func:`merge_states`.

A row's arithmetic and its order depend on nothing but the row and its keys.

Called by ``attention_kernel`` and ``attention_rows``.
"""

import numpy as np

from jitney.kernels.cpu.attention_records import STATE_EXTRA
from jitney.kernels.cpu.cache_groups import GROUP_TOKENS
from jitney.kernels.cpu.emit import LANES, VECTOR_BYTES
from jitney.kernels.cpu.simd import (
    LOG2_E,
    ONE,
    ZERO,
    element_bytes,
    exp2,
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
    sigmoid,
    splat,
    store,
    store_as,
    store_f32,
)

_NEGATIVE_INFINITY = np.float32(-np.inf)
_LOWEST = np.float32(-1e30)
"""The running maximum before any key: finite, so that no difference is infinity less infinity."""

# Bytes from the end of a state's outputs; the maximum is at 0.
_SUM = 4
_BEFORE = 8


@inner
def state_bytes(padded):
    """Bytes of a row's state."""
    return (padded + STATE_EXTRA) * 4


@inner
def power_of_two(x):
    """2**x of one number, as ``exp2``."""
    return first_lane(exp2(splat(x)))


@inner
def begin_states(call, kv_head, rows, states, sinks):
    """The states of so many rows before the first key. If the address of ``sinks`` is not 0, the
    head's sink counts as a key whose value is zero."""
    for r in range(rows):
        state = states + r * state_bytes(call.padded)
        maximum = _LOWEST
        total = ZERO
        if sinks != 0:
            head = kv_head * call.heads_per_kv + r % call.heads_per_kv
            maximum = load_f32(sinks + 4 * head) * LOG2_E
            total = ONE
        for d in range(0, call.padded, LANES):
            store(state + 4 * d, splat(ZERO))
        outputs_end = state + 4 * call.padded
        store_f32(outputs_end, maximum)
        store_f32(outputs_end + _SUM, total)


@inner
def merge_states(call, rows, totals, states):
    """Add each row's state over one split (``states``) to its state over all splits before
    (``totals``). A split of which a row sees no key changes nothing: its maximum is _LOWEST, so its
    factor is 0."""
    for r in range(rows):
        total = totals + r * state_bytes(call.padded)
        state = states + r * state_bytes(call.padded)
        total_end = total + 4 * call.padded
        state_end = state + 4 * call.padded
        total_maximum = load_f32(total_end)
        state_maximum = load_f32(state_end)
        maximum = max(total_maximum, state_maximum)
        total_factor = power_of_two(total_maximum - maximum)
        state_factor = power_of_two(state_maximum - maximum)
        for d in range(0, call.padded, LANES):
            added = load(state + 4 * d) * splat(state_factor)
            store(total + 4 * d, fma(load(total + 4 * d), splat(total_factor), added))
        total_sum = load_f32(total_end + _SUM)
        state_sum = load_f32(state_end + _SUM)
        store_f32(total_end + _SUM, total_sum * total_factor + state_sum * state_factor)
        store_f32(total_end, maximum)


@inner
def raise_maximum(
    cache_tag, scores, groups, low, high, scale, softcap, factor, outputs_end, key_scales
):  # fmt: skip
    """Raise the running maximum of a row to that of its ``scores`` of so many groups, and keep what
    it was as the maximum before. Scores of keys outside [low, high) become -inf.

    ``outputs_end`` is where the outputs of the row's state end."""
    if has_scales(cache_tag):
        # The scores so far are of keys as they stand in the cache, as bytes.
        for where in range(0, groups * VECTOR_BYTES, VECTOR_BYTES):
            store(scores + where, load(scores + where) * load(key_scales + where))
    if softcap != ZERO:
        cap_row(scores, groups, scale, softcap)
    best = splat(_NEGATIVE_INFINITY)
    # Most spans are seen whole: only those at the window's beginning and at the row's end are not.
    some_hidden = low > 0 or high < groups * GROUP_TOKENS
    for g in range(groups):
        where = scores + g * VECTOR_BYTES
        if some_hidden:
            first = g * LANES
            seen = keep_between(load(where), low - first, high - first, _NEGATIVE_INFINITY)
            store(where, seen)
        best = larger(load(where), best)
    before = load_f32(outputs_end)
    store_f32(outputs_end, max(before, lane_max(best) * factor))
    store_f32(outputs_end + _BEFORE, before)


@inner
def weigh_row(
    cache_tag, product_tag, scores, weights, groups, factor, outputs_end, value_scales
):  # fmt: skip
    """Turn a row's scores into weights 2**(score * factor - maximum) and add these to its running
    sum; ``outputs_end`` is where its state's outputs end.

    Returns what the outputs must be multiplied with, as they were added up under the maximum
    before."""
    maximum = load_f32(outputs_end)
    before = load_f32(outputs_end + _BEFORE)
    factors = splat(factor)
    minus_maximum = splat(-maximum)
    added = splat(ZERO)
    for g in range(groups):
        w = exp2(fma(load(scores + g * VECTOR_BYTES), factors, minus_maximum))
        added = added + w
        if has_scales(cache_tag):
            # The sum is of weights alone; the product is with values as bytes.
            w = w * load(value_scales + g * VECTOR_BYTES)
        store_as(product_tag, weights + g * LANES * element_bytes(product_tag), w)
    rescale = ONE if maximum == before else power_of_two(before - maximum)
    store_f32(outputs_end + _SUM, load_f32(outputs_end + _SUM) * rescale + lane_sum(added))
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
def scale_row(row, padded, factor):
    """float32 [padded] times ``factor``."""
    for d in range(0, padded, LANES):
        store(row + d * 4, load(row + d * 4) * splat(factor))


@inner
def one_over_sum(state, padded):
    """What outputs are multiplied with at the end: one over the running sum."""
    return ONE / load_f32(state + 4 * padded + _SUM)
