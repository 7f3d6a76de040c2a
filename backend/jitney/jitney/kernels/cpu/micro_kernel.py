"""The micro-kernel: a small matrix product with all its sums in registers.

It computes, for a few rows m and a few vectors n of 16 lanes::

    out[m, 16 n + lane] (+)= sum over u of left[m, u] . right_n[u, lane]

                     right_0           right_1      ...    "width" of them, streamed:
                  +-------------+   +-------------+        each vector is loaded once for
            u = 0 |  16 units   |   |             |        all rows, and lines further on
            u = 1 |             |   |             |        are prefetched
             ...  |             |   |             |
                  +-------------+   +-------------+
    left, in L1          |                 |
     m = 0 [u0 u1 ...]   sums of (0, 0)    sums of (0, 1)  in registers all the time
     m = 1 [u0 u1 ...]   sums of (1, 0)    sums of (1, 1)

u counts units of four bytes. A unit of ``left`` is broadcast to all lanes. So a type of two bytes
multiplies two neighbouring elements in each lane and adds both products (``dot``).

There are two ways to compute it, and the argument ``use_tiles`` chooses one at run time:

- By vectors, 1 to MAX_ROWS rows. There is code for each number of rows, so that every sum has a
  register of its own. For 2 rows and 2 vectors it does this::

      sum_00 = sum_01 = sum_10 = sum_11 = 0
      for unit in range(units):
          prefetch 64 bytes of what is read after right_0, and of what is read after right_1
          vector_0 = 64 bytes at right_0 + unit * unit_stride
          vector_1 = 64 bytes at right_1 + unit * unit_stride
          broadcast = 4 bytes at left + unit * 4, in every lane
          sum_00 += broadcast . vector_0
          sum_01 += broadcast . vector_1
          broadcast = 4 bytes at left + left_stride + unit * 4, in every lane
          sum_10 += broadcast . vector_0
          sum_11 += broadcast . vector_1
      store sum_00 and sum_01 at out, sum_10 and sum_11 at out + out_stride

- By tiles (AMX), of bfloat16 alone, as many rows as :func:`begin_tiles` was told: 16 units of all
  rows of ``left`` meet 16 vectors of ``right_n`` in one instruction.

Called by ``attention_rows`` (scores, values), ``product_kernel`` (weights, where no tiles are used)
and ``adapter_kernel``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.amx import TILE_ROW_BYTES, emit_amx, emit_shapes, load_tile, store_tile
from jitney.kernels.cpu.dot import multiply_units
from jitney.kernels.cpu.emit import (
    I64_BYTES,
    TAG,
    UNIT_BYTES,
    VECTOR_BYTES,
    constant,
    emitted,
    f32x,
    i8,
    i64,
    load_broadcast,
    load_vector,
    offset_by,
    pointer,
    prefetch_line,
)
from jitney.kernels.cpu.processor import accumulators, host_has_amx
from jitney.kernels.cpu.simd import BF16_TYPE, WIDE_TYPE

MAX_ROWS = 6
"""Rows by vectors, at most: 6 rows times 4 vectors are the 24 sums that AVX-512 has registers for
(``processor.accumulators``)."""
MAX_ROWS_AMX = 16
"""Rows by tiles, at most."""


# --------------------------------------------------------------------------- tiles


class _FactorTiles(NamedTuple):
    """The tile registers that hold some units of both factors."""

    left: int
    """[rows, units]"""
    right: int
    """[units, a vector]"""
    units: int


# Tiles 0 to 3 are the sums, float32 [rows, 16], of up to four vectors.
_SUM_TILES = 4
_SIXTEEN_UNITS = _FactorTiles(left=4, right=5, units=16)
# A head is padded to a multiple of 16 elements. So a key has a multiple of 8 units in bfloat16, and
# 8 units may be left. A group of values has 8 lines of units: it always takes this shape.
_EIGHT_UNITS = _FactorTiles(left=6, right=7, units=8)


@emitted(types.void, types.int64)
def begin_tiles(builder, rows):
    """Set the shapes of this thread's tiles for 1 to 16 ``rows`` of the micro-kernel."""
    rows = builder.trunc(rows, i8)
    tile_rows = [rows] * _SUM_TILES
    row_bytes = [TILE_ROW_BYTES] * _SUM_TILES
    for factors in (_SIXTEEN_UNITS, _EIGHT_UNITS):
        # The left tile, then the right one.
        tile_rows += [rows, factors.units]
        row_bytes += [factors.units * UNIT_BYTES, VECTOR_BYTES]
    emit_shapes(builder, tile_rows, row_bytes)


