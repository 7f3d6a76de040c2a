"""A step's inputs on the device: packed into one copy, unpacked into static buffers.

Everything about a step that changes leaves the host as one array of 32-bit numbers in one copy;
the kernel :func:`prepare.prepare` makes the module's and the attention's inputs of it, in buffers
whose addresses never change, so that a CUDA graph may read them. The array is packed so (R rows, T
tokens, in order):

    8 fields x [R]     begin, length, start, place, first, count, offset, carried
    [T]                token ids; 0 where the token is carried
    [N]                new entries of block tables
    [W]                wanted: tokens of which logits are computed
    [S]                sources: for each sequence to sample its place among the wanted
    [C], [C]           blocks to copy from, and to

The host fills one of two arrays while the copy from the other may still be on its way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.gpu.device import Device
from jitney.execution.gpu.prepare import FIELDS, LANES, prepare
from jitney.execution.gpu.tables import DeviceTables, TableUpdates
from jitney.request import Row

_MOST_STRIDES = 16
# Tables of sequences that sit out a step stay on the device, up to so many.
_SPARE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """What the host knows of a step."""

    num_rows: int
    num_tokens: int
    longest_query: int
    longest_context: int

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token."""
        return self.num_tokens == self.num_rows


@dataclass(slots=True)
class _Packed:
    """A step as it lies in the device's array: where its parts begin."""

    tokens_at: int
    values_at: int
    wanted_at: int
    sources_at: int
    copies_at: int
    end: int
    longest_table: int
    most_carried: int
    """The highest place that a row takes its token from; -1: none does."""


class _Staging:
    """One host array, and when the copy from it is over."""

    def __init__(self, device: Device, count: int) -> None:
        self.tensor = device.staging(count)
        self.array = self.tensor.numpy()
        self.copied = device.event()


