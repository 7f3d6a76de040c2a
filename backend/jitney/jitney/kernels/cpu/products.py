"""Small matrix products with all accumulators in registers: the two inner loops of attention.

Both compute ``out[m, n] += sum over u of a[m, u] . b_n[u]`` for a few rows m and COLUMNS vectors n
of 16 lanes. u counts units of four bytes (see ``simd``): a[m, u] is one unit, broadcast to all
lanes, and b_n[u] is one vector of 16 units, so a two-byte type multiplies two neighbouring elements
per lane and adds both products, which is one instruction on processors with AVX512-BF16.

- ``score_tile``: a = queries, u = head elements, lanes = 16 tokens of one group of keys;
- ``value_tile_wide``, ``value_tile_narrow``: a = weights, u = tokens, lanes = 16 head elements of
  the values.

Each takes ``tiles``: whether the processor's tile unit (AMX) computes it, of bfloat16 and as many
rows as :func:`amx_begin` was told, or vectors, of 1 to MAX_ROWS rows.

A thread has eight tile registers of at most 16 rows of 64 bytes. Before it uses them it sets their
shapes (:func:`emit_shapes`), and in the end it gives them back (:func:`amx_end`), so that nothing
has to be saved at a context switch.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.simd import (
    LANES,
    TAG,
    UNIT_BYTES,
    bf16,
    call_llvm,
    emitted,
    every,
    f32x,
    host_has,
    i8,
    i16,
    i32,
    i32x,
    i64,
    offset_by,
    pointer,
    prefetch_line,
    splat_value,
    widen_bf16,
)

MAX_ROWS = 6
MAX_ROWS_AMX = 16
COLUMNS = 4
GROUP_TOKENS = LANES
"""Tokens in one group of the cache."""
VECTOR_BYTES = LANES * UNIT_BYTES
PREFETCH_GROUPS = 8
"""The lists of groups go on for so many entries after those in use: what is read soon."""

# Tiles 0 to 3 accumulate [rows, 16 float32]; 4 and 5 hold a and b for 16 units, 6 and 7 for 8
# units, because heads are multiples of 16 elements and a group holds 16 tokens: 8 units of
# bfloat16.
_A, _B, _A_HALF, _B_HALF = 4, 5, 6, 7
_TILE_ROW_BYTES = [64] * 6 + [32, 64]

# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see its Documentation/arch/x86/xstate.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def host_has_amx() -> bool:
    """Whether the processor that Numba compiles for has a tile unit for bfloat16."""
    return host_has("amx-bf16")


def may_use_amx() -> bool:
    """Whether this process may use a tile unit: asks Linux for the right. Asking twice is fine."""
    if not host_has_amx() or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def widens() -> bool:
    """Whether the processor multiplies no bfloat16, so that it has to be widened."""
    return not may_use_amx() and not host_has("avx512bf16")


def instruction_set() -> str:
    """What kernels are made of here: ``amx``, ``avx512`` with what it has of bfloat16 and bytes,
    ``avx2``, or ``vectors`` of another kind."""
    if may_use_amx():
        return "amx"
    if host_has("avx512f"):
        return " ".join(["avx512", *(x for x in ("bf16", "vnni") if host_has(f"avx512{x}"))])
    return "avx2" if host_has("avx2") else "vectors"


def emit_amx(builder: Any, name: str, *args: Any) -> None:
    """IR: an instruction of the tile unit, by LLVM's name, if there is one. Numbers are tiles."""
    values = [ir.Constant(i8, a) if isinstance(a, int) else a for a in args]
    if host_has_amx():
        call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), values)


def move_tile(builder: Any, name: str, tile: int, address: Any, stride: Any) -> None:
    """IR: load or store a tile whose rows are ``stride`` bytes apart in memory."""
    emit_amx(builder, name, tile, pointer(builder, address, i8), stride)


def emit_shapes(builder: Any, rows: Sequence[Any], row_bytes: Sequence[int]) -> None:
    """IR: set the shapes of this thread's eight tiles: ``rows`` are numbers or values of 8 bits."""
    values = [1, *[0] * 63]  # the palette is 1
    values[16:32:2], values[48:56] = row_bytes, rows
    where = stack_memory(builder, 64)
    for offset, value in enumerate(values):
        byte = ir.Constant(i8, value) if isinstance(value, int) else value
        builder.store(byte, pointer(builder, offset_by(builder, where, offset), i8))
    emit_amx(builder, "ldtilecfg", pointer(builder, where, i8))


