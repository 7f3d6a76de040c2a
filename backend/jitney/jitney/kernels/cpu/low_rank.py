"""What LoRA adapters add to a step's products, as items of a ``program``; imported only where Numba
is.

A step's tokens are spans of at most SPAN_TOKENS of one adapter, or of none. For each product one
kernel shrinks x to ``x A^T`` of the adapters' ranks, and one expands that to what the product adds
to its own result. Both read a factor as columns of 16 outputs, as ``product_kernel`` does, by the
micro-kernel of vectors; ranks are filled up to whole columns, whatever other adapters have. A row's
result depends on that row and its adapter alone.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor
from torch.nn import functional

from jitney.execution.low_rank import Factors, Part, Span
from jitney.kernels.cpu.compiled import Call, reader, record
from jitney.kernels.cpu.products import MAX_ROWS, VECTOR_BYTES, make_tile, stack_memory
from jitney.kernels.cpu.simd import (
    BF16,
    LANES,
    ZERO,
    emitted,
    fetch_add,
    inner,
    load,
    load_as,
    load_i64,
    splat,
    store_as,
    store_i64,
)
from jitney.kernels.fused.whole_model import Places

SPAN_TOKENS = MAX_ROWS
PARTS = 4
"""Into which the outputs of an item are cut."""

# An adapter's table: int64 of each place (a fused layer of a decoder layer).
_A, _A_COLUMNS, _SEGMENTS = 0, 1, 2
"""Address of its A factors, one above the other; their columns; then for each linear layer:"""
_FIRST, _LAST, _STEP, _B, _UNITS, _AT = range(6)
"""Its columns of the result, ``_STEP`` apart; address of B; its units; where its x begins."""
_FIELDS, _MOST = 6, 3
PLACE_FIELDS = _SEGMENTS + _MOST * _FIELDS
PLACES, _GATED = len(Places._fields), Places._fields.index("gated")


@record
class LowRankCall(Call):
    """Arguments of :func:`shrink_body` and :func:`expand_body`; ``count`` is that of items."""

    x: int
    """[T, K] bfloat16; expanding: what was shrunk."""
    x_stride: int
    """Bytes from row to row."""
    out: int
    out_stride: int
    other: int
    """Address of what :func:`expand_body` adds its product to, as ``out``. 0: none."""
    spans: int
    """Address of int64 [spans, 3]: first token, number of tokens, address of a table or 0."""
    place: int
    """Bytes from an adapter's table to that of the layer and place."""
    units: int
    """Pairs of inputs in K."""
    columns: int
    """Of ``out`` that are written: N / 16."""


read_low_rank = reader(LowRankCall)
multiply_column = make_tile(1, across=True, ahead=1)


@emitted(types.int64)
def column_memory(builder):
    """The address of int64 [2], then float32 [SPAN_TOKENS, 16]."""
    return stack_memory(builder, 64 + SPAN_TOKENS * VECTOR_BYTES)


@inner
def multiply_rows(call, rows, x, column, units, memory):
    """float32 [rows, 16] behind ``memory``'s list: rows of x times one column of a factor."""
    store_i64(memory, column)
    store_i64(memory + 8, column + units * VECTOR_BYTES)
    multiply_column(
        BF16, False, rows, x, call.x_stride, memory, 1, units, VECTOR_BYTES, 0, memory + 64,
        VECTOR_BYTES,
    )  # fmt: skip


@inner
def shrink_body(arguments):
    """out = x A^T of each span's adapter; rows without one are left."""
    call, memory = read_low_rank(arguments), column_memory()
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        span = call.spans + 24 * item
        first, rows, adapter = load_i64(span), load_i64(span + 8), load_i64(span + 16)
        if adapter == 0:
            continue
        table, x = adapter + call.place, call.x + first * call.x_stride
        for n in range(load_i64(table + 8 * _A_COLUMNS)):
            column = load_i64(table + 8 * _A) + n * call.units * VECTOR_BYTES
            multiply_rows(call, rows, x, column, call.units, memory)
            for m in range(rows):
                out = call.out + (first + m) * call.out_stride + 2 * LANES * n
                store_as(BF16, out, load(memory + 64 + m * VECTOR_BYTES))


@inner
def find_segment(table, column):
    """The address of the segment that has a column of the result; 0 if none has."""
    for n in range(_MOST):
        segment = table + 8 * (_SEGMENTS + n * _FIELDS)
        first, step = load_i64(segment + 8 * _FIRST), load_i64(segment + 8 * _STEP)
        inside = first <= column and column < load_i64(segment + 8 * _LAST)
        if inside and (column - first) % step == 0:
            return segment
    return np.int64(0)


