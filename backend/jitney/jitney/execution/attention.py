"""The paged KV cache and what attention over it must know of a step.

A paged KV cache is one tensor for K and one for V per layer, of :func:`cache_shape`. Dimension 0
counts blocks, so that a block is copied or cleared by its index; how the last two dimensions are
used inside a block is private to the attention function that writes and reads the cache.

The runner builds an :class:`AttentionMetadata` once per step, and every layer of the model calls
its function (``interface``) with it. ``reference`` is plain torch; fast ones come from an
``Accelerator``.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jitney.batch import Row
from jitney.execution.byte_cache import SCALE_BYTES
from jitney.execution.low_rank import Span, spans_of
from jitney.execution.machine import to_device

HEAD_ALIGNMENT = 16
"""Head sizes are padded in the cache to a multiple of this: the lanes of one vector register."""


@dataclass(slots=True)
class AttentionMetadata:
    """One step: R rows, T flattened tokens. All tensors live on the device of the cache."""

    query_start: Tensor
    """int32 [R + 1]: row r's tokens are [query_start[r], query_start[r + 1]) of the T."""
    context_len: Tensor
    """int32 [R]: tokens in the cache for row r once this step is written."""
    block_table: Tensor
    """int32 [R, max_blocks], padded with 0; its rows need not be contiguous. Position p of row r is
    in block ``block_table[r, p // block_size]`` at offset ``p % block_size``."""
    last_block: int
    """No block in the table has a higher number."""
    slot_mapping: Tensor
    """int64 [T]: block * block_size + offset of each new token."""
    positions: Tensor
    """int64 [T]: position of each new token in its sequence."""
    block_size: int
    max_query_len: int
    max_context_len: int
    plans: dict[Hashable, object] = field(default_factory=dict)
    """Work lists that an attention function derives from this step, kept for its other layers."""
    adapted: list[Span] = field(default_factory=list)
    """The tokens that are under adapters, in order."""

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
        num_rows, num_columns = self._array.shape
        if num_rows < len(tables) or num_columns < width:
            num_rows = max(num_rows, len(tables))
            num_columns = max(num_columns, 2 * width)  # tables grow: not in every step anew
            self._array = np.zeros((num_rows, num_columns), np.int32)
            self._written = [[] for _ in range(num_rows)]
        for r, table in enumerate(tables):
            if self._written[r] != table:
                row = self._array[r]
                row[: len(table)] = table
                row[len(table) :] = 0
                self._written[r] = table.copy()
                self.last_block = max(self.last_block, *table)
        return self._array[: len(tables), :width]


def build_metadata(
    rows: list[Row],
    block_size: int,
    device: torch.device | str = "cpu",
    tables: BlockTables | None = None,
) -> AttentionMetadata:
    """Metadata of a batch. Each row holds at least one token and blocks for all of its context.

    ``tables`` saves work if the last step's metadata was built with them, too. The result then
    shares their memory: it is good until the next call with them.
    """
    # Plain lists where possible: for some dozens of rows a call of NumPy costs more than a loop.
    assert rows, "a batch has at least one row"
    lengths = [len(row.token_ids) for row in rows]
    starts = [row.start for row in rows]
    longest = max(lengths)
    assert min(lengths) > 0, "a row has at least one token"
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    used_tables = []
    for row, end in zip(rows, ends, strict=True):
        table = row.block_table
        num_blocks = -(-end // block_size)
        assert len(table) >= num_blocks
        used_tables.append(table if len(table) == num_blocks else table[:num_blocks])
    tables = tables or BlockTables()
    table_array = tables.fill(used_tables)

    if longest == 1:
        # Decodes only: each row's token is its last, and so in the last of its blocks.
        query_start = np.arange(len(rows) + 1, dtype=np.int32)
        positions = np.array(starts, np.int64)
        slot_list = []
        for table, start in zip(used_tables, starts, strict=True):
            slot_list.append(table[-1] * block_size + start % block_size)
        slots = np.array(slot_list, np.int64)
    else:
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        # A row's positions are the indices of its tokens among the T, moved by so much.
        shift = np.array(starts, np.int64) - query_start[:-1]
        positions = np.arange(int(query_start[-1])) + shift[row_of_token]
        column, offset = np.divmod(positions, block_size)
        slots = table_array[row_of_token, column].astype(np.int64) * block_size + offset

    device = torch.device(device)
    return AttentionMetadata(
        query_start=to_device(query_start, device),
        context_len=to_device(np.array(ends, np.int32), device),
        block_table=to_device(table_array, device),
        last_block=tables.last_block,
        slot_mapping=to_device(slots, device),
        positions=to_device(positions, device),
        block_size=block_size,
        max_query_len=longest,
        max_context_len=max(ends),
        adapted=spans_of(rows),
    )


def cache_shape(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[int, int, int, int]:
    """Shape of one layer's key cache, and of its value cache: [blocks, KV heads, tokens, head].

    The head size is rounded up to a multiple of HEAD_ALIGNMENT; int8 adds SCALE_BYTES.
    """
    padded = -(-head_size // HEAD_ALIGNMENT) * HEAD_ALIGNMENT
    scale = SCALE_BYTES if dtype == torch.int8 else 0
    return (num_blocks, num_kv_heads, block_size, padded + scale)


class AttentionShape(NamedTuple):
    """What the choice of a layer's attention function depends on."""

    device: torch.device
    dtype: torch.dtype
    """The cache's."""
    model_dtype: torch.dtype
    head_size: int
    num_heads: int
    num_kv_heads: int
    batch_invariant: bool = False