def stack_memory(builder: Any, size: int) -> Any:
    """IR: the address of so many bytes on the stack, in whole cache lines."""
    # Of vectors: Numba stores zeros there, and of 16,384 bytes LLVM makes a store of each.
    memory = cgutils.alloca_once(builder, ir.ArrayType(f32x, -(-size // VECTOR_BYTES)))
    memory.align = 64
    return builder.ptrtoint(memory, i64)


@emitted(types.void, types.int64)
def amx_begin(builder, rows):
    """Set the shapes of this thread's tiles for attention of slices of 1 to 16 ``rows``."""
    rows = builder.trunc(rows, i8)
    emit_shapes(builder, [*[rows] * 5, 16, rows, 8], _TILE_ROW_BYTES)


@emitted(types.void)
def amx_end(builder):
    """Give the tile registers back."""
    emit_amx(builder, "tilerelease")


def _dot(builder: Any, tag: Any, acc: Any, units: Sequence[Any], b: Any) -> Any:
    """IR: acc + a . b per lane; a, the only one of ``units``, and b are vectors of 16 units as
    int32. Of bytes, those of a are unsigned and those of b signed, and the float32 lanes of acc
    hold the bits of int32. WIDE has two units of a, the low elements and the high ones."""
    if tag == types.uint32:
        halves = widen_bf16(builder, b), builder.bitcast(builder.and_(b, every(i32x, -65536)), f32x)
        for unit, half in zip(units, halves, strict=True):
            args = [builder.bitcast(unit, f32x), half, acc]
            acc = call_llvm(builder, "llvm.fma.v16f32", f32x, args)
        return acc
    (a,) = units
    if tag == types.int8:
        return builder.bitcast(_dot_bytes(builder, builder.bitcast(acc, i32x), a, b), f32x)
    if tag == types.uint16 and host_has("avx512bf16"):
        pairs = ir.VectorType(bf16, 2 * LANES)
        args = [acc, builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x, args)
    if tag == types.uint16:  # the low elements, then the high ones, as float32
        low = widen_bf16(builder, a), widen_bf16(builder, b)
        acc = call_llvm(builder, "llvm.fma.v16f32", f32x, [*low, acc])
        a, b = (builder.and_(units, every(i32x, -65536)) for units in (a, b))
    last = builder.bitcast(a, f32x), builder.bitcast(b, f32x)
    return call_llvm(builder, "llvm.fma.v16f32", f32x, [*last, acc])


def _dot_bytes(builder: Any, acc: Any, a: Any, b: Any) -> Any:
    """IR: acc + a . b per lane, exactly; all are vectors of int32."""
    if host_has("avx512vnni"):
        return _by_parts(builder, "avx512.vpdpbusd.512", i32, acc, a, b)
    if host_has("avxvnni"):
        return _by_parts(builder, "avx512.vpdpbusd.256", i32, acc, a, b)
    # As int16 the even bytes of both, then the odd ones: an instruction multiplies them and adds
    # two products. (That for bytes would add them in int16, where they do not fit.)
    pairs = ir.VectorType(i16, 2 * LANES)
    eight, low = (ir.Constant(pairs, [x] * (2 * LANES)) for x in (8, 255))
    a, b = builder.bitcast(a, pairs), builder.bitcast(b, pairs)
    even = builder.and_(a, low), builder.ashr(builder.shl(b, eight), eight)
    odd = builder.lshr(a, eight), builder.ashr(b, eight)
    name = "avx512.pmaddw.d.512" if host_has("avx512bw") else "avx2.pmadd.wd"
    for each in (even, odd):
        acc = builder.add(acc, _by_parts(builder, name, i16, *each))
    return acc


def multiply_nibbles(builder: Any, part: Any, a: Any, b: Any) -> Any:
    """IR: part + a . b per lane, exactly, for :func:`add_nibbles`, which must follow after eight of
    them; a has bytes from 0 to 15, and b signed ones."""
    if host_has("avx512vnni") or host_has("avxvnni"):
        return _dot_bytes(builder, part, a, b)
    # Eight sums of two products of 15 and 127 fit into 16 bits.
    name = "avx512.pmaddubs.w.512" if host_has("avx512bw") else "avx2.pmadd.ub.sw"
    pairs = ir.VectorType(i16, 2 * LANES)
    product = builder.bitcast(_by_parts(builder, name, i8, a, b, result=i16), pairs)
    return builder.bitcast(builder.add(builder.bitcast(part, pairs), product), i32x)


def add_nibbles(builder: Any, total: Any, part: Any) -> Any:
    """IR: int32 total + part."""
    if not (host_has("avx512vnni") or host_has("avxvnni")):
        name = "avx512.pmaddw.d.512" if host_has("avx512bw") else "avx2.pmadd.wd"
        part = _by_parts(builder, name, i16, part, every(i32x, 0x10001))
    return builder.add(total, part)


def _by_parts(builder: Any, name: str, element: Any, *values: Any, result: Any = i32) -> Any:
    """IR: an instruction on vectors, of 256 bits or 512 as its ``name`` says, for all lanes. The
    last two ``values`` are of ``element``, and any other of int32. The ``result`` has elements of
    this type, and is given as int32."""
    count = 1 if name.endswith("512") else 2
    lanes = LANES // count
    done = []
    for part in range(count):
        mine = ir.Constant(ir.VectorType(i32, lanes), list(range(part * lanes, (part + 1) * lanes)))
        units = [builder.bitcast(value, i32x) for value in values]
        arguments = [builder.shuffle_vector(each, each, mine) for each in units]
        kind = ir.VectorType(element, lanes * 32 // element.width)
        arguments[-2:] = [builder.bitcast(each, kind) for each in arguments[-2:]]
        to = ir.VectorType(result, lanes * 32 // result.width)
        value = call_llvm(builder, f"llvm.x86.{name}", to, arguments)
        done.append(builder.bitcast(value, ir.VectorType(i32, lanes)))
    if count == 1:
        return done[0]
    return builder.shuffle_vector(*done, ir.Constant(i32x, list(range(LANES))))


def accumulators() -> int:
    """Vectors of 16 lanes that stay in registers at once: 24 of AVX-512's 32, beside 4 of b and a
    broadcast, or 6 pairs of AVX2's 16."""
    return 24 if host_has("avx512f") else 6


def every_lane(builder: Any, address: Any, kind: Any = i32) -> Any:
    """IR: the number of four bytes at ``address``, in every lane."""
    return splat_value(builder, builder.load(pointer(builder, address, kind), align=4))


def emit_by_rows(builder: Any, rows: Any, columns: int, emit: Callable[[int, range], None]) -> None:
    """IR: what ``emit(m, chosen)`` emits for m rows, which are 1 to MAX_ROWS, and for as many of
    the columns at a time as have all their accumulators in registers."""
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for m in range(1, MAX_ROWS + 1):
        block = builder.append_basic_block(f"rows.{m}")
        switch.add_case(ir.Constant(i64, m), block)
        builder.position_at_end(block)
        width = max(1, min(columns, accumulators() // m))
        for n in range(0, columns, width):
            emit(m, range(n, min(n + width, columns)))
        builder.branch(done)
    builder.position_at_end(done)


def make_tile(columns: int, *, across: bool, ahead: int = PREFETCH_GROUPS) -> Any:
    """A Numba function for one tile of ``columns`` vectors, which prefetches groups so far ahead.

    ``a``: address of [rows] times ``count`` times ``units`` units, rows ``a_stride`` bytes apart.
    ``groups``: address of int64 addresses of groups, whose units are ``step`` bytes apart and begin
    at ``offset``. ``out``: float32 [rows, columns * 16], rows ``out_stride`` bytes apart.

    With ``across``, each vector is of another group, ``count`` is 1, and ``out`` is written. Else
    they lie side by side in each of ``count`` groups, and what ``out`` holds is added to.
    """

    @emitted(types.void, TAG, types.boolean, *[types.int64] * 10)
    def tile(
        builder, tag, tiles, rows, a, a_stride, groups, count, units, step, offset, out, out_stride
    ):
        def entry(index: Any) -> Any:
            return builder.load(pointer(builder, offset_by(builder, groups, index, 8), i64))

        def vectors(group: Any, chosen: Sequence[int], further: int = 0) -> list[Any]:
            """Addresses of the first units."""
            if across:
                return [entry(ir.Constant(i64, n + further)) for n in chosen]
            start = builder.add(entry(offset_by(builder, group, further)), offset)
            return [offset_by(builder, start, n, VECTOR_BYTES) for n in chosen]

        def by_vectors(m: int, chosen: Sequence[int]) -> None:
            starts = [offset_by(builder, out, i, out_stride) for i in range(m)]
            outs = [
                pointer(builder, offset_by(builder, start, n, VECTOR_BYTES), f32x)
                for start in starts
                for n in chosen
            ]
            # In registers, once LLVM has promoted these stack slots.
            accumulators = [cgutils.alloca_once(builder, f32x) for _ in outs]
            for where, slot in zip(outs, accumulators, strict=True):
                begin = every(f32x, 0.0) if across else builder.load(where, align=4)
                builder.store(begin, slot)
            with cgutils.for_range(builder, count) as group:
                first = builder.mul(group.index, units)
                now, soon = (vectors(group.index, chosen, further) for further in (0, ahead))
                with cgutils.for_range(builder, units) as unit:
                    for b in soon:
                        prefetch_line(builder, offset_by(builder, b, unit.index, step))
                    wheres = [offset_by(builder, b, unit.index, step) for b in now]
                    loaded = [builder.load(pointer(builder, x, i32x), align=4) for x in wheres]
                    parts = 2 if tag == types.uint32 else 1
                    at = builder.add(first, unit.index)
                    u = offset_by(builder, a, at, parts * UNIT_BYTES)
                    for i in range(m):
                        row = offset_by(builder, u, i, a_stride)
                        wheres = [offset_by(builder, row, n, UNIT_BYTES) for n in range(parts)]
                        left = [every_lane(builder, where) for where in wheres]
                        for n, right in enumerate(loaded):
                            slot = accumulators[i * len(chosen) + n]
                            builder.store(_dot(builder, tag, builder.load(slot), left, right), slot)
            for where, slot in zip(outs, accumulators, strict=True):
                builder.store(builder.load(slot), where, align=4)

        def by_tiles() -> None:
            few = builder.icmp_signed("<", rows, ir.Constant(i64, MAX_ROWS))
            outs = [offset_by(builder, out, n, VECTOR_BYTES) for n in range(columns)]
            for n, where in enumerate(outs):
                if across:
                    emit_amx(builder, "tilezero", n)
                else:
                    move_tile(builder, "tileloadd64", n, where, out_stride)
            with cgutils.for_range(builder, count) as group:
                first = builder.mul(group.index, units)
                starts, soon = (vectors(group.index, range(columns), n) for n in (0, ahead))

                def add(unit: Any, left: int, right: int) -> None:
                    with builder.if_then(few):
                        for b in soon:
                            for line in range(16 if left == _A else 8):
                                at = builder.add(unit, ir.Constant(i64, line))
                                prefetch_line(builder, offset_by(builder, b, at, step))
                    u = builder.add(first, unit)
                    where = offset_by(builder, a, u, UNIT_BYTES)
                    move_tile(builder, "tileloadd64", left, where, a_stride)
                    for n, start in enumerate(starts):
                        where = offset_by(builder, start, unit, step)
                        move_tile(builder, "tileloadd64", right, where, step)
                        emit_amx(builder, "tdpbf16ps", n, left, right)

                zero, sixteen = ir.Constant(i64, 0), ir.Constant(i64, 16)
                whole = builder.and_(units, ir.Constant(i64, -16))
                with cgutils.for_range_slice(builder, zero, whole, sixteen, inc=True) as (unit, _):
                    add(unit, _A, _B)
                with builder.if_then(builder.icmp_signed("<", whole, units)):
                    add(whole, _A_HALF, _B_HALF)
            for n, where in enumerate(outs):
                move_tile(builder, "tilestored64", n, where, out_stride)

        if tag != types.uint16 or not host_has_amx():
            emit_by_rows(builder, rows, columns, by_vectors)
            return
        with builder.if_else(tiles) as (then, otherwise):
            with then:
                by_tiles()
            with otherwise:
                emit_by_rows(builder, rows, columns, by_vectors)

    return tile


score_tile = make_tile(COLUMNS, across=True)
value_tile_wide = make_tile(COLUMNS, across=False)
value_tile_narrow = make_tile(1, across=False)
