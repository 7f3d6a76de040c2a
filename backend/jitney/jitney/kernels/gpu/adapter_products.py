"""What LoRA adapters add to a step's products on a GPU: two launches for each fused layer, whatever
adapters and ranks the step has.

The tokens of a step are put into *blocks*: up to BLOCK_TOKENS tokens of one adapter, wherever they
stand in the step. Here of three rows, with BLOCK_TOKENS = 4::

    token      0   1   2   3   4   5   6   7   8
    adapter    A   A   A   A   A   A   B   A   A       blocks: A: 0 1 2 3, A: 4 5 7 8, B: 6

:func:`shrink_kernel` computes ``x A^T`` of each block, rounded to x's dtype; :func:`expand_kernel`
adds the product of that and B^T. A block says where its adapter's table is, and the table where the
adapter's factors are. So a program reads the factors of its own block's adapter, and goes as far as
that adapter's rank for that layer.

Sums are float32, in an order that depends on the layer and on this rank. So a token's result has
the same bits in a prefill, in a decode and in every batch.

Called by ``gpu_layers`` and ``gpu_accelerator``.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jitney.execution.low_rank import AdapterSpan, AddProducts, Factors, LowRank, Part
from jitney.execution.machine import to_device
from jitney.kernels.gpu.language import dot

BLOCK_TOKENS = 16
"""Tokens of a block, at most: the fewest rows that matrix units take. An adapter seldom has more
decodes in a step."""
RANKS = 16
"""Ranks of a tile: the fewest that matrix units take."""
DEPTH = 128
"""Inputs that the shrinking kernel loads at once."""
COLUMNS = 128
"""Outputs of a tile of the expanding kernel."""

# The fields of an entry of an adapter's table, each 64 bits. There is an entry for each linear
# layer; in that of a layer which the adapter does not change, all are 0.
_A = tl.constexpr(0)  # address of A [rank, inputs]
_B = tl.constexpr(1)  # address of B^T [rank, outputs]
_RANK = tl.constexpr(2)
_FIRST = tl.constexpr(3)  # the first column of the fused layer's result that is this layer's
_OUTPUTS = tl.constexpr(4)  # how many columns are this layer's
_FIELDS = tl.constexpr(5)  # how many fields an entry has


class FactorTable(NamedTuple):
    """An adapter as the kernels read it: ``LowRank.packed``."""

    entries: Tensor
    """int64 [linear layers, _FIELDS], on the device."""
    largest_rank: int
    """Of all linear layers."""


class _Work(NamedTuple):
    """What the launches of a step read."""

    blocks: Tensor
    """int64 [blocks, 1 + BLOCK_TOKENS], on the device: the address of the adapter's table, then the
    tokens, filled up with -1."""
    rank_tiles: int
    """The most tiles of RANKS that an adapter of the step has."""


class GroupedProducts:
    """What adapters add to the layers of one model."""

    def __init__(self, layers: Sequence[Sequence[Part]]) -> None:
        """``layers`` are the fused layers, by their parts. A launch is for all parts of a layer."""
        self._parts = [part for parts in layers for part in parts]
        self._index = {part.path: index for index, part in enumerate(self._parts)}
        """By path: the index of a part, and of its entry in a table."""

    def pack(self, factors: Mapping[str, Factors]) -> FactorTable:
        """A :data:`low_rank.Pack`. The factors are on the device, and must outlive the table. Any
        thread may call it."""
        entries = torch.zeros(len(self._parts), _FIELDS.value, dtype=torch.int64)
        for path, pair in factors.items():
            index = self._index[path]
            part = self._parts[index]
            rank = len(pair.a)
            outputs = part.last - part.first
            assert pair.a.is_contiguous()
            assert pair.b.is_contiguous()
            assert pair.b.shape == (rank, outputs)
            # In the order of the fields.
            entry = [pair.a.data_ptr(), pair.b.data_ptr(), rank, part.first, outputs]
            entries[index] = torch.tensor(entry)
        device = next(iter(factors.values())).a.device
        largest_rank = max(len(pair.a) for pair in factors.values())
        return FactorTable(entries.to(device), largest_rank)

    def begin(self, spans: Sequence[AdapterSpan]) -> AddProducts:
        """A :data:`low_rank.BeginProducts`. Sends what the launches read to the device, without
        waiting for it."""
        tokens_of: dict[LowRank, list[int]] = {}
        for span in spans:
            tokens_of.setdefault(span.adapter, []).extend(range(span.first, span.last))

        blocks: list[list[int]] = []
        for adapter, tokens in tokens_of.items():
            table = adapter.packed.entries.data_ptr()
            for start in range(0, len(tokens), BLOCK_TOKENS):
                block = tokens[start : start + BLOCK_TOKENS]
                filling = [-1] * (BLOCK_TOKENS - len(block))
                blocks.append([table, *block, *filling])
        largest_rank = max(adapter.packed.largest_rank for adapter in tokens_of)
        device = spans[0].adapter.packed.entries.device
        work = _Work(to_device(blocks, device), triton.cdiv(largest_rank, RANKS))

        changed: set[str] = set()
        for adapter in tokens_of:
            changed.update(adapter.factors)

        def add(parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
            if any(part.path in changed for part in parts):
                self._launch(work, parts, x, out)

        return add

    def _launch(self, work: _Work, parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
        """Launch both kernels for a layer: an :data:`AddProducts`."""
        first_entry = self._index[parts[0].path]
        assert self._parts[first_entry : first_entry + len(parts)] == list(parts)
        assert x.dtype == out.dtype
        assert out.stride(1) == 1
        x = x.contiguous()
        blocks = len(work.blocks)
        tiles = len(parts) * work.rank_tiles
        shrunk = x.new_empty(len(x), tiles * RANKS)
        shrink_kernel[(blocks, tiles)](
            shrunk, x, work.blocks, first_entry, work.rank_tiles, x.shape[1],
            BLOCK_TOKENS, RANKS, DEPTH, num_warps=4, num_stages=4,
        )  # fmt: skip
        widest = max(part.last - part.first for part in parts)
        even = all(part.first % 16 == 0 and part.last % 16 == 0 for part in parts)
        expand_kernel[(blocks, triton.cdiv(widest, COLUMNS), len(parts))](
            out, shrunk, work.blocks, first_entry, work.rank_tiles, out.stride(0),
            even, BLOCK_TOKENS, RANKS, COLUMNS, num_warps=4, num_stages=2,
        )  # fmt: skip


# Layers and steps differ in the numbers that are not specialized: the compiled code serves all.
@triton.jit(do_not_specialize=["first_entry", "rank_tiles"])
def shrink_kernel(
    out,  # [T, parts * rank_tiles * RANKS]: x A^T of each part
    x,  # [T, inputs]
    blocks,  # see ``_Work``, which also has ``rank_tiles``
    first_entry,  # the table's entry of the first part
    rank_tiles,
    inputs,
    BLOCK_TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Programs (blocks, parts * rank_tiles): each computes a tile of RANKS ranks of a part for one
    block of tokens. Those beyond the adapter's rank have no work."""
    block = blocks + tl.program_id(0) * (BLOCK_TOKENS + 1)
    part = tl.program_id(1) // rank_tiles
    tile = tl.program_id(1) % rank_tiles
    table = tl.load(block).to(tl.pointer_type(tl.int64))
    entry = table + (first_entry + part) * _FIELDS
    rank = tl.load(entry + _RANK)
    if tile * RANKS < rank:
        token = tl.load(block + 1 + tl.arange(0, BLOCK_TOKENS))
        index = tile * RANKS + tl.arange(0, RANKS)
        depth = tl.arange(0, DEPTH)
        real_token = (token >= 0)[:, None]
        real_index = (index < rank)[:, None]
        factor = tl.load(entry + _A).to(tl.pointer_type(x.dtype.element_ty))
        left = x + token[:, None] * inputs + depth[None, :]
        right = tl.multiple_of(factor, 16) + index[:, None] * inputs + depth[None, :]
        total = tl.zeros([BLOCK_TOKENS, RANKS], tl.float32)
        for start in range(0, inputs, DEPTH):
            inside = (start + depth < inputs)[None, :]
            a = tl.load(left + start, mask=real_token & inside, other=0.0)
            b = tl.load(right + start, mask=real_index & inside, other=0.0)
            total = dot(a, b.T, total)
        column = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        address = out + token[:, None] * (tl.num_programs(1) * RANKS) + column[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=real_token)


