"""The product of linear layers whose weights have 4 bits, in groups of inputs, as a Numba kernel.

A weight is ``q * scale + least`` with q from 0 to 15; scale and least are its group's of 32, 64 or
128 inputs. Each group of a row of x is rounded to bytes of a scale of its own. The product of two
groups is an exact sum in int32; those are scaled and added up in float32, in the groups' order.
So vectors, for the few rows of a decode, and the tile unit give the same bits.

A column of 16 outputs is ``size / group`` times a vector of bfloat16 pairs (scale, least), then the
group's nibbles: the low ones of a vector are what a vector of bytes would be (``product_kernel``),
and the high ones the next. Vectors are unpacked in registers, tiles once for ROWS_PER_CHUNK rows.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.compiled import Call, reader, record
from jitney.kernels.cpu.product_kernel import (
    ROWS_PER_CHUNK,
    finish,
    multiply_16,
    multiply_32,
    read_product,
    result_memory,
    set_shapes,
    take_item,
)
from jitney.kernels.cpu.products import (
    MAX_ROWS,
    accumulators,
    add_nibbles,
    amx_end,
    i8,
    multiply_nibbles,
    stack_memory,
)
from jitney.kernels.cpu.simd import (
    BF16,
    I4,
    LANES,
    ZERO,
    call_llvm,
    emitted,
    every,
    f32,
    f32x,
    fetch_add,
    fma,
    i32,
    i32x,
    i64,
    inner,
    lane_max,
    lane_sum,
    larger,
    load_as,
    nearest,
    offset_by,
    pointer,
    prefetch_line,
    splat,
    splat_value,
    store,
    store_f32,
    vector,
    widen_bf16,
)

_ROWS_PER_ITEM = 4
_BLOCK = 32
"""Inputs whose products sum up in 16 bits, where the processor has no instruction for 32."""
_LEAST = np.float32(1e-36)
"""A group whose elements are no larger is taken for zeros: 127 over them would be infinite."""
_PAIR_BYTES = 64
"""Of scales and leasts of a column."""
_TILE_BYTES, _RESULT_BYTES = 2048, 4096
"""Of a column's group of 128 inputs, and of a product of tiles."""


@record
class RoundGroupsCall(Call):
    """Arguments of :func:`round_groups_body`."""

    x: int
    """bfloat16 [count, size]"""
    size: int
    group: int
    out: int
    """[count] rows: int8 [size], then float32 [size / group, 2]: a group's scale, and the sum of
    its bytes times that."""
    out_stride: int


read_round_groups = reader(RoundGroupsCall)


@emitted(types.void, types.intp, vector)
def store_signed(builder, address, value):
    """Whole lanes of -128 to 127 as bytes."""
    narrow = ir.VectorType(i8, LANES)
    whole = builder.trunc(builder.fptosi(value, i32x), narrow)
    builder.store(whole, pointer(builder, address, narrow), align=1)


