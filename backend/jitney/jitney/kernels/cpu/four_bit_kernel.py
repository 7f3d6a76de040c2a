"""The product of linear layers whose weights have 4 bits, as a Numba kernel.

A weight is ``q * scale + least`` with q from 0 to 15. Scale and least value are those of its group,
which in this file is 32, 64 or 128 inputs of one output, as in ``quantization``. A row of x is
rounded to bytes, with a scale for each group of inputs (``convert_kernel``). So the product of a
row and an output is, over all groups::

    sum of (the exact sum of q * byte) * scale of the row * scale of the output
         + (the sum of the bytes * scale of the row) * least value of the output

The exact sums are int32; the rest is float32, added up in the groups' order. So vectors and the
tile unit give the same bits.

A column of 16 outputs is, for each group of inputs::

    | 16 x (scale, least value), bfloat16: 64 bytes | 64 bytes of nibbles | 64 bytes of nibbles ...

64 bytes of nibbles are 8 inputs of the 16 outputs. Their low nibbles are a vector of bytes: 4
inputs of each output. Their high nibbles are another one: the next 4 inputs.

Loops, from outer to inner, inside those of ``product_kernel``::

    with the tile unit, for more than 6 rows:                         multiply_groups_by_tiles
      groups     unpacked to bytes on the thread's stack, once for 128 rows
        32 rows  multiplied by the tile unit; then their sums are scaled and added up

    otherwise:                                                        multiply_few
      6 rows     all sums are in registers, as ``four_bit_vectors`` says

Called by ``tile_linear``.
"""

from jitney.kernels.cpu.amx import TILE_BYTES, TILE_ROW_BYTES
from jitney.kernels.cpu.emit import VECTOR_BYTES
from jitney.kernels.cpu.four_bit_vectors import (
    COLUMN_FACTORS,
    INPUT_BYTES,
    ROW_FACTORS,
    VECTOR_INPUTS,
    add_scaled,
    multiply_few,
    unpack_vector,
)
from jitney.kernels.cpu.micro_kernel import MAX_ROWS
from jitney.kernels.cpu.product_call import PAIR_ROW_BYTES, RESULT_BYTES, ROWS_BY_TILES
from jitney.kernels.cpu.product_finish import finish
from jitney.kernels.cpu.product_kernel import make_body
from jitney.kernels.cpu.product_tiles import multiply_rows
from jitney.kernels.cpu.simd import ZERO, inlined, inner, splat, store

# --------------------------------------------------------------------------- by tiles

_UNPACKED_COLUMN = 2 * TILE_BYTES
"""Memory for a column's group of 128 inputs, unpacked to bytes: two tiles."""
_UNPACKED_BYTES = 2 * _UNPACKED_COLUMN
_GROUP_SUMS_BYTES = ROWS_BY_TILES * PAIR_ROW_BYTES
"""Memory for the exact products of a group, int32 [32, 32]."""


@inlined
def fill_with_zeros(address, vectors):
    """So many vectors from ``address`` on."""
    for i in range(vectors):
        store(address + i * VECTOR_BYTES, splat(ZERO))


@inlined
def unpack_group(column_group, group, target):
    """A column's group, as bytes."""
    nibbles = column_group + COLUMN_FACTORS
    for i in range(group // VECTOR_INPUTS):
        unpack_vector(nibbles + i * VECTOR_BYTES, target + i * 2 * VECTOR_BYTES)


@inner
def multiply_groups_by_tiles(tag, call, first_column, first, last, totals, shaped):
    """``totals`` float32 [last - first, 32] = rows [first, last) times two columns. The tile unit
    is set for ``shaped`` rows; returns the number for which it is set afterwards."""
    group = call.group
    group_bytes = COLUMN_FACTORS + group * INPUT_BYTES
    second_column = first_column + call.column_bytes
    # Behind the totals is memory for a group of both columns, unpacked, and for its products.
    first_unpacked = totals + RESULT_BYTES
    second_unpacked = first_unpacked + _UNPACKED_COLUMN
    group_sums = first_unpacked + _UNPACKED_BYTES
    fill_with_zeros(totals, 2 * (last - first))
    # A tile has 64 inputs. With groups of 32, the other 32 have weights that stay 0.
    tiles = -(-group // TILE_ROW_BYTES)
    if group < TILE_ROW_BYTES:
        fill_with_zeros(first_unpacked, _UNPACKED_BYTES // VECTOR_BYTES)
    for index in range(call.inputs // group):
        first_group = first_column + index * group_bytes
        second_group = second_column + index * group_bytes
        unpack_group(first_group, group, first_unpacked)
        unpack_group(second_group, group, second_unpacked)
        for begin in range(first, last, ROWS_BY_TILES):
            x = call.x + begin * call.x_stride
            rows = min(last - begin, ROWS_BY_TILES)
            shaped = multiply_rows(
                tag,
                rows,
                False,  # the unpacked weights are in the cache
                shaped,
                x=x + index * group,
                x_stride=call.x_stride,
                first_column=first_unpacked,
                second_column=second_unpacked,
                tiles=tiles,
                out=group_sums,
                add_to_out=False,
            )
            for m in range(rows):
                row_factors = x + m * call.x_stride + call.inputs + index * ROW_FACTORS
                row_totals = totals + (begin - first + m) * PAIR_ROW_BYTES
                row_sums = group_sums + m * PAIR_ROW_BYTES
                add_scaled(row_totals, row_sums, row_factors, first_group)
                add_scaled(
                    row_totals + VECTOR_BYTES,
                    row_sums + VECTOR_BYTES,
                    row_factors,
                    second_group,
                )
    return shaped


# --------------------------------------------------------------------------- a pair


@inner
def multiply_group_pair(tag, call, pair, first, last, result, shaped):
    """The outputs of one pair for rows [first, last); see ``product_kernel.multiply_pair``."""
    column = call.weight + pair * 2 * call.column_bytes
    # For a few rows the tile unit would not be faster than vectors are.
    if call.use_tiles != 0 and last - first > MAX_ROWS:
        shaped = multiply_groups_by_tiles(
            tag, call, column, first, last, totals=result, shaped=shaped
        )
        finish(tag, call, pair, first, rows=last - first, result=result)
        return shaped
    for begin in range(first, last, MAX_ROWS):
        rows = min(last - begin, MAX_ROWS)
        multiply_few(
            rows,
            x=call.x + begin * call.x_stride,
            x_stride=call.x_stride,
            inputs=call.inputs,
            group=call.group,
            column=column,
            column_bytes=call.column_bytes,
            out=result,
        )
        finish(tag, call, pair, begin, rows=rows, result=result)
    return shaped


groups_body = make_body(multiply_group_pair, spare_bytes=_UNPACKED_BYTES + _GROUP_SUMS_BYTES)
