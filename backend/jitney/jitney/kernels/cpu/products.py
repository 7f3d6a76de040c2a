# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""Small matrix products with all accumulators in registers: the two inner loops of attention.

Both compute ``out[m, n] += sum over u of a[m, u] . b_n[u]`` for a few rows m and COLUMNS vectors n
of 16 lanes. u counts units of four bytes (see ``simd``): a[m, u] is one unit, broadcast to all
lanes, and b_n[u] is one vector of 16 units, so a two-byte type multiplies two neighbouring elements
per lane and adds both products, which is one instruction on processors with AVX512-BF16.

- :func:`score_tile`: a = queries, u = head elements, lanes = 16 tokens of one group of keys;
- ``value_tile_wide``, ``value_tile_narrow``: a = weights, u = tokens, lanes = 16 head elements of
  the values.

Each takes ``tiles``: whether the tile unit (``amx``) computes it, of bfloat16 and always
MAX_ROWS_AMX rows, or vectors, of 1 to MAX_ROWS rows.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.amx import emit_amx, emit_shapes, host_has_amx, move_tile
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
"""6 rows of 4 columns are 24 accumulators: with 4 vectors of b and a broadcast they fill the 32
registers of AVX-512."""
COLUMNS = 4
GROUP_TOKENS = LANES
"""Tokens in one group of the cache."""
VECTOR_BYTES = LANES * UNIT_BYTES
PREFETCH_GROUPS = 8
"""The lists of groups go on for so many entries after those in use: what is read soon."""

# Tiles 0 to 3 accumulate [16 rows, 16 float32]; 4 and 5 hold a and b for 16 units, 6 and 7 for 8
# units, because heads are multiples of 16 elements and a group holds 16 tokens: 8 units of
# bfloat16.
_A, _B, _A_HALF, _B_HALF = 4, 5, 6, 7
_TILE_ROWS, _TILE_ROW_BYTES = [16] * 7 + [8], [64] * 6 + [32, 64]


def _dot(builder: Any, tag: Any, acc: Any, a: Any, b: Any) -> Any:
    """IR: acc + a . b per lane; a and b are vectors of 16 units as int32."""
    if tag == types.uint16 and host_has("avx512bf16"):
        pairs = ir.VectorType(bf16, 2 * LANES)
        args = [acc, builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x, args)
    for x, y in zip(_widen(builder, tag, a), _widen(builder, tag, b), strict=True):
        acc = call_llvm(builder, "llvm.fma.v16f32", f32x, [x, y, acc])
    return acc


def _widen(builder: Any, tag: Any, units: Any) -> list[Any]:
    """IR: the elements of each unit as float32: the one, or the low and the high one."""
    if tag == types.float32:
        return [builder.bitcast(units, f32x)]
    high = builder.and_(units, every(i32x, -65536))
    return [widen_bf16(builder, units), builder.bitcast(high, f32x)]


def _entry(builder: Any, addresses: Any, index: Any) -> Any:
    """IR: entry ``index`` of a list of int64 addresses."""
    return builder.load(pointer(builder, offset_by(builder, addresses, index, 8), i64))


