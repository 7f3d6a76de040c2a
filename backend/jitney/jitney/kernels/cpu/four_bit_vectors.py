"""IR: the innermost steps of the product with weights of 4 bits.

A weight is ``q * scale + least``: q is its nibble, and ``least`` the *least value* of its scale
group. ``four_bit_kernel`` draws the layout of a column and says what is computed.

Called by ``four_bit_kernel``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.dot import add_run, multiply_nibbles
from jitney.kernels.cpu.emit import (
    F32_BYTES,
    UNIT_BYTES,
    VECTOR_BYTES,
    constant,
    emitted,
    f32,
    f32x,
    fused_multiply_add,
    i32x,
    i64,
    load_broadcast,
    load_vector,
    offset_by,
    prefetch_line,
    store_vector,
    widen_high,
    widen_low,
)
from jitney.kernels.cpu.micro_kernel import emit_by_rows
from jitney.kernels.cpu.product_call import PAIR_ROW_BYTES

VECTOR_INPUTS = 8
"""Inputs of a vector of nibbles."""
INPUT_BYTES = VECTOR_BYTES // VECTOR_INPUTS
"""Bytes of one input in a column: 16 nibbles."""
COLUMN_HEAD_BYTES = VECTOR_BYTES
"""Bytes at the head of a scale group of a column: a scale and a least value of each of the 16
outputs. Nibbles follow."""
ROW_GROUP_BYTES = 2 * F32_BYTES
"""Bytes of the scale and the sum of a scale group of a row. Those of all its scale groups stand
behind the row's bytes."""
_RUN = 32
"""Inputs of a run. Where the processor has no instruction that sums up products in 32 bits, those
of a run are summed up in 16 bits. ``dot.multiply_nibbles`` takes 4 inputs in a call, and allows 8
calls for a run."""
_PAIR_COLUMNS = 2


@dataclass(frozen=True)
class _ScalesAndLeasts:
    """IR: scales and least values of 16 outputs in a scale group, two vectors of float32."""

    scales: Any
    leasts: Any


def _load_scales_and_leasts(builder, group_address) -> _ScalesAndLeasts:
    """IR: from the head of a scale group of a column."""
    both = load_vector(builder, group_address)
    return _ScalesAndLeasts(scales=widen_low(builder, both), leasts=widen_high(builder, both))


def _emit_unpack(builder, address) -> list[Any]:
    """IR: a vector of nibbles as two vectors of bytes: the low nibbles, then the high ones."""
    both = load_vector(builder, address)
    mask = constant(i32x, 0x0F0F0F0F)
    low = builder.and_(both, mask)
    high = builder.and_(builder.lshr(both, constant(i32x, 4)), mask)
    return [low, high]


def _emit_add_scaled(
    builder, total, group_sum, row_scale_and_sum, scales_and_leasts: _ScalesAndLeasts
):
    """IR: ``total`` plus the product of a scale group, in float32.

    ``group_sum`` is the exact product of the bytes, int32. ``row_scale_and_sum`` is the address of
    the row's scale and sum in the scale group."""
    row_scale = load_broadcast(builder, offset_by(builder, row_scale_and_sum, 0), f32)
    row_sum = load_broadcast(builder, offset_by(builder, row_scale_and_sum, F32_BYTES), f32)
    value = builder.fmul(builder.sitofp(group_sum, f32x), row_scale)
    total = fused_multiply_add(builder, value, scales_and_leasts.scales, total)
    return fused_multiply_add(builder, row_sum, scales_and_leasts.leasts, total)


# --------------------------------------------------------------------------- by vectors


@emitted(types.void)
def multiply_few(builder, rows, x, x_stride, inputs, scale_group, column, column_bytes, out):
    """``out`` float32 [rows, 32] = 1 to MAX_ROWS rows of x times the two columns from address
    ``column`` on. The two columns behind these are prefetched."""
    group_bytes = builder.add(
        constant(i64, COLUMN_HEAD_BYTES),
        builder.mul(scale_group, constant(i64, INPUT_BYTES)),
    )
    emitter = _FewRows(
        builder=builder,
        x=x,
        x_stride=x_stride,
        inputs=inputs,
        scale_group=scale_group,
        scale_groups=builder.sdiv(inputs, scale_group),
        group_bytes=group_bytes,
        column=column,
        column_bytes=column_bytes,
        out=out,
    )
    emit_by_rows(builder, rows, _PAIR_COLUMNS, emitter.multiply)


