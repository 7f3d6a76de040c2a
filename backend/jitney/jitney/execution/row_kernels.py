# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""Kernels over the rows of a step's activations: RMS norm, and rotary embedding in place.

Written for ``fused``, which calls the two bodies here on torch's threads (``team``). Each takes one
address, that of the int64 arguments listed below, and takes items, some rows each, from a counter
until none is left. A row is computed by one thread in a fixed order, whatever the batch. Elements
are float32 or bfloat16, told apart by the type of ``tag`` (``attention.simd``); sums are float32.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from jitney.execution.attention.simd import (
    LANES,
    element_bytes,
    f32,
    fetch_add,
    fma,
    i16,
    i16x,
    i32,
    i32x,
    lane_sum,
    load,
    load_f32,
    load_i64,
    pointer,
    splat,
    store_as,
    vector,
)

# Arguments of both bodies, in units of 8 bytes.
COUNTER = 0  # items taken so far; 0 at the start
ROWS = 1
ROWS_PER_ITEM = 2
EPSILON = 3  # float32
DATA = 4  # the rows
STRIDE = 5  # bytes from row to row
# of norm_body
OUT = 6
OUT_STRIDE = 7
WIDTH = 8  # elements of a row
SCALE = 9  # address of float32 [width]
INDEX = 10  # address of int64 [rows]: which rows of the data to norm; 0: the first ones
NORM_ARGUMENTS = 11
# of rotate_body: a row holds query heads, then key heads, then what is left alone
QUERY_HEADS = 6
KEY_HEADS = 7
HEAD_SIZE = 8
ROTARY_SIZE = 9  # the first so many elements of a head are rotated
COS = 10  # [rows, rotary size] in the rows' type
SIN = 11
ANGLE_STRIDE = 12  # bytes from row to row of both
POSITIONS = 13  # address of int64 [rows]: which rows of both belong to them; 0: the first ones
QUERY_SCALE = 14  # address of float32 [head size]: heads are normed before; 0: they are not
KEY_SCALE = 15
ROTATE_ARGUMENTS = 16

ONE = np.float32(1.0)
ZERO = np.float32(0.0)


# --------------------------------------------------------------------------- elements


def _widen(builder: Any, bits: Any, integers: Any, floats: Any, shift: Any) -> Any:
    """IR: bfloat16 bits as float32, of which they are the upper half."""
    return builder.bitcast(builder.shl(builder.zext(bits, integers), shift), floats)


@intrinsic
def load_as(typingctx, tag, address):
    """16 elements of the tag's type, as float32."""

    def emit(context, builder, signature, args):
        f32x = ir.VectorType(f32, LANES)
        if tag == types.float32:
            return builder.load(pointer(builder, args[1], f32x), align=4)
        bits = builder.load(pointer(builder, args[1], i16x), align=2)
        return _widen(builder, bits, i32x, f32x, ir.Constant(i32x, [16] * LANES))

    return vector(tag, types.intp), emit


@intrinsic
def load_one(typingctx, tag, address):
    """One element of the tag's type, as float32."""

    def emit(context, builder, signature, args):
        if tag == types.float32:
            return builder.load(pointer(builder, args[1], f32), align=4)
        bits = builder.load(pointer(builder, args[1], i16), align=2)
        return _widen(builder, bits, i32, f32, ir.Constant(i32, 16))

    return types.float32(tag, types.intp), emit


