"""Chunked attention (Llama 4): a query sees the tokens of its own chunk only, up to itself.

A chunk is a whole number of blocks. So the tokens of a row that are in one chunk are a row of their
own, whose block table begins where the chunk does, and any attention function can compute it.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import AttentionCall, AttentionFunction, LayerCache
from jitney.execution.machine import to_device


class ChunkedAttention:
    """An attention function in chunks of so many tokens; see
    :class:`interface.AttentionFunction`."""

    def __init__(self, attend: AttentionFunction, chunk: int) -> None:
        self.name = attend.name
        self._attend = attend
        self._chunk = chunk

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """See :class:`interface.AttentionFunction`."""
        key = (type(self), self._chunk)
        chunked = meta.plans.get(key)
        if chunked is None:
            chunked = split_rows(meta, self._chunk)
            meta.plans[key] = chunked
        assert isinstance(chunked, AttentionMetadata)
        return self._attend(call, cache._replace(attend=self._attend), chunked)


def split_rows(meta: AttentionMetadata, chunk: int) -> AttentionMetadata:
    """The step with a row for each chunk of each row."""
    assert chunk % meta.block_size == 0, "a chunk is a whole number of blocks"
    chunk_blocks = chunk // meta.block_size
    tables = meta.block_table.cpu().numpy()
    starts = meta.query_start.tolist()
    query_start = [0]
    contexts = []
    parts = []
    for r, context in enumerate(meta.context_len.tolist()):
        position = context - (starts[r + 1] - starts[r])
        while position < context:
            number = position // chunk
            end = min(context, (number + 1) * chunk)
            query_start.append(query_start[-1] + end - position)
            contexts.append(end - number * chunk)
            first_block = number * chunk_blocks
            parts.append(tables[r, first_block : first_block + chunk_blocks])
            position = end
    table_array = np.zeros((len(parts), max(len(part) for part in parts)), np.int32)
    for row, part in zip(table_array, parts, strict=True):
        row[: len(part)] = part
    device = meta.block_table.device
    lengths = np.diff(query_start)
    return replace(
        meta,
        query_start=to_device(np.array(query_start, np.int32), device),
        context_len=to_device(np.array(contexts, np.int32), device),
        block_table=to_device(table_array, device),
        max_query_len=int(lengths.max()),
        max_context_len=max(contexts),
        plans={},
    )
