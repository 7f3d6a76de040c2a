"""What follows a product of linear layers: scales, bias, sum, activation, rounding.

It is done for the 32 outputs of a pair of columns at once, while they are in the first-level cache.

Called by ``product_kernel`` and ``four_bit_kernel``.
"""

import numpy as np
from numba.extending import overload

from jitney.kernels.cpu.convert_kernel import (
    OUTLIER_BYTES,
    TAIL_COUNT,
    TAIL_INDICES,
    TAIL_VALUES,
)
from jitney.kernels.cpu.emit import LANES, UNIT_BYTES, VECTOR_BYTES
from jitney.kernels.cpu.product_call import (
    GELU,
    NONE,
    PAIR_ROW_BYTES,
    RELU,
    SILU,
)
from jitney.kernels.cpu.simd import (
    BF16,
    F32,
    F32_TYPE,
    LOG2_E,
    ONE,
    ZERO,
    element_bytes,
    exp2,
    fma,
    inlined,
    inner,
    is_i8,
    larger,
    load,
    load_as,
    load_difference,
    load_f32,
    load_i32,
    load_signed,
    sigmoid,
    splat,
    store_as,
    with_sign_of,
)


@inner
def error_function(x):
    """erf(x), within 2e-7: formula 7.1.26 of Abramowitz and Stegun (1964). For NaN, NaN."""
    size = larger(splat(ZERO) - x, x)
    t = splat(ONE) / fma(size, splat(np.float32(0.3275911)), splat(ONE))
    p = splat(np.float32(1.061405429))
    p = fma(p, t, splat(np.float32(-1.453152027)))
    p = fma(p, t, splat(np.float32(1.421413741)))
    p = fma(p, t, splat(np.float32(-0.284496736)))
    p = fma(p, t, splat(np.float32(0.254829592)))
    rest = p * t * exp2(splat(ZERO) - x * x * splat(LOG2_E))
    return with_sign_of(splat(ONE) - rest, x)


@inner
def soft_cap(x, cap):
    """cap * tanh(x / cap). For NaN, NaN."""
    two = splat(np.float32(2.0))
    caps = splat(cap)
    return caps * (two * sigmoid(two * x / caps) - splat(ONE))


@inner
def activate(kind, x):
    """SiLU; ReLU; GELU; or GELU by its tanh formula, which is
    x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3)). For NaN, NaN."""
    if kind == SILU:
        return x * sigmoid(x)
    if kind == RELU:
        return larger(splat(ZERO), x)
    if kind == GELU:
        half = x * splat(np.float32(0.5))
        return fma(half, error_function(x * splat(np.float32(0.7071067811865476))), half)
    inside = fma(x * x, splat(np.float32(0.044715)), splat(ONE)) * x
    return x * sigmoid(inside * splat(np.float32(1.5957691216057308)))


def result_tag(tag):
    """The tag of the result: F32 if the product's is F32, else BF16.

    Compiled code calls it. Its two results have two types, so an ``if`` of compiled code could not
    choose: the function below does, while the call is compiled. It gets the tag's type, and returns
    the function that is called instead.
    """


@overload(result_tag, inline="always")
def _choose_result_tag(tag):
    if tag == F32_TYPE:
        return lambda tag: F32
    return lambda tag: BF16


@inlined
def scale_bytes(call, pair, row, sums):
    """A row of a pair's product of bytes, as float32: two vectors.

    ``sums`` is the address of the int32 sums of the products of bytes. What is to be made of them::

        outputs = ((sums - shifts) * the row's scale + outliers * weights) * scales

    """
    shifts = call.shifts + pair * PAIR_ROW_BYTES
    scales = call.scales + pair * PAIR_ROW_BYTES
    tail = call.x + row * call.x_stride + call.tail
    row_scale = splat(load_f32(tail))
    # A byte of x is 128 plus the number that it stands for. So a sum is too large by 128 times the
    # sum of the output's weights, which is the shift.
    a = load_difference(sums, shifts) * row_scale
    b = load_difference(sums + VECTOR_BYTES, shifts + VECTOR_BYTES) * row_scale
    # The elements of x that are far larger than the others are zeros in the bytes, and are listed.
    first_column = call.weight + pair * 2 * call.column_bytes
    second_column = first_column + call.column_bytes
    outliers = load_i32(tail + TAIL_COUNT)
    for n in range(outliers):
        k = np.int64(load_i32(tail + TAIL_INDICES + OUTLIER_BYTES * n))
        value = splat(load_f32(tail + TAIL_VALUES + OUTLIER_BYTES * n))
        # The weights of input k are in vector k // 4 of the column: one byte of each unit.
        vector_offset = k // UNIT_BYTES * VECTOR_BYTES
        byte = k % UNIT_BYTES
        a = fma(load_signed(first_column + vector_offset, byte), value, a)
        b = fma(load_signed(second_column + vector_offset, byte), value, b)
    return a * load(scales), b * load(scales + VECTOR_BYTES)


@inner
def finish(tag, call, pair, first_row, rows, sums):
    """Make outputs of the sums [rows, 32] of one pair at ``sums``, and write them to rows
    ``first_row``, ``first_row`` + 1, ... of the layer's result."""
    out_tag = result_tag(tag)
    gated = call.gated != 0
    factor = splat(call.factor)
    out_column_bytes = LANES * element_bytes(out_tag)  # 16 numbers in a row of the result
    bias = call.bias + pair * PAIR_ROW_BYTES
    for m in range(rows):
        row = first_row + m
        row_sums = sums + m * PAIR_ROW_BYTES
        # From here on, a and b are the row's 16 numbers of the first column, and of the second.
        if is_i8(tag):
            a, b = scale_bytes(call, pair, row, row_sums)
        else:
            a = load(row_sums)
            b = load(row_sums + VECTOR_BYTES)
        if call.bias != 0:
            a = a + load(bias)
            b = b + load(bias + VECTOR_BYTES)
        a = a * factor
        b = b * factor
        if call.softcap != ZERO:
            a = soft_cap(a, call.softcap)
            b = soft_cap(b, call.softcap)
        if call.other != 0:
            # It has all N numbers of the product: if gated, twice those of the result.
            other_stride = call.out_stride * 2 if gated else call.out_stride
            other = call.other + row * other_stride + pair * 2 * out_column_bytes
            a = a + load_as(out_tag, other)
            b = b + load_as(out_tag, other + out_column_bytes)
        out = call.out + row * call.out_stride
        if gated:
            # A pair gives 16 numbers of the result: a is their gate, b what that is multiplied by.
            store_as(out_tag, out + pair * out_column_bytes, activate(call.activation, a) * b)
        else:
            # A pair gives 32 numbers of the result.
            if call.activation != NONE:
                a = activate(call.activation, a)
                b = activate(call.activation, b)
            pair_out = out + pair * 2 * out_column_bytes
            store_as(out_tag, pair_out, a)
            store_as(out_tag, pair_out + out_column_bytes, b)
