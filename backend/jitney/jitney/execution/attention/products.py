# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""Small matrix products with all accumulators in registers: the two inner loops of attention.

Both compute ``out[m, n] += sum over u of a[m, u] . b_n[u]`` for a few rows m and COLUMNS vectors n
of 16 lanes. u counts units of four bytes (see ``simd``): a[m, u] is one unit, broadcast to all
lanes, and b_n[u] is one vector of 16 units, so a two-byte type multiplies two neighbouring elements
per lane and adds both products, which is one instruction on processors with AVX512-BF16.

- :func:`score_tile`: a = queries, u = head elements, lanes = 16 tokens of one group of keys;
- :func:`value_tile`: a = weights, u = tokens, lanes = 16 head elements of the values.
"""

from itertools import chain
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jitney.execution.attention.simd import (
    LANES,
    UNIT_BYTES,
    bf16,
    call_llvm,
    f16,
    f32x,
    host_has,
    i16x,
    i32,
    i32x,
    i64,
    pointer,
    prefetch_line,
    splat_value,
)

MAX_ROWS = 6
"""6 rows of 4 columns are 24 accumulators: with 4 vectors of b and a broadcast they fill the 32
registers of AVX-512."""
COLUMNS = 4
GROUP_TOKENS = LANES
"""Tokens in one group of the cache."""
VECTOR_BYTES = LANES * UNIT_BYTES
PREFETCH_GROUPS = 8
"""The lists of groups go on for so many entries after those in use: what is wanted soon."""


def _dot(builder: Any, tag: Any, acc: Any, a: Any, b: Any) -> Any:
    """IR: acc + a . b per lane; a and b are vectors of 16 units as int32."""
    if tag == types.float32:
        return _fma(builder, builder.bitcast(a, f32x), builder.bitcast(b, f32x), acc)
    if tag == types.uint16 and host_has("avx512bf16"):
        pairs = ir.VectorType(bf16, 2 * LANES)
        args = [acc, builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x, args)
    widen = _widen_bf16 if tag == types.uint16 else _widen_f16
    for x, y in zip(widen(builder, a), widen(builder, b), strict=True):
        acc = _fma(builder, x, y, acc)
    return acc


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, "llvm.fma.v16f32", f32x, [a, b, c])


def _widen_bf16(builder: Any, units: Any) -> tuple[Any, Any]:
    """IR: the low and the high element of each unit; a bfloat16 is the upper half of a float32."""
    low = builder.shl(units, ir.Constant(i32x, [16] * LANES))
    high = builder.and_(units, ir.Constant(i32x, [-65536] * LANES))
    return builder.bitcast(low, f32x), builder.bitcast(high, f32x)


def _widen_f16(builder: Any, units: Any) -> tuple[Any, Any]:
    halves = ir.VectorType(f16, LANES)
    shifted = builder.lshr(units, ir.Constant(i32x, [16] * LANES))
    low, high = (
        builder.fpext(builder.bitcast(builder.trunc(x, i16x), halves), f32x)
        for x in (units, shifted)
    )
    return low, high


def _entry(builder: Any, addresses: Any, index: Any) -> Any:
    """IR: entry ``index`` of a list of int64 addresses."""
    where = builder.add(addresses, builder.mul(index, ir.Constant(i64, 8)))
    return builder.load(pointer(builder, where, i64))


def _load_units(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, i32x), align=4)


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
        builder = self.builder
        for m, row in enumerate(self.slots):
            start = builder.add(out, builder.mul(out_stride, ir.Constant(i64, m)))
            for n, slot in enumerate(row):
                where = builder.add(start, ir.Constant(i64, n * VECTOR_BYTES))
                yield pointer(builder, where, f32x), slot

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
        vectors = [_load_units(builder, address) for address in b]
        for m, row in enumerate(self.slots):
            where = builder.add(a, builder.mul(a_stride, ir.Constant(i64, m)))
            unit = splat_value(builder, builder.load(pointer(builder, where, i32), align=4))
            for slot, units in zip(row, vectors, strict=True):
                builder.store(_dot(builder, self.tag, builder.load(slot), unit, units), slot)


def _for_each_row_count(builder: Any, rows: Any, emit: Any) -> None:
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


@intrinsic
def score_tile(typingctx, tag, rows, q, q_stride, groups, units, out, out_stride):
    """Scores of 1 to MAX_ROWS queries against COLUMNS groups of keys.

    ``q``: address of [rows] queries, ``q_stride`` bytes apart, ``units`` units each. ``groups``:
    address of COLUMNS int64 addresses of groups [units, 16 tokens]. ``out``: float32
    [rows, COLUMNS * 16], rows ``out_stride`` bytes apart.
    """

    def emit(context, builder, signature, args):
        _, rows, q, q_stride, groups, units, out, out_stride = args

        def product(m: int) -> None:
            acc = _Accumulators(builder, tag, m, COLUMNS)
            acc.clear()
            starts, later = (
                [_entry(builder, groups, ir.Constant(i64, n + ahead)) for n in range(COLUMNS)]
                for ahead in (0, PREFETCH_GROUPS)
            )
            with cgutils.for_range(builder, units) as loop:
                step = builder.mul(loop.index, ir.Constant(i64, VECTOR_BYTES))
                a = builder.add(q, builder.mul(loop.index, ir.Constant(i64, UNIT_BYTES)))
                now, soon = ([builder.add(x, step) for x in xs] for xs in (starts, later))
                acc.add_unit(a, q_stride, now, soon)
            acc.write(out, out_stride)

        _for_each_row_count(builder, rows, product)
        return context.get_dummy_value()

    n = types.int64
    return types.void(tag, n, n, n, n, n, n, n), emit


def _make_value_tile(columns: int) -> Any:
    @intrinsic
    def value_tile(typingctx, tag, rows, p, p_stride, groups, count, step, offset, out, out_stride):
        def emit(context, builder, signature, args):
            _, rows, p, p_stride, groups, count, step, offset, out, out_stride = args
            pairs = 1 if tag == types.float32 else 2
            units = ir.Constant(i64, GROUP_TOKENS // pairs)

            def product(m: int) -> None:
                acc = _Accumulators(builder, tag, m, columns)
                acc.read(out, out_stride)
                with cgutils.for_range(builder, count) as group:
                    start = builder.add(_entry(builder, groups, group.index), offset)
                    ahead = builder.add(group.index, ir.Constant(i64, PREFETCH_GROUPS))
                    later = builder.add(_entry(builder, groups, ahead), offset)
                    first = builder.mul(group.index, units)
                    with cgutils.for_range(builder, units) as unit:
                        now, soon = (
                            [
                                builder.add(b, ir.Constant(i64, n * VECTOR_BYTES))
                                for n in range(columns)
                            ]
                            for b in (
                                builder.add(x, builder.mul(unit.index, step))
                                for x in (start, later)
                            )
                        )
                        u = builder.add(first, unit.index)
                        a = builder.add(p, builder.mul(u, ir.Constant(i64, UNIT_BYTES)))
                        acc.add_unit(a, p_stride, now, soon)
                acc.write(out, out_stride)

            _for_each_row_count(builder, rows, product)
            return context.get_dummy_value()

        n = types.int64
        return types.void(tag, n, n, n, n, n, n, n, n, n), emit

    value_tile.__doc__ = f"""Add {columns * LANES} head elements of weights times values.

    ``p``: address of [rows] weights, ``p_stride`` bytes apart, of 16 tokens per group. ``groups``:
    address of ``count`` int64 addresses of groups [token units, head], whose units are ``step``
    bytes apart; ``offset`` bytes lead to the first head element. ``out``: float32 accumulators,
    rows ``out_stride`` bytes apart.
    """
    return value_tile


value_tile_wide = _make_value_tile(COLUMNS)
value_tile_narrow = _make_value_tile(1)


# --------------------------------------------------------------------------- the tile unit (AMX)
#
# Eight tile registers of at most 16 rows of 64 bytes. Numbers 0 to 3 accumulate [16 rows, 16
# float32]; 4 and 5 hold a and b for 16 units, 6 and 7 for 8 units, because heads are multiples of
# 16 elements and a group holds 16 tokens: 8 units of bfloat16.

MAX_ROWS_AMX = 16
_A, _B, _A_HALF, _B_HALF = 4, 5, 6, 7


def host_has_amx() -> bool:
    """Whether this processor has a tile unit for bfloat16."""
    return host_has("amx-bf16")


def _amx(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", fnty=kind), list(args))


def _tile(number: int) -> Any:
    return ir.Constant(ir.IntType(8), number)


def _move_tile(builder: Any, name: str, number: int, address: Any, stride: Any) -> None:
    _amx(builder, name, _tile(number), pointer(builder, address, ir.IntType(8)), stride)


def _nothing(context: Any) -> Any:
    return context.get_dummy_value()


@intrinsic
def amx_begin(typingctx):
    """Set the shapes of this thread's tile registers."""

    def emit(context, builder, signature, args):
        if host_has_amx():
            rows = [16] * 7 + [8]
            column_bytes = [64] * 6 + [32, 64]
            shapes = bytearray(64)
            shapes[0] = 1  # palette
            for i in range(8):
                shapes[16 + 2 * i] = column_bytes[i]
                shapes[48 + i] = rows[i]
            constant = cgutils.global_constant(
                builder, "tile_shapes", cgutils.make_bytearray(bytes(shapes))
            )
            _amx(builder, "ldtilecfg", builder.bitcast(constant, ir.IntType(8).as_pointer()))
        return _nothing(context)

    return types.void(), emit


