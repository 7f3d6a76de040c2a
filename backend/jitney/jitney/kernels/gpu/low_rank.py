"""What LoRA adapters add to a step's products on a GPU: two launches for a layer, whatever adapters
and ranks its tokens have.

The tokens of a step are grouped by adapter into blocks of at most ROWS, wherever they stand in it.
One kernel shrinks x to ``x A^T``, rounded to its dtype; the other one adds what that expands to. An
adapter's table holds the addresses of its factors, and a program reads its block's: it goes as far
as that adapter's rank for that layer. Sums are float32, in an order that the layer and this rank
decide; so a token's result is bitwise the same in a prefill, in a decode and in every batch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from jitney.execution.low_rank import AddProducts, Factors, LowRank, Part, Span
from jitney.execution.machine import to_device
from jitney.kernels.gpu.language import dot

ROWS = RANKS = 16
"""Of a tile: the least that matrix units take. Decodes have a row or a few of an adapter."""
DEPTH = COLUMNS = 128
_A, _B, _RANK, _FIRST, _OUTPUTS, _FIELDS = map(tl.constexpr, range(6))
"""Of an adapter's table: addresses of A [rank, inputs] and B^T [rank, outputs], the rank, where the
outputs begin, and how many they are. All are 0 if it leaves the linear layer as it is."""


class PackedAdapter(NamedTuple):
    """An adapter as the kernels read it."""

    table: Tensor
    """int64 [linear layers, _FIELDS], on the device."""
    rank: int
    """Its largest."""


class GroupedProducts:
    """What adapters add to the layers of one model."""

    def __init__(self, layers: Sequence[Sequence[Part]]) -> None:
        """``layers`` by their parts: one launch is for all parts of a layer."""
        self._parts = [part for parts in layers for part in parts]
        self._numbers = {part.path: number for number, part in enumerate(self._parts)}

    def pack(self, factors: Mapping[str, Factors]) -> PackedAdapter:
        """``LowRank.packed`` of factors on the device, which must outlive it. Any thread may call
        it."""
        table = torch.zeros(len(self._parts), _FIELDS.value, dtype=torch.int64)
        for path, (a, b) in factors.items():
            number = self._numbers[path]
            _, first, last = self._parts[number]
            assert a.is_contiguous()
            assert b.is_contiguous()
            assert b.shape == (len(a), last - first)
            row = a.data_ptr(), b.data_ptr(), len(a), first, last - first
            table[number] = torch.tensor(row)
        device = next(iter(factors.values())).a.device
        return PackedAdapter(table.to(device), max(len(a) for a, _ in factors.values()))

    def begin(self, spans: Sequence[Span]) -> AddProducts:
        """A ``low_rank.BeginProducts``: all that the step's launches read is on its way."""
        tokens: dict[LowRank, list[int]] = {}
        for first, last, adapter in spans:
            tokens.setdefault(adapter, []).extend(range(first, last))
        blocks = [
            (adapter.packed.table.data_ptr(), own[start : start + ROWS])
            for adapter, own in tokens.items()
            for start in range(0, len(own), ROWS)
        ]
        table = np.full((len(blocks), 1 + ROWS), -1, np.int64)
        for line, (address, own) in zip(table, blocks, strict=True):
            line[0], line[1 : 1 + len(own)] = address, own
        work = to_device(table, spans[0].adapter.packed.table.device)
        changed = set[str]().union(*(adapter.factors for adapter in tokens))
        tiles = triton.cdiv(max(adapter.packed.rank for adapter in tokens), RANKS)

        def add(parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
            if any(part.path in changed for part in parts):
                self._launch(work, tiles, parts, x, out)

        return add

    def _launch(
        self, work: Tensor, tiles: int, parts: Sequence[Part], x: Tensor, out: Tensor
    ) -> None:
        number = self._numbers[parts[0].path]
        assert self._parts[number : number + len(parts)] == parts
        assert x.dtype == out.dtype
        assert out.stride(1) == 1
        x = x.contiguous()
        shrunk = x.new_empty(len(x), len(parts) * tiles * RANKS)
        shrink_kernel[(len(work), len(parts) * tiles)](
            shrunk, x, work, number, tiles, x.shape[1], ROWS, RANKS, DEPTH,
            num_warps=4, num_stages=4,
        )  # fmt: skip
        widest = max(last - first for _, first, last in parts)
        even = all(first % 16 == last % 16 == 0 for _, first, last in parts)
        expand_kernel[(len(work), triton.cdiv(widest, COLUMNS), len(parts))](
            out, shrunk, work, number, tiles, out.stride(0), even, ROWS, RANKS, COLUMNS,
            num_warps=4, num_stages=2,
        )  # fmt: skip


# Layers and steps differ in these; the compiled code does not.
@triton.jit(do_not_specialize=["number", "tiles"])
def shrink_kernel(
    out,  # [T, parts * tiles * RANKS]: x A^T of each part
    x,  # [T, inputs]
    work,  # int64 [blocks, 1 + ROWS]: address of the adapter's table; tokens, then -1
    number,  # of the first part, in an adapter's table
    tiles,  # of RANKS, that the adapters of the step have at most
    inputs,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of a part's ranks for one block of tokens."""
    work += tl.program_id(0) * (ROWS + 1)
    part, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    site = tl.load(work).to(tl.pointer_type(tl.int64)) + (number + part) * _FIELDS
    rank = tl.load(site + _RANK)
    if tile * RANKS < rank:
        row = tl.load(work + 1 + tl.arange(0, ROWS))
        index, depth = tile * RANKS + tl.arange(0, RANKS), tl.arange(0, DEPTH)
        some_row, some_index = (row >= 0)[:, None], (index < rank)[:, None]
        factor = tl.load(site + _A).to(tl.pointer_type(x.dtype.element_ty))
        left = x + row[:, None] * inputs + depth[None, :]
        right = tl.multiple_of(factor, 16) + index[:, None] * inputs + depth[None, :]
        total = tl.zeros([ROWS, RANKS], tl.float32)
        for start in range(0, inputs, DEPTH):
            inside = (start + depth < inputs)[None, :]
            a = tl.load(left + start, mask=some_row & inside, other=0.0)
            b = tl.load(right + start, mask=some_index & inside, other=0.0)
            total = dot(a, b.T, total)
        column = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        address = out + row[:, None] * (tl.num_programs(1) * RANKS) + column[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=some_row)


@triton.jit(do_not_specialize=["number", "tiles"])
def expand_kernel(
    out,  # [T, outputs of all parts], rows ``stride`` apart
    x,  # [T, parts * tiles * RANKS]: what was shrunk
    work,
    number,
    tiles,
    stride,
    EVEN: tl.constexpr,  # all parts begin and end at multiples of 16
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds to COLUMNS of a part's outputs for one block of tokens."""
    work += tl.program_id(0) * (ROWS + 1)
    begin, part = tl.program_id(1) * COLUMNS, tl.program_id(2)
    site = tl.load(work).to(tl.pointer_type(tl.int64)) + (number + part) * _FIELDS
    outputs = tl.load(site + _OUTPUTS)
    if begin < outputs:
        rank, first = tl.load(site + _RANK), tl.load(site + _FIRST)
        if EVEN:  # so that values are read by eight
            first, outputs = tl.multiple_of(first, 16), tl.multiple_of(outputs, 16)
        row = tl.load(work + 1 + tl.arange(0, ROWS))
        index, column = tl.arange(0, RANKS), begin + tl.arange(0, COLUMNS)
        some_row, some_column = (row >= 0)[:, None], (column < outputs)[None, :]
        factor = tl.load(site + _B).to(tl.pointer_type(x.dtype.element_ty))
        left = x + ((row * tl.num_programs(2) + part) * tiles * RANKS)[:, None] + index[None, :]
        right = tl.multiple_of(factor, 16) + index[:, None] * outputs + column[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, rank, RANKS):
            some_index = (start + index < rank)[:, None]
            a = tl.load(left + start, mask=some_row, other=0.0)
            b = tl.load(right + start * outputs, mask=some_index & some_column, other=0.0)
            total = dot(a, b, total)
        address, some = (
            out + row[:, None] * stride + first + column[None, :],
            some_row & some_column,
        )
        total += tl.load(address, mask=some, other=0.0).to(tl.float32)
        tl.store(address, total.to(out.dtype.element_ty), mask=some)
