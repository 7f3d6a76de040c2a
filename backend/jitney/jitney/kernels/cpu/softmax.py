"""The online softmax of attention, row by row (Milakov and Gimelshein 2018), in base 2.

A row's state, over the keys seen so far, is float32 at one address::

    | outputs, not yet divided: [padded] | maximum | sum | maximum before | (13 unused) |

A span of keys is added in three steps: :func:`raise_maximum` looks at its scores,
:func:`weigh_row` turns them into weights 2**(score - maximum) and says by what the outputs so far
are to be multiplied, and the product of weights and values is added to the outputs. States over
different keys are joined by :func:`merge_states`.

A row's arithmetic and its order depend on nothing but the row and its keys.

Called by ``attention_kernel``.
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

# Bytes behind a state's outputs.
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
    """The states of so many rows before the first key; a sink, if the address of ``sinks`` is not
    0, counts as a key of no value."""
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
        behind = state + 4 * call.padded
        store_f32(behind, maximum)
        store_f32(behind + _SUM, total)


@inner
def merge_states(call, rows, totals, states):
    """Add each row's state over one split to its state over all splits before. A split of which a
    row sees no key changes nothing."""
    for r in range(rows):
        total = totals + r * state_bytes(call.padded)
        state = states + r * state_bytes(call.padded)
        behind_total = total + 4 * call.padded
        behind_state = state + 4 * call.padded
        before = load_f32(behind_total)
        theirs = load_f32(behind_state)
        best = max(before, theirs)
        kept = power_of_two(before - best)
        share = power_of_two(theirs - best)
        for d in range(0, call.padded, LANES):
            value = load(state + 4 * d) * splat(share)
            store(total + 4 * d, fma(load(total + 4 * d), splat(kept), value))
        old_sum = load_f32(behind_total + _SUM)
        more = load_f32(behind_state + _SUM)
        store_f32(behind_total + _SUM, old_sum * kept + more * share)
        store_f32(behind_total, best)


@inner
def raise_maximum(
    cache_tag, scores, groups, low, high, scale, softcap, factor, behind, key_scales
):  # fmt: skip
    """Raise the running maximum of a row by its ``scores`` of so many groups; what it was is kept
    behind the running sum. Scores of keys outside [low, high) become -inf. ``behind`` is where the
    outputs of the row's state end."""
    if has_scales(cache_tag):
        # The scores so far are of keys as they stand in the cache, as bytes.
        for where in range(0, groups * VECTOR_BYTES, VECTOR_BYTES):
            store(scores + where, load(scores + where) * load(key_scales + where))
    if softcap != ZERO:
        cap_row(scores, groups, scale, softcap)
    best = splat(_NEGATIVE_INFINITY)
    # Most spans are seen whole: only those at the window's beginning and at the row's end are not.
    hides = low > 0 or high < groups * GROUP_TOKENS
    for g in range(groups):
        where = scores + g * VECTOR_BYTES
        if hides:
            first = g * LANES
            seen = keep_between(load(where), low - first, high - first, _NEGATIVE_INFINITY)
            store(where, seen)
        best = larger(load(where), best)
    before = load_f32(behind)
    store_f32(behind, max(before, lane_max(best) * factor))
    store_f32(behind + _BEFORE, before)


@inner
def weigh_row(cache_tag, product_tag, scores, weights, groups, factor, behind, value_scales):
    """Turn a row's scores into weights and add these to its running sum; ``behind`` is where its
    state's outputs end.

    Returns the factor for what was added up under the maximum before."""
    after = load_f32(behind)
    before = load_f32(behind + _BEFORE)
    steep = splat(factor)
    shift = splat(-after)
    added = splat(ZERO)
    for g in range(groups):
        w = exp2(fma(load(scores + g * VECTOR_BYTES), steep, shift))
        added = added + w
        if has_scales(cache_tag):
            # The sum is of weights alone; the product is with values as bytes.
            w = w * load(value_scales + g * VECTOR_BYTES)
        store_as(product_tag, weights + g * LANES * element_bytes(product_tag), w)
    rescale = ONE if after == before else power_of_two(before - after)
    store_f32(behind + _SUM, load_f32(behind + _SUM) * rescale + lane_sum(added))
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
def share_of(state, padded):
    """What outputs are multiplied with at the end: one over the running sum."""
    return ONE / load_f32(state + 4 * padded + _SUM)
