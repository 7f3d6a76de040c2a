# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""Matrix products of bfloat16 on the processor's tile unit (AMX), with what follows them.

Written for ``panels``, which calls :func:`product_body` on torch's threads, alone or as a step of
a ``program``. A weight [N, K] is packed in panels of 16 outputs, each ``[K / 2, 16, 2]``: 16 rows
of a panel are one tile. Two panels at a time meet at most 32 rows of x, so that four tiles
accumulate and each tile loaded is used twice. An item is a few pairs of panels and ROWS_PER_CHUNK
rows; a row's result depends on nothing but that row.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jitney.execution.attention.products import _amx as amx
from jitney.execution.attention.products import _move_tile as move_tile
from jitney.execution.attention.products import _tile as tile
from jitney.execution.attention.products import amx_end, host_has_amx
from jitney.execution.attention.simd import (
    BF16,
    LANES,
    exp2,
    fetch_add,
    fma,
    i64,
    inner,
    larger,
    load,
    load_i64,
    pointer,
    splat,
    store,
    store_as,
)
from jitney.execution.row_kernels import load_as

PANEL = LANES
"""Outputs of one panel."""
STEP = 32
"""Elements of K that one tile holds."""
ROWS_PER_CHUNK = 128

# Arguments, in units of 8 bytes. Strides are in bytes.
COUNTER = 0  # items taken so far; 0 at the start
THREADS = 1  # threads that have begun; 0 at the start
ROWS = 2
X = 3  # [rows, K]
X_STRIDE = 4
STEPS = 5  # K / STEP
PANELS = 6
PAIRS = 7  # of panels: N / 32
PAIRS_PER_ITEM = 8
OUT = 9
OUT_STRIDE = 10
ACTIVATION = 11  # 0: none; else the pairs are (gate, up), and 16 outputs come of each
OTHER = 12  # address of [rows, N], added to the result; 0: none
OTHER_STRIDE = 13
BIAS = 14  # address of float32 [N]; 0: none
SCRATCH = 15
ARGUMENTS = 16

SCRATCH_BYTES = 8192
"""Per thread: a float32 [32, 32] result, and the shapes of the tiles behind it."""
_SHAPES_AT = 4096

SILU, GELU_TANH = 1, 2

LOG2_E = np.float32(1.4426950408889634)
ZERO, ONE = np.float32(0.0), np.float32(1.0)

# Tiles: results of (upper, lower rows) x (first, second panel), x of both, both panels.
_UPPER_FIRST, _UPPER_SECOND, _LOWER_FIRST, _LOWER_SECOND = range(4)
_UPPER, _LOWER, _FIRST, _SECOND = range(4, 8)


@intrinsic
def set_shapes(typingctx, where, upper, lower):
    """Set this thread's tiles for 1 to 16 ``upper`` rows and as many ``lower`` ones of x.

    ``where`` is the address of 64 bytes to be written.
    """

    def emit(context, builder, signature, args):
        if not host_has_amx():
            return context.get_dummy_value()
        where, upper, lower = args
        byte = ir.IntType(8)

        def put(offset: int, value: Any) -> None:
            address = builder.add(where, ir.Constant(i64, offset))
            builder.store(value, pointer(builder, address, byte))

        for offset in range(64):
            put(offset, ir.Constant(byte, 0))
        put(0, ir.Constant(byte, 1))  # the palette
        rows = {
            **dict.fromkeys((_UPPER, _UPPER_FIRST, _UPPER_SECOND), builder.trunc(upper, byte)),
            **dict.fromkeys((_LOWER, _LOWER_FIRST, _LOWER_SECOND), builder.trunc(lower, byte)),
            **dict.fromkeys((_FIRST, _SECOND), ir.Constant(byte, 16)),
        }
        for number in range(8):
            put(16 + 2 * number, ir.Constant(byte, 64))  # bytes of a row
            put(48 + number, rows[number])
        amx(builder, "ldtilecfg", pointer(builder, where, byte))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _make_multiply(with_lower: bool) -> Any:
    @intrinsic
    def multiply(typingctx, x, x_stride, panel, steps, out):
        def emit(context, builder, signature, args):
            if not host_has_amx():
                return context.get_dummy_value()
            x, x_stride, panel, steps, out = args
            line = ir.Constant(i64, 64)
            panel_bytes = builder.mul(steps, ir.Constant(i64, 1024))
            second = builder.add(panel, panel_bytes)
            lower = builder.add(x, builder.mul(x_stride, ir.Constant(i64, 16)))
            results = [(_UPPER_FIRST, 0, 0), (_UPPER_SECOND, 0, 1)]
            if with_lower:
                results += [(_LOWER_FIRST, 1, 0), (_LOWER_SECOND, 1, 1)]
            for number, _, _ in results:
                amx(builder, "tilezero", tile(number))
            with cgutils.for_range(builder, steps) as loop:
                at = builder.mul(loop.index, line)
                row = builder.mul(loop.index, ir.Constant(i64, 1024))
                for start, number in ((panel, _FIRST), (second, _SECOND)):
                    move_tile(builder, "tileloadd64", number, builder.add(start, row), line)
                move_tile(builder, "tileloadd64", _UPPER, builder.add(x, at), x_stride)
                if with_lower:
                    move_tile(builder, "tileloadd64", _LOWER, builder.add(lower, at), x_stride)
                for number, half, which in results:
                    amx(
                        builder,
                        "tdpbf16ps",
                        tile(number),
                        tile((_UPPER, _LOWER)[half]),
                        tile((_FIRST, _SECOND)[which]),
                    )
            for number, half, which in results:
                where = builder.add(out, ir.Constant(i64, half * 16 * 128 + which * 64))
                move_tile(builder, "tilestored64", number, where, ir.Constant(i64, 128))
            return context.get_dummy_value()

        n = types.int64
        return types.void(n, n, n, n, n), emit

    multiply.__doc__ = f"""float32 ``out`` [{32 if with_lower else 16}, 32] = rows of x times two
    panels, the second right behind the first."""
    return multiply


