# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""Matrix products of bfloat16 on the processor's tile unit (AMX), with what follows them.

Written for ``tile_linear``, which calls :func:`product_body` on torch's threads, alone or as a step
of a ``program``. A weight [N, K] is packed in columns of 16 outputs, each ``[K / 2, 16, 2]``: 16
rows of a column are one tile. Two columns at a time meet at most 32 rows of x, so that four tiles
accumulate and each tile loaded is used twice. An item is a few pairs of columns and ROWS_PER_CHUNK
rows; a row's result depends on nothing but that row.
"""

import ctypes
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.amx import amx_end, emit_amx, emit_shapes, host_has_amx, i8, move_tile
from jitney.kernels.cpu.records import reader, record
from jitney.kernels.cpu.simd import (
    BF16,
    ONE,
    emitted,
    fetch_add,
    fma,
    i64,
    inner,
    load,
    load_as,
    offset_by,
    sigmoid,
    splat,
    store,
    store_as,
)

STEP = 32
"""Elements of K that one tile holds."""
ROWS_PER_CHUNK = 128
SCRATCH_BYTES = 8192
"""Per thread: a float32 [32, 32] result, and the shapes of the tiles behind it."""
_SHAPES_AT = 4096

SILU, GELU_TANH = 1, 2


@record
class ProductCall(ctypes.Structure):
    """Arguments of :func:`product_body`. Strides are in bytes."""

    counter: int
    """Items taken so far: 0 at the start."""
    threads: int
    """Threads that have begun: 0 at the start."""
    rows: int
    x: int
    """[rows, K]"""
    x_stride: int
    steps: int
    """K / STEP."""
    weight: int
    """Packed."""
    pairs: int
    """Of columns: N / 32."""
    pairs_per_item: int
    out: int
    out_stride: int
    activation: int
    """0: none. Else the pairs are (gate, up), and 16 outputs come of each."""
    other: int
    """Address of [rows, N], added to the result. 0: none."""
    other_stride: int
    bias: int
    """Address of float32 [N]. 0: none."""
    scratch: int


read_product = reader(ProductCall)
THREADS_OFFSET = ProductCall.threads.offset  # type: ignore[attr-defined]

# Tiles: results of (upper, lower rows) x (first, second column), x of both, both columns.
_UPPER_FIRST, _UPPER_SECOND, _LOWER_FIRST, _LOWER_SECOND = range(4)
_UPPER, _LOWER, _FIRST, _SECOND = range(4, 8)


@emitted(types.void, *[types.int64] * 3)
def set_shapes(builder, where, upper, lower):
    """Set this thread's tiles for 1 to 16 ``upper`` rows and as many ``lower`` ones of x.

    ``where`` is the address of 64 bytes to be written.
    """
    if not host_has_amx():
        return
    upper, lower = (builder.trunc(rows, i8) for rows in (upper, lower))
    rows = {
        **dict.fromkeys((_UPPER, _UPPER_FIRST, _UPPER_SECOND), upper),
        **dict.fromkeys((_LOWER, _LOWER_FIRST, _LOWER_SECOND), lower),
        **dict.fromkeys((_FIRST, _SECOND), 16),
    }
    emit_shapes(builder, where, [rows[tile] for tile in range(8)], [64] * 8)


def _make_multiply(with_lower: bool) -> Any:
    """float32 ``out`` [32 or 16, 32] = rows of x times two columns of the weight, the second right
    behind the first."""

    @emitted(types.void, *[types.int64] * 5)
    def multiply(builder, x, x_stride, column, steps, out):
        if not host_has_amx():
            return
        line = ir.Constant(i64, 64)
        second = offset_by(builder, column, steps, 1024)
        lower = offset_by(builder, x, 16, x_stride)
        results = [(_UPPER_FIRST, 0, 0), (_UPPER_SECOND, 0, 1)]
        if with_lower:
            results += [(_LOWER_FIRST, 1, 0), (_LOWER_SECOND, 1, 1)]
        for tile, _, _ in results:
            emit_amx(builder, "tilezero", tile)
        with cgutils.for_range(builder, steps) as loop:
            for start, tile in ((column, _FIRST), (second, _SECOND)):
                where = offset_by(builder, start, loop.index, 1024)
                move_tile(builder, "tileloadd64", tile, where, line)
            for start, tile in ((x, _UPPER), (lower, _LOWER))[: 1 + with_lower]:
                where = offset_by(builder, start, loop.index, line)
                move_tile(builder, "tileloadd64", tile, where, x_stride)
            for tile, half, which in results:
                a, b = (_UPPER, _LOWER)[half], (_FIRST, _SECOND)[which]
                emit_amx(builder, "tdpbf16ps", tile, a, b)
        for tile, half, which in results:
            where = offset_by(builder, out, half * 16 * 128 + which * 64)
            move_tile(builder, "tilestored64", tile, where, ir.Constant(i64, 128))

    return multiply


multiply_32 = _make_multiply(True)
multiply_16 = _make_multiply(False)


@inner
def activate(kind, x):
    """SiLU, or GELU by its tanh formula: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3))."""
    if kind == SILU:
        return x * sigmoid(x)
    inside = fma(x * x, splat(np.float32(0.044715)), splat(ONE)) * x
    return x * sigmoid(inside * splat(np.float32(1.5957691216057308)))


@inner
def add_bias(result, rows, bias):
    """Add float32 [32] to each row of [rows, 32]."""
    for m in range(rows):
        for n in range(2):
            where = result + (m * 2 + n) * 64
            store(where, load(where) + load(bias + n * 64))


@inner
def finish(call, pair, first, rows, result):
    """Write the float32 [rows, 32] of one pair to the output."""
    out = call.out + first * call.out_stride
    if call.bias != 0:
        add_bias(result, rows, call.bias + pair * 128)
    for m in range(rows):
        row, target = result + m * 128, out + m * call.out_stride
        if call.activation != 0:
            gated = activate(call.activation, load(row)) * load(row + 64)
            store_as(BF16, target + pair * 32, gated)
        else:
            for n in range(2):
                value, at = load(row + n * 64), pair * 64 + n * 32
                if call.other != 0:
                    other = call.other + (first + m) * call.other_stride
                    value = value + load_as(BF16, other + at)
                store_as(BF16, target + at, value)


@inner
def multiply_chunk(call, pair, first, last, result, shaped):
    """Rows [first, last) times one pair. ``shaped`` is the row count that the tiles are set for,
    at most 32; returns the one they are set for afterwards."""
    column = call.weight + pair * call.steps * 2048
    while first < last:
        rows = min(last - first, 32)
        if rows != shaped:
            set_shapes(result + _SHAPES_AT, min(rows, 16), max(rows - 16, 1))
            shaped = rows
        start = call.x + first * call.x_stride
        if rows > 16:
            multiply_32(start, call.x_stride, column, call.steps, result)
        else:
            multiply_16(start, call.x_stride, column, call.steps, result)
        finish(call, pair, first, rows, result)
        first += rows
    return shaped


@inner
def product_body(arguments):
    """Take items until none is left."""
    call = read_product(arguments)
    result = call.scratch + fetch_add(arguments + THREADS_OFFSET) * SCRATCH_BYTES
    groups = -(-call.pairs // call.pairs_per_item)
    shaped = np.int64(0)
    while True:
        item = fetch_add(arguments)
        first = item // groups * ROWS_PER_CHUNK
        if first >= call.rows:
            break
        begin = item % groups * call.pairs_per_item
        for pair in range(begin, min(begin + call.pairs_per_item, call.pairs)):
            last = min(first + ROWS_PER_CHUNK, call.rows)
            shaped = multiply_chunk(call, pair, first, last, result, shaped)
    amx_end()
