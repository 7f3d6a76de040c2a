"""The product of linear layers as a Numba kernel, with what follows it.

At the few rows of a decode step it reads weights faster than oneDNN's, a call costs a tenth, and it
can be a step of a ``program``, which a call into torch cannot. The product of a few rows is one of
two micro-kernels: the tile unit's (AMX) where there is one, else that of vectors, which widens to
float32 what the processor does not multiply. Imported only where Numba is.

A weight [N, K] is packed in columns of 16 outputs, each ``[K / 2, 16, 2]``: 16 rows of a column are
one tile, and each row is one vector. Two columns at a time meet at most 32 rows of x in the tile
unit, so that four tiles accumulate and each tile loaded is used twice; or MAX_ROWS in vectors. An
item is a few pairs of columns and ROWS_PER_CHUNK rows; a row's result depends on nothing but that
row.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import overload

from jitney.kernels.cpu.compiled import Call, reader, record
from jitney.kernels.cpu.products import (
    MAX_ROWS,
    VECTOR_BYTES,
    amx_end,
    emit_amx,
    emit_shapes,
    i8,
    make_tile,
    move_tile,
    stack_memory,
)
from jitney.kernels.cpu.simd import (
    BF16,
    F32,
    ONE,
    TAG,
    element_bytes,
    emitted,
    fetch_add,
    fma,
    i64,
    inner,
    load,
    load_as,
    load_difference,
    load_f32,
    load_i32,
    load_signed,
    offset_by,
    prefetch_line,
    sigmoid,
    splat,
    store_as,
    store_i64,
)
from jitney.kernels.fused.forms import Activation

STEP_BYTES = 64
"""Of an output's weights: what one tile holds."""
ROWS_PER_CHUNK = 128
RESULT_BYTES = ROWS_PER_CHUNK * 128
UNPACKED_BYTES = 8192
"""Of nibbles: two columns of a group of 128 inputs as bytes, and int32 [32, 32]."""
_BLOCK = 8
"""Steps of two columns that stay in the first-level cache while all tiles of a chunk's rows meet
them: else the tile unit waits for the second-level one."""
ITEMS = 64
"""About so many items a product is cut into: many enough to share out, few enough to be cheap."""
SILU, GELU_TANH = 1, 2
ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": SILU, "gelu_tanh": GELU_TANH}


@record
class ProductCall(Call):
    """Arguments of :func:`product_body`."""

    x: int
    """[count, K]"""
    x_stride: int
    """Bytes from row to row."""
    steps: int
    """Of STEP_BYTES in an output's weights. Of nibbles: bytes of a column."""
    size: int
    """Of nibbles: K, and how many of these are a group."""
    group: int
    weight: int
    """Packed."""
    pairs: int
    """Of columns: N / 32."""
    pairs_per_item: int
    out: int
    out_stride: int
    """Bytes from row to row."""
    activation: int
    """0: none. Else the pairs are (gate, up), and 16 outputs come of each."""
    other: int
    """Address of [count, N], added to the product, whose columns its own lie like. 0: none."""
    bias: int
    """Address of float32 [N]. 0: none."""
    tiles: int
    """Whether the processor's tile unit is used: 0 or 1."""
    scales: int
    """Of bytes, whose rows have a tail (``rows``) behind their steps: address of float32 [N]."""
    shifts: int
    """Of bytes: address of int32 [N], 128 times the sum of each output's weights."""


read_product = reader(ProductCall)

# Tiles 0 to 3 are the results of (upper, lower rows) x (first, second column), in this order.
_X, _COLUMN = 4, 6
"""The first of two tiles: of rows of x, and of columns."""
_AHEAD = 2
"""The vectors' micro-kernel asks for the pair of columns after the one it reads."""
_TILES_AHEAD = 6
"""Steps. Without, no weight comes in while the tile unit multiplies the second half of its rows."""


@emitted(types.int64, TAG)
def product_memory(builder, tag):
    """The address of float32 [ROWS_PER_CHUNK, 32], and behind it of int64 [2 + _AHEAD], or of what
    ``groups`` keeps there."""
    spare = UNPACKED_BYTES if tag == types.int16 else 8 * (2 + _AHEAD)
    return stack_memory(builder, RESULT_BYTES + spare)


