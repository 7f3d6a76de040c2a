"""Groups of an int8 cache: how a token's key and value are rounded into them, and what the products
of attention read of them.

A group has keys as [head, 16 tokens], values as [16 tokens, head], and then a float32 scale for
each token. An int8 is a number of bfloat16, so groups are widened exactly.
"""

import numpy as np
from numba import types

from jitney.execution.byte_cache import LEAST_SCALE, SCALE_BYTES
from jitney.kernels.cpu.products import GROUP_TOKENS, PREFETCH_GROUPS, VECTOR_BYTES, stack_memory
from jitney.kernels.cpu.simd import (
    I8,
    LANES,
    ONE,
    ZERO,
    copy_element,
    element_bytes,
    emitted,
    fma,
    has_scales,
    inner,
    keep_between,
    lane_max,
    lane_sum,
    larger,
    load,
    load_as,
    load_i64,
    prefetch,
    second_bytes,
    splat,
    store,
    store_as,
    store_f32,
    store_pairs,
)


@inner
def group_bytes(kept, padded):
    """Bytes of a group in a cache of type ``kept``."""
    scale = SCALE_BYTES if has_scales(kept) else 0
    return GROUP_TOKENS * (padded * element_bytes(kept) + scale)


@emitted(types.int64)
def spare_vector(builder):
    """The address of memory on the stack."""
    return stack_memory(builder, VECTOR_BYTES)


@inner
def load_part(tag, source, count, spare):
    """16 elements as float32, of which those from ``count`` on are 0. ``spare`` is overwritten."""
    if count >= LANES:
        return load_as(tag, source)
    store(spare, splat(ZERO))
    for e in range(count):
        copy_element(tag, source + e * element_bytes(tag), spare + e * element_bytes(tag))
    return load_as(tag, spare)


@inner
def round_vector(tag, source, head, padded, group, lane, first, step):
    """One token's vector into lane ``lane`` of a group of bytes, from ``first`` on every ``step``
    bytes; zeros beyond the head. The token's scale makes its largest element 127."""
    size, spare = element_bytes(tag), spare_vector()
    best, strange = splat(ZERO), splat(ZERO)
    for d in range(0, padded, LANES):
        x = load_part(tag, source + d * size, head - d, spare)
        best = larger(larger(x, splat(ZERO) - x), best)
        strange = fma(x, splat(ZERO), strange)  # NaN, if x is or is not finite
    scale = max(lane_max(best) / np.float32(127.0), np.float32(LEAST_SCALE))
    where = group + GROUP_TOKENS * padded + lane * SCALE_BYTES
    store_f32(where, scale + lane_sum(strange))
    inverse = splat(ONE / scale)
    for d in range(0, padded, LANES):
        x = load_part(tag, source + d * size, head - d, spare) * inverse
        if step == 1:
            store_as(I8, group + first + d, x)
        else:
            store_as(I8, spare, x)
            for e in range(LANES):
                copy_element(I8, spare + e, group + first + (d + e) * step)


@inner
def read_scales(padded, keys, values, tokens, at):
    """Those of a span of so many ``tokens``, whose groups are listed at ``keys`` and ``values``.
    Behind its last token values get the scale 0."""
    scales = GROUP_TOKENS * padded
    for g in range(-(-tokens // GROUP_TOKENS)):
        key, value = load_i64(keys + 8 * g) + scales, load_i64(values + 8 * g) + scales
        store(at.key_scales + g * VECTOR_BYTES, load(key))
        scale = keep_between(load(value), 0, tokens - g * GROUP_TOKENS, ZERO)
        store(at.value_scales + g * VECTOR_BYTES, scale)


@inner
def widen_groups(dot, groups, count, target, padded, width):
    """Make what products of type ``dot`` read of so many groups of bytes, whose addresses are
    listed at ``groups``; ask for those that follow. Rows of bytes are ``width`` long."""
    size = GROUP_TOKENS * padded * second_bytes(dot)
    for g in range(count):
        soon = load_i64(groups + 8 * (g + PREFETCH_GROUPS))
        for line in range(0, group_bytes(I8, padded), VECTOR_BYTES):
            prefetch(soon + line)
        widen_group(dot, load_i64(groups + 8 * g), target + g * size, padded, width)


@inner
def widen_group(dot, source, target, padded, width):
    """A group of bytes, whose rows are ``width`` bytes, as float32 or in pairs of rows."""
    if second_bytes(dot) == 4:
        for i in range(0, GROUP_TOKENS * padded, LANES):
            store(target + i * 4, load_as(I8, source + i))
        return
    for row in range(0, GROUP_TOKENS * padded, 2 * width):
        for d in range(row, row + width, LANES):
            store_pairs(
                target + row * 2 + (d - row) * 4, load_as(I8, source + d),
                load_as(I8, source + d + width),
            )  # fmt: skip
