"""The product of linear layers whose weights have 4 bits, in groups of inputs, as a Numba kernel.

A weight is ``q * scale + least`` with q from 0 to 15; scale and least are its group's of 32, 64 or
128 inputs. Each group of a row of x is rounded to bytes of a scale of its own (``rows``). The
product of two groups is an exact sum in int32; those are scaled and added up in float32, in the
groups' order. So vectors, for the few rows of a decode, and the tile unit give the same bits.

A column of 16 outputs is ``size / group`` times a vector of bfloat16 pairs (scale, least), then the
group's nibbles: the low ones of a vector are what a vector of bytes would be (``product_kernel``),
and the high ones the next. Vectors are unpacked in registers, tiles once for ROWS_PER_CHUNK rows.
"""

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.product_kernel import RESULT_BYTES, finish, make_body, multiply_rows
from jitney.kernels.cpu.products import (
    MAX_ROWS,
    add_nibbles,
    emit_by_rows,
    every_lane,
    multiply_nibbles,
)
from jitney.kernels.cpu.simd import (
    ZERO,
    call_llvm,
    emitted,
    every,
    f32,
    f32x,
    i32x,
    i64,
    inner,
    offset_by,
    pointer,
    prefetch_line,
    splat,
    store,
    widen_bf16,
)

_BLOCK = 32
"""Inputs whose products sum up in 16 bits, where the processor has no instruction for 32."""
_PAIR_BYTES = 64
"""Of scales and leasts of a column."""
_COLUMN_BYTES = 2048
"""Of a column's group of 128 inputs, unpacked."""


# --------------------------------------------------------------------------- by vectors


def _pair(builder: Any, address: Any) -> tuple[Any, Any]:
    """IR: scales and leasts of a column's group."""
    both = builder.load(pointer(builder, address, i32x), align=4)
    return widen_bf16(builder, both), builder.bitcast(builder.and_(both, every(i32x, -65536)), f32x)


def _halves(builder: Any, address: Any) -> tuple[Any, Any]:
    """IR: a vector of nibbles as two of bytes."""
    both = builder.load(pointer(builder, address, i32x), align=4)
    mask = every(i32x, 0x0F0F0F0F)
    return builder.and_(both, mask), builder.and_(builder.lshr(both, every(i32x, 4)), mask)