class _Accumulators:
    """rows x columns vectors, in registers once LLVM has promoted the stack slots."""

    def __init__(self, builder: Any, tag: Any, rows: int, columns: int) -> None:
        self.builder, self.tag = builder, tag
        self.slots = [
            [cgutils.alloca_once(builder, f32x) for _ in range(columns)] for _ in range(rows)
        ]

    def clear(self) -> None:
        for slot in chain.from_iterable(self.slots):
            self.builder.store(ir.Constant(f32x, [0.0] * LANES), slot)

    def _addresses(self, out: Any, out_stride: Any) -> Any:
        for m, row in enumerate(self.slots):
            start = offset_by(self.builder, out, m, out_stride)
            for n, slot in enumerate(row):
                where = offset_by(self.builder, start, n, VECTOR_BYTES)
                yield pointer(self.builder, where, f32x), slot

    def read(self, out: Any, out_stride: Any) -> None:
        for where, slot in self._addresses(out, out_stride):
            self.builder.store(self.builder.load(where, align=4), slot)

    def write(self, out: Any, out_stride: Any) -> None:
        for where, slot in self._addresses(out, out_stride):
            self.builder.store(self.builder.load(slot), where, align=4)

    def add_unit(self, a: Any, a_stride: Any, b: list[Any], soon: list[Any]) -> None:
        """acc[m][n] += a[m] . b[n], where ``a`` is the address of row 0's unit.

        ``soon`` are addresses to be fetched into the cache meanwhile.
        """
        builder = self.builder
        for address in soon:
            prefetch_line(builder, address)
        vectors = [builder.load(pointer(builder, x, i32x), align=4) for x in b]
        for m, row in enumerate(self.slots):
            where = pointer(builder, offset_by(builder, a, m, a_stride), i32)
            unit = splat_value(builder, builder.load(where, align=4))
            for slot, units in zip(row, vectors, strict=True):
                builder.store(_dot(builder, self.tag, builder.load(slot), unit, units), slot)


def _either(
    builder: Any,
    tag: Any,
    tiles: Any,
    rows: Any,
    by_tiles: Callable[[], None],
    by_vectors: Callable[[int], None],
) -> None:
    """IR: one of the two, as ``tiles`` says at run time, where the processor and the type allow."""
    if tag != types.uint16 or not host_has_amx():
        _for_each_row_count(builder, rows, by_vectors)
        return
    with builder.if_else(tiles) as (then, otherwise):
        with then:
            by_tiles()
        with otherwise:
            _for_each_row_count(builder, rows, by_vectors)


def _for_each_row_count(builder: Any, rows: Any, emit: Callable[[int], None]) -> None:
    """IR: run ``emit(m)`` for the m from 1 to MAX_ROWS that ``rows`` holds at run time."""
    done = builder.append_basic_block("rows.done")
    switch = builder.switch(rows, done)
    for m in range(1, MAX_ROWS + 1):
        block = builder.append_basic_block(f"rows.{m}")
        switch.add_case(ir.Constant(i64, m), block)
        builder.position_at_end(block)
        emit(m)
        builder.branch(done)
    builder.position_at_end(done)


@emitted(types.void, TAG, types.boolean, *[types.int64] * 7)
def score_tile(builder, tag, tiles, rows, q, q_stride, groups, units, out, out_stride):
    """Scores of ``rows`` queries against COLUMNS groups of keys.

    ``q``: address of [rows] queries, ``q_stride`` bytes apart, ``units`` units each. ``groups``:
    address of COLUMNS int64 addresses of groups [units, 16 tokens]. ``out``: float32
    [rows, COLUMNS * 16], rows ``out_stride`` bytes apart.
    """

    def by_vectors(m: int) -> None:
        acc = _Accumulators(builder, tag, m, COLUMNS)
        acc.clear()
        starts, later = (
            [_entry(builder, groups, n + ahead) for n in range(COLUMNS)]
            for ahead in (0, PREFETCH_GROUPS)
        )
        with cgutils.for_range(builder, units) as loop:
            step = builder.mul(loop.index, ir.Constant(i64, VECTOR_BYTES))
            now, soon = ([builder.add(x, step) for x in xs] for xs in (starts, later))
            acc.add_unit(offset_by(builder, q, loop.index, UNIT_BYTES), q_stride, now, soon)
        acc.write(out, out_stride)

    def by_tiles() -> None:
        line = ir.Constant(i64, VECTOR_BYTES)

        def step(unit: Any, a: int, b: int) -> None:
            here = offset_by(builder, q, unit, UNIT_BYTES)
            move_tile(builder, "tileloadd64", a, here, q_stride)
            for n in range(COLUMNS):
                where = offset_by(builder, _entry(builder, groups, n), unit, line)
                move_tile(builder, "tileloadd64", b, where, line)
                emit_amx(builder, "tdpbf16ps", n, a, b)

        for n in range(COLUMNS):
            emit_amx(builder, "tilezero", n)
        whole = builder.and_(units, ir.Constant(i64, -16))
        with cgutils.for_range_slice(
            builder, ir.Constant(i64, 0), whole, ir.Constant(i64, 16), inc=True
        ) as (unit, _):
            step(unit, _A, _B)
        with builder.if_then(builder.icmp_signed("<", whole, units)):
            step(whole, _A_HALF, _B_HALF)
        for n in range(COLUMNS):
            where = offset_by(builder, out, n, VECTOR_BYTES)
            move_tile(builder, "tilestored64", n, where, out_stride)

    _either(builder, tag, tiles, rows, by_tiles, by_vectors)


