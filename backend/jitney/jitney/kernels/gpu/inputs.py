"""What CUDA graphs of decode steps read: buffers whose addresses never change."""

import torch
from torch import Tensor

from jitney.execution.attention import AttentionMetadata


class DecodeInputs:
    """Owns the buffers. A step of R rows, a token each, is copied into their beginning; the rows
    behind it are padding, which sees nothing and is written nowhere."""

    def __init__(
        self,
        device: torch.device,
        *,
        max_rows: int,
        max_context: int,
        block_size: int,
        last_block: int,
    ) -> None:
        """``max_rows`` and ``max_context``: of any graph. ``last_block``: see the metadata's."""
        self._block_size, self._last_block = block_size, last_block
        self.ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.rows = torch.arange(max_rows, device=device)
        self._positions, self._slots = torch.zeros_like(self.ids), torch.zeros_like(self.ids)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._context_len = torch.zeros(max_rows, dtype=torch.int32, device=device)
        columns = -(-max_context // block_size)
        self._block_table = torch.zeros((max_rows, columns), dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Put a step of padding alone into the buffers."""
        self._context_len.zero_()
        self._slots.fill_(-1)

    def load(self, ids: Tensor, meta: AttentionMetadata) -> None:
        """Copy a step, in stream order."""
        self.clear()
        rows, columns = meta.block_table.shape
        self.ids[:rows].copy_(ids)
        self._positions[:rows].copy_(meta.positions)
        self._slots[:rows].copy_(meta.slot_mapping)
        self._context_len[:rows].copy_(meta.context_len)
        self._block_table[:rows, :columns].copy_(meta.block_table)

    def metadata(self, rows: int, max_context: int) -> AttentionMetadata:
        """Of a step of ``rows`` rows, padding included, with contexts up to ``max_context``."""
        return AttentionMetadata(
            query_start=self._query_start[: rows + 1],
            context_len=self._context_len[:rows],
            block_table=self._block_table[:rows, : -(-max_context // self._block_size)],
            last_block=self._last_block,
            slot_mapping=self._slots[:rows],
            positions=self._positions[:rows],
            block_size=self._block_size,
            max_query_len=1,
            max_context_len=max_context,
        )