@emitted(types.void, *[types.int64] * 2)
def set_shapes(builder, upper, lower):
    """Set this thread's tiles for 1 to 16 ``upper`` rows and as many ``lower`` ones of x."""
    upper, lower = (builder.trunc(rows, i8) for rows in (upper, lower))
    emit_shapes(builder, [upper, upper, lower, lower, upper, lower, 16, 16], [64] * 8)


def _make_multiply(with_lower: bool, ahead: int = 0) -> Any:
    """``out`` [32 or 16, 32] = rows of x times two columns of the weight: float32, or int32 of
    bytes. The second is ``second`` steps behind the first. With ``more``, they are added to it.
    Weights so many steps ``ahead`` are prefetched, if that is not 0."""

    @emitted(types.void, TAG, *[types.int64] * 6, types.boolean)
    def multiply(builder, tag, x, x_stride, column, steps, second, out, more):
        if tag in (types.float32, types.uint32):  # the tile unit has no such product
            return
        dot = {types.int8: "tdpbusd", types.int16: "tdpbsud"}.get(tag, "tdpbf16ps")
        line = ir.Constant(i64, 64)
        second = offset_by(builder, column, second, 1024)
        lower = offset_by(builder, x, 16, x_stride)
        results = range(4 if with_lower else 2)
        places = [offset_by(builder, out, tile // 2 * 16 * 128 + tile % 2 * 64) for tile in results]
        width = ir.Constant(i64, 128)
        with builder.if_else(more) as (then, otherwise):
            with then:
                for tile, where in zip(results, places, strict=True):
                    move_tile(builder, "tileloadd64", tile, where, width)
            with otherwise:
                for tile in results:
                    emit_amx(builder, "tilezero", tile)
        with cgutils.for_range(builder, steps) as loop:
            for n, start in enumerate((column, second)):
                where = offset_by(builder, start, loop.index, 1024)
                move_tile(builder, "tileloadd64", _COLUMN + n, where, line)
            for n, start in enumerate((x, lower)[: 1 + with_lower]):
                where = offset_by(builder, start, loop.index, line)
                move_tile(builder, "tileloadd64", _X + n, where, x_stride)
            for tile in results:
                emit_amx(builder, dot, tile, _X + tile // 2, _COLUMN + tile % 2)
                if ahead:  # a few lines at a time: else they hold up the tiles' own loads
                    start = (column, second)[tile // 2]
                    soon = offset_by(builder, start, loop.index, 1024)
                    for line_number in range(8):
                        at = ahead * 1024 + tile % 2 * 512 + line_number * 64
                        prefetch_line(builder, offset_by(builder, soon, at))
        for tile, where in zip(results, places, strict=True):
            move_tile(builder, "tilestored64", tile, where, width)

    return multiply


multiply_32 = _make_multiply(True)
multiply_32_of_few = _make_multiply(True, _TILES_AHEAD)
multiply_16 = _make_multiply(False)
multiply_vectors = make_tile(2, across=True, ahead=_AHEAD)


@inner
def activate(kind, x):
    """SiLU, or GELU by its tanh formula: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3))."""
    if kind == SILU:
        return x * sigmoid(x)
    inside = fma(x * x, splat(np.float32(0.044715)), splat(ONE)) * x
    return x * sigmoid(inside * splat(np.float32(1.5957691216057308)))


def result_tag(tag):
    """That of the output: F32 of float32, else BF16."""


@overload(result_tag, inline="always")
def _choose_result_tag(tag):
    return (lambda tag: F32) if tag == types.float32 else (lambda tag: BF16)


@inner
def finish(tag, call, pair, first, rows, result):
    """Write the [rows, 32] of one pair to the output."""
    bias, to = call.bias + pair * 128, result_tag(tag)
    half = 16 * element_bytes(to)
    for m in range(rows):
        where = result + m * 128
        if element_bytes(tag) == 1:
            shift, scale = call.shifts + pair * 128, call.scales + pair * 128
            tail = call.x + (first + m) * call.x_stride + call.steps * STEP_BYTES
            row = splat(load_f32(tail))
            a, b = (
                load_difference(where, shift) * row,
                load_difference(where + 64, shift + 64) * row,
            )
            for n in range(load_i32(tail + 4)):  # outliers
                k, value = np.int64(load_i32(tail + 8 + 8 * n)), splat(load_f32(tail + 12 + 8 * n))
                units = call.weight + pair * call.steps * 2048 + k // 4 * 64
                a = fma(load_signed(units, k % 4), value, a)
                b = fma(load_signed(units + call.steps * 1024, k % 4), value, b)
            a, b = a * load(scale), b * load(scale + 64)
        else:
            a, b = load(where), load(where + 64)
        if call.bias != 0:
            a, b = a + load(bias), b + load(bias + 64)
        if call.other != 0:
            stride = call.out_stride * (1 if call.activation == 0 else 2)
            other = call.other + (first + m) * stride + pair * 2 * half
            a, b = a + load_as(to, other), b + load_as(to, other + half)
        at = (first + m) * call.out_stride + pair * half * (2 if call.activation == 0 else 1)
        if call.activation != 0:
            store_as(to, call.out + at, activate(call.activation, a) * b)
            continue
        store_as(to, call.out + at, a)
        store_as(to, call.out + at + half, b)


@inner
def multiply_rows(tag, rows, once, shaped, x, x_stride, column, steps, second, out, more):
    """As ``multiply_32``, of 1 to 32 rows; ``once``: no others read these weights. ``shaped`` is
    the number of rows that the tiles are set for; returns the one they are set for afterwards."""
    if rows != shaped:
        set_shapes(min(rows, 16), max(rows - 16, 1))
    if rows > 16 and once:
        multiply_32_of_few(tag, x, x_stride, column, steps, second, out, more)
    elif rows > 16:
        multiply_32(tag, x, x_stride, column, steps, second, out, more)
    else:
        multiply_16(tag, x, x_stride, column, steps, second, out, more)
    return rows


@inner
def multiply_by_tiles(tag, call, pair, first, last, result, shaped):
    """Rows [first, last) times one pair; ``shaped`` as in :func:`multiply_rows`."""
    column, x_stride, whole = call.weight + pair * call.steps * 2048, call.x_stride, call.steps
    block = whole if last - first <= 32 else _BLOCK
    for step in range(0, whole, block):
        steps, start = min(block, whole - step), column + step * 1024
        for begin in range(first, last, 32):
            x, out = call.x + begin * x_stride + step * 64, result + (begin - first) * 128
            shaped = multiply_rows(
                tag, min(last - begin, 32), last - first <= 32, shaped, x, x_stride, start, steps,
                whole, out, step > 0,
            )  # fmt: skip
    finish(tag, call, pair, first, last - first, result)
    return shaped


@inner
def multiply_pair(tag, call, pair, first, last, result, shaped):
    """Rows [first, last) times one pair, by tiles (``shaped`` as in :func:`multiply_rows`) or by
    vectors in slices of equal size."""
    if call.tiles != 0:
        return multiply_by_tiles(tag, call, pair, first, last, result, shaped)
    count, columns = last - first, result + RESULT_BYTES
    for n in range(2 + _AHEAD):
        store_i64(columns + 8 * n, call.weight + (2 * pair + n) * call.steps * 1024)
    slices = -(-count // MAX_ROWS)
    for i in range(slices):
        begin = first + count * i // slices
        rows = first + count * (i + 1) // slices - begin
        multiply_vectors(
            tag, False, rows, call.x + begin * call.x_stride, call.x_stride, columns, 1,
            call.steps * 16, VECTOR_BYTES, 0, result, 128,
        )  # fmt: skip
        finish(tag, call, pair, begin, rows, result)
    return shaped


def make_body(multiply: Any) -> Any:
    """The body of a kernel whose items are some pairs of columns and ROWS_PER_CHUNK rows each.
    ``multiply`` is that of a pair: :func:`multiply_pair`, or that of ``groups``."""

    @inner
    def body(tag, arguments):
        call, result, shaped = read_product(arguments), product_memory(tag), np.int64(0)
        parts = -(-call.pairs // call.pairs_per_item)
        while True:
            item = fetch_add(arguments)
            first, begin = item // parts * ROWS_PER_CHUNK, item % parts * call.pairs_per_item
            last = min(first + ROWS_PER_CHUNK, call.count)
            if first >= last:
                break
            for pair in range(begin, min(begin + call.pairs_per_item, call.pairs)):
                shaped = multiply(tag, call, pair, first, last, result, shaped)
        if call.tiles != 0:
            amx_end()

    return body


product_body = make_body(multiply_pair)
