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

from jitney.execution.byte_cache import SCALE_BYTES
from jitney.execution.low_rank import Span, spans_of
from jitney.execution.machine import to_device
from jitney.messages import Row

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
    """int32 [R, max_blocks], padded with 0, its rows perhaps apart. Position p of row r is in block
    ``block_table[r, p // block_size]`` at offset ``p % block_size``."""
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
    """The tokens that adapters change, in order."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.context_len.shape[0]


class BlockTables:
    """The block tables of steps as one array, kept from step to step: as a rule a row's table is
    what the same slot held a step before, and only a table that differs is written."""

    def __init__(self) -> None:
        self.last_block = 0
        """No block that was ever written has a higher number."""
        self._array = np.zeros((0, 0), np.int32)
        self._written: list[list[int]] = []

    def fill(self, tables: list[list[int]]) -> np.ndarray:
        """int32 [tables, longest], padded with 0: a view of what the next call overwrites."""
        width = max(len(table) for table in tables)
        rows, columns = self._array.shape
        if rows < len(tables) or columns < width:
            shape = max(rows, len(tables)), max(columns, 2 * width)
            self._array, self._written = np.zeros(shape, np.int32), [[] for _ in range(shape[0])]
        for slot, table in enumerate(tables):
            if self._written[slot] != table:
                row, count = self._array[slot], len(table)
                row[:count] = table
                row[count:] = 0
                self._written[slot] = table.copy()
                self.last_block = max(self.last_block, *table)
        return self._array[: len(tables), :width]


def build_metadata(
    rows: list[Row],
    block_size: int,
    device: torch.device | str = "cpu",
    tables: BlockTables | None = None,
) -> AttentionMetadata:
    """Metadata of a batch. Each row holds at least one token and blocks for all of its context.

    With ``tables``, those of the last step, the result is good until the next call with them.
    """
    # Plain lists where they do: for some dozens of rows each call of NumPy costs more than a loop.
    assert rows, "a batch has at least one row"
    lengths = [len(row.token_ids) for row in rows]
    starts = [row.start for row in rows]
    longest = max(lengths)
    assert min(lengths) > 0, "a row has at least one token"
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    used = []
    for row, end in zip(rows, ends, strict=True):
        table, blocks = row.block_table, -(-end // block_size)
        assert len(table) >= blocks
        used.append(table if len(table) == blocks else table[:blocks])
    tables = tables or BlockTables()
    table_array = tables.fill(used)

    if longest == 1:
        query_start = np.arange(len(rows) + 1, dtype=np.int32)
        positions = np.array(starts, np.int64)
        pairs = zip(used, starts, strict=True)
        slots = np.array([t[-1] * block_size + start % block_size for t, start in pairs], np.int64)
    else:
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        owner = np.repeat(np.arange(len(rows)), lengths)
        first = np.array(starts, np.int64) - query_start[:-1]
        positions = np.arange(int(query_start[-1])) + first[owner]
        block, offset = np.divmod(positions, block_size)
        slots = table_array[owner, block].astype(np.int64) * block_size + offset

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