@intrinsic
def store_one(typingctx, tag, address, value):
    """One element, rounded to nearest even if the tag's type is bfloat16. Not for NaN."""

    def emit(context, builder, signature, args):
        value = args[2]
        if tag != types.float32:
            bits = builder.bitcast(value, i32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
            bits = builder.add(bits, builder.add(odd, ir.Constant(i32, 0x7FFF)))
            value = builder.trunc(builder.lshr(bits, ir.Constant(i32, 16)), i16)
        builder.store(value, pointer(builder, args[1], value.type), align=2)
        return context.get_dummy_value()

    return types.void(tag, types.intp, types.float32), emit


# --------------------------------------------------------------------------- norm


@njit
def inverse_rms(tag, row, width, epsilon):
    """1 / sqrt(mean of squares + epsilon) of one row."""
    size = element_bytes(tag)
    first, second = splat(ZERO), splat(ZERO)
    i = 0
    while i + 2 * LANES <= width:
        a, b = load_as(tag, row + i * size), load_as(tag, row + (i + LANES) * size)
        first, second = fma(a, a, first), fma(b, b, second)
        i += 2 * LANES
    total = lane_sum(first + second)
    while i < width:
        x = load_one(tag, row + i * size)
        total += x * x
        i += 1
    return ONE / np.sqrt(total / np.float32(width) + epsilon)


@njit
def norm_row(tag, row, out, scale, width, epsilon):
    """out = row * inverse RMS * scale. ``out`` may be ``row``."""
    size = element_bytes(tag)
    factor = inverse_rms(tag, row, width, epsilon)
    i = 0
    while i + LANES <= width:
        x = load_as(tag, row + i * size) * splat(factor)
        store_as(tag, out + i * size, x * load(scale + i * 4))
        i += LANES
    while i < width:
        x = load_one(tag, row + i * size) * factor
        store_one(tag, out + i * size, x * load_f32(scale + i * 4))
        i += 1


@njit
def norm_body(tag, args):
    """RMS norm (Zhang and Sennrich 2019) of each row into ``OUT``."""
    rows, step = load_i64(args + 8 * ROWS), load_i64(args + 8 * ROWS_PER_ITEM)
    data, stride = load_i64(args + 8 * DATA), load_i64(args + 8 * STRIDE)
    out, out_stride = load_i64(args + 8 * OUT), load_i64(args + 8 * OUT_STRIDE)
    width, scale = load_i64(args + 8 * WIDTH), load_i64(args + 8 * SCALE)
    epsilon, index = load_f32(args + 8 * EPSILON), load_i64(args + 8 * INDEX)
    while True:
        first = fetch_add(args + 8 * COUNTER) * step
        if first >= rows:
            return
        for r in range(first, min(first + step, rows)):
            source = r if index == 0 else load_i64(index + 8 * r)
            norm_row(tag, data + source * stride, out + r * out_stride, scale, width, epsilon)


# --------------------------------------------------------------------------- rotary embedding


@njit
def rotate_head(tag, head, cos, sin, rotary):
    """Rotate the pairs (i, i + rotary / 2) of a head's first elements, in place."""
    size = element_bytes(tag)
    half = rotary // 2
    low, high = head, head + half * size
    i = 0
    while i + LANES <= half:
        at, other = i * size, (half + i) * size
        a, b = load_as(tag, low + at), load_as(tag, high + at)
        first = a * load_as(tag, cos + at) - b * load_as(tag, sin + at)
        second = b * load_as(tag, cos + other) + a * load_as(tag, sin + other)
        store_as(tag, low + at, first)
        store_as(tag, high + at, second)
        i += LANES
    while i < half:
        at, other = i * size, (half + i) * size
        x, y = load_one(tag, low + at), load_one(tag, high + at)
        store_one(tag, low + at, x * load_one(tag, cos + at) - y * load_one(tag, sin + at))
        store_one(tag, high + at, y * load_one(tag, cos + other) + x * load_one(tag, sin + other))
        i += 1


@njit
def rotate_body(tag, args):
    """Norm (if asked for) and rotate the query and key heads of each row (Su et al. 2021)."""
    rows, step = load_i64(args + 8 * ROWS), load_i64(args + 8 * ROWS_PER_ITEM)
    data, stride = load_i64(args + 8 * DATA), load_i64(args + 8 * STRIDE)
    queries, keys = load_i64(args + 8 * QUERY_HEADS), load_i64(args + 8 * KEY_HEADS)
    width, rotary = load_i64(args + 8 * HEAD_SIZE), load_i64(args + 8 * ROTARY_SIZE)
    cos, sin = load_i64(args + 8 * COS), load_i64(args + 8 * SIN)
    angle_stride = load_i64(args + 8 * ANGLE_STRIDE)
    query_scale, key_scale = load_i64(args + 8 * QUERY_SCALE), load_i64(args + 8 * KEY_SCALE)
    epsilon = load_f32(args + 8 * EPSILON)
    positions = load_i64(args + 8 * POSITIONS)
    head_bytes = width * element_bytes(tag)
    while True:
        first = fetch_add(args + 8 * COUNTER) * step
        if first >= rows:
            return
        for r in range(first, min(first + step, rows)):
            angles = (r if positions == 0 else load_i64(positions + 8 * r)) * angle_stride
            for h in range(queries + keys):
                head = data + r * stride + h * head_bytes
                scale = query_scale if h < queries else key_scale
                if scale != 0:
                    norm_row(tag, head, head, scale, width, epsilon)
                rotate_head(tag, head, cos + angles, sin + angles, rotary)
