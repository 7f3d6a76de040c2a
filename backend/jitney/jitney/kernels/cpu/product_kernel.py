"""The product of linear layers as a Numba kernel: x [count, K] times a packed weight [N, K].

For the few rows of a decode step it reads weights faster than oneDNN's product does. And it can be
part of a ``program``, which a call into torch cannot.

A weight is packed in columns of 16 outputs. In bfloat16, where a unit is two inputs::

    column 0: outputs 0 to 15                       column 1: outputs 16 to 31      ...
    | unit 0 (inputs 0, 1) of the 16 outputs |      |                        |
    | unit 1 (inputs 2, 3) of the 16 outputs |      |                        |
    |   ...                                  |      |                        |
    one line of the drawing is a vector, 64 bytes;  16 vectors of a column are a tile

Two neighbouring columns are a pair. Loops, from outer to inner::

    items            some pairs x 128 rows of x; a thread takes them from a counter   make_body
      pairs          one pair x 128 rows                                              multiply_pair
        with the tile unit:                                                   multiply_by_tiles
          8 tiles    of each of the two columns: 16 KiB, which stay in the
                     first-level cache while all 128 rows meet them
            32 rows  in registers: sums of 32 rows and 32 outputs             ``product_tiles``
        without it:                                                           multiply_by_vectors
          6 rows     times the pair, in registers: 12 sums (AVX2: 6 at once)  ``micro_kernel``
        then         scales, bias, sum, activation, rounding                  ``product_finish``

The sums of a pair, float32 [128, 32], are kept on the thread's stack until they are finished. A
row's result depends on nothing but that row.

Called by ``column_linear``, which fills the arguments. Imported only where Numba is.
"""

from typing import Any

import numpy as np
from numba import types

from jitney.kernels.cpu.amx import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, amx_end
from jitney.kernels.cpu.emit import I64_BYTES, VECTOR_BYTES, ceil_div, emitted, stack_memory
from jitney.kernels.cpu.micro_kernel import MAX_ROWS, make_micro_kernel
from jitney.kernels.cpu.product_call import (
    PAIR_ROW_BYTES,
    RESULT_BYTES,
    ROWS_BY_TILES,
    ROWS_PER_ITEM,
    read_product,
)
from jitney.kernels.cpu.product_finish import finish
from jitney.kernels.cpu.product_tiles import multiply_rows
from jitney.kernels.cpu.simd import fetch_add, inlined, inner, store_i64

_TILES_AT_ONCE = 8
"""Tiles of a column that all rows of an item meet before the next ones. Those of two columns fit
into the first-level cache beside the rows: with more, the tile unit would wait for the second-level
cache."""
_COLUMNS_AHEAD = 2
"""While vectors multiply a pair, the next pair is prefetched: two columns further on."""
LISTED_COLUMNS = 2 + _COLUMNS_AHEAD


# --------------------------------------------------------------------------- a pair by tiles


@inner
def multiply_by_tiles(tag, call, pair, first, end, memory, shaped):
    """The outputs of one pair for rows [first, end). The tile unit is set for ``shaped`` rows;
    returns the number for which it is set afterwards. For ``memory`` see :func:`make_body`."""
    sums = memory
    first_column = call.weight + pair * 2 * call.column_bytes
    second_column = first_column + call.column_bytes
    # If all rows are multiplied at once, each tile of the columns is needed once: there is nothing
    # to keep in the cache. Otherwise the columns are cut, and ``sums`` holds the sums so far.
    read_once = end - first <= ROWS_BY_TILES
    tiles_at_once = call.column_tiles if read_once else _TILES_AT_ONCE
    for tile in range(0, call.column_tiles, tiles_at_once):
        tiles = min(tiles_at_once, call.column_tiles - tile)
        for begin in range(first, end, ROWS_BY_TILES):
            shaped = multiply_rows(
                tag,
                min(end - begin, ROWS_BY_TILES),
                read_once,
                shaped,
                x=call.x + begin * call.x_stride + tile * TILE_ROW_BYTES,
                x_stride=call.x_stride,
                first_column=first_column + tile * TILE_BYTES,
                second_column=second_column + tile * TILE_BYTES,
                tiles=tiles,
                out=sums + (begin - first) * PAIR_ROW_BYTES,
                add_to_out=tile > 0,
            )
    finish(tag, call, pair, first, rows=end - first, sums=sums)
    return shaped


