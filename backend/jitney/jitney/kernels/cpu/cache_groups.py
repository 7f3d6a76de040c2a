"""A group: 16 tokens of one KV head in the cache, and how it is written and read.

A group of keys has the head's units from top to bottom, and its 16 tokens side by side; a group of
values has the 16 tokens' units from top to bottom, and the head's elements side by side. A unit is
four bytes. Here for bfloat16, where it holds two neighbours (k3 is element 3 of a key)::

    keys     token 0  token 1     token 15     values   element 0   element 1   ...  padded - 1
    unit 0   k0 k1  | k0 k1  | .. | k0 k1      unit 0   t0 t1     | t0 t1     | ..
    unit 1   k2 k3  | k2 k3  | .. | k2 k3      unit 1   t2 t3     | t2 t3     | ..
      ...                                        ...
    unit padded / 2 - 1                        unit 7   t14 t15   | t14 t15   | ..

So one vector load feeds the scores of 16 tokens, or 16 elements of the output, and nothing is
summed across lanes. With float32 a unit is one element of a key, or of one token's values.

A cache of bytes (int8) has keys as [head, 16 tokens], values as [16 tokens, head], and behind
either a float32 scale for each token. An int8 is a number of bfloat16, so its groups are widened
exactly to the drawing above before products read them.

Called by ``cache_blocks``, which knows where groups are, and by ``attention_kernel``.
"""

import numpy as np

from jitney.execution.byte_cache import LEAST_SCALE, SCALE_BYTES
from jitney.kernels.cpu.emit import LANES, UNIT_BYTES, VECTOR_BYTES
from jitney.kernels.cpu.simd import (
    I8,
    ONE,
    ZERO,
    copy_element,
    element_bytes,
    fma,
    has_scales,
    inner,
    keep_between,
    lane_max,
    lane_sum,
    larger,
    load,
    load_as,
    load_i32,
    load_i64,
    prefetch,
    second_bytes,
    splat,
    store,
    store_as,
    store_f32,
    store_i32,
    store_one,
    store_pairs,
    vector_on_stack,
)

GROUP_TOKENS = LANES
PREFETCH_GROUPS = 8
"""Lists of groups go on for so many entries after those in use: what is read soon."""


@inner
def group_bytes(cache_tag, padded):
    """Bytes of a group in a cache of type ``cache_tag``."""
    scale = SCALE_BYTES if has_scales(cache_tag) else 0
    return GROUP_TOKENS * (padded * element_bytes(cache_tag) + scale)


@inner
def load_some(tag, source, count, spare):
    """16 elements as float32, of which those from ``count`` on are 0. So are all of them if it is
    negative. ``spare`` is overwritten."""
    if count >= LANES:
        return load_as(tag, source)
    size = element_bytes(tag)
    store(spare, splat(ZERO))
    for e in range(count):
        copy_element(tag, source + e * size, spare + e * size)
    return load_as(tag, spare)


# --------------------------------------------------------------------------- writing a token