class StepInputs:
    """Owns the buffers and the device's block tables. One step at a time, in stream order:
    :meth:`load` overwrites what the step before read."""

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_tokens: int,
        max_blocks: int,
        block_size: int,
        last_block: int,
    ) -> None:
        """``max_rows`` padding included; ``max_blocks`` of one sequence; ``last_block``: the
        highest number of a block."""
        self.max_rows = max_rows
        self._device = device
        self._block_size = block_size
        self._last_block = last_block
        spare = min(max_rows, _SPARE_ROWS)
        self._tables = DeviceTables(max_rows + spare)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.torch_device)

        tokens = max(max_tokens, max_rows)
        self.ids = zeros(tokens, dtype=torch.int64)
        self.positions = zeros(tokens, dtype=torch.int64)
        self.every_row = torch.arange(max_rows, device=device.torch_device)
        self._slots = zeros(tokens, dtype=torch.int64)
        self._query_start = zeros(max_rows + 1)
        self._context_len = zeros(max_rows)
        self._block_table = zeros(max_rows, max_blocks)
        self._all_tables = zeros(max_rows + spare, max_blocks)
        self._none_sampled = zeros(1, dtype=torch.int64)

        count = len(FIELDS) * max_rows + 2 * tokens + 4 * max_rows
        self._array = zeros(count)
        self._stagings = [_Staging(device, count) for _ in range(2)]
        self._packed = _Packed(0, 0, 0, 0, 0, 0, 0, -1)

    @property
    def num_bytes(self) -> int:
        """Device memory that the buffers take."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return sum(each.numel() * each.element_size() for each in tensors)

    # ------------------------------------------------------------------ host to device

    def load(
        self,
        rows: list[Row],
        lengths: list[int],
        starts: list[int],
        *,
        wanted: Sequence[int] = (),
        sources: Sequence[int] = (),
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Pack a step and begin its copy. ``lengths`` and ``starts`` are the rows'."""
        tables = [row.block_table for row in rows]
        updates = self._tables.update(tables)
        parts = [list(wanted), list(sources), [a for a, _ in copies], [b for _, b in copies]]
        count, total = len(rows), sum(lengths)
        tokens_at = len(FIELDS) * count
        values_at = tokens_at + total
        bounds = [values_at + len(updates.values)]
        for part in parts:
            bounds.append(bounds[-1] + len(part))
        staging = self._next_staging(bounds[-1])
        array = staging.array
        fields = array[:tokens_at].reshape(len(FIELDS), count)
        _pack_rows(fields, rows, lengths, starts, updates)
        if total == count:
            array[tokens_at:values_at] = [row.token_ids[0] for row in rows]
        else:
            array[tokens_at:values_at] = list(chain.from_iterable(row.token_ids for row in rows))
        if updates.values:
            array[values_at : bounds[0]] = updates.values
        for part, begin, end in zip(parts, bounds, bounds[1:], strict=False):
            if part:
                array[begin:end] = part
        self._packed = _Packed(
            tokens_at,
            values_at,
            bounds[0],
            bounds[1],
            bounds[2],
            bounds[-1],
            max(map(len, tables), default=0),
            int(fields[7].max()) if count else -1,
        )
        self._array[: bounds[-1]].copy_(staging.tensor[: bounds[-1]], non_blocking=True)
        staging.copied.record()

    def prepare(self, shape: Shape, padded: int, sampled: Tensor | None) -> None:
        """Unpack for a step of ``padded`` rows; ``sampled`` are the tokens of the step before."""
        packed = self._packed
        assert packed.longest_table <= self._block_table.shape[1], "a block table is too long"
        known = 0 if sampled is None else len(sampled)
        assert packed.most_carried < known, "a row takes a token that no step before it sampled"
        self._unpack(shape.num_rows, shape.num_tokens, padded, sampled, shape.longest_query)

    def clear(self) -> None:
        """Put a step of padding alone in the buffers: it writes nothing and attends to nothing."""
        self._packed = _Packed(0, 0, 0, 0, 0, 0, 0, -1)
        self._unpack(0, 0, self.max_rows, None, 1)

    def _unpack(
        self,
        num_rows: int,
        num_tokens: int,
        padded: int,
        sampled: Tensor | None,
        longest_query: int,
    ) -> None:
        packed = self._packed
        widest = max(longest_query, packed.longest_table)
        strides = min(-(-widest // LANES), _MOST_STRIDES)
        prepare[(padded, strides)](
            self._array,
            self._none_sampled if sampled is None else sampled,
            self._all_tables,
            self.ids,
            self.positions,
            self._slots,
            self._query_start,
            self._context_len,
            self._block_table,
            num_rows,
            num_tokens,
            packed.tokens_at,
            packed.values_at,
            self._block_table.shape[1],
            BLOCK_SIZE=self._block_size,
            LANES=LANES,
        )

    def forget(self) -> None:
        """A step failed: what the device holds is unknown."""
        self._tables.forget()

    def _next_staging(self, count: int) -> _Staging:
        """The array whose copy began two steps ago, with room for ``count`` numbers."""
        staging, other = self._stagings
        staging.copied.synchronize()
        if staging.array.shape[0] < count:  # long tables, all of them new at once
            staging = _Staging(self._device, 2 * count)
        if self._array.shape[0] < count:
            self._array = self._array.new_zeros(2 * count)
        self._stagings = [other, staging]  # both, even if there was no memory for a longer one
        return staging

    # ------------------------------------------------------------------ on the device

    def wanted(self) -> Tensor:
        """int64: tokens of the step of which logits are to be computed."""
        return self._array[self._packed.wanted_at : self._packed.sources_at].long()

    def sources(self) -> Tensor:
        """int64: for each sequence to sample its place among the wanted."""
        return self._array[self._packed.sources_at : self._packed.copies_at].long()

    def copies(self) -> Tensor:
        """int64 [2, C]: blocks to copy from, and to."""
        return self._array[self._packed.copies_at : self._packed.end].long().view(2, -1)

    def metadata(self, shape: Shape) -> AttentionMetadata:
        """Of a step of this shape, over the static buffers. For a graph, ``shape`` states the
        padded numbers and the longest context that the graph may be replayed with."""
        blocks = -(-shape.longest_context // self._block_size)
        return AttentionMetadata(
            query_start=self._query_start[: shape.num_rows + 1],
            context_len=self._context_len[: shape.num_rows],
            block_table=self._block_table[: shape.num_rows, :blocks],
            last_block=self._last_block,
            slot_mapping=self._slots[: shape.num_tokens],
            positions=self.positions[: shape.num_tokens],
            block_size=self._block_size,
            max_query_len=shape.longest_query,
            max_context_len=shape.longest_context,
        )


def _pack_rows(
    fields: np.ndarray,
    rows: list[Row],
    lengths: list[int],
    starts: list[int],
    updates: TableUpdates,
) -> None:
    """Write the rows' fields [8, R]."""
    fields[1] = lengths
    np.cumsum(fields[1], out=fields[0])
    fields[0] -= fields[1]
    fields[2] = starts
    fields[3] = updates.places
    fields[4] = updates.first
    fields[5] = updates.counts
    fields[6] = updates.offsets
    fields[7] = [-1 if row.carried is None else row.carried for row in rows]
