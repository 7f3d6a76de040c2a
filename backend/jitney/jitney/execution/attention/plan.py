# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types of what it compiles here.
"""Cutting a step into the works of the CPU kernel.

Done for every step: so it is compiled, which takes a tenth of the time of NumPy's calls.
"""

from dataclasses import dataclass

import numpy as np

from jitney.execution.attention.layout import SPLIT_TOKENS, TILE_ROWS, Work
from jitney.execution.attention.products import GROUP_TOKENS
from jitney.execution.compiled import compile_function

_FIELDS = len(Work._fields)


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
    into tiles of TILE_ROWS rows. Neither looks at any other row. Both arrays are int32.
    """
    reach = int(context_len.max()) if window is None else window
    tile = max(1, TILE_ROWS // group)
    # Numba's cache would not see a change of the constants, were they not arguments.
    works, parts, split_rows = _cut(
        query_start, context_len, tile, reach, SPLIT_TOKENS, GROUP_TOKENS
    )
    return Plan(works, parts, split_rows)


@compile_function
def _cut(query_start, context_len, tile, reach, split_tokens, group_tokens):
    """(works, parts of split rows, split rows) for queries that see ``reach`` keys at most."""
    counts = np.empty(len(context_len), np.int64)
    for row in range(len(context_len)):
        context = np.int64(context_len[row])
        length = np.int64(query_start[row + 1]) - query_start[row]
        if length == 1:
            first = max(context - reach, 0) // group_tokens * group_tokens
            counts[row] = -(-(context - first) // split_tokens)
        else:
            counts[row] = -(-length // tile)
    total = counts.sum()
    works = np.empty((total, _FIELDS), np.int64)
    cost = np.empty(total, np.int64)
    done = parts = split_rows = 0
    for row in range(len(context_len)):
        start, context = np.int64(query_start[row]), np.int64(context_len[row])
        length = np.int64(query_start[row + 1]) - start
        count = counts[row]
        for nth in range(count):
            if length == 1:
                offset, tokens, part = 0, 1, nth
            else:
                offset, part = nth * tile, 0
                tokens = min(length - offset, tile)
            position = context - length + offset
            begin = max(position + 1 - reach, 0) // group_tokens * group_tokens
            end = position + tokens
            if length == 1:
                begin += nth * split_tokens
                end = min(end, begin + split_tokens)
            num_parts = count if length == 1 else 1
            works[done] = (
                row, start + offset, tokens, position, begin, end, part, num_parts, parts,
                split_rows,
            )  # fmt: skip
            cost[done] = tokens * (end - begin)
            done += 1
        if length == 1 and count > 1:
            parts += count
            split_rows += 1
    order = np.argsort(-cost, kind="mergesort")  # a stable one
    return works[order], parts, split_rows
