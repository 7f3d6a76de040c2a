"""The paged KV cache and what attention over it must know of a step.

A paged KV cache is one tensor for K and one for V per layer, of :func:`cache_shape`. Dimension 0
counts blocks, so that a block is copied or cleared by its index. What the last two dimensions hold
inside a block is private to the attention function that writes and reads the cache.

The runner builds an :class:`AttentionMetadata` once per step, and every layer of the model calls
its attention function (``interface``) with it. ``reference`` is plain torch; fast functions come
from an ``Accelerator``.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jitney.batch import Row
from jitney.execution.byte_cache import SCALE_BYTES
from jitney.execution.low_rank import AdapterSpan, spans_of
from jitney.execution.machine import to_device

HEAD_ALIGNMENT = 16
"""The cache pads head sizes to a multiple of this. It belongs to the cache's format: an attention
function may read and write whole groups of so many elements."""


class RowSlot(NamedTuple):
    """Where a row's states are, in a model with state layers (``state_slots``)."""

    slot: int
    first: int
    """The index of the row's first token among the T."""
    num_tokens: int
    is_new: bool
    """Whether the row begins its sequence: nothing in the slot is the sequence's."""


@dataclass(slots=True)
class AttentionMetadata:
    """One step: R rows, T flattened tokens. All tensors live on the device of the cache."""

    query_start: Tensor
    """int32 [R + 1]: row r's tokens are [query_start[r], query_start[r + 1]) of the T."""
    context_len: Tensor
    """int32 [R]: tokens in the cache for row r once this step is written."""
    block_table: Tensor
    """int32 [R, max_blocks], padded with 0. Position p of row r is in block
    ``block_table[r, p // block_size]`` at offset ``p % block_size``. The tensor may be a view of a
    wider one, so its rows need not follow each other in memory."""
    last_block: int
    """No block in the table has a higher number. Attention functions compare it with the size of
    their cache."""
    slot_mapping: Tensor
    """int64 [T]: block * block_size + offset of each new token."""
    positions: Tensor
    """int64 [T]: position of each new token in its sequence."""
    block_size: int
    max_query_len: int
    max_context_len: int
    plans: dict[Hashable, object] = field(default_factory=dict)
    """What an attention function has derived from this step in one layer, kept for the others."""
    adapted: list[AdapterSpan] = field(default_factory=list)
    """The tokens that are under adapters, in order."""
    slots: list[RowSlot] = field(default_factory=list)
    """By row; empty in a model without state layers."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.context_len.shape[0]


class BlockTables:
    """The block tables of a step as one array, which is kept from step to step. As a rule row r has
    the same table as in the step before; only tables that differ are written."""

    def __init__(self) -> None:
        self.last_block = 0
        """No block that was ever written has a higher number."""
        self._array = np.zeros((0, 0), np.int32)
        self._written: list[list[int]] = []
        """By the array's row: the table that it holds."""

    def fill(self, tables: list[list[int]]) -> np.ndarray:
        """The tables as int32 [tables, longest], padded with 0: a view of the array, which the next
        call overwrites."""
        width = max(len(table) for table in tables)
        self._reserve(len(tables), width)
        for r, table in enumerate(tables):
            if self._written[r] != table:
                row = self._array[r]
                row[: len(table)] = table
                row[len(table) :] = 0
                self._written[r] = table.copy()
                self.last_block = max(self.last_block, *table)
        return self._array[: len(tables), :width]

    def _reserve(self, rows: int, width: int) -> None:
        """Make a larger array if this one is too small."""
        num_rows, num_columns = self._array.shape
        if rows <= num_rows and width <= num_columns:
            return
        num_rows = max(num_rows, rows)
        # Twice the width, because sequences grow: else every new block would need a new array.
        num_columns = max(num_columns, 2 * width)
        self._array = np.zeros((num_rows, num_columns), np.int32)
        self._written = [[] for _ in range(num_rows)]