@inner
def round_groups_body(arguments):
    """x -> x / scale, where a scale for each group makes its largest element 127."""
    call = read_round_groups(arguments)
    while True:
        first = fetch_add(arguments) * _ROWS_PER_ITEM
        if first >= call.count:
            return
        for r in range(first, min(first + _ROWS_PER_ITEM, call.count)):
            row, out = call.x + r * call.size * 2, call.out + r * call.out_stride
            factors = out + call.size
            for begin in range(0, call.size, call.group):
                best, strange = splat(ZERO), splat(ZERO)
                for i in range(begin, begin + call.group, LANES):
                    x = load_as(BF16, row + 2 * i)
                    best = larger(larger(x, splat(ZERO) - x), best)
                    strange = fma(x, splat(ZERO), strange)  # NaN, if x is or is not finite
                largest, total = lane_max(best), splat(ZERO)
                share = splat(np.float32(127.0) / largest if largest > _LEAST else ZERO)
                for i in range(begin, begin + call.group, LANES):
                    whole = nearest(load_as(BF16, row + 2 * i) * share)
                    store_signed(out + i, whole)
                    total = total + whole
                scale = largest / np.float32(127.0) + lane_sum(strange)
                store_f32(factors, scale)
                store_f32(factors + 4, scale * lane_sum(total))
                factors += 8


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
                    row = [_every_lane(builder, where, f32, 4 * k) for k in range(2)]
                    value = _add_group(builder, builder.load(slot), builder.load(whole), row, pair)
                    builder.store(value, slot)
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
                    right = _every_lane(builder, where, i32, 8 * step + 4 * half)
                    for n, left in enumerate(halves):
                        key = i * len(halves) + n
                        parts[key] = multiply_nibbles(builder, parts[key], left[half], right)
        for slot, part in zip(wholes, parts, strict=True):
            builder.store(add_nibbles(builder, builder.load(slot), part), slot)

    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for m in range(1, MAX_ROWS + 1):
        block = builder.append_basic_block(f"rows.{m}")
        switch.add_case(ir.Constant(i64, m), block)
        builder.position_at_end(block)
        width = max(1, min(2, accumulators() // m))
        for n in range(0, 2, width):
            by_rows(m, range(n, n + width))
        builder.branch(done)
    builder.position_at_end(done)


def _every_lane(builder: Any, address: Any, kind: Any, offset: int) -> Any:
    """IR: a number of four bytes, in every lane."""
    where = pointer(builder, offset_by(builder, address, offset), kind)
    return splat_value(builder, builder.load(where, align=4))


def _add_group(builder: Any, total: Any, whole: Any, row: Any, pair: Any) -> Any:
    """IR: ``total`` plus a group's product, of its sum of int32."""
    value = builder.fmul(builder.sitofp(whole, f32x), row[0])
    for factors in ((value, pair[0]), (row[1], pair[1])):
        total = call_llvm(builder, "llvm.fma.v16f32", f32x, [*factors, total])
    return total


# --------------------------------------------------------------------------- by tiles


@emitted(types.int64)
def tile_memory(builder):
    """The address of two columns of a group as bytes, int32 [32, 32], float32 [ROWS_PER_CHUNK,
    32]."""
    return stack_memory(builder, 2 * _TILE_BYTES + _RESULT_BYTES + ROWS_PER_CHUNK * 128)


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
    row = [_every_lane(builder, factors, f32, 4 * k) for k in range(2)]
    total = _add_group(builder, builder.load(where, align=4), whole, row, _pair(builder, pairs))
    builder.store(total, where, align=4)


@inner
def multiply_by_tiles(call, column, first, last, memory, shaped):
    """Rows [first, last) times two columns; ``shaped`` as in ``product_kernel``."""
    size, group = call.size, call.group
    group_bytes, steps = _PAIR_BYTES + 8 * group, -(-group // 64)
    column_bytes = size // group * group_bytes
    result = memory + 2 * _TILE_BYTES
    sums = result + _RESULT_BYTES
    for i in range(2 * (last - first)):
        store(sums + 64 * i, splat(ZERO))
    for i in range(2 * _TILE_BYTES // 64 if group < 64 else 0):  # what a tile has beyond a group
        store(memory + 64 * i, splat(ZERO))
    for g in range(size // group):
        pairs = column + g * group_bytes
        for n in range(2):
            for i in range(group // 8):
                source = pairs + n * column_bytes + _PAIR_BYTES + 64 * i
                unpack(source, memory + n * steps * 1024 + 128 * i)
        for begin in range(first, last, 32):
            rows = min(last - begin, 32)
            if rows != shaped:
                set_shapes(min(rows, 16), max(rows - 16, 1))
                shaped = rows
            x = call.x + begin * call.x_stride
            if rows > 16:
                multiply_32(I4, x + g * group, call.x_stride, memory, steps, steps, result, False)
            else:
                multiply_16(I4, x + g * group, call.x_stride, memory, steps, steps, result, False)
            for m in range(rows):
                factors, at = x + m * call.x_stride + size + 8 * g, 128 * m
                where = sums + 128 * (begin - first) + at
                add_row(where, result + at, factors, pairs)
                add_row(where + 64, result + at + 64, factors, pairs + column_bytes)
    return shaped


# --------------------------------------------------------------------------- the kernel


@inner
def groups_body(arguments):
    """Take items until none is left."""
    call = read_product(arguments)
    result, memory = result_memory(), tile_memory()
    shaped = np.int64(0)
    while True:
        first, last, begin, end = take_item(arguments, call)
        if first >= last:
            break
        for pair in range(begin, end):
            column = call.weight + pair * call.steps * 2
            if call.tiles != 0 and last - first > MAX_ROWS:
                shaped = multiply_by_tiles(call, column, first, last, memory, shaped)
                finish(
                    I4, call, pair, first, last - first, memory + 2 * _TILE_BYTES + _RESULT_BYTES
                )
                continue
            for at in range(first, last, MAX_ROWS):
                rows = min(last - at, MAX_ROWS)
                x = call.x + at * call.x_stride
                multiply_few(rows, x, call.x_stride, call.size, call.group, column, result)
                finish(I4, call, pair, at, rows, result)
    if call.tiles != 0:
        amx_end()
