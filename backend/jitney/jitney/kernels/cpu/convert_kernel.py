"""Rows of x, which are bfloat16, in the form that a product reads, as a Numba kernel.

The tag of a conversion, and what it writes::

    F32   the same numbers as float32, which products of WIDE read

    I8    | K bytes: 128 + x / scale | gap | scale | number of outliers | (index, value) ... |
                                           ^ the row's "tail"
          One scale for the row. Outliers are elements far larger than the others. They would make
          the scale coarse, so they are listed in the tail, and their bytes stand for 0. The gap
          fills the bytes up to a multiple of 64; what it holds meets zeros of the weight.

    I4    | K bytes: x / scale | (scale, sum of the bytes * scale) of each scale group |
          One scale for each scale group: the inputs whose weights share a scale, too.

A scale makes the largest element of its row or scale group 127. In a tail the scale and the values
are float32, the number and the indices int32.

An instruction that multiplies bytes takes one factor without a sign and one with a sign. The
weights of int8 have a sign, so the bytes of I8 have none. The weights of 4 bits have none, so the
bytes of I4 have one.

Items are four rows. A row is read once to find its scale, and once, from the first-level cache, to
round; with outliers a few times more. It is computed by one thread in a fixed order, whatever the
batch.

Called by ``column_linear``, before ``product_kernel`` and ``four_bit_kernel``.
"""

import numpy as np

from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, LANES
from jitney.kernels.cpu.simd import (
    BF16,
    I8,
    ZERO,
    fetch_add,
    fma,
    inlined,
    inner,
    is_i4,
    is_i8,
    lane_max,
    lane_sum,
    larger,
    load,
    load_as,
    load_f32,
    load_i32,
    load_one,
    nearest,
    splat,
    store,
    store_as,
    store_byte,
    store_bytes,
    store_f32,
    store_i32,
)

_ROWS_PER_ITEM = 4
_BF16_BYTES = 2
_LARGEST_BYTE = np.float32(127.0)
_BYTE_OF_ZERO = np.uint8(128)
_LEAST = np.float32(1e-36)
"""If the largest element of a row, or of a scale group, is not above this, all of them are rounded
to zeros: 127 divided by so small a number might be infinite."""


@record
class ConvertCall(KernelCall):
    """Arguments of :func:`convert_body`; ``count`` is in rows."""

    x: int
    """Address of bfloat16 [count, size]."""
    size: int
    """K, a multiple of 16."""
    out: int
    """Address of the converted rows."""
    out_stride: int
    """Bytes from row to row of ``out``."""
    tail: int
    """For I8: bytes from the beginning of a row of ``out`` to its tail."""
    outlier: float
    """For I8: an outlier is larger than so many times the mean size of its row's elements. See
    :func:`list_outliers`."""
    most_outliers: int
    """For I8: how many outliers a tail has memory for."""
    input_factors: int
    """For I8: address of float32 [size], with which x is multiplied first. 0: there are none."""
    scale_group: int
    """For I4: how many inputs share a scale."""


read_convert = reader(ConvertCall)

# The scale is at the beginning of a tail. Bytes from there to the tail's other fields:
TAIL_COUNT = 4
TAIL_INDICES = 8
TAIL_VALUES = 12
OUTLIER_BYTES = 8
"""From an outlier's index or value to the next one's."""


@inner
def one_over_scale(largest):
    """What numbers are multiplied by to become bytes, if ``largest`` is their largest size."""
    return _LARGEST_BYTE / largest if largest > _LEAST else ZERO


# --------------------------------------------------------------------------- I8


@inner
def load_scaled(call, row, i):
    """16 elements of x from element ``i`` on, times their input factors."""
    x = load_as(BF16, row + i * _BF16_BYTES)
    return x if call.input_factors == 0 else x * load(call.input_factors + i * F32_BYTES)


@inner
def load_one_scaled(call, row, k):
    """Element ``k`` of x, times its input factor."""
    value = load_one(BF16, row + k * _BF16_BYTES)
    if call.input_factors != 0:
        value *= load_f32(call.input_factors + k * F32_BYTES)
    return value