def _make_value_tile(columns: int) -> Any:
    """Adds 16 * ``columns`` head elements of weights times values.

    ``p``: address of [rows] weights, ``p_stride`` bytes apart, of 16 tokens per group. ``groups``:
    address of ``count`` int64 addresses of groups [token units, head], whose units are ``step``
    bytes apart; ``offset`` bytes lead to the first head element. ``out``: float32 accumulators,
    rows ``out_stride`` bytes apart.
    """

    @emitted(types.void, TAG, types.boolean, *[types.int64] * 9)
    def value_tile(
        builder, tag, tiles, rows, p, p_stride, groups, count, step, offset, out, out_stride
    ):
        def by_vectors(m: int) -> None:
            units = ir.Constant(i64, GROUP_TOKENS * tag.bitwidth // 32)
            acc = _Accumulators(builder, tag, m, columns)
            acc.read(out, out_stride)
            with cgutils.for_range(builder, count) as group:
                ahead = offset_by(builder, group.index, PREFETCH_GROUPS)
                starts = [
                    builder.add(_entry(builder, groups, g), offset) for g in (group.index, ahead)
                ]
                first = builder.mul(group.index, units)
                with cgutils.for_range(builder, units) as unit:
                    here = (offset_by(builder, start, unit.index, step) for start in starts)
                    now, soon = (
                        [offset_by(builder, b, n, VECTOR_BYTES) for n in range(columns)]
                        for b in here
                    )
                    u = builder.add(first, unit.index)
                    acc.add_unit(offset_by(builder, p, u, UNIT_BYTES), p_stride, now, soon)
            acc.write(out, out_stride)

        def by_tiles() -> None:
            outs = [offset_by(builder, out, n, VECTOR_BYTES) for n in range(columns)]
            for n, where in enumerate(outs):
                move_tile(builder, "tileloadd64", n, where, out_stride)
            with cgutils.for_range(builder, count) as group:
                weights = offset_by(builder, p, group.index, 2 * GROUP_TOKENS)
                move_tile(builder, "tileloadd64", _A_HALF, weights, p_stride)
                start = builder.add(_entry(builder, groups, group.index), offset)
                for n in range(columns):
                    where = offset_by(builder, start, n, VECTOR_BYTES)
                    move_tile(builder, "tileloadd64", _B_HALF, where, step)
                    emit_amx(builder, "tdpbf16ps", n, _A_HALF, _B_HALF)
            for n, where in enumerate(outs):
                move_tile(builder, "tilestored64", n, where, out_stride)

        _either(builder, tag, tiles, rows, by_tiles, by_vectors)

    return value_tile


value_tile_wide = _make_value_tile(COLUMNS)
value_tile_narrow = _make_value_tile(1)


@emitted(types.void, types.int64)
def amx_begin(builder, where):
    """Set the shapes of this thread's tiles. ``where``: address of 64 bytes to be written."""
    if host_has_amx():
        emit_shapes(builder, where, _TILE_ROWS, _TILE_ROW_BYTES)
