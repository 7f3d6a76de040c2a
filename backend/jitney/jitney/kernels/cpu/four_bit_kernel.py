"""The product of linear layers whose weights have 4 bits, as a Numba kernel.

A weight is ``q * scale + least`` with q from 0 to 15. The inputs that share a scale and a least
value, for one output, are a *scale group*: 32, 64 or 128 neighbours (``quantization`` calls it a
group). A row of x is rounded to bytes, with a scale for each scale group (``convert_kernel``). So
the product of a row and an output is::

    sum over scale groups g of:    dot_g * x_scale_g * scale_g  +  x_sum_g * least_g

    dot_g                 the sum of q * byte over the inputs of g: int32, exact
    x_scale_g             the row's scale in g
    x_sum_g               the sum of the row's bytes in g, times x_scale_g
    scale_g, least_g      the output's scale and least value in g

All but dot_g is float32, and is added up in the order of g. So vectors and the tile unit give the
same bits.

A column of 16 outputs is, for each scale group::

    | 16 x (scale, least value), bfloat16: 64 bytes | 64 bytes of nibbles | 64 bytes of nibbles ...

64 bytes of nibbles are 8 inputs of the 16 outputs. Their low nibbles are a vector of bytes: 4
inputs of each output. Their high nibbles are another one: the next 4 inputs.

Loops, from outer to inner, inside those of ``product_kernel``::

    with the tile unit, for more than 6 rows:                         multiply_groups_by_tiles
      scale groups   unpacked to bytes on the thread's stack, once for 128 rows
        32 rows      multiplied by the tile unit; then their sums are scaled and added up

    otherwise:                                                        multiply_few
      6 rows         all sums are in registers, as ``four_bit_vectors`` says

Called by ``column_linear``.
"""

from jitney.kernels.cpu.amx import TILE_BYTES, TILE_ROW_BYTES
from jitney.kernels.cpu.emit import VECTOR_BYTES, ceil_div
from jitney.kernels.cpu.four_bit_vectors import (
    COLUMN_HEAD_BYTES,
    INPUT_BYTES,
    ROW_GROUP_BYTES,
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
"""Memory for a scale group of a column, unpacked to bytes: two tiles, 128 inputs at most."""
_UNPACKED_BYTES = 2 * _UNPACKED_COLUMN
_GROUP_SUMS_BYTES = ROWS_BY_TILES * PAIR_ROW_BYTES
"""Memory for the exact products of a scale group, int32 [32, 32]."""


@inlined
def fill_with_zeros(address, vectors):
    """Write so many vectors of zeros from ``address`` on."""
    for i in range(vectors):
        store(address + i * VECTOR_BYTES, splat(ZERO))


@inlined
def unpack_group(group_address, scale_group, target):
    """A scale group of a column, as bytes."""
    nibbles = group_address + COLUMN_HEAD_BYTES
    for i in range(scale_group // VECTOR_INPUTS):
        unpack_vector(nibbles + i * VECTOR_BYTES, target + i * 2 * VECTOR_BYTES)


@inner
def multiply_groups_by_tiles(tag, call, first_column, first, end, memory, shaped):
    """The sums [end - first, 32] of rows [first, end) times two columns. The tile unit is set for
    ``shaped`` rows; returns the number for which it is set afterwards.

    For ``memory`` see ``product_kernel.make_body``. Behind the sums it has a scale group of both
    columns, unpacked, and the exact products of that group."""
    sums = memory
    first_unpacked = memory + RESULT_BYTES
    second_unpacked = first_unpacked + _UNPACKED_COLUMN
    group_sums = first_unpacked + _UNPACKED_BYTES
    scale_group = call.scale_group
    group_bytes = COLUMN_HEAD_BYTES + scale_group * INPUT_BYTES
    second_column = first_column + call.column_bytes
    vectors_of_sums = (end - first) * (PAIR_ROW_BYTES // VECTOR_BYTES)
    fill_with_zeros(sums, vectors_of_sums)
    # A product by tiles takes 64 inputs. A scale group of 32 inputs fills half of them: the weights
    # of the other half are set to 0 here, and stay 0.
    tiles = ceil_div(scale_group, TILE_ROW_BYTES)
    if scale_group < TILE_ROW_BYTES:
        fill_with_zeros(first_unpacked, _UNPACKED_BYTES // VECTOR_BYTES)
    for index in range(call.inputs // scale_group):
        first_group = first_column + index * group_bytes
        second_group = second_column + index * group_bytes
        unpack_group(first_group, scale_group, first_unpacked)
        unpack_group(second_group, scale_group, second_unpacked)
        for begin in range(first, end, ROWS_BY_TILES):
            x = call.x + begin * call.x_stride
            rows = min(end - begin, ROWS_BY_TILES)
            shaped = multiply_rows(
                tag,
                rows,
                read_once=False,  # the unpacked weights are in the cache
                shaped=shaped,
                x=x + index * scale_group,
                x_stride=call.x_stride,
                first_column=first_unpacked,
                second_column=second_unpacked,
                tiles=tiles,
                out=group_sums,
                add_to_out=False,
            )
            for m in range(rows):
                row_scale_and_sum = x + m * call.x_stride + call.inputs + index * ROW_GROUP_BYTES
                row_sums = sums + (begin - first + m) * PAIR_ROW_BYTES
                row_group_sums = group_sums + m * PAIR_ROW_BYTES
                add_scaled(row_sums, row_group_sums, row_scale_and_sum, first_group)
                add_scaled(
                    row_sums + VECTOR_BYTES,
                    row_group_sums + VECTOR_BYTES,
                    row_scale_and_sum,
                    second_group,
                )
    return shaped


# --------------------------------------------------------------------------- a pair


@inner
def multiply_four_bit_pair(tag, call, pair, first, end, memory, shaped):
    """The outputs of one pair for rows [first, end); see ``product_kernel.multiply_pair``."""
    sums = memory
    column = call.weight + pair * 2 * call.column_bytes
    # For a few rows the tile unit would not be faster than vectors are.
    if call.use_tiles != 0 and end - first > MAX_ROWS:
        shaped = multiply_groups_by_tiles(
            tag, call, column, first, end, memory=memory, shaped=shaped
        )
        finish(tag, call, pair, first, rows=end - first, sums=sums)
        return shaped
    for begin in range(first, end, MAX_ROWS):
        rows = min(end - begin, MAX_ROWS)
        multiply_few(
            rows,
            x=call.x + begin * call.x_stride,
            x_stride=call.x_stride,
            inputs=call.inputs,
            scale_group=call.scale_group,
            column=column,
            column_bytes=call.column_bytes,
            out=sums,
        )
        finish(tag, call, pair, begin, rows=rows, sums=sums)
    return shaped


four_bit_body = make_body(multiply_four_bit_pair, extra_bytes=_UNPACKED_BYTES + _GROUP_SUMS_BYTES)