@inner
def list_outliers(call, row, limit, tail):
    """Write the outliers of a row to its tail. Returns the size of the largest other element.

    "Size" is the absolute value. An outlier is an element whose size is above a limit. The limit is
    ``call.outlier`` times a mean: the sum of the sizes of all elements that are no outliers,
    divided by K. So limit and outliers depend on each other, and are found in rounds:

    - In the first round ``limit`` is that of the mean of all elements.
    - Without the outliers of a round the mean is smaller, so the next round has a lower limit. It
      is lowered twice at most.
    - If a round finds more outliers than the tail has memory for, the limit is doubled until they
      fit.
    """
    lowerings_left = 2
    while True:
        count = 0
        # Of the elements that are no outliers: the largest size, and the sum of sizes in two parts.
        largest = ZERO
        vector_sums = splat(ZERO)  # of vectors that have no outlier, lane by lane
        single_sum = ZERO  # of vectors that have one
        for i in range(0, call.size, LANES):
            x = load_scaled(call, row, i)
            sizes = larger(x, splat(ZERO) - x)
            largest_of_vector = lane_max(sizes)
            if largest_of_vector <= limit:
                # As in nearly all vectors.
                largest = max(largest, largest_of_vector)
                vector_sums = vector_sums + sizes
                continue
            for k in range(i, i + LANES):
                value = load_one_scaled(call, row, k)
                if abs(value) <= limit:
                    largest = max(largest, abs(value))
                    single_sum = single_sum + abs(value)
                    continue
                # When the tail is full, outliers are still counted: the limit is doubled below.
                if count < call.most_outliers:
                    store_i32(tail + TAIL_INDICES + OUTLIER_BYTES * count, np.int32(k))
                    store_f32(tail + TAIL_VALUES + OUTLIER_BYTES * count, value)
                count += 1
        times_mean = call.outlier / np.float32(call.size)
        lower_limit = (lane_sum(vector_sums) + single_sum) * times_mean
        if count > call.most_outliers:
            # Too many: the limit is doubled, and not lowered again. As it may be 0, a little is
            # added as well.
            limit = limit + limit + np.float32(1e-30)
            lowerings_left = 0
        elif lowerings_left > 0 and largest > lower_limit:
            # With the lower limit, there are more outliers.
            limit = lower_limit
            lowerings_left = lowerings_left - 1
        else:
            store_i32(tail + TAIL_COUNT, np.int32(count))
            return largest


@inner
def round_row(call, row, out):
    """A row of I8, with its tail. The scale is NaN if an element of x is NaN or infinite, and then
    so are all results of the row."""
    size = call.size
    tail = out + call.tail
    largest_by_lane = splat(ZERO)
    total = splat(ZERO)
    not_finite = splat(ZERO)
    for i in range(0, size, LANES):
        x = load_scaled(call, row, i)
        sizes = larger(x, splat(ZERO) - x)
        largest_by_lane = larger(sizes, largest_by_lane)
        total = total + sizes
        not_finite = fma(x, splat(ZERO), not_finite)  # stays 0, or NaN where x is NaN or infinite
    largest = lane_max(largest_by_lane)
    limit = lane_sum(total) * (call.outlier / np.float32(size))
    store_i32(tail + TAIL_COUNT, np.int32(0))
    if largest > limit:
        largest = list_outliers(call, row, limit, tail)
    store_f32(tail, largest / _LARGEST_BYTE + lane_sum(not_finite))
    inverse = splat(one_over_scale(largest))
    for i in range(0, size, LANES):
        store_bytes(out + i, load_scaled(call, row, i) * inverse)
    for n in range(load_i32(tail + TAIL_COUNT)):
        index = load_i32(tail + TAIL_INDICES + OUTLIER_BYTES * n)
        store_byte(out + index, _BYTE_OF_ZERO)


# --------------------------------------------------------------------------- I4


@inner
def round_groups(call, row, out):
    """A row of I4. The scale of a scale group is NaN if an element of x is NaN or infinite."""
    scale_and_sum = out + call.size
    for begin in range(0, call.size, call.scale_group):
        largest_by_lane = splat(ZERO)
        not_finite = splat(ZERO)
        for i in range(begin, begin + call.scale_group, LANES):
            x = load_as(BF16, row + i * _BF16_BYTES)
            largest_by_lane = larger(larger(x, splat(ZERO) - x), largest_by_lane)
            # It stays 0, or becomes NaN where x is NaN or infinite.
            not_finite = fma(x, splat(ZERO), not_finite)
        largest = lane_max(largest_by_lane)
        inverse = splat(one_over_scale(largest))
        total = splat(ZERO)
        for i in range(begin, begin + call.scale_group, LANES):
            rounded = nearest(load_as(BF16, row + i * _BF16_BYTES) * inverse)
            store_as(I8, out + i, rounded)
            total = total + rounded
        scale = largest / _LARGEST_BYTE + lane_sum(not_finite)
        store_f32(scale_and_sum, scale)
        store_f32(scale_and_sum + F32_BYTES, scale * lane_sum(total))
        scale_and_sum += 2 * F32_BYTES


# --------------------------------------------------------------------------- items


@inlined
def widen_row(call, row, out):
    """A row of F32."""
    for i in range(0, call.size, LANES):
        store(out + i * F32_BYTES, load_as(BF16, row + i * _BF16_BYTES))


@inner
def convert_body(tag, arguments):
    """Convert rows to the form that products of the tag read. An item is _ROWS_PER_ITEM rows."""
    call = read_convert(arguments)
    while True:
        first = fetch_add(arguments) * _ROWS_PER_ITEM
        if first >= call.count:
            return
        for r in range(first, min(first + _ROWS_PER_ITEM, call.count)):
            row = call.x + r * call.size * _BF16_BYTES
            out = call.out + r * call.out_stride
            if is_i8(tag):
                round_row(call, row, out)
            elif is_i4(tag):
                round_groups(call, row, out)
            else:
                widen_row(call, row, out)
