"""A few rows of x times two columns of a weight, by the tile unit (AMX).

There are 8 tile registers: four of sums, two of x, two of weights::

                          first column    second column
                          tile 6          tile 7
    upper 16 rows of x    sums:           sums:
    tile 4                tile 0          tile 1
    lower 16 rows of x    sums:           sums:
    tile 5                tile 2          tile 3

A column is a sequence of tiles. Each of these meets 64 bytes of every row of x, its 16 units.

Called by ``product_kernel``, and by ``four_bit_kernel`` for weights that it has unpacked to bytes.
"""

from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.amx import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILES,
    emit_amx,
    emit_shapes,
    load_tile,
    store_tile,
)
from jitney.kernels.cpu.emit import (
    TAG,
    VECTOR_BYTES,
    constant,
    emitted,
    i8,
    i64,
    offset_by,
    prefetch_line,
)
from jitney.kernels.cpu.product_call import PAIR_ROW_BYTES
from jitney.kernels.cpu.simd import F32_TYPE, I4_TYPE, I8_TYPE, WIDE_TYPE, inner

_TILES_AHEAD = 6
"""If a column comes from memory, it is prefetched so many tiles ahead. A turn of the loop loads its
tiles and then multiplies. During the products no load is under way, so memory would be idle:
prefetches fill that time."""
_HALF_TILE = TILE_BYTES // 2

# --------------------------------------------------------------------------- tile registers

_UPPER_ROWS = 4
_LOWER_ROWS = 5
_FIRST_COLUMN = 6
_SECOND_COLUMN = 7


class _TileProduct(NamedTuple):
    """sums += x times weights: three tile registers, and where the sums are in memory."""

    sums: int
    x: int
    weights: int
    offset: int
    """Bytes from the beginning of the result, float32 [rows, 32], to these [16, 16]."""


_LOWER_OFFSET = TILE_ROWS * PAIR_ROW_BYTES
_OF_UPPER_ROWS = [
    _TileProduct(sums=0, x=_UPPER_ROWS, weights=_FIRST_COLUMN, offset=0),
    _TileProduct(sums=1, x=_UPPER_ROWS, weights=_SECOND_COLUMN, offset=VECTOR_BYTES),
]
_OF_LOWER_ROWS = [
    _TileProduct(sums=2, x=_LOWER_ROWS, weights=_FIRST_COLUMN, offset=_LOWER_OFFSET),
    _TileProduct(
        sums=3, x=_LOWER_ROWS, weights=_SECOND_COLUMN, offset=_LOWER_OFFSET + VECTOR_BYTES
    ),
]


@emitted(types.void)
def set_shapes(builder, upper_rows, lower_rows):
    """Set the shapes of this thread's tiles, for 1 to 16 upper rows and 1 to 16 lower ones."""
    upper = builder.trunc(upper_rows, i8)
    lower = builder.trunc(lower_rows, i8)
    rows = [upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS]
    emit_shapes(builder, rows, [TILE_ROW_BYTES] * TILES)


# --------------------------------------------------------------------------- products