@intrinsic
def amx_end(typingctx):
    """Give the tile registers back: nothing to save at a context switch."""

    def emit(context, builder, signature, args):
        if host_has_amx():
            _amx(builder, "tilerelease")
        return _nothing(context)

    return types.void(), emit


@intrinsic
def score_tile_amx(typingctx, q, q_stride, groups, units, out, out_stride):
    """As :func:`score_tile`, of bfloat16 and always MAX_ROWS_AMX rows."""

    def emit(context, builder, signature, args):
        if not host_has_amx():
            return _nothing(context)
        q, q_stride, groups, units, out, out_stride = args
        line = ir.Constant(i64, VECTOR_BYTES)

        def step(unit: Any, a: int, b: int) -> None:
            _move_tile(
                builder,
                "tileloadd64",
                a,
                builder.add(q, builder.mul(unit, ir.Constant(i64, UNIT_BYTES))),
                q_stride,
            )
            for n in range(COLUMNS):
                start = _entry(builder, groups, ir.Constant(i64, n))
                where = builder.add(start, builder.mul(unit, line))
                _move_tile(builder, "tileloadd64", b, where, line)
                _amx(builder, "tdpbf16ps", _tile(n), _tile(a), _tile(b))

        for n in range(COLUMNS):
            _amx(builder, "tilezero", _tile(n))
        whole = builder.and_(units, ir.Constant(i64, -16))
        with cgutils.for_range_slice(
            builder, ir.Constant(i64, 0), whole, ir.Constant(i64, 16), inc=True
        ) as (unit, _):
            step(unit, _A, _B)
        with builder.if_then(builder.icmp_signed("<", whole, units)):
            step(whole, _A_HALF, _B_HALF)
        for n in range(COLUMNS):
            where = builder.add(out, ir.Constant(i64, n * VECTOR_BYTES))
            _move_tile(builder, "tilestored64", n, where, out_stride)
        return _nothing(context)

    n = types.int64
    return types.void(n, n, n, n, n, n), emit


