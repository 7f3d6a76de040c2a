"""The product of linear layers as a Numba kernel, with what follows it.

At the few rows of a decode step it reads weights faster than oneDNN's, a call costs a tenth, and it
can be a step of a ``program``, which a call into torch cannot.

A weight [N, K] is packed in *columns* of 16 outputs, each ``[K / 2, 16, 2]`` in bfloat16::

    column 0: outputs 0 to 15              column 1: outputs 16 to 31        ...
    | unit 0 of 16 outputs | 64 bytes      |  one vector                |
    | unit 1 of 16 outputs |               |                            |
    |   ...                |               |   16 vectors are a tile    |

A *pair* is two columns, 32 outputs. Loops, from outer to inner::

    items: some pairs x 128 rows         a thread takes them from a counter      make_body
      pairs                              a weight is streamed once for 128 rows
        by tiles                                                                 multiply_by_tiles
          8 steps of 64 bytes            2 columns of them: 16 KiB, in the first-level cache
            32 rows                      2 tiles of x, 2 of weights, 4 of sums   multiply_rows
        or by vectors                                                            multiply_by_vectors
          6 rows                         12 sums in registers                    micro_kernel
        finish                           scales, bias, sum, activation, rounding finish

The result of a pair, [128, 32] float32, stays on the thread's stack until it is finished. A row's
result depends on nothing but that row.

Forms: tiles of bfloat16 and of bytes (AMX), or vectors of what ``dot`` has for the processor; what
it does not multiply is widened to float32 first.

Called by ``tile_linear``, which packs weights and fills the arguments. Imported only where Numba
is.
"""

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import overload

from jitney.kernels.cpu.amx import (
    TILE_BYTES,
    TILE_ROWS,
    amx_end,
    emit_amx,
    emit_shapes,
    load_tile,
    store_tile,
)
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import (
    TAG,
    VECTOR_BYTES,
    constant,
    emitted,
    i8,
    i64,
    offset_by,
    prefetch_line,
    stack_memory,
)
from jitney.kernels.cpu.micro_kernel import MAX_ROWS, make_micro_kernel
from jitney.kernels.cpu.rounding_kernel import (
    OUTLIER_BYTES,
    TAIL_COUNT,
    TAIL_INDICES,
    TAIL_VALUES,
)
from jitney.kernels.cpu.simd import (
    BF16,
    F32,
    F32_TYPE,
    I4_TYPE,
    I8_TYPE,
    ONE,
    WIDE_TYPE,
    element_bytes,
    fetch_add,
    fma,
    inlined,
    inner,
    load,
    load_as,
    load_difference,
    load_f32,
    load_i32,
    load_signed,
    sigmoid,
    splat,
    store_as,
    store_i64,
)
from jitney.kernels.fused.forms import Activation

STEP_BYTES = 64
"""A step is so many bytes of a row of x, and of an output's weights: what a row of a tile holds."""
ROWS_PER_ITEM = 128
ROWS_BY_TILES = 2 * TILE_ROWS
"""Rows of x that two tiles hold."""
PAIR_ROW_BYTES = 2 * VECTOR_BYTES
"""Bytes of a row of a pair's result, 32 float32, and of what there is for each of its outputs."""
RESULT_BYTES = ROWS_PER_ITEM * PAIR_ROW_BYTES
UNPACKED_BYTES = 8192
"""Memory of ``four_bit_kernel``: two columns of a group of 128 inputs, unpacked to bytes, and a
result, int32 [32, 32]."""
_STEPS_AT_ONCE = 8
"""Steps of two columns that stay in the first-level cache while all tiles of an item's rows meet
them: else the tile unit waits for the second-level one."""
ITEMS = 64
"""About so many items a product is cut into: many enough to share out, few enough to be cheap."""
SILU = 1
GELU_TANH = 2
ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": SILU, "gelu_tanh": GELU_TANH}


@record
class ProductCall(KernelCall):
    """Arguments of :func:`product_body`."""

    x: int
    """[count, K]"""
    x_stride: int
    """Bytes from row to row."""
    steps: int
    """How many steps an output's weights have. With nibbles: bytes of a column."""
    size: int
    """With nibbles: K."""
    group: int
    """With nibbles: how many inputs share a scale."""
    weight: int
    """Packed."""
    pairs: int
    """Pairs of columns: N / 32."""
    pairs_per_item: int
    out: int
    out_stride: int
    """Bytes from row to row."""
    activation: int
    """0: none. Else the pairs are (gate, up), and 16 outputs come of each."""
    other: int
    """Address of [count, N] in the output's type, added to the product. Its columns are in the
    order of the weight's columns: those of gate and up by turns. 0: none."""
    bias: int
    """Address of float32 [N]. 0: none."""
    tiles: int
    """Whether the processor's tile unit is used: 0 or 1."""
    scales: int
    """With bytes: address of float32 [N], the scale of each output. (That of each row of x is in
    the row's tail, behind its steps: ``rounding_kernel``.)"""
    shifts: int
    """With bytes: address of int32 [N], 128 times the sum of each output's weights."""


