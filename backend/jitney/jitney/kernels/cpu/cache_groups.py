"""A group: 16 tokens of one KV head in the cache, and how it is written and read.

Products read units of four bytes (``micro_kernel``). In bfloat16 a unit holds two neighbours: two
elements of one key, or one element of the values of two tokens::

    a group of keys; k2 is element 2 of a token's key
        unit 0             k0 k1  | k0 k1  | .. | k0 k1
        unit 1             k2 k3  | k2 k3  | .. | k2 k3
          ...
        the head's last    ..     | ..     | .. | ..
                           token 0  token 1      token 15

    a group of values; t2 is an element of token 2's value
        units, line 0      t0 t1    | t0 t1    | .. | t0 t1
        units, line 1      t2 t3    | t2 t3    | .. | t2 t3
          ...
        units, line 7      t14 t15  | t14 t15  | .. | t14 t15
                           element 0  element 1       element padded - 1

So one load of 16 units feeds the scores of 16 tokens, or 16 elements of the output, and nothing is
summed across lanes. In float32 a unit is a single element, and a group of values has 16 lines.

A cache of bytes (int8) has no units. Behind the bytes stands a float32 scale for each token::

    a group of keys                                    a group of values
        element 0          16 bytes, one a token           token 0     "padded" bytes
        element 1          16 bytes                        token 1     "padded" bytes
          ...                                                ...
        scales             16 float32                      scales      16 float32

Before products read such a group it is widened to the first form. That is exact: every int8 is a
number of bfloat16 too.

Called by ``cache_blocks``, which knows where groups are, and by ``attention_kernel``,
``attention_spans`` and ``attention_rows``.
"""

import numpy as np

from jitney.execution.byte_cache import LEAST_SCALE, SCALE_BYTES
from jitney.kernels.cpu.emit import (
    F32_BYTES,
    I64_BYTES,
    LANES,
    UNIT_BYTES,
    VECTOR_BYTES,
    ceil_div,
)
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
    right_bytes,
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
"""While a kernel works on a group it prefetches the one that stands so much further on in the list
of groups."""
_LARGEST_BYTE = np.float32(127.0)


@inner
def group_bytes(cache_tag, padded):
    """Bytes of a group in a cache of type ``cache_tag``."""
    scale = SCALE_BYTES if has_scales(cache_tag) else 0
    return GROUP_TOKENS * (padded * element_bytes(cache_tag) + scale)


@inner
def load_some(tag, source, count, spare):
    """The first ``count`` of 16 elements as float32, and 0 in the other lanes. ``spare`` is
    overwritten.

    Callers give as ``count`` how many elements are left in a head: it may be over 16, and in the
    zeros behind the head it is negative."""
    if count >= LANES:
        return load_as(tag, source)
    size = element_bytes(tag)
    store(spare, splat(ZERO))
    for e in range(count):
        copy_element(tag, source + e * size, spare + e * size)
    return load_as(tag, spare)


# --------------------------------------------------------------------------- writing a token
# ``lane`` is the number of the token in its group, 0 to 15.


@inner
def pack_key(tag, source, head_size, padded, group, lane):
    """Write one token's key into a group, with zeros beyond the head."""
    size = element_bytes(tag)
    unit_elements = UNIT_BYTES // size
    target = group + lane * UNIT_BYTES
    full_units = head_size // unit_elements
    all_units = padded // unit_elements
    for unit in range(full_units):
        store_i32(target + unit * VECTOR_BYTES, load_i32(source + unit * UNIT_BYTES))
    for unit in range(full_units, all_units):
        store_i32(target + unit * VECTOR_BYTES, np.int32(0))
    # An odd head size: its last element is one half of a unit, which has just become zero.
    if head_size % unit_elements != 0:
        last_element = source + (head_size - 1) * size
        copy_element(tag, last_element, target + full_units * VECTOR_BYTES)


@inner
def pack_value(tag, source, head_size, padded, group, lane):
    """Write one token's value into a group, with zeros beyond the head."""
    size = element_bytes(tag)
    unit_tokens = UNIT_BYTES // size
    line = lane // unit_tokens * padded * UNIT_BYTES
    inside_unit = lane % unit_tokens * size
    target = group + line + inside_unit
    for d in range(head_size):
        copy_element(tag, source + d * size, target + d * UNIT_BYTES)
    for d in range(head_size, padded):
        store_one(tag, target + d * UNIT_BYTES, ZERO)


@inner
def write_scale(tag, source, head_size, padded, group, lane, spare):
    """Write the scale of one token's key or value into a group of bytes: it makes the largest
    element 127. Returns one over the scale. ``spare`` is overwritten."""
    size = element_bytes(tag)
    largest = splat(ZERO)
    not_finite = splat(ZERO)
    for d in range(0, padded, LANES):
        x = load_some(tag, source + d * size, head_size - d, spare)
        magnitude = larger(x, splat(ZERO) - x)
        largest = larger(magnitude, largest)
        # 0 times a finite x adds 0. 0 times infinity, or times NaN, is NaN.
        not_finite = fma(x, splat(ZERO), not_finite)
    scale = max(lane_max(largest) / _LARGEST_BYTE, np.float32(LEAST_SCALE))
    # A byte cannot be NaN. If an element is not finite, the token's scale is NaN instead.
    scales = group + GROUP_TOKENS * padded
    store_f32(scales + lane * SCALE_BYTES, scale + lane_sum(not_finite))
    return ONE / scale