def _make_value_tile_amx(columns: int) -> Any:
    @intrinsic
    def value_tile_amx(typingctx, p, p_stride, groups, count, step, offset, out, out_stride):
        def emit(context, builder, signature, args):
            if not host_has_amx():
                return _nothing(context)
            p, p_stride, groups, count, step, offset, out, out_stride = args
            columns_at = [ir.Constant(i64, n * VECTOR_BYTES) for n in range(columns)]
            for n, column in enumerate(columns_at):
                _move_tile(builder, "tileloadd64", n, builder.add(out, column), out_stride)
            with cgutils.for_range(builder, count) as group:
                weights = builder.mul(group.index, ir.Constant(i64, 2 * GROUP_TOKENS))
                _move_tile(builder, "tileloadd64", _A_HALF, builder.add(p, weights), p_stride)
                start = builder.add(_entry(builder, groups, group.index), offset)
                for n, column in enumerate(columns_at):
                    _move_tile(builder, "tileloadd64", _B_HALF, builder.add(start, column), step)
                    _amx(builder, "tdpbf16ps", _tile(n), _tile(_A_HALF), _tile(_B_HALF))
            for n, column in enumerate(columns_at):
                _move_tile(builder, "tilestored64", n, builder.add(out, column), out_stride)
            return _nothing(context)

        n = types.int64
        return types.void(n, n, n, n, n, n, n, n), emit

    value_tile_amx.__doc__ = f"""As the value tile of {columns * LANES} head elements, of bfloat16
    and always MAX_ROWS_AMX rows."""
    return value_tile_amx


value_tile_wide_amx = _make_value_tile_amx(COLUMNS)
value_tile_narrow_amx = _make_value_tile_amx(1)