def _make_multiply(*, with_lower: bool, prefetches: bool = False) -> Any:
    """A Numba function: ``out`` [32 or 16, 32] = rows of x times so many ``tiles`` of two columns.
    ``out`` is float32, or int32 if the elements are bytes.

    With ``add_to_out`` the product is added to what ``out`` holds.

    With ``prefetches``, which needs ``with_lower``, each turn also prefetches a tile of each
    column: half a tile after each of its four products.
    """
    assert with_lower or not prefetches
    products = [*_OF_UPPER_ROWS, *_OF_LOWER_ROWS] if with_lower else _OF_UPPER_ROWS

    @emitted(types.void, TAG, add_to_out=types.boolean)
    def multiply(builder, tag, x, x_stride, first_column, second_column, tiles, out, add_to_out):
        if tag in (F32_TYPE, WIDE_TYPE):
            return  # the tile unit has no such product, and is not asked for it
        out_stride = constant(i64, PAIR_ROW_BYTES)
        results = [offset_by(builder, out, product.offset) for product in products]
        with builder.if_else(add_to_out) as (then, otherwise):
            with then:
                for product, address in zip(products, results, strict=True):
                    load_tile(builder, product.sums, address, out_stride)
            with otherwise:
                for product in products:
                    emit_amx(builder, "tilezero", product.sums)

        lower_rows = offset_by(builder, x, TILE_ROWS, x_stride)
        weights_stride = constant(i64, TILE_ROW_BYTES)
        with cgutils.for_range(builder, tiles) as loop:
            tile = loop.index
            first = offset_by(builder, first_column, tile, TILE_BYTES)
            second = offset_by(builder, second_column, tile, TILE_BYTES)
            load_tile(builder, _FIRST_COLUMN, first, weights_stride)
            load_tile(builder, _SECOND_COLUMN, second, weights_stride)
            upper = offset_by(builder, x, tile, TILE_ROW_BYTES)
            load_tile(builder, _UPPER_ROWS, upper, x_stride)
            if with_lower:
                lower = offset_by(builder, lower_rows, tile, TILE_ROW_BYTES)
                load_tile(builder, _LOWER_ROWS, lower, x_stride)
            for number, product in enumerate(products):
                emit_amx(builder, _instruction(tag), product.sums, product.x, product.weights)
                if prefetches:
                    # Half a tile at a time: first the two halves of the first column's tile, then
                    # those of the second one's. More at once would hold up the loads of the next
                    # turn.
                    start = first if number < 2 else second
                    _prefetch_half_tile(builder, start, half=number % 2)

        for product, address in zip(products, results, strict=True):
            store_tile(builder, product.sums, address, out_stride)

    return multiply


def _instruction(tag) -> str:
    """The tile unit's product for elements of the tag's type, by LLVM's name."""
    if tag == I8_TYPE:
        return "tdpbusd"  # Tile Dot Product of Bytes: Unsigned x, Signed weights, to 32 bits
    if tag == I4_TYPE:
        return "tdpbsud"  # signed x, and weights that were unpacked to unsigned bytes
    return "tdpbf16ps"


def _prefetch_half_tile(builder, start, half: int) -> None:
    """IR: ask for a half, 0 or 1, of the tile that comes _TILES_AHEAD tiles behind ``start``."""
    begin = _TILES_AHEAD * TILE_BYTES + half * _HALF_TILE
    for offset in range(begin, begin + _HALF_TILE, TILE_ROW_BYTES):
        prefetch_line(builder, offset_by(builder, start, offset))


multiply_two_tiles = _make_multiply(with_lower=True)
"""17 to 32 rows: two tiles of x."""
multiply_two_tiles_prefetching = _make_multiply(with_lower=True, prefetches=True)
"""The same, for columns that come from memory."""
multiply_one_tile = _make_multiply(with_lower=False)
"""1 to 16 rows."""


@inner
def multiply_rows(
    tag,
    rows,
    read_once,
    shaped,
    x,
    x_stride,
    first_column,
    second_column,
    tiles,
    out,
    add_to_out,
):
    """``out`` [rows, 32] = 1 to 32 rows of x times so many ``tiles`` of two columns; with
    ``add_to_out``, the product is added to ``out``.

    The tile unit is set for ``shaped`` rows; returns the number for which it is set afterwards.
    """
    if rows != shaped:
        # The lower tile has at least one row, also where it is not used.
        upper_rows = min(rows, TILE_ROWS)
        lower_rows = max(rows - TILE_ROWS, 1)
        set_shapes(upper_rows, lower_rows)
    # Three calls that are alike but for the function: Numba has to know it when it compiles a call.
    if rows > TILE_ROWS and read_once:
        # No other rows read these weights: they come from memory.
        multiply_two_tiles_prefetching(
            tag,
            x,
            x_stride,
            first_column,
            second_column,
            tiles=tiles,
            out=out,
            add_to_out=add_to_out,
        )
    elif rows > TILE_ROWS:
        multiply_two_tiles(
            tag,
            x,
            x_stride,
            first_column,
            second_column,
            tiles=tiles,
            out=out,
            add_to_out=add_to_out,
        )
    else:
        multiply_one_tile(
            tag,
            x,
            x_stride,
            first_column,
            second_column,
            tiles=tiles,
            out=out,
            add_to_out=add_to_out,
        )
    return rows