@dataclass(frozen=True)
class _FewRows:
    """Emits the product of a few rows by vectors. For one row and one column it does this::

        total = 0
        for index in range(scale_groups):
            group_sum = 0
            for run in range(scale_group / 32):
                run_sum = 0
                four times, as code without a loop:
                    vector = the next 64 bytes of nibbles
                    run_sum += (vector & 0x0F...) . the next 4 bytes of x, in every lane
                    run_sum += (vector >> 4 & 0x0F...) . the 4 bytes after, in every lane
                group_sum += run_sum
            total += group_sum * row_scale * scales + row_sum * leasts
        store total at out

    With more rows and columns, each ``total``, ``group_sum`` and ``run_sum`` is one vector for each
    row and column; a vector of nibbles is loaded once for all rows. In Python these are lists of
    lists: ``totals[i][n]`` is that of row i and column n.

    The fields are IR values: see :func:`multiply_few`.
    """

    builder: Any
    x: Any
    x_stride: Any
    inputs: Any
    scale_group: Any
    """How many inputs share a scale."""
    scale_groups: Any
    """How many scale groups a column has."""
    group_bytes: Any
    """Bytes of a scale group of a column."""
    column: Any
    column_bytes: Any
    out: Any

    def multiply(self, m: int, chosen: range) -> None:
        """IR: m rows times the ``chosen`` columns of the two."""
        builder = self.builder
        totals = []
        group_sums = []
        for _ in range(m):
            # Stack slots, as their values change in a loop; LLVM makes registers of them.
            totals.append([cgutils.alloca_once(builder, f32x) for _ in chosen])
            group_sums.append([cgutils.alloca_once(builder, i32x) for _ in chosen])
        for row_totals in totals:
            for slot in row_totals:
                builder.store(constant(f32x, 0.0), slot)
        with cgutils.for_range(builder, self.scale_groups) as loop:
            self._add_group(loop.index, chosen, totals, group_sums)
        for row, row_totals in enumerate(totals):
            of_row = offset_by(builder, self.out, row, PAIR_ROW_BYTES)
            for n, slot in zip(chosen, row_totals, strict=True):
                address = offset_by(builder, of_row, n, VECTOR_BYTES)
                store_vector(builder, builder.load(slot), address)

    def _add_group(
        self, index, chosen: range, totals: list[list[Any]], group_sums: list[list[Any]]
    ) -> None:
        """IR: add the products of scale group ``index`` to the totals."""
        builder = self.builder
        # Where the scale group begins in each column, and in each row of x.
        column_offset = builder.mul(index, self.group_bytes)
        columns = []
        for n in chosen:
            column = offset_by(builder, self.column, n, self.column_bytes)
            columns.append(builder.add(column_offset, column))
        row_offset = builder.mul(index, self.scale_group)
        rows = []
        for row in range(len(totals)):
            of_row = offset_by(builder, self.x, row, self.x_stride)
            rows.append(builder.add(row_offset, of_row))

        for row_sums in group_sums:
            for slot in row_sums:
                builder.store(constant(i32x, 0), slot)
        runs = builder.sdiv(self.scale_group, constant(i64, _RUN))
        with cgutils.for_range(builder, runs) as loop:
            self._add_run(loop.index, columns, rows, group_sums)

        # A row has ``inputs`` bytes, and then a scale and a sum of each scale group. ``rows`` are
        # the addresses of this group's bytes. The distance from there to this group's scale is the
        # same in every row: the rest of the bytes, plus ``index`` pairs of scale and sum.
        to_end_of_bytes = builder.sub(self.inputs, row_offset)
        to_scale = offset_by(builder, to_end_of_bytes, index, ROW_GROUP_BYTES)
        scales_of_columns = [_load_scales_and_leasts(builder, column) for column in columns]
        for i, row in enumerate(rows):
            row_scale_and_sum = builder.add(row, to_scale)
            for n, scales_and_leasts in enumerate(scales_of_columns):
                total = builder.load(totals[i][n])
                group_sum = builder.load(group_sums[i][n])
                total = _emit_add_scaled(
                    builder, total, group_sum, row_scale_and_sum, scales_and_leasts
                )
                builder.store(total, totals[i][n])

    def _add_run(
        self, run, columns: Sequence[Any], rows: Sequence[Any], group_sums: list[list[Any]]
    ) -> None:
        """IR: add the products of the 32 inputs of one run. ``columns`` and ``rows`` are the
        addresses of the scale group."""
        builder = self.builder
        run_sums = [[constant(i32x, 0) for _ in columns] for _ in rows]
        for number in range(_RUN // VECTOR_INPUTS):
            # One vector of nibbles of each column.
            addresses = []
            for column in columns:
                of_run = offset_by(builder, column, run, _RUN * INPUT_BYTES)
                offset = COLUMN_HEAD_BYTES + number * VECTOR_BYTES
                addresses.append(offset_by(builder, of_run, offset))
            for address in addresses:
                # The same vector of the next pair.
                upcoming = offset_by(builder, address, _PAIR_COLUMNS, self.column_bytes)
                prefetch_line(builder, upcoming)
            unpacked = [_emit_unpack(builder, address) for address in addresses]
            # Its low nibbles meet 4 inputs of each row, a unit; its high nibbles meet the next 4.
            for half in range(2):
                for i, row in enumerate(rows):
                    of_run = offset_by(builder, row, run, _RUN)
                    offset = number * VECTOR_INPUTS + half * UNIT_BYTES
                    unit = load_broadcast(builder, offset_by(builder, of_run, offset))
                    for n, halves in enumerate(unpacked):
                        run_sum = run_sums[i][n]
                        run_sums[i][n] = multiply_nibbles(builder, run_sum, halves[half], unit)
        for i in range(len(rows)):
            for n in range(len(columns)):
                slot = group_sums[i][n]
                group_sum = add_run(builder, builder.load(slot), run_sums[i][n])
                builder.store(group_sum, slot)


# --------------------------------------------------------------------------- by tiles


@emitted(types.void, types.int64, types.int64)
def unpack_vector(builder, source, target):
    """A vector of nibbles as two vectors of bytes."""
    for n, half in enumerate(_emit_unpack(builder, source)):
        store_vector(builder, half, offset_by(builder, target, n, VECTOR_BYTES))


@emitted(types.void)
def add_scaled(builder, sums, group_sums, row_scale_and_sum, group_address):
    """Add the product of a scale group, for one row and one column: exact int32 [16] at
    ``group_sums``, to float32 [16] at ``sums``. ``group_address`` is that of the column's part."""
    group_sum = load_vector(builder, group_sums)
    total = load_vector(builder, sums, f32x)
    scales_and_leasts = _load_scales_and_leasts(builder, group_address)
    total = _emit_add_scaled(builder, total, group_sum, row_scale_and_sum, scales_and_leasts)
    store_vector(builder, total, sums)