@inner
def expand_body(arguments):
    """out = other + x B^T of each span's adapter; all rows are written."""
    call, memory = read_low_rank(arguments), column_memory()
    part = -(-call.columns // PARTS)
    while True:
        item = fetch_add(arguments)
        if item >= call.count:
            return
        span = call.spans + 24 * (item // PARTS)
        first, rows, adapter = load_i64(span), load_i64(span + 8), load_i64(span + 16)
        begin = item % PARTS * part
        for column in range(begin, min(begin + part, call.columns)):
            segment = np.int64(0)
            if adapter != 0:
                segment = find_segment(adapter + call.place, column)
            if segment != 0:
                steps = column - load_i64(segment + 8 * _FIRST)
                units = load_i64(segment + 8 * _UNITS)
                index = steps // load_i64(segment + 8 * _STEP)
                factor = load_i64(segment + 8 * _B) + index * units * VECTOR_BYTES
                x = call.x + first * call.x_stride + load_i64(segment + 8 * _AT)
                multiply_rows(call, rows, x, factor, units, memory)
            for m in range(rows):
                at = (first + m) * call.out_stride + column * 2 * LANES
                value = splat(ZERO)
                if segment != 0:
                    value = load(memory + 64 + m * VECTOR_BYTES)
                if call.other != 0:
                    value = value + load_as(BF16, call.other + at)
                store_as(BF16, call.out + at, value)


# --------------------------------------------------------------------------- an adapter's factors


class PackedAdapter(NamedTuple):
    """An adapter as the kernels read it."""

    table: np.ndarray
    """int64 [layers, PLACES, PLACE_FIELDS]"""
    address: int
    """Of the table."""
    used: frozenset[int]
    """Indices of the places that it changes in some layer."""
    columns: int
    """The most that x is shrunk to, in LANES."""
    memory: list[Tensor]
    """What the table's addresses are of."""


def pack(factors: Mapping[str, Factors], layers: Sequence[Places]) -> PackedAdapter:
    """Factors in bfloat16, by path, for the places of each decoder layer."""
    table = np.zeros((len(layers), PLACES, PLACE_FIELDS), np.int64)
    table[:, :, _SEGMENTS + _STEP :: _FIELDS] = 1
    memory = list[Tensor]()
    for layer, places in enumerate(layers):
        for place, parts in enumerate(places):
            if any(part.path in factors for part in parts):
                gated = place == _GATED
                memory += _pack_place(table[layer, place], parts, factors, gated=gated)
    columns = table[:, :, _A_COLUMNS]
    used = frozenset(np.flatnonzero(columns.any(0)).tolist())
    return PackedAdapter(table, table.ctypes.data, used, int(columns.max(initial=0)), memory)


def _pack_place(
    row: np.ndarray, parts: Sequence[Part], factors: Mapping[str, Factors], *, gated: bool
) -> list[Tensor]:
    """Fill one place's part of the table. Where it is ``gated``, the columns of gate and up lie by
    turns."""
    shrinking, memory, at = list[Tensor](), list[Tensor](), 0
    for number, (path, first, last) in enumerate(parts):
        if path not in factors:
            continue
        a, b = factors[path].a, factors[path].b.T
        if gated and len(parts) == 1:
            b = b.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)
        more = -len(a) % LANES
        shrinking.append(functional.pad(a, (0, 0, 0, more)))
        memory.append(_columns(functional.pad(b, (0, more))))
        begin, end, step = first // LANES, last // LANES, 1
        if gated and len(parts) == 2:
            begin, end, step = number, len(parts) * (end - begin), len(parts)
        segment = _SEGMENTS + number * _FIELDS
        units = (len(a) + more) // 2
        row[segment : segment + _FIELDS] = begin, end, step, memory[-1].data_ptr(), units, 2 * at
        at += len(a) + more
    memory.append(_columns(torch.cat(shrinking)))
    row[_A], row[_A_COLUMNS] = memory[-1].data_ptr(), at // LANES
    return memory


def _columns(weight: Tensor) -> Tensor:
    """[N / 16, K / 2, 16, 2] of a weight [N, K]."""
    return weight.view(len(weight) // LANES, LANES, -1, 2).transpose(1, 2).contiguous()


def fill_spans(array: np.ndarray, spans: Sequence[Span], tokens: int) -> int:
    """Write all of a step's tokens as spans to int64 [most, 3]; returns how many these are."""
    count = end = 0
    pieces = list[tuple[int, int, int]]()
    for first, last, adapter in spans:
        pieces += (end, first, 0), (first, last, adapter.packed.address)
        end = last
    for begin, stop, address in (*pieces, (end, tokens, 0)):
        for start in range(begin, stop, SPAN_TOKENS):
            array[count] = start, min(SPAN_TOKENS, stop - start), address
            count += 1
    return count