@triton.jit(do_not_specialize=["first_entry", "rank_tiles"])
def expand_kernel(
    out,  # [T, outputs of all parts], rows ``stride`` apart
    shrunk,  # [T, parts * rank_tiles * RANKS]: what ``shrink_kernel`` gave
    blocks,  # as in ``shrink_kernel``; likewise the next two
    first_entry,
    rank_tiles,
    stride,
    EVEN: tl.constexpr,  # all parts begin and end at multiples of 16 columns
    BLOCK_TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs (blocks, tiles of the widest part, parts): each adds to COLUMNS outputs of a part
    for one block of tokens. Those beyond the part's outputs have no work."""
    block = blocks + tl.program_id(0) * (BLOCK_TOKENS + 1)
    begin = tl.program_id(1) * COLUMNS
    part = tl.program_id(2)
    table = tl.load(block).to(tl.pointer_type(tl.int64))
    entry = table + (first_entry + part) * _FIELDS
    outputs = tl.load(entry + _OUTPUTS)
    if begin < outputs:
        rank = tl.load(entry + _RANK)
        first = tl.load(entry + _FIRST)
        if EVEN:  # so that the compiler loads eight values at once
            first = tl.multiple_of(first, 16)
            outputs = tl.multiple_of(outputs, 16)
        token = tl.load(block + 1 + tl.arange(0, BLOCK_TOKENS))
        index = tl.arange(0, RANKS)
        column = begin + tl.arange(0, COLUMNS)
        real_token = (token >= 0)[:, None]
        real_column = (column < outputs)[None, :]
        factor = tl.load(entry + _B).to(tl.pointer_type(shrunk.dtype.element_ty))
        row = (token * tl.num_programs(2) + part) * rank_tiles * RANKS
        left = shrunk + row[:, None] + index[None, :]
        right = tl.multiple_of(factor, 16) + index[:, None] * outputs + column[None, :]
        total = tl.zeros([BLOCK_TOKENS, COLUMNS], tl.float32)
        for start in range(0, rank, RANKS):
            real_index = (start + index < rank)[:, None]
            a = tl.load(left + start, mask=real_token, other=0.0)
            b = tl.load(right + start * outputs, mask=real_index & real_column, other=0.0)
            total = dot(a, b, total)
        address = out + token[:, None] * stride + first + column[None, :]
        real = real_token & real_column
        total += tl.load(address, mask=real, other=0.0).to(tl.float32)
        tl.store(address, total.to(out.dtype.element_ty), mask=real)