# --------------------------------------------------------------------------- the function


def make_micro_kernel(width: int, *, source_per_vector: bool, ahead: int) -> Any:
    """A Numba function that computes ``width`` vectors of the result's rows.

    A *source* is memory that holds vectors of ``right``: a column of a weight, or a group of keys
    or values. The arguments, after the tag, are ``use_tiles``, which chooses the way to compute it,
    and the fields of :class:`_Arguments`, by their names.

    With ``source_per_vector``, vector n is in source n of the list, and ``out`` is overwritten.
    Callers give 1 for ``num_sources`` and 0 for ``offset``. Example: the scores of ``width`` groups
    of keys, 16 scores from each group.

    Otherwise each source holds all vectors, side by side, and the products of all sources are added
    to what ``out`` holds. Example: ``width`` times 16 elements of the head, summed up over all
    groups of values.

    The function prefetches the sources that stand ``ahead`` further on in the list. So the list
    must be so much longer. Behind the sources in use it may hold any addresses: what is there is
    prefetched, and not read.
    """

    @emitted(types.void, TAG, use_tiles=types.boolean)
    def multiply(
        builder,
        tag,
        use_tiles,
        rows,
        left,
        left_stride,
        sources,
        num_sources,
        units,
        unit_stride,
        offset,
        out,
        out_stride,
    ):
        arguments = _Arguments(
            rows=rows,
            left=left,
            left_stride=left_stride,
            sources=sources,
            num_sources=num_sources,
            units=units,
            unit_stride=unit_stride,
            offset=offset,
            out=out,
            out_stride=out_stride,
        )
        emitter = _Emitter(
            builder=builder,
            tag=tag,
            width=width,
            source_per_vector=source_per_vector,
            ahead=ahead,
            arguments=arguments,
        )
        if tag != BF16_TYPE or not host_has_amx():
            # There is no tile unit, or none of its instructions is for this product.
            emitter.by_vectors()
            return
        with builder.if_else(use_tiles) as (then, otherwise):
            with then:
                emitter.by_tiles()
            with otherwise:
                emitter.by_vectors()

    return multiply


class _Arguments(NamedTuple):
    """IR: what a micro-kernel is called with. All are int64; addresses and strides are in bytes."""

    rows: Any
    """How many rows."""
    left: Any
    """Address of the rows [rows, num_sources * units] of units, which are four bytes (eight with
    WIDE: two float32)."""
    left_stride: Any
    """From one row of ``left`` to the next."""
    sources: Any
    """Address of a list, int64: the address of each source."""
    num_sources: Any
    """Over how many sources each vector is summed up."""
    units: Any
    """Units of each source."""
    unit_stride: Any
    """From one unit's vectors to the next unit's, inside a source."""
    offset: Any
    """From a source's beginning to the first vector of its unit 0."""
    out: Any
    """Address of the result, float32 [rows, width * 16]."""
    out_stride: Any
    """From one row of ``out`` to the next."""