multiply_32 = _make_multiply(True)
multiply_16 = _make_multiply(False)


@inner
def sigmoid(x):
    """1 / (1 + e**-x)."""
    limit = splat(np.float32(-126.0))  # 2**126 is finite, and its inverse is 0 in any sum with 1
    power = splat(ZERO) - larger(x * splat(LOG2_E), limit)
    return splat(ONE) / (splat(ONE) + exp2(power))


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
def finish(args, pair, first, rows, result):
    """From the float32 [rows, 32] of one pair to its place in the output."""
    out_stride, other_stride = load_i64(args + 8 * OUT_STRIDE), load_i64(args + 8 * OTHER_STRIDE)
    out = load_i64(args + 8 * OUT) + first * out_stride
    other = load_i64(args + 8 * OTHER)
    bias = load_i64(args + 8 * BIAS)
    kind = load_i64(args + 8 * ACTIVATION)
    if bias != 0:
        add_bias(result, rows, bias + pair * 128)
    if kind != 0:
        for m in range(rows):
            gate, up = load(result + m * 128), load(result + m * 128 + 64)
            store_as(BF16, out + m * out_stride + pair * 32, activate(kind, gate) * up)
    elif other != 0:
        other += first * other_stride
        for m in range(rows):
            for n in range(2):
                at = pair * 64 + n * 32
                value = load(result + m * 128 + n * 64)
                added = load_as(BF16, other + m * other_stride + at)
                store_as(BF16, out + m * out_stride + at, value + added)
    else:
        for m in range(rows):
            for n in range(2):
                value = load(result + m * 128 + n * 64)
                store_as(BF16, out + m * out_stride + pair * 64 + n * 32, value)


@inner
def multiply_chunk(args, pair, first, last, result, shaped):
    """Rows [first, last) times one pair. ``shaped`` is the row count that the tiles are set for,
    at most 32; returns the one they are set for afterwards."""
    x, x_stride = load_i64(args + 8 * X), load_i64(args + 8 * X_STRIDE)
    steps = load_i64(args + 8 * STEPS)
    panel = load_i64(args + 8 * PANELS) + pair * steps * 2048
    while first < last:
        rows = min(last - first, 32)
        if rows != shaped:
            set_shapes(result + _SHAPES_AT, min(rows, 16), max(rows - 16, 1))
            shaped = rows
        start = x + first * x_stride
        if rows > 16:
            multiply_32(start, x_stride, panel, steps, result)
        else:
            multiply_16(start, x_stride, panel, steps, result)
        finish(args, pair, first, rows, result)
        first += rows
    return shaped


@inner
def product_body(args):
    """Take items until none is left."""
    thread = fetch_add(args + 8 * THREADS)
    result = load_i64(args + 8 * SCRATCH) + thread * SCRATCH_BYTES
    rows = load_i64(args + 8 * ROWS)
    pairs, step = load_i64(args + 8 * PAIRS), load_i64(args + 8 * PAIRS_PER_ITEM)
    groups = -(-pairs // step)
    shaped = np.int64(0)
    while True:
        item = fetch_add(args + 8 * COUNTER)
        first = item // groups * ROWS_PER_CHUNK
        if first >= rows:
            break
        begin = item % groups * step
        for pair in range(begin, min(begin + step, pairs)):
            last = min(first + ROWS_PER_CHUNK, rows)
            shaped = multiply_chunk(args, pair, first, last, result, shaped)
    amx_end()
