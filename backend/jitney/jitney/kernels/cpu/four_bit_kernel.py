"""The product of linear layers whose weights have 4 bits, in groups of inputs, as a Numba kernel.

A weight is ``q * scale + least`` with q from 0 to 15; scale and least are its group's. A group, in
this file, is 32, 64 or 128 inputs of one output, as quantization has them. Each group of a row of x
is rounded to bytes of a scale of its own (``rounding_kernel``). The product of two groups is an
exact sum in int32; those are scaled and added up in float32, in the groups' order. So vectors, for
the few rows of a decode, and the tile unit give the same bits.

A column of 16 outputs is ``size / group`` times, for each group of its inputs::

    | 16 x (scale, least) as bfloat16: 64 bytes | 64 bytes of nibbles | 64 bytes of nibbles | ...

64 bytes of nibbles are the weights of 8 inputs. They unpack to two vectors of bytes, of 4 inputs
each: first the low nibbles, then the high ones.

Loops, from outer to inner, inside those of ``product_kernel``::

    by vectors                             by tiles
      groups                                 groups      unpacked once for 128 rows, on the stack
        runs of 32 inputs                    32 rows   int32 sums of tiles
          vectors, rows, columns                 rows, columns: scaled, added to the result

By vectors, nibbles are unpacked in registers, where all sums stay too.

Called by ``tile_linear``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.amx import TILE_BYTES
from jitney.kernels.cpu.dot import add_nibbles, multiply_nibbles
from jitney.kernels.cpu.emit import (
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
from jitney.kernels.cpu.micro_kernel import MAX_ROWS, emit_by_rows
from jitney.kernels.cpu.product_kernel import (
    PAIR_ROW_BYTES,
    RESULT_BYTES,
    ROWS_BY_TILES,
    STEP_BYTES,
    finish,
    make_body,
    multiply_rows,
)
from jitney.kernels.cpu.simd import ZERO, inner, splat, store

_RUN = 32
"""Inputs whose products sum up in 16 bits, where the processor has no instruction for 32."""
_FACTOR_BYTES = 64
"""Bytes of the scales and leasts of a column's group."""
_UNPACKED_COLUMN = 2048
"""Bytes of a column's group of 128 inputs, unpacked: two tiles."""


@dataclass(frozen=True)
class _Factors:
    """IR: scales and leasts of a column's group, as vectors of float32."""

    scales: Any
    leasts: Any


def _load_factors(builder, address) -> _Factors:
    """IR: the factors at the beginning of a column's group."""
    both = load_vector(builder, address)
    return _Factors(scales=widen_low(builder, both), leasts=widen_high(builder, both))


def _unpack_vector(builder, address) -> list[Any]:
    """IR: a vector of nibbles as two of bytes: the low ones, the high ones."""
    both = load_vector(builder, address)
    mask = constant(i32x, 0x0F0F0F0F)
    low = builder.and_(both, mask)
    high = builder.and_(builder.lshr(both, constant(i32x, 4)), mask)
    return [low, high]


def _add_scaled(builder, total, group_sum, row_factors, factors: _Factors):
    """IR: ``total`` plus a group's product, which is its int32 ``group_sum`` in the scales of row
    and column, and the column's leasts times the sum of the row's inputs.

    ``row_factors`` is the address of the row's scale and sum for the group."""
    scale = load_broadcast(builder, offset_by(builder, row_factors, 0), f32)
    row_sum = load_broadcast(builder, offset_by(builder, row_factors, 4), f32)
    value = builder.fmul(builder.sitofp(group_sum, f32x), scale)
    total = fused_multiply_add(builder, value, factors.scales, total)
    return fused_multiply_add(builder, row_sum, factors.leasts, total)


# --------------------------------------------------------------------------- by vectors


@emitted(types.void, *[types.int64] * 7)
def multiply_few(builder, rows, x, x_stride, size, group, column, out):
    """``out`` float32 [rows, 32] = 1 to MAX_ROWS rows of x times two columns, one right behind the
    other. It asks for the pair after the one it reads."""
    groups = builder.sdiv(size, group)
    group_bytes = offset_by(builder, constant(i64, _FACTOR_BYTES), group, 8)
    emitter = _FewRows(
        builder=builder,
        x=x,
        x_stride=x_stride,
        size=size,
        group=group,
        groups=groups,
        group_bytes=group_bytes,
        column=column,
        column_bytes=builder.mul(groups, group_bytes),
        out=out,
    )
    emit_by_rows(builder, rows, 2, emitter.multiply)


