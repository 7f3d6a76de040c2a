"""Cutting a step into the works of the CPU kernel."""

from dataclasses import dataclass

import numpy as np

from jitney.execution.attention.layout import SPLIT_TOKENS, TILE_ROWS, Work
from jitney.execution.attention.products import GROUP_TOKENS


@dataclass(slots=True)
class Plan:
    """A step's works for layers of one window and one number of query heads per KV head."""

    works: np.ndarray
    """int64 [works, fields of layout.Work], the longest first."""
    parts: int
    """Of all split rows."""
    split_rows: int


def make_plan(
    query_start: np.ndarray, context_len: np.ndarray, group: int, window: int | None
) -> Plan:
    """Cut a step into works, for ``group`` query heads per KV head.

    A row of one token is split by its keys into parts of SPLIT_TOKENS, a longer one by its tokens
    into tiles of TILE_ROWS rows. Neither looks at any other row.
    """
    tile = max(1, TILE_ROWS // group)
    start, end = query_start[:-1].astype(np.int64), query_start[1:].astype(np.int64)
    context = context_len.astype(np.int64)
    length = end - start
    reach = int(context.max()) if window is None else window
    first = _group_start(context - reach)
    parts = np.where(length == 1, -(-(context - first) // SPLIT_TOKENS), 1)
    count = np.where(length == 1, parts, -(-length // tile))

    row = np.repeat(np.arange(len(length)), count)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    split = length[row] == 1
    offset = np.where(split, 0, nth * tile)
    tokens = np.minimum(length[row] - offset, tile)
    position = (context - length)[row] + offset
    begin = _group_start(position + 1 - reach) + np.where(split, nth * SPLIT_TOKENS, 0)
    limit = position + tokens
    finish = np.where(split, np.minimum(limit, begin + SPLIT_TOKENS), limit)
    in_parts = np.where(parts > 1, parts, 0)
    columns = {
        "row": row,
        "first_token": start[row] + offset,
        "num_tokens": tokens,
        "position": position,
        "keys_begin": begin,
        "keys_end": finish,
        "part": np.where(split, nth, 0),
        "num_parts": parts[row],
        "first_part": (np.cumsum(in_parts) - in_parts)[row],
        "split_row": (np.cumsum(parts > 1) - (parts > 1))[row],
    }
    order = np.argsort(-tokens * (finish - begin), kind="stable")
    works = np.stack([columns[name] for name in Work._fields], axis=1)[order]
    return Plan(works, int(in_parts.sum()), int((parts > 1).sum()))


def _group_start(position: np.ndarray) -> np.ndarray:
    """The first position of the group of 16 that ``position``, at least 0, lies in."""
    return np.maximum(position, 0) // GROUP_TOKENS * GROUP_TOKENS