def build_metadata(
    rows: list[Row],
    block_size: int,
    device: torch.device | str = "cpu",
    tables: BlockTables | None = None,
) -> AttentionMetadata:
    """Metadata of a batch. Each row holds at least one token and blocks for all of its context.

    ``tables`` saves work if they were given for the step before, too. The metadata then shares
    their memory, so it is valid only until they are given for another step.
    """
    assert rows, "a batch has at least one row"
    # Plain lists where possible: for some dozens of rows a call of NumPy costs more than a loop.
    lengths = [len(row.token_ids) for row in rows]
    starts = [row.start for row in rows]
    assert min(lengths) > 0, "a row has at least one token"
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    used_tables = _used_tables(rows, ends, block_size)
    tables = tables or BlockTables()
    table_array = tables.fill(used_tables)

    longest = max(lengths)
    if longest == 1:
        tokens = _lay_out_decodes(used_tables, starts, block_size)
    else:
        tokens = _lay_out_chunks(
            table_array=table_array,
            starts=starts,
            lengths=lengths,
            block_size=block_size,
        )
    device = torch.device(device)
    return AttentionMetadata(
        query_start=to_device(tokens.query_start, device),
        context_len=to_device(np.array(ends, np.int32), device),
        block_table=to_device(table_array, device),
        last_block=tables.last_block,
        slot_mapping=to_device(tokens.slot_mapping, device),
        positions=to_device(tokens.positions, device),
        block_size=block_size,
        max_query_len=longest,
        max_context_len=max(ends),
        adapted=spans_of(rows),
        slots=_row_slots(rows),
    )


def _row_slots(rows: list[Row]) -> list[RowSlot]:
    """See :class:`AttentionMetadata`."""
    slots = []
    first = 0
    for row in rows:
        num_tokens = len(row.token_ids)
        if row.slot is not None:
            slots.append(RowSlot(row.slot, first, num_tokens, is_new=row.start == 0))
        first += num_tokens
    return slots


def _used_tables(rows: list[Row], ends: list[int], block_size: int) -> list[list[int]]:
    """Each row's block table up to the block of its last token."""
    used = []
    for row, end in zip(rows, ends, strict=True):
        table = row.block_table
        num_blocks = (end + block_size - 1) // block_size
        assert len(table) >= num_blocks
        if len(table) > num_blocks:
            table = table[:num_blocks]  # else the row's own list will do
        used.append(table)
    return used


class _TokenLayout(NamedTuple):
    """Which tokens a step has, and where they go: these fields of :class:`AttentionMetadata`."""

    query_start: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray


def _lay_out_decodes(
    used_tables: list[list[int]], starts: list[int], block_size: int
) -> _TokenLayout:
    """For rows of one token each. The token is its row's last, and so in the last of its blocks."""
    slots = []
    for table, start in zip(used_tables, starts, strict=True):
        slots.append(table[-1] * block_size + start % block_size)
    return _TokenLayout(
        query_start=np.arange(len(starts) + 1, dtype=np.int32),
        positions=np.array(starts, np.int64),
        slot_mapping=np.array(slots, np.int64),
    )


def _lay_out_chunks(
    table_array: np.ndarray, starts: list[int], lengths: list[int], block_size: int
) -> _TokenLayout:
    """For rows of any number of tokens."""
    query_start = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    row_of_token = np.repeat(np.arange(len(starts)), lengths)
    # Subtract a token's index among all T tokens from its position: that gives the same difference
    # for all tokens of a row.
    difference = np.array(starts, np.int64) - query_start[:-1]
    positions = np.arange(int(query_start[-1])) + difference[row_of_token]
    block_number, offset = np.divmod(positions, block_size)
    blocks = table_array[row_of_token, block_number].astype(np.int64)
    return _TokenLayout(
        query_start=query_start,
        positions=positions,
        slot_mapping=blocks * block_size + offset,
    )


def cache_shape(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[int, int, int, int]:
    """Shape of one layer's key cache, and of its value cache: [blocks, KV heads, tokens, head].

    The head size is rounded up to a multiple of HEAD_ALIGNMENT; int8 adds SCALE_BYTES. A head size
    of 0 stays 0.
    """
    padded = (head_size + HEAD_ALIGNMENT - 1) // HEAD_ALIGNMENT * HEAD_ALIGNMENT
    scale = SCALE_BYTES if dtype == torch.int8 and head_size > 0 else 0
    return (num_blocks, num_kv_heads, block_size, padded + scale)


class AttentionShape(NamedTuple):
    """What the choice of a layer's attention function depends on."""

    device: torch.device
    dtype: torch.dtype
    """The cache's."""
    model_dtype: torch.dtype
    """Of queries, keys and values."""
    head_size: int
    num_heads: int
    num_kv_heads: int
    batch_invariant: bool = False