read_product = reader(ProductCall)

_X = 4
"""The first of two tiles of rows of x: upper and lower rows. Tiles 0 to 3 are the results of
(upper, lower rows) x (first, second column), in this order."""
_COLUMN = 6
"""The first of two tiles of weights: first and second column."""
_COLUMNS_AHEAD = 2
"""The vectors' micro-kernel asks for the pair of columns after the one it reads."""
_STEPS_AHEAD = 6
"""Without, no weight comes in while the tile unit multiplies the second half of its rows."""


@emitted(types.int64, TAG)
def product_memory(builder, tag):
    """The address of a thread's memory: float32 [ROWS_PER_ITEM, 32] for a pair's result, and behind
    it a list of columns, int64 [2 + _COLUMNS_AHEAD], or what ``four_bit_kernel`` keeps there."""
    behind = UNPACKED_BYTES if tag == I4_TYPE else 8 * (2 + _COLUMNS_AHEAD)
    return stack_memory(builder, RESULT_BYTES + behind)


# --------------------------------------------------------------------------- by tiles


@emitted(types.void, *[types.int64] * 2)
def set_shapes(builder, upper, lower):
    """Set this thread's tiles for 1 to 16 ``upper`` rows and as many ``lower`` ones of x."""
    upper = builder.trunc(upper, i8)
    lower = builder.trunc(lower, i8)
    results = [upper, upper, lower, lower]
    emit_shapes(builder, [*results, upper, lower, TILE_ROWS, TILE_ROWS], [64] * 8)