@inner
def round_key(tag, source, head_size, padded, group, lane):
    """Write one token's key into a group of bytes, with its scale, and with zeros beyond the
    head."""
    size = element_bytes(tag)
    spare = vector_on_stack()
    inverse = splat(write_scale(tag, source, head_size, padded, group, lane, spare))
    for d in range(0, padded, LANES):
        x = load_some(tag, source + d * size, head_size - d, spare) * inverse
        # The rounded elements stand side by side in ``spare``. In the group they are 16 bytes
        # apart: each is among the same element of the other tokens' keys.
        store_as(I8, spare, x)
        for e in range(LANES):
            element = group + (d + e) * GROUP_TOKENS
            copy_element(I8, spare + e, element + lane)


@inner
def round_value(tag, source, head_size, padded, group, lane):
    """The same of one token's value."""
    size = element_bytes(tag)
    spare = vector_on_stack()
    inverse = splat(write_scale(tag, source, head_size, padded, group, lane, spare))
    for d in range(0, padded, LANES):
        x = load_some(tag, source + d * size, head_size - d, spare) * inverse
        store_as(I8, group + lane * padded + d, x)


# --------------------------------------------------------------------------- reading


@inner
def copy_last_values(tag, source, padded, tokens, target):
    """Copy the first ``tokens`` of a group of values, and write zeros for the others."""
    unit_tokens = UNIT_BYTES // element_bytes(tag)
    full_units = tokens // unit_tokens * padded
    all_units = GROUP_TOKENS // unit_tokens * padded
    for unit in range(full_units):
        store_i32(target + unit * UNIT_BYTES, load_i32(source + unit * UNIT_BYTES))
    for unit in range(full_units, all_units):
        store_i32(target + unit * UNIT_BYTES, np.int32(0))
    # An odd number of tokens: the last one is the lower half of a line of units, which has just
    # become zero.
    if tokens % unit_tokens != 0:
        for d in range(padded):
            offset = (full_units + d) * UNIT_BYTES
            copy_element(tag, source + offset, target + offset)


@inner
def read_scales(padded, keys, values, tokens, scratch):
    """Copy the scales of so many ``tokens`` to the scratch memory. Their groups are listed at
    ``keys`` and ``values``. Behind the last token the scales of values are 0."""
    scales_offset = GROUP_TOKENS * padded
    for g in range(ceil_div(tokens, GROUP_TOKENS)):
        key_scales = load_i64(keys + g * I64_BYTES) + scales_offset
        value_scales = load_i64(values + g * I64_BYTES) + scales_offset
        store(scratch.key_scales + g * VECTOR_BYTES, load(key_scales))
        tokens_from_here = tokens - g * GROUP_TOKENS
        kept = keep_between(load(value_scales), 0, tokens_from_here, ZERO)
        store(scratch.value_scales + g * VECTOR_BYTES, kept)


@inner
def widen_groups(product_tag, groups, count, target, padded, line_bytes):
    """Widen ``count`` groups of bytes, which are listed at ``groups``, to what products read, and
    prefetch the groups that follow in the list.

    ``line_bytes`` is the length of a line of the last drawing in the module's docstring (a cache of
    bytes): 16 bytes for keys, ``padded`` for values.
    """
    widened_bytes = GROUP_TOKENS * padded * right_bytes(product_tag)
    for g in range(count):
        soon = load_i64(groups + (g + PREFETCH_GROUPS) * I64_BYTES)
        for offset in range(0, group_bytes(I8, padded), VECTOR_BYTES):
            prefetch(soon + offset)
        source = load_i64(groups + g * I64_BYTES)
        widen_group(product_tag, source, target + g * widened_bytes, padded, line_bytes)


@inner
def widen_group(product_tag, source, target, padded, line_bytes):
    """Widen one group of bytes, whose lines are ``line_bytes`` long."""
    num_bytes = GROUP_TOKENS * padded
    if right_bytes(product_tag) == F32_BYTES:
        # Float32 stands in the order of the bytes.
        for i in range(0, num_bytes, LANES):
            store(target + i * F32_BYTES, load_as(I8, source + i))
        return
    # Bfloat16: two lines of bytes, one below the other, become one line of units.
    for offset in range(0, num_bytes, 2 * line_bytes):
        upper_line = source + offset
        lower_line = upper_line + line_bytes
        unit_line = target + offset * 2  # a bfloat16 has twice the bytes of an int8
        for i in range(0, line_bytes, LANES):
            upper = load_as(I8, upper_line + i)
            lower = load_as(I8, lower_line + i)
            store_pairs(unit_line + i * UNIT_BYTES, upper, lower)