@emitted(types.void, *[types.int64] * 7)
def multiply_few(builder, rows, x, x_stride, size, group, column, out):
    """``out`` float32 [rows, 32] = 1 to MAX_ROWS rows of x times two columns, one right behind the
    other. It asks for the pair after the one it reads."""
    count = builder.sdiv(size, group)
    group_bytes = offset_by(builder, ir.Constant(i64, _PAIR_BYTES), group, 8)
    column_bytes = builder.mul(count, group_bytes)

    def by_rows(m: int, chosen: range) -> None:
        keys = [(i, n) for i in range(m) for n in chosen]
        # In registers, once LLVM has promoted these stack slots.
        sums = [cgutils.alloca_once(builder, f32x) for _ in keys]
        wholes = [cgutils.alloca_once(builder, i32x) for _ in keys]
        for slot in sums:
            builder.store(every(f32x, 0.0), slot)
        with cgutils.for_range(builder, count) as loop:
            at = builder.mul(loop.index, group_bytes)
            starts = [builder.add(at, offset_by(builder, column, n, column_bytes)) for n in chosen]
            at = builder.mul(loop.index, group)
            begins = [builder.add(at, offset_by(builder, x, i, x_stride)) for i in range(m)]
            for slot in wholes:
                builder.store(every(i32x, 0), slot)
            blocks = builder.sdiv(group, ir.Constant(i64, _BLOCK))
            with cgutils.for_range(builder, blocks) as block:
                add_block(starts, begins, block.index, wholes)
            factors = offset_by(builder, builder.sub(size, at), loop.index, 8)
            pairs = [_pair(builder, start) for start in starts]
            for i, begin in enumerate(begins):
                where = builder.add(begin, factors)
                for n, pair in enumerate(pairs):
                    slot, whole = (each[i * len(pairs) + n] for each in (sums, wholes))
                    total, whole = builder.load(slot), builder.load(whole)
                    builder.store(_add_group(builder, total, whole, where, pair), slot)
        for (i, n), slot in zip(keys, sums, strict=True):
            where = offset_by(builder, offset_by(builder, out, i, 128), n, 64)
            builder.store(builder.load(slot), pointer(builder, where, f32x), align=4)

    def add_block(starts: list[Any], begins: list[Any], block: Any, wholes: list[Any]) -> None:
        parts = [every(i32x, 0) for _ in wholes]
        for step in range(_BLOCK // 8):
            wheres = [offset_by(builder, start, block, 8 * _BLOCK) for start in starts]
            wheres = [offset_by(builder, where, _PAIR_BYTES + 64 * step) for where in wheres]
            for where in wheres:
                prefetch_line(builder, offset_by(builder, where, 2, column_bytes))
            halves = [_halves(builder, where) for where in wheres]
            for half in range(2):
                for i, begin in enumerate(begins):
                    where = offset_by(builder, begin, block, _BLOCK)
                    right = every_lane(builder, offset_by(builder, where, 8 * step + 4 * half))
                    for n, left in enumerate(halves):
                        key = i * len(halves) + n
                        parts[key] = multiply_nibbles(builder, parts[key], left[half], right)
        for slot, part in zip(wholes, parts, strict=True):
            builder.store(add_nibbles(builder, builder.load(slot), part), slot)

    emit_by_rows(builder, rows, 2, by_rows)


def _add_group(builder: Any, total: Any, whole: Any, factors: Any, pair: Any) -> Any:
    """IR: ``total`` plus a group's product, of its sum of int32; ``factors`` is the address of the
    row's scale and sum."""
    scale, row_sum = (every_lane(builder, offset_by(builder, factors, x), f32) for x in (0, 4))
    value = builder.fmul(builder.sitofp(whole, f32x), scale)
    for one in ((value, pair[0]), (row_sum, pair[1])):
        total = call_llvm(builder, "llvm.fma.v16f32", f32x, [*one, total])
    return total


# --------------------------------------------------------------------------- by tiles


@emitted(types.void, types.int64, types.int64)
def unpack(builder, source, target):
    """64 bytes of nibbles as 128 bytes."""
    for n, half in enumerate(_halves(builder, source)):
        builder.store(half, pointer(builder, offset_by(builder, target, 64 * n), i32x), align=4)


@emitted(types.void, *[types.int64] * 4)
def add_row(builder, sums, wholes, factors, pairs):
    """Add a group's product of one row and one column to float32 [16]."""
    where = pointer(builder, sums, f32x)
    whole = builder.load(pointer(builder, wholes, i32x), align=4)
    total = builder.load(where, align=4)
    total = _add_group(builder, total, whole, factors, _pair(builder, pairs))
    builder.store(total, where, align=4)


@inner
def multiply_by_tiles(tag, call, column, first, last, sums, shaped):
    """``sums`` float32 [last - first, 32] = rows [first, last) times two columns; ``shaped`` as in
    ``product_kernel``."""
    size, group = call.size, call.group
    group_bytes, steps = _PAIR_BYTES + 8 * group, -(-group // 64)
    column_bytes = size // group * group_bytes
    unpacked = sums + RESULT_BYTES
    result = unpacked + 2 * _COLUMN_BYTES
    for i in range(2 * (last - first)):
        store(sums + 64 * i, splat(ZERO))
    for i in range(2 * _COLUMN_BYTES // 64 if group < 64 else 0):  # what a tile has beyond a group
        store(unpacked + 64 * i, splat(ZERO))
    for g in range(size // group):
        pairs = column + g * group_bytes
        for n in range(2):
            for i in range(group // 8):
                source = pairs + n * column_bytes + _PAIR_BYTES + 64 * i
                unpack(source, unpacked + n * steps * 1024 + 128 * i)
        for begin in range(first, last, 32):
            x = call.x + begin * call.x_stride
            shaped = multiply_rows(
                tag, min(last - begin, 32), False, shaped, x + g * group, call.x_stride, unpacked,
                steps, steps, result, False,
            )  # fmt: skip
            for m in range(shaped):
                factors, at = x + m * call.x_stride + size + 8 * g, 128 * m
                where = sums + 128 * (begin - first) + at
                add_row(where, result + at, factors, pairs)
                add_row(where + 64, result + at + 64, factors, pairs + column_bytes)
    return shaped


@inner
def multiply_group_pair(tag, call, pair, first, last, result, shaped):
    """As ``product_kernel.multiply_pair``. Few rows are as fast by vectors."""
    column = call.weight + pair * call.steps * 2
    if call.tiles != 0 and last - first > MAX_ROWS:
        shaped = multiply_by_tiles(tag, call, column, first, last, result, shaped)
        finish(tag, call, pair, first, last - first, result)
        return shaped
    for at in range(first, last, MAX_ROWS):
        rows, x = min(last - at, MAX_ROWS), call.x + at * call.x_stride
        multiply_few(rows, x, call.x_stride, call.size, call.group, column, result)
        finish(tag, call, pair, at, rows, result)
    return shaped


groups_body = make_body(multiply_group_pair)