@dataclass(frozen=True)
class _FewRows:
    """Emits the product of a few rows by vectors. Its fields are IR values; see
    :func:`multiply_few`."""

    builder: Any
    x: Any
    x_stride: Any
    size: Any
    group: Any
    groups: Any
    group_bytes: Any
    column: Any
    column_bytes: Any
    out: Any

    def multiply(self, m: int, chosen: range) -> None:
        """IR: m rows times the ``chosen`` columns of the two."""
        builder = self.builder
        # For each row and column, the sum in float32 over all groups so far, and that in int32 over
        # one group. They are in registers, once LLVM has promoted these stack slots.
        slots = [(row, n) for row in range(m) for n in chosen]
        sums = [cgutils.alloca_once(builder, f32x) for _ in slots]
        group_sums = [cgutils.alloca_once(builder, i32x) for _ in slots]
        for slot in sums:
            builder.store(constant(f32x, 0.0), slot)
        with cgutils.for_range(builder, self.groups) as group:
            self._add_group(m, chosen, group.index, sums, group_sums)
        for (row, n), slot in zip(slots, sums, strict=True):
            of_row = offset_by(builder, self.out, row, PAIR_ROW_BYTES)
            where = offset_by(builder, of_row, n, VECTOR_BYTES)
            store_vector(builder, builder.load(slot), where)

    def _add_group(
        self, m: int, chosen: range, index, sums: Sequence[Any], group_sums: Sequence[Any]
    ) -> None:
        """IR: add the products of group ``index``."""
        builder = self.builder
        # Where the group begins, in each of the columns and in each of the rows of x.
        in_column = builder.mul(index, self.group_bytes)
        starts = [
            builder.add(in_column, offset_by(builder, self.column, n, self.column_bytes))
            for n in chosen
        ]
        in_row = builder.mul(index, self.group)
        rows = [
            builder.add(in_row, offset_by(builder, self.x, row, self.x_stride)) for row in range(m)
        ]
        for slot in group_sums:
            builder.store(constant(i32x, 0), slot)
        runs = builder.sdiv(self.group, constant(i64, _RUN))
        with cgutils.for_range(builder, runs) as run:
            self._add_run(starts, rows, run.index, group_sums)
        # Behind a row's ``size`` bytes are two factors of each group: from the group's beginning to
        # its factors are size - in_row + 8 * index bytes.
        to_factors = offset_by(builder, builder.sub(self.size, in_row), index, 8)
        factors = [_load_factors(builder, start) for start in starts]
        for i, row in enumerate(rows):
            row_factors = builder.add(row, to_factors)
            for n, of_column in enumerate(factors):
                slot = i * len(factors) + n
                total = builder.load(sums[slot])
                group_sum = builder.load(group_sums[slot])
                total = _add_scaled(builder, total, group_sum, row_factors, of_column)
                builder.store(total, sums[slot])

    def _add_run(
        self, starts: Sequence[Any], rows: Sequence[Any], run, group_sums: Sequence[Any]
    ) -> None:
        """IR: add the products of the 32 inputs of a run, in 4 steps of 8 inputs. A step reads 64
        bytes of nibbles of each column, two vectors of bytes, and 2 units of each row."""
        builder = self.builder
        narrow = [constant(i32x, 0) for _ in group_sums]
        for step in range(_RUN // 8):
            addresses = []
            for start in starts:
                of_run = offset_by(builder, start, run, 8 * _RUN)
                address = offset_by(builder, of_run, _FACTOR_BYTES + VECTOR_BYTES * step)
                addresses.append(address)
            for address in addresses:
                prefetch_line(builder, offset_by(builder, address, 2, self.column_bytes))
            unpacked = [_unpack_vector(builder, address) for address in addresses]
            for half in range(2):
                for i, row in enumerate(rows):
                    of_run = offset_by(builder, row, run, _RUN)
                    x = load_broadcast(builder, offset_by(builder, of_run, 8 * step + 4 * half))
                    for n, halves in enumerate(unpacked):
                        slot = i * len(unpacked) + n
                        narrow[slot] = multiply_nibbles(builder, narrow[slot], halves[half], x)
        for group_sum, run_sum in zip(group_sums, narrow, strict=True):
            total = add_nibbles(builder, builder.load(group_sum), run_sum)
            builder.store(total, group_sum)


# --------------------------------------------------------------------------- by tiles


@emitted(types.void, types.int64, types.int64)
def unpack(builder, source, target):
    """64 bytes of nibbles as 128 bytes."""
    for n, half in enumerate(_unpack_vector(builder, source)):
        store_vector(builder, half, offset_by(builder, target, VECTOR_BYTES * n))


@emitted(types.void, *[types.int64] * 4)
def add_row(builder, sums, group_sums, row_factors, column_group):
    """Add a group's product of one row and one column, of int32 [16] ``group_sums``, to float32
    [16] ``sums``. ``column_group`` is the address of the column's group."""
    group_sum = load_vector(builder, group_sums)
    total = load_vector(builder, sums, f32x)
    factors = _load_factors(builder, column_group)
    total = _add_scaled(builder, total, group_sum, row_factors, factors)
    store_vector(builder, total, sums)


@inner
def multiply_groups_by_tiles(tag, call, column, first, last, sums, shaped):
    """``sums`` float32 [last - first, 32] = rows [first, last) times two columns; ``shaped`` as in
    ``product_kernel``."""
    size = call.size
    group = call.group
    group_bytes = _FACTOR_BYTES + 8 * group
    steps = -(-group // STEP_BYTES)
    column_bytes = size // group * group_bytes
    # Behind the sums: the unpacked group of both columns, and its product.
    unpacked = sums + RESULT_BYTES
    result = unpacked + 2 * _UNPACKED_COLUMN
    for i in range(2 * (last - first)):
        store(sums + VECTOR_BYTES * i, splat(ZERO))
    if group < STEP_BYTES:
        # A step has 64 inputs. The weights of those beyond a group of 32 stay 0.
        for i in range(2 * _UNPACKED_COLUMN // VECTOR_BYTES):
            store(unpacked + VECTOR_BYTES * i, splat(ZERO))
    for g in range(size // group):
        start = column + g * group_bytes
        for n in range(2):
            for i in range(group // 8):
                source = start + n * column_bytes + _FACTOR_BYTES + VECTOR_BYTES * i
                unpack(source, unpacked + n * steps * TILE_BYTES + 2 * VECTOR_BYTES * i)
        for begin in range(first, last, ROWS_BY_TILES):
            x = call.x + begin * call.x_stride
            rows = min(last - begin, ROWS_BY_TILES)
            shaped = multiply_rows(
                tag,
                rows,
                False,
                shaped,
                x=x + g * group,
                x_stride=call.x_stride,
                column=unpacked,
                steps=steps,
                second=steps,
                out=result,
                add_to_out=False,
            )
            for m in range(rows):
                row_factors = x + m * call.x_stride + size + 8 * g
                at = PAIR_ROW_BYTES * m
                where = sums + PAIR_ROW_BYTES * (begin - first) + at
                add_row(where, result + at, row_factors, start)
                add_row(
                    where + VECTOR_BYTES,
                    result + at + VECTOR_BYTES,
                    row_factors,
                    start + column_bytes,
                )
    return shaped


# --------------------------------------------------------------------------- a pair


@inner
def multiply_group_pair(tag, call, pair, first, last, result, shaped):
    """As ``product_kernel.multiply_pair``. A few rows are multiplied by vectors even where there is
    a tile unit, which is not faster for them."""
    column = call.weight + pair * call.steps * 2
    if call.tiles != 0 and last - first > MAX_ROWS:
        shaped = multiply_groups_by_tiles(
            tag, call, column, first, last, sums=result, shaped=shaped
        )
        finish(tag, call, pair, first, rows=last - first, result=result)
        return shaped
    for begin in range(first, last, MAX_ROWS):
        rows = min(last - begin, MAX_ROWS)
        multiply_few(
            rows,
            x=call.x + begin * call.x_stride,
            x_stride=call.x_stride,
            size=call.size,
            group=call.group,
            column=column,
            out=result,
        )
        finish(tag, call, pair, begin, rows=rows, result=result)
    return shaped


groups_body = make_body(multiply_group_pair)
