# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""Kernels over the rows of a step's activations: RMS norm, and rotary embedding in place.

Written for ``fused``, which runs the two bodies on torch's threads. Each takes the address of its
record and takes items, some rows each, from a counter until none is left. A row is computed by one
thread in a fixed order, whatever the batch. Elements are float32 or bfloat16, told apart by the
type of ``tag`` (``simd``); sums are float32.
"""

import ctypes

import numpy as np
from numba import njit

from jitney.kernels.cpu.records import reader, record
from jitney.kernels.cpu.simd import (
    LANES,
    ONE,
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    lane_sum,
    load,
    load_as,
    load_f32,
    load_i64,
    load_one,
    splat,
    store_as,
    store_one,
)


@record
class NormCall(ctypes.Structure):
    """Arguments of :func:`norm_body`. Strides are in bytes."""

    counter: int
    """Items taken so far: 0 at the start."""
    rows: int
    rows_per_item: int
    epsilon: float
    data: int
    stride: int
    out: int
    out_stride: int
    width: int
    """Elements of a row."""
    scale: int
    """Address of float32 [width]."""
    index: int
    """Address of int64 [rows]: which rows of the data to norm. 0: the first ones."""


@record
class RotateCall(ctypes.Structure):
    """Arguments of :func:`rotate_body`. Strides are in bytes.

    A row of the data holds query heads, then key heads, then what is left alone.
    """

    counter: int
    """Items taken so far: 0 at the start."""
    rows: int
    rows_per_item: int
    epsilon: float
    data: int
    stride: int
    query_heads: int
    key_heads: int
    head_size: int
    rotary_size: int
    """The first so many elements of a head are rotated."""
    cos: int
    """[positions, rotary size] in the data's type."""
    sin: int
    angle_stride: int
    """From row to row of both."""
    positions: int
    """Address of int64 [rows]: which rows of both belong to them. 0: the first ones."""
    query_scale: int
    """Address of float32 [head size]: heads are normed first. 0: they are not."""
    key_scale: int


read_norm, read_rotate = reader(NormCall), reader(RotateCall)


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
def norm_body(tag, arguments):
    """RMS norm (Zhang and Sennrich 2019) of each row into ``out``."""
    call = read_norm(arguments)
    while True:
        first = fetch_add(arguments) * call.rows_per_item
        if first >= call.rows:
            return
        for r in range(first, min(first + call.rows_per_item, call.rows)):
            row = call.data + (r if call.index == 0 else load_i64(call.index + 8 * r)) * call.stride
            out = call.out + r * call.out_stride
            norm_row(tag, row, out, call.scale, call.width, call.epsilon)


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
def rotate_body(tag, arguments):
    """Norm (if asked for) and rotate the query and key heads of each row (Su et al. 2021)."""
    call = read_rotate(arguments)
    head_bytes = call.head_size * element_bytes(tag)
    while True:
        first = fetch_add(arguments) * call.rows_per_item
        if first >= call.rows:
            return
        for r in range(first, min(first + call.rows_per_item, call.rows)):
            position = r if call.positions == 0 else load_i64(call.positions + 8 * r)
            angles = position * call.angle_stride
            for h in range(call.query_heads + call.key_heads):
                head = call.data + r * call.stride + h * head_bytes
                scale = call.query_scale if h < call.query_heads else call.key_scale
                if scale != 0:
                    norm_row(tag, head, head, scale, call.head_size, call.epsilon)
                rotate_head(tag, head, call.cos + angles, call.sin + angles, call.rotary_size)