@inner
def pack_key(tag, source, head_size, padded, group, lane):
    """One token's key into lane ``lane`` of a group; zeros beyond the head."""
    size = element_bytes(tag)
    unit_elements = UNIT_BYTES // size
    target = group + lane * UNIT_BYTES
    full = head_size // unit_elements
    for unit in range(full):
        store_i32(target + unit * VECTOR_BYTES, load_i32(source + unit * UNIT_BYTES))
    for unit in range(full, padded // unit_elements):
        store_i32(target + unit * VECTOR_BYTES, np.int32(0))
    # The last unit of an odd head size is half full.
    if head_size % unit_elements != 0:
        copy_element(tag, source + (head_size - 1) * size, target + full * VECTOR_BYTES)


@inner
def pack_value(tag, source, head_size, padded, group, lane):
    """One token's value into its part of a row of units; zeros beyond the head. (A unit of bfloat16
    has the elements of two neighbouring tokens, one of float32 that of one.)"""
    size = element_bytes(tag)
    unit_tokens = UNIT_BYTES // size
    row = lane // unit_tokens * padded * UNIT_BYTES
    target = group + row + lane % unit_tokens * size
    for d in range(head_size):
        copy_element(tag, source + d * size, target + d * UNIT_BYTES)
    for d in range(head_size, padded):
        store_one(tag, target + d * UNIT_BYTES, ZERO)


@inner
def round_vector(tag, source, head_size, padded, group, lane, first, step):
    """One token's key or value into a group of bytes; zeros beyond the head. The token's scale
    makes its largest element 127.

    The token is number ``lane`` of the group. Its elements are ``step`` bytes apart, from byte
    ``first`` of the group on: keys are [head, 16 tokens], so their step is 16; values are [16
    tokens, head], so theirs is 1."""
    size = element_bytes(tag)
    spare = vector_on_stack()
    best = splat(ZERO)
    not_finite = splat(ZERO)
    for d in range(0, padded, LANES):
        x = load_some(tag, source + d * size, head_size - d, spare)
        best = larger(larger(x, splat(ZERO) - x), best)
        not_finite = fma(x, splat(ZERO), not_finite)  # stays 0, or NaN where x is NaN or infinite
    scale = max(lane_max(best) / np.float32(127.0), np.float32(LEAST_SCALE))
    where = group + GROUP_TOKENS * padded + lane * SCALE_BYTES
    # What bytes cannot say, the scale says: it is NaN where an element is not finite.
    store_f32(where, scale + lane_sum(not_finite))
    inverse = splat(ONE / scale)
    for d in range(0, padded, LANES):
        x = load_some(tag, source + d * size, head_size - d, spare) * inverse
        if step == 1:
            # A value.
            store_as(I8, group + first + d, x)
        else:
            # A key.
            store_as(I8, spare, x)
            for e in range(LANES):
                copy_element(I8, spare + e, group + first + (d + e) * step)


# --------------------------------------------------------------------------- reading


@inner
def copy_last_values(tag, source, padded, tokens, target):
    """The first ``tokens`` of a group of values, and zeros for the rest."""
    unit_tokens = UNIT_BYTES // element_bytes(tag)
    full = tokens // unit_tokens * padded
    every = GROUP_TOKENS // unit_tokens * padded
    for i in range(full):
        store_i32(target + i * UNIT_BYTES, load_i32(source + i * UNIT_BYTES))
    for i in range(full, every):
        store_i32(target + i * UNIT_BYTES, np.int32(0))
    # Of an odd number of tokens the last one has half a row of units.
    if tokens % unit_tokens != 0:
        for d in range(padded):
            where = (full + d) * UNIT_BYTES
            copy_element(tag, source + where, target + where)


@inner
def read_scales(padded, keys, values, tokens, scratch):
    """Copy the scales of so many ``tokens``, whose groups are listed at ``keys`` and ``values``, to
    the scratch memory. Behind the last token values get the scale 0."""
    scales = GROUP_TOKENS * padded
    for g in range(-(-tokens // GROUP_TOKENS)):
        of_keys = load_i64(keys + 8 * g) + scales
        of_values = load_i64(values + 8 * g) + scales
        store(scratch.key_scales + g * VECTOR_BYTES, load(of_keys))
        kept = keep_between(load(of_values), 0, tokens - g * GROUP_TOKENS, ZERO)
        store(scratch.value_scales + g * VECTOR_BYTES, kept)


@inner
def widen_groups(product_tag, groups, count, target, padded, width):
    """Widen ``count`` groups of bytes, whose addresses are listed at ``groups``, to what products
    read, and prefetch the groups that follow in the list.

    A group's rows are ``width`` bytes: 16 of keys, ``padded`` of values."""
    size = GROUP_TOKENS * padded * second_bytes(product_tag)
    for g in range(count):
        soon = load_i64(groups + 8 * (g + PREFETCH_GROUPS))
        for line in range(0, group_bytes(I8, padded), VECTOR_BYTES):
            prefetch(soon + line)
        source = load_i64(groups + 8 * g)
        widen_group(product_tag, source, target + g * size, padded, width)


@inner
def widen_group(product_tag, source, target, padded, width):
    """A group of bytes, whose rows are ``width`` bytes, as float32, or as bfloat16: then each unit
    has an element of one row and that below it."""
    if second_bytes(product_tag) == 4:
        for i in range(0, GROUP_TOKENS * padded, LANES):
            store(target + i * 4, load_as(I8, source + i))
        return
    for row in range(0, GROUP_TOKENS * padded, 2 * width):
        # Two rows of bytes become one row of units, each of 4 bytes for 2.
        unit_row = target + row * 2
        for d in range(0, width, LANES):
            upper = load_as(I8, source + row + d)
            lower = load_as(I8, source + row + width + d)
            store_pairs(unit_row + d * UNIT_BYTES, upper, lower)