# --------------------------------------------------------------------------- a pair by vectors


multiply_vectors = make_micro_kernel(2, source_per_vector=True, ahead=_COLUMNS_AHEAD)
"""1 to MAX_ROWS rows of x times two columns, each of which is a source."""


@inlined
def multiply_by_vectors(tag, call, pair, first, end, memory):
    """The outputs of one pair for rows [first, end). For ``memory`` see :func:`make_body`."""
    sums = memory
    column_list = memory + RESULT_BYTES
    # The pair's two columns, and behind them those that are prefetched.
    for n in range(LISTED_COLUMNS):
        column = call.weight + (2 * pair + n) * call.column_bytes
        store_i64(column_list + n * I64_BYTES, column)
    # The same number of rows in each turn, or one more: 7 are 3 and 4, not 6 and 1.
    count = end - first
    turns = ceil_div(count, MAX_ROWS)
    for turn in range(turns):
        turn_begin = first + count * turn // turns
        turn_end = first + count * (turn + 1) // turns
        multiply_vectors(
            tag,
            use_tiles=False,
            rows=turn_end - turn_begin,
            left=call.x + turn_begin * call.x_stride,
            left_stride=call.x_stride,
            sources=column_list,
            num_sources=1,
            units=call.column_tiles * TILE_ROWS,
            unit_stride=VECTOR_BYTES,
            offset=0,
            out=sums,
            out_stride=PAIR_ROW_BYTES,
        )
        finish(tag, call, pair, turn_begin, rows=turn_end - turn_begin, sums=sums)


@inner
def multiply_pair(tag, call, pair, first, end, memory, shaped):
    """The outputs of one pair for rows [first, end); see :func:`multiply_by_tiles`."""
    if call.use_tiles != 0:
        return multiply_by_tiles(tag, call, pair, first, end, memory=memory, shaped=shaped)
    multiply_by_vectors(tag, call, pair, first, end, memory=memory)
    return shaped


# --------------------------------------------------------------------------- items


def make_body(multiply: Any, extra_bytes: int) -> Any:
    """The body of a kernel whose items are some pairs of columns and ROWS_PER_ITEM rows each.

    ``multiply`` computes one pair: it is :func:`multiply_pair`, or that of ``four_bit_kernel``. It
    gets the address of the thread's memory, and overwrites what is there::

        | the sums of a pair: RESULT_BYTES | what else the product needs: ``extra_bytes`` |
    """

    @emitted(types.int64)
    def thread_memory(builder):
        return stack_memory(builder, RESULT_BYTES + extra_bytes)

    @inner
    def body(tag, arguments):
        call = read_product(arguments)
        memory = thread_memory()
        shaped = np.int64(0)
        items_of_same_rows = ceil_div(call.pairs, call.pairs_per_item)
        while True:
            # First come all items of rows 0 to ROWS_PER_ITEM - 1, then those of the next rows, and
            # so on. Behind the last row, all items have been taken.
            item = fetch_add(arguments)
            first = item // items_of_same_rows * ROWS_PER_ITEM
            end = min(first + ROWS_PER_ITEM, call.count)
            if first >= end:
                break
            first_pair = item % items_of_same_rows * call.pairs_per_item
            end_pair = min(first_pair + call.pairs_per_item, call.pairs)
            for pair in range(first_pair, end_pair):
                shaped = multiply(tag, call, pair, first, end, memory=memory, shaped=shaped)
        if call.use_tiles != 0:
            amx_end()

    return body


product_body = make_body(multiply_pair, extra_bytes=LISTED_COLUMNS * I64_BYTES)
