"""Rows of x in another form before a product, as a Numba kernel.

What products of a tag read, of a row of bfloat16::

    F32   | float32 ...                                                              |
    I8    | bytes, 128 + x / scale | filling | scale | outliers | (index, value) ...  |
                                             ^ "tail"
    I4    | bytes with a sign, x / scale of a group | (scale, sum * scale) of each group |

A tail is::

    | float32 scale | int32 number of outliers | of each: int32 index, float32 value |

A body takes the address of its record and takes items, four rows each, from a counter until none
is left. For each row it reads x twice, from the first-level cache the second time: once to find the
scale, once to round. A row is computed by one thread in a fixed order, whatever the batch.

Called by ``tile_linear``, before ``product_kernel`` and ``four_bit_kernel``.
"""

import numpy as np

from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.simd import (
    BF16,
    I8,
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    inner,
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
_LEAST = np.float32(1e-36)
"""A group whose elements are no larger is taken for zeros: 127 over them would be infinite."""


@record
class ConvertCall(KernelCall):
    """Arguments of :func:`convert_body`."""

    x: int
    """bfloat16 [count, size]"""
    size: int
    """A multiple of 16."""
    out: int
    """uint8, or float32, [count, size]"""
    out_stride: int
    tail: int
    """For I8: bytes from the beginning of a row of ``out`` to its tail."""
    outlier: float
    """An outlier is larger than so many times the mean size of its row."""
    most_outliers: int
    factors: int
    """For I8: address of float32 [size], by which x is multiplied before. 0: there are none."""
    group: int
    """For I4: how many inputs share a scale. Behind a row's bytes, which have a sign, are float32
    [size / group, 2]: a group's scale, and the sum of its bytes times that."""


read_convert = reader(ConvertCall)

# Bytes from a tail's beginning, where its scale is, to the rest.
TAIL_COUNT = 4
TAIL_INDICES = 8
TAIL_VALUES = 12
OUTLIER_BYTES = 8
"""From an outlier's index or value to the next one's."""


@inner
def load_scaled(call, row, i):
    """16 elements of x times their factors."""
    x = load_as(BF16, row + 2 * i)
    return x if call.factors == 0 else x * load(call.factors + 4 * i)


@inner
def load_one_scaled(call, row, k):
    """One element of x times its factor."""
    value = load_one(BF16, row + 2 * k)
    if call.factors != 0:
        value *= load_f32(call.factors + 4 * k)
    return value


# --------------------------------------------------------------------------- bytes


@inner
def list_outliers(call, row, limit, tail):
    """Write the outliers, which are elements larger than a limit, to the tail. Returns the size of
    the largest element of the rest.

    An outlier is larger than so many times (``call.outlier``) the mean size of a row. The first
    ``limit`` is of the mean of all elements. Without the outliers the mean is smaller, so the limit
    is lowered, twice at most. If more outliers are found than the tail has memory for, the limit is
    doubled until they fit.
    """
    times_lowered = 0
    while True:
        count = 0
        largest = ZERO  # of the rest, which are the elements that are no outliers
        whole_vectors = splat(ZERO)  # sum of the rest, as far as it is in vectors without outliers
        single = ZERO  # sum of the rest in vectors with outliers
        for i in range(0, call.size, LANES):
            x = load_scaled(call, row, i)
            x = larger(x, splat(ZERO) - x)
            best = lane_max(x)
            if best <= limit:
                # Nearly all vectors have no outlier.
                largest = max(largest, best)
                whole_vectors = whole_vectors + x
                continue
            for k in range(i, i + LANES):
                value = load_one_scaled(call, row, k)
                if abs(value) <= limit:
                    largest = max(largest, abs(value))
                    single = single + abs(value)
                    continue
                # Count on when the list is full: the limit is doubled below.
                if count < call.most_outliers:
                    store_i32(tail + TAIL_INDICES + OUTLIER_BYTES * count, np.int32(k))
                    store_f32(tail + TAIL_VALUES + OUTLIER_BYTES * count, value)
                count += 1
        lower_limit = (lane_sum(whole_vectors) + single) * (call.outlier / np.float32(call.size))
        if count > call.most_outliers:
            # Too many. The small number is for a limit of 0. From now on the limit only grows.
            limit = limit + limit + np.float32(1e-30)
            times_lowered = 2
        elif times_lowered < 2 and largest > lower_limit:
            limit = lower_limit
            times_lowered = times_lowered + 1
        else:
            store_i32(tail + TAIL_COUNT, np.int32(count))
            return largest


@inner
def round_row(call, row, out):
    """x -> 128 + x / scale, as bytes, where the scale makes the largest element 127.

    Outliers, far larger than the others, would make that scale coarse. So they are left out: their
    bytes are 128, which is a zero, and the product adds their part in float32
    (``product_kernel.scale_bytes``). The scale is NaN if an element is not finite."""
    size = call.size
    tail = out + call.tail
    best = splat(ZERO)
    total = splat(ZERO)
    not_finite = splat(ZERO)
    for i in range(0, size, LANES):
        x = load_scaled(call, row, i)
        positive = larger(x, splat(ZERO) - x)
        best = larger(positive, best)
        total = total + positive
        not_finite = fma(x, splat(ZERO), not_finite)  # stays 0, or NaN where x is NaN or infinite
    largest = lane_max(best)
    limit = lane_sum(total) * (call.outlier / np.float32(size))
    store_i32(tail + TAIL_COUNT, np.int32(0))
    if largest > limit:
        largest = list_outliers(call, row, limit, tail)
    store_f32(tail, largest / np.float32(127.0) + lane_sum(not_finite))
    share = splat(np.float32(127.0) / largest if largest > ZERO else ZERO)
    for i in range(0, size, LANES):
        store_bytes(out + i, load_scaled(call, row, i) * share)
    for n in range(load_i32(tail + TAIL_COUNT)):
        index = load_i32(tail + TAIL_INDICES + OUTLIER_BYTES * n)
        store_byte(out + index, np.uint8(128))


# --------------------------------------------------------------------------- groups of bytes


@inner
def round_groups(call, row, out):
    """x -> x / scale, where a scale for each group makes its largest element 127."""
    factors = out + call.size
    for begin in range(0, call.size, call.group):
        best = splat(ZERO)
        not_finite = splat(ZERO)
        for i in range(begin, begin + call.group, LANES):
            x = load_as(BF16, row + 2 * i)
            best = larger(larger(x, splat(ZERO) - x), best)
            not_finite = fma(
                x, splat(ZERO), not_finite
            )  # stays 0, or NaN where x is NaN or infinite
        largest = lane_max(best)
        total = splat(ZERO)
        share = splat(np.float32(127.0) / largest if largest > _LEAST else ZERO)
        for i in range(begin, begin + call.group, LANES):
            whole = nearest(load_as(BF16, row + 2 * i) * share)
            store_as(I8, out + i, whole)
            total = total + whole
        scale = largest / np.float32(127.0) + lane_sum(not_finite)
        store_f32(factors, scale)
        store_f32(factors + 4, scale * lane_sum(total))
        factors += 8


# --------------------------------------------------------------------------- items


@inner
def convert_body(tag, arguments):
    """Rows of bfloat16 to what products with weights of the tag's type read: of I8 bytes, each row
    with a tail; of I4 bytes in groups; of F32 the same numbers in float32."""
    call = read_convert(arguments)
    while True:
        first = fetch_add(arguments) * _ROWS_PER_ITEM
        if first >= call.count:
            return
        for r in range(first, min(first + _ROWS_PER_ITEM, call.count)):
            row = call.x + r * call.size * 2
            out = call.out + r * call.out_stride
            if element_bytes(tag) == 1:
                round_row(call, row, out)
            elif element_bytes(tag) == 2:
                round_groups(call, row, out)
            else:
                for i in range(0, call.size, LANES):
                    store(out + 4 * i, load_as(BF16, row + 2 * i))
