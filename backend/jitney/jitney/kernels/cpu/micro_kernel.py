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

Two forms, chosen at run time by ``use_tiles``:

- vectors, 1 to MAX_ROWS rows: a copy of the loop for each number of rows, so that sums have fixed
  registers;
- tiles (AMX; of bfloat16 alone), as many rows as :func:`begin_tiles` was told: 16 units of a row of
  ``left`` at a time meet 16 vectors of ``right_n``.

Called by ``attention_rows`` (scores, values), ``product_kernel`` (weights, where there is no tile
unit) and ``adapter_kernel``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core import cgutils

from jitney.kernels.cpu.amx import emit_amx, emit_shapes, load_tile, store_tile
from jitney.kernels.cpu.dot import multiply_units
from jitney.kernels.cpu.emit import (
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
"""Rows of the form of vectors, at most: their sums for four vectors fill AVX-512's registers."""
MAX_ROWS_AMX = 16
"""Rows of the form of tiles, at most."""

# Which tile holds what. Tiles 0 to 3 are the sums [rows, 16 float32] of up to four vectors. Heads
# are multiples of 16 elements and a group holds 16 tokens, which are 8 units of bfloat16: so there
# are tiles for 16 units of a factor, and tiles for 8.
_LEFT = 4  # [rows, 16 units]
_RIGHT = 5  # [16 units, a vector]
_LEFT_HALF = 6  # [rows, 8 units]
_RIGHT_HALF = 7  # [8 units, a vector]


@emitted(types.void, types.int64)
def begin_tiles(builder, rows):
    """Set the shapes of this thread's tiles for 1 to 16 ``rows`` of the micro-kernel."""
    rows = builder.trunc(rows, i8)
    # The four sums, then _LEFT, _RIGHT, _LEFT_HALF and _RIGHT_HALF.
    tile_rows = [rows, rows, rows, rows, rows, 16, rows, 8]
    row_bytes = [64, 64, 64, 64, 64, 64, 32, 64]
    emit_shapes(builder, tile_rows, row_bytes)


def make_micro_kernel(width: int, *, across: bool, ahead: int) -> Any:
    """A Numba function for ``width`` vectors of the result.

    Its arguments:

    - ``use_tiles``: which form computes it;
    - ``left``, ``left_stride``, ``rows``, ``count``, ``units``: ``left`` is the address of
      [rows, count * units] units, rows ``left_stride`` bytes apart. (WIDE has two float32 a unit.)
    - ``sources``: the address of a list of int64, which are the addresses of sources: memory that
      holds vectors of ``right``;
    - ``offset``, ``step``: in a source, how many bytes from its beginning unit 0 of the vectors is,
      and how many bytes there are from one unit to the next;
    - ``out``, ``out_stride``: the address of float32 [rows, width * 16], rows so many bytes apart.

    With ``across``, each vector has a source of its own, entry n of the list for vector n.
    ``count`` is 1, ``offset`` 0, and ``out`` is overwritten. (Scores: a source is a group of keys.)

    Otherwise all vectors lie side by side in each of ``count`` sources, and the products of all
    sources are added to what ``out`` holds. (Values: a source is a group of values.)

    The kernel prefetches the sources that stand ``ahead`` entries further on in the list, so these
    entries must be addresses that can be read.
    """

    @emitted(types.void, TAG, types.boolean, *[types.int64] * 10)
    def multiply(
        builder,
        tag,
        use_tiles,
        rows,
        left,
        left_stride,
        sources,
        count,
        units,
        step,
        offset,
        out,
        out_stride,
    ):
        emitter = _Emitter(
            builder=builder,
            tag=tag,
            width=width,
            across=across,
            ahead=ahead,
            rows=rows,
            left=left,
            left_stride=left_stride,
            sources=sources,
            count=count,
            units=units,
            step=step,
            offset=offset,
            out=out,
            out_stride=out_stride,
        )
        if tag != BF16_TYPE or not host_has_amx():
            # The tile unit has no such product, or there is no tile unit.
            emitter.by_vectors()
            return
        with builder.if_else(use_tiles) as (then, otherwise):
            with then:
                emitter.by_tiles()
            with otherwise:
                emitter.by_vectors()

    return multiply


def emit_by_rows(builder, rows, width: int, emit: Callable[[int, range], None]) -> None:
    """IR: code for each number of rows from 1 to MAX_ROWS, and a branch on ``rows`` to it.

    For m rows, ``emit(m, chosen)`` emits the code for the ``chosen`` ones of ``width`` vectors. It
    is called once if all their sums fit into registers, else for a few vectors at a time."""
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for m in range(1, MAX_ROWS + 1):
        block = builder.append_basic_block(f"rows.{m}")
        switch.add_case(constant(i64, m), block)
        builder.position_at_end(block)
        at_once = max(1, min(width, accumulators() // m))
        for first in range(0, width, at_once):
            last = min(first + at_once, width)
            emit(m, range(first, last))
        builder.branch(done)
    builder.position_at_end(done)


@dataclass(frozen=True)
class _Emitter:
    """Emits one micro-kernel. Its arguments are IR values; see :func:`make_micro_kernel`."""

    builder: Any
    tag: Any
    width: int
    across: bool
    ahead: int
    rows: Any
    left: Any
    left_stride: Any
    sources: Any
    count: Any
    units: Any
    step: Any
    offset: Any
    out: Any
    out_stride: Any

    # ----------------------------------------------------------------- where the vectors are

    def _source(self, index):
        """IR: entry ``index`` of the list of sources."""
        where = offset_by(self.builder, self.sources, index, 8)
        return self.builder.load(pointer(self.builder, where, i64))

    def _first_vectors(self, source, chosen: Sequence[int], further: int = 0) -> list[Any]:
        """IR: the addresses of unit 0 of the ``chosen`` vectors, in ``source`` (or, across sources,
        each in its own), or in those that stand so many entries ``further`` on in the list."""
        if self.across:
            return [self._source(constant(i64, n + further)) for n in chosen]
        entry = self._source(offset_by(self.builder, source, further))
        start = self.builder.add(entry, self.offset)
        return [offset_by(self.builder, start, n, VECTOR_BYTES) for n in chosen]

    # ----------------------------------------------------------------- the form of vectors

    def by_vectors(self) -> None:
        """IR: a loop for each number of rows."""
        emit_by_rows(self.builder, self.rows, self.width, self._multiply_by_vectors)

    def _multiply_by_vectors(self, m: int, chosen: Sequence[int]) -> None:
        """IR: m rows times the ``chosen`` vectors.

        Loops, from outer to inner: sources, units, rows, vectors. The last two are unrolled.
        """
        builder = self.builder
        outs = self._vectors_of_result(m, chosen)
        sums = self._begin_sums(outs)
        with cgutils.for_range(builder, self.count) as source:
            first_unit = builder.mul(source.index, self.units)
            now = self._first_vectors(source.index, chosen)
            soon = self._first_vectors(source.index, chosen, self.ahead)
            with cgutils.for_range(builder, self.units) as unit:
                for start in soon:
                    prefetch_line(builder, offset_by(builder, start, unit.index, self.step))
                addresses = [offset_by(builder, start, unit.index, self.step) for start in now]
                right = [load_vector(builder, address) for address in addresses]
                self._add_unit(m, builder.add(first_unit, unit.index), right, sums)
        for where, slot in zip(outs, sums, strict=True):
            builder.store(builder.load(slot), where, align=4)

    def _vectors_of_result(self, m: int, chosen: Sequence[int]) -> list[Any]:
        """IR: pointers to the vectors of ``out``, row by row."""
        builder = self.builder
        outs = []
        starts = [offset_by(builder, self.out, row, self.out_stride) for row in range(m)]
        for start in starts:
            for n in chosen:
                where = offset_by(builder, start, n, VECTOR_BYTES)
                outs.append(pointer(builder, where, f32x))
        return outs

    def _begin_sums(self, outs: Sequence[Any]) -> list[Any]:
        """IR: a sum for each of ``outs``, in a register once LLVM has promoted its stack slot."""
        builder = self.builder
        sums = [cgutils.alloca_once(builder, f32x) for _ in outs]
        for where, slot in zip(outs, sums, strict=True):
            begin = constant(f32x, 0.0) if self.across else builder.load(where, align=4)
            builder.store(begin, slot)
        return sums

    def _add_unit(self, m: int, unit, right: Sequence[Any], sums: Sequence[Any]) -> None:
        """IR: add the products of one unit of each row, broadcast, and the vectors ``right``."""
        builder = self.builder
        # WIDE: both elements of a unit have been widened to float32.
        parts = 2 if self.tag == WIDE_TYPE else 1
        start = offset_by(builder, self.left, unit, parts * UNIT_BYTES)
        for row in range(m):
            of_row = offset_by(builder, start, row, self.left_stride)
            addresses = [offset_by(builder, of_row, part, UNIT_BYTES) for part in range(parts)]
            left_units = [load_broadcast(builder, address) for address in addresses]
            for n, vector in enumerate(right):
                slot = sums[row * len(right) + n]
                before = builder.load(slot)
                total = multiply_units(builder, self.tag, before, left_units, vector)
                builder.store(total, slot)

    # ----------------------------------------------------------------- the form of tiles

    def by_tiles(self) -> None:
        """IR: all rows times all vectors.

        Loops, from outer to inner: sources, 16 units at a time, vectors; the last is unrolled. The
        sums are in tiles 0 to 3.
        """
        builder = self.builder
        # Few rows take less time than their keys and values take to arrive from memory, so these
        # are asked for here. With more rows the caller does it (``prefetch_span``).
        few = builder.icmp_signed("<", self.rows, constant(i64, MAX_ROWS))
        outs = [offset_by(builder, self.out, n, VECTOR_BYTES) for n in range(self.width)]
        for tile, where in enumerate(outs):
            if self.across:
                emit_amx(builder, "tilezero", tile)
            else:
                load_tile(builder, tile, where, self.out_stride)
        with cgutils.for_range(builder, self.count) as source:
            self._add_source(source.index, few)
        for tile, where in enumerate(outs):
            store_tile(builder, tile, where, self.out_stride)

    def _add_source(self, source, few) -> None:
        """IR: add the products of one source, all its units."""
        builder = self.builder
        vectors = range(self.width)
        first_unit = builder.mul(source, self.units)
        starts = self._first_vectors(source, vectors)
        soon = self._first_vectors(source, vectors, self.ahead)

        def add(unit, units: int, left: int, right: int) -> None:
            """IR: add so many ``units`` from ``unit`` on, by the tiles ``left`` and ``right``."""
            with builder.if_then(few):
                self._prefetch_units(soon, unit, units)
            left_unit = builder.add(first_unit, unit)
            where = offset_by(builder, self.left, left_unit, UNIT_BYTES)
            load_tile(builder, left, where, self.left_stride)
            for tile, start in enumerate(starts):
                where = offset_by(builder, start, unit, self.step)
                load_tile(builder, right, where, self.step)
                emit_amx(builder, "tdpbf16ps", tile, left, right)

        zero = constant(i64, 0)
        sixteen = constant(i64, 16)
        whole = builder.and_(self.units, constant(i64, -16))
        with cgutils.for_range_slice(builder, zero, whole, sixteen, inc=True) as (unit, _):
            add(unit, 16, _LEFT, _RIGHT)
        # What is left are 8 units: see the tiles' shapes.
        with builder.if_then(builder.icmp_signed("<", whole, self.units)):
            add(whole, 8, _LEFT_HALF, _RIGHT_HALF)

    def _prefetch_units(self, starts: Sequence[Any], unit, units: int) -> None:
        """IR: ask for so many ``units`` from ``unit`` on of vectors that are read soon."""
        builder = self.builder
        for start in starts:
            for n in range(units):
                at = builder.add(unit, constant(i64, n))
                prefetch_line(builder, offset_by(builder, start, at, self.step))