def _make_multiply(*, with_lower: bool, ahead: int = 0) -> Any:
    """A function that computes ``out`` [32 or 16, 32] = rows of x times two columns of a weight,
    over ``steps`` steps. It is float32, or int32 if they are bytes.

    The second column is ``second`` steps behind the first. With ``add_to_out``, the product is
    added to what ``out`` holds. Weights so many steps ``ahead`` are prefetched, if not 0."""
    results = range(4 if with_lower else 2)

    @emitted(types.void, TAG, *[types.int64] * 6, types.boolean)
    def multiply(builder, tag, x, x_stride, column, steps, second, out, add_to_out):
        if tag in (F32_TYPE, WIDE_TYPE):  # the tile unit has no such product
            return
        column_stride = constant(i64, STEP_BYTES)
        out_stride = constant(i64, PAIR_ROW_BYTES)
        columns = [column, offset_by(builder, column, second, TILE_BYTES)]
        lower = offset_by(builder, x, TILE_ROWS, x_stride)
        rows = [x, lower] if with_lower else [x]
        addresses = [offset_by(builder, out, _result_offset(tile)) for tile in results]
        with builder.if_else(add_to_out) as (then, otherwise):
            with then:
                for tile, address in zip(results, addresses, strict=True):
                    load_tile(builder, tile, address, out_stride)
            with otherwise:
                for tile in results:
                    emit_amx(builder, "tilezero", tile)
        with cgutils.for_range(builder, steps) as step:
            for n, start in enumerate(columns):
                where = offset_by(builder, start, step.index, TILE_BYTES)
                load_tile(builder, _COLUMN + n, where, column_stride)
            for n, start in enumerate(rows):
                where = offset_by(builder, start, step.index, STEP_BYTES)
                load_tile(builder, _X + n, where, x_stride)
            for tile in results:
                emit_amx(builder, _tile_product(tag), tile, _X + tile // 2, _COLUMN + tile % 2)
                if ahead:
                    # After each of the four products half of a column's tile: the first column's
                    # halves, then the second's.
                    soon = offset_by(builder, columns[tile // 2], step.index, TILE_BYTES)
                    _prefetch_half(builder, soon, ahead, half=tile % 2)
        for tile, address in zip(results, addresses, strict=True):
            store_tile(builder, tile, address, out_stride)

    return multiply


def _result_offset(tile: int) -> int:
    """Bytes from the beginning of a pair's result to that of the tile: 16 rows down, or 16 outputs
    to the right."""
    return tile // 2 * TILE_ROWS * PAIR_ROW_BYTES + tile % 2 * VECTOR_BYTES


def _tile_product(tag) -> str:
    """The tile unit's instruction for products of the tag's type."""
    if tag == I8_TYPE:
        return "tdpbusd"  # x: bytes without a sign; weights: bytes with one
    if tag == I4_TYPE:
        return "tdpbsud"  # x: bytes with a sign; weights: unpacked nibbles, without one
    return "tdpbf16ps"


def _prefetch_half(builder, start, ahead: int, half: int) -> None:
    """IR: ask for half of a tile so many steps further on. Not for more at once: that would hold up
    the tiles' own loads."""
    for line_number in range(8):
        at = ahead * TILE_BYTES + half * TILE_BYTES // 2 + line_number * 64
        prefetch_line(builder, offset_by(builder, start, at))


multiply_32 = _make_multiply(with_lower=True)
multiply_32_of_few = _make_multiply(with_lower=True, ahead=_STEPS_AHEAD)
multiply_16 = _make_multiply(with_lower=False)


@inner
def multiply_rows(tag, rows, once, shaped, x, x_stride, column, steps, second, out, add_to_out):
    """As ``multiply_32``, for 1 to 32 rows; ``once``: no other rows read these weights.

    The tiles are set for ``shaped`` rows before; returns for how many they are set afterwards."""
    if rows != shaped:
        # A tile has at least one row, also where it is not used.
        set_shapes(min(rows, TILE_ROWS), max(rows - TILE_ROWS, 1))
    if rows > TILE_ROWS and once:
        # The weights come from memory: ask for them ahead.
        multiply_32_of_few(
            tag, x, x_stride, column, steps, second=second, out=out, add_to_out=add_to_out
        )
    elif rows > TILE_ROWS:
        multiply_32(tag, x, x_stride, column, steps, second=second, out=out, add_to_out=add_to_out)
    else:
        multiply_16(tag, x, x_stride, column, steps, second=second, out=out, add_to_out=add_to_out)
    return rows


@inner
def multiply_by_tiles(tag, call, pair, first, last, result, shaped):
    """Rows [first, last) times one pair; ``shaped`` as in :func:`multiply_rows`."""
    column = call.weight + pair * call.steps * 2 * TILE_BYTES
    all_steps = call.steps
    once = last - first <= ROWS_BY_TILES
    # Weights that are read once need not stay in the cache: all steps at once.
    at_once = all_steps if once else _STEPS_AT_ONCE
    for step in range(0, all_steps, at_once):
        steps = min(at_once, all_steps - step)
        for begin in range(first, last, ROWS_BY_TILES):
            shaped = multiply_rows(
                tag,
                min(last - begin, ROWS_BY_TILES),
                once,
                shaped,
                x=call.x + begin * call.x_stride + step * STEP_BYTES,
                x_stride=call.x_stride,
                column=column + step * TILE_BYTES,
                steps=steps,
                second=all_steps,
                out=result + (begin - first) * PAIR_ROW_BYTES,
                add_to_out=step > 0,
            )
    finish(tag, call, pair, first, rows=last - first, result=result)
    return shaped


# --------------------------------------------------------------------------- by vectors


multiply_vectors = make_micro_kernel(2, across=True, ahead=_COLUMNS_AHEAD)


@inlined
def multiply_by_vectors(tag, call, pair, first, last, result):
    """Rows [first, last) times one pair, a few rows at a time and about as many each time."""
    # The list of the pair's columns, and of those to prefetch.
    columns = result + RESULT_BYTES
    for n in range(2 + _COLUMNS_AHEAD):
        store_i64(columns + 8 * n, call.weight + (2 * pair + n) * call.steps * TILE_BYTES)
    count = last - first
    turns = -(-count // MAX_ROWS)
    for i in range(turns):
        begin = first + count * i // turns
        rows = first + count * (i + 1) // turns - begin
        multiply_vectors(
            tag,
            False,
            rows,
            left=call.x + begin * call.x_stride,
            left_stride=call.x_stride,
            sources=columns,
            count=1,
            units=call.steps * 16,
            step=VECTOR_BYTES,
            offset=0,
            out=result,
            out_stride=PAIR_ROW_BYTES,
        )
        finish(tag, call, pair, begin, rows=rows, result=result)


@inner
def multiply_pair(tag, call, pair, first, last, result, shaped):
    """Rows [first, last) times one pair; ``shaped`` as in :func:`multiply_rows`."""
    if call.tiles != 0:
        return multiply_by_tiles(tag, call, pair, first, last, result=result, shaped=shaped)
    multiply_by_vectors(tag, call, pair, first, last, result=result)
    return shaped


# --------------------------------------------------------------------------- what follows


@inner
def activate(kind, x):
    """SiLU, or GELU by its tanh formula: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3))."""
    if kind == SILU:
        return x * sigmoid(x)
    inside = fma(x * x, splat(np.float32(0.044715)), splat(ONE)) * x
    return x * sigmoid(inside * splat(np.float32(1.5957691216057308)))


def result_tag(tag):
    """The tag of the output: F32 with F32, else BF16. (Numba compiles what the overload returns: a
    choice by type, which compiled code could not make.)"""


@overload(result_tag, inline="always")
def _choose_result_tag(tag):
    return (lambda tag: F32) if tag == F32_TYPE else (lambda tag: BF16)


@inlined
def scale_bytes(call, pair, row, where):
    """The two vectors at ``where`` of a row of a product of bytes. They are int32; returns float32,
    in the scales of row and outputs, with outliers, which the bytes of x leave out
    (``rounding_kernel``)."""
    shift = call.shifts + pair * PAIR_ROW_BYTES
    scale = call.scales + pair * PAIR_ROW_BYTES
    tail = call.x + row * call.x_stride + call.steps * STEP_BYTES
    row_scale = splat(load_f32(tail))
    # Bytes of x are 128 too large: that times an output's weights is taken off.
    a = load_difference(where, shift) * row_scale
    b = load_difference(where + VECTOR_BYTES, shift + VECTOR_BYTES) * row_scale
    outliers = load_i32(tail + TAIL_COUNT)
    for n in range(outliers):
        k = np.int64(load_i32(tail + TAIL_INDICES + OUTLIER_BYTES * n))
        value = splat(load_f32(tail + TAIL_VALUES + OUTLIER_BYTES * n))
        # Input k is byte k % 4 of the column's vector number k // 4.
        units = call.weight + pair * call.steps * 2 * TILE_BYTES + k // 4 * VECTOR_BYTES
        a = fma(load_signed(units, k % 4), value, a)
        b = fma(load_signed(units + call.steps * TILE_BYTES, k % 4), value, b)
    return a * load(scale), b * load(scale + VECTOR_BYTES)


@inner
def finish(tag, call, pair, first, rows, result):
    """Write the [rows, 32] of one pair to the output, from row ``first`` on.

    Without an activation the pair's 32 results are 32 outputs. With one, a is 16 outputs' gate and
    b their up, so the output is half as wide as the product."""
    bias = call.bias + pair * PAIR_ROW_BYTES
    to = result_tag(tag)
    column_bytes = 16 * element_bytes(to)
    for m in range(rows):
        where = result + m * PAIR_ROW_BYTES
        if element_bytes(tag) == 1:
            a, b = scale_bytes(call, pair, first + m, where)
        else:
            a = load(where)
            b = load(where + VECTOR_BYTES)
        if call.bias != 0:
            a = a + load(bias)
            b = b + load(bias + VECTOR_BYTES)
        if call.other != 0:
            # As wide as the product.
            stride = call.out_stride * (1 if call.activation == 0 else 2)
            other = call.other + (first + m) * stride + pair * 2 * column_bytes
            a = a + load_as(to, other)
            b = b + load_as(to, other + column_bytes)
        columns = 2 if call.activation == 0 else 1  # that a pair gives
        out = call.out + (first + m) * call.out_stride + pair * columns * column_bytes
        if call.activation != 0:
            store_as(to, out, activate(call.activation, a) * b)
            continue
        store_as(to, out, a)
        store_as(to, out + column_bytes, b)


# --------------------------------------------------------------------------- items


def make_body(multiply: Any) -> Any:
    """The body of a kernel whose items are some pairs of columns and ROWS_PER_ITEM rows each.
    ``multiply`` is that of a pair: :func:`multiply_pair`, or that of ``four_bit_kernel``."""

    @inner
    def body(tag, arguments):
        call = read_product(arguments)
        result = product_memory(tag)
        shaped = np.int64(0)
        items_per_row = -(-call.pairs // call.pairs_per_item)
        while True:
            item = fetch_add(arguments)
            first = item // items_per_row * ROWS_PER_ITEM
            last = min(first + ROWS_PER_ITEM, call.count)
            if first >= last:  # behind the last row
                break
            begin = item % items_per_row * call.pairs_per_item
            end = min(begin + call.pairs_per_item, call.pairs)
            for pair in range(begin, end):
                shaped = multiply(tag, call, pair, first, last, result=result, shaped=shaped)
        if call.tiles != 0:
            amx_end()

    return body


product_body = make_body(multiply_pair)