def emit_by_rows(builder, rows, width: int, emit: Callable[[int, range], None]) -> None:
    """IR: code for each number of rows from 1 to MAX_ROWS, and a branch on ``rows`` to it.

    ``emit(m, chosen)`` emits code for m rows and the ``chosen`` ones of ``width`` vectors. It is
    called once if all their sums fit into registers, otherwise for a few vectors at a time. With
    AVX2, which has registers for 6 sums, for 2 vectors::

        switch (rows) {
            case 1: emit(1, [0, 1])
            case 2: emit(2, [0, 1])
            case 3: emit(3, [0, 1])
            case 4: emit(4, [0]), emit(4, [1])
            case 5: emit(5, [0]), emit(5, [1])
            case 6: emit(6, [0]), emit(6, [1])
        }
    """
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for m in range(1, MAX_ROWS + 1):
        block = builder.append_basic_block(f"rows.{m}")
        switch.add_case(constant(i64, m), block)
        builder.position_at_end(block)
        fitting_vectors = max(1, accumulators() // m)
        for first in range(0, width, fitting_vectors):
            end = min(first + fitting_vectors, width)
            emit(m, range(first, end))
        builder.branch(done)
    builder.position_at_end(done)


class _Source(NamedTuple):
    """IR: what is read of one source (or, with ``source_per_vector``, of one for each vector)."""

    left_unit: Any
    """Which unit of the left rows, from 0 on, meets unit 0 of the source."""
    vectors: list[Any]
    """Addresses of unit 0 of each vector."""
    upcoming: list[Any]
    """The same of the source that stands ``ahead`` further on in the list, to be prefetched."""


@dataclass(frozen=True)
class _Emitter:
    """Emits one micro-kernel: see :func:`make_micro_kernel`."""

    builder: Any
    tag: Any
    width: int
    source_per_vector: bool
    ahead: int
    arguments: _Arguments

    # ----------------------------------------------------------------- where the vectors are

    def _find_source(self, index, chosen: Sequence[int]) -> _Source:
        """IR: where to read the ``chosen`` vectors of the source with this ``index``."""
        return _Source(
            left_unit=self.builder.mul(index, self.arguments.units),
            vectors=self._first_vectors(index, chosen),
            upcoming=self._first_vectors(index, chosen, further=self.ahead),
        )

    def _first_vectors(self, index, chosen: Sequence[int], further: int = 0) -> list[Any]:
        """IR: addresses of unit 0 of the ``chosen`` vectors, of the source that stands so much
        ``further`` on in the list than ``index``."""
        builder = self.builder
        if self.source_per_vector:
            # Vector n is source n of the list, and ``index`` is 0: ``num_sources`` is 1.
            return [self._source(constant(i64, n + further)) for n in chosen]
        source = self._source(offset_by(builder, index, further))
        start = builder.add(source, self.arguments.offset)
        return [offset_by(builder, start, n, VECTOR_BYTES) for n in chosen]

    def _source(self, index):
        """IR: the address with this ``index`` in the list of sources."""
        where = offset_by(self.builder, self.arguments.sources, index, I64_BYTES)
        return self.builder.load(pointer(self.builder, where, i64))

    # ----------------------------------------------------------------- by vectors

    def by_vectors(self) -> None:
        """IR: code for each number of rows."""
        emit_by_rows(self.builder, self.arguments.rows, self.width, self._multiply_by_vectors)

    def _multiply_by_vectors(self, m: int, chosen: Sequence[int]) -> None:
        """IR: m rows times the ``chosen`` vectors.

        Loops, from outer to inner: sources, units, rows, vectors. The last two are unrolled.
        """
        builder = self.builder
        results = self._vectors_of_result(m, chosen)
        sums = self._begin_sums(results)
        with cgutils.for_range(builder, self.arguments.num_sources) as loop:
            source = self._find_source(loop.index, chosen)
            with cgutils.for_range(builder, self.arguments.units) as inner_loop:
                self._add_unit(inner_loop.index, source, sums)
        for row_results, row_sums in zip(results, sums, strict=True):
            for result, slot in zip(row_results, row_sums, strict=True):
                builder.store(builder.load(slot), result, align=4)

    def _vectors_of_result(self, m: int, chosen: Sequence[int]) -> list[list[Any]]:
        """IR: for each row, pointers to its vectors in ``out``."""
        builder = self.builder
        results = []
        for row in range(m):
            start = offset_by(builder, self.arguments.out, row, self.arguments.out_stride)
            addresses = [offset_by(builder, start, n, VECTOR_BYTES) for n in chosen]
            results.append([pointer(builder, address, f32x) for address in addresses])
        return results

    def _begin_sums(self, results: list[list[Any]]) -> list[list[Any]]:
        """IR: a sum for each vector of the result, in the same order. It is a stack slot here, as
        its value changes in a loop; LLVM makes a register of it."""
        builder = self.builder
        sums = []
        for row_results in results:
            row_sums = []
            for result in row_results:
                if self.source_per_vector:
                    begin = constant(f32x, 0.0)
                else:
                    begin = builder.load(result, align=4)
                slot = cgutils.alloca_once(builder, f32x)
                builder.store(begin, slot)
                row_sums.append(slot)
            sums.append(row_sums)
        return sums

    def _add_unit(self, unit, source: _Source, sums: list[list[Any]]) -> None:
        """IR: add the products of one unit of each row and of each vector."""
        builder = self.builder
        for start in source.upcoming:
            prefetch_line(builder, offset_by(builder, start, unit, self.arguments.unit_stride))
        addresses = [
            offset_by(builder, start, unit, self.arguments.unit_stride) for start in source.vectors
        ]
        vectors = [load_vector(builder, address) for address in addresses]
        # WIDE: the two elements of a left unit have been widened to float32.
        left_parts = 2 if self.tag == WIDE_TYPE else 1
        left_unit = builder.add(source.left_unit, unit)
        left = offset_by(builder, self.arguments.left, left_unit, left_parts * UNIT_BYTES)
        for row, row_sums in enumerate(sums):
            of_row = offset_by(builder, left, row, self.arguments.left_stride)
            parts = [offset_by(builder, of_row, part, UNIT_BYTES) for part in range(left_parts)]
            broadcasts = [load_broadcast(builder, part) for part in parts]
            for slot, vector in zip(row_sums, vectors, strict=True):
                before = builder.load(slot)
                total = multiply_units(builder, self.tag, before, broadcasts, vector)
                builder.store(total, slot)

    # ----------------------------------------------------------------- by tiles

    def by_tiles(self) -> None:
        """IR: all rows times all vectors.

        Loops, from outer to inner: sources, 16 units at a time, vectors; the last is unrolled. The
        sums of vector n are in tile n.
        """
        builder = self.builder
        out = self.arguments.out
        results = [offset_by(builder, out, n, VECTOR_BYTES) for n in range(self.width)]
        # The products of few rows take less time than keys and values take to arrive from memory.
        # So for few rows the loop below prefetches. With more rows the caller does
        # (``attention_spans.prefetch_span``).
        prefetches = builder.icmp_signed("<", self.arguments.rows, constant(i64, MAX_ROWS))
        for tile, address in enumerate(results):
            if self.source_per_vector:
                emit_amx(builder, "tilezero", tile)
            else:
                load_tile(builder, tile, address, self.arguments.out_stride)
        with cgutils.for_range(builder, self.arguments.num_sources) as loop:
            source = self._find_source(loop.index, range(self.width))
            self._add_source(source, prefetches)
        for tile, address in enumerate(results):
            store_tile(builder, tile, address, self.arguments.out_stride)

    def _add_source(self, source: _Source, prefetches) -> None:
        """IR: add the products of all units of one source."""
        builder = self.builder
        zero = constant(i64, 0)
        sixteen = constant(i64, 16)
        # The number of units, rounded down to a multiple of 16.
        end_of_16s = builder.and_(self.arguments.units, constant(i64, -16))
        with cgutils.for_range_slice(builder, zero, end_of_16s, sixteen, inc=True) as (unit, _):
            self._add_units(source, unit, _SIXTEEN_UNITS, prefetches)
        # Either 8 units are left, or none.
        with builder.if_then(builder.icmp_signed("<", end_of_16s, self.arguments.units)):
            self._add_units(source, end_of_16s, _EIGHT_UNITS, prefetches)

    def _add_units(self, source: _Source, unit, factors: _FactorTiles, prefetches) -> None:
        """IR: add the products of 16 or 8 units, from ``unit`` on."""
        builder = self.builder
        with builder.if_then(prefetches):
            for start in source.upcoming:
                for n in range(factors.units):
                    upcoming_unit = builder.add(unit, constant(i64, n))
                    line = offset_by(builder, start, upcoming_unit, self.arguments.unit_stride)
                    prefetch_line(builder, line)
        left_unit = builder.add(source.left_unit, unit)
        left = offset_by(builder, self.arguments.left, left_unit, UNIT_BYTES)
        load_tile(builder, factors.left, left, self.arguments.left_stride)
        for sum_tile, start in enumerate(source.vectors):
            right = offset_by(builder, start, unit, self.arguments.unit_stride)
            load_tile(builder, factors.right, right, self.arguments.unit_stride)
            emit_amx(builder, "tdpbf16ps", sum_tile, factors.left, factors.right)
