# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types of what it compiles here.
"""Cutting a step into the works of the CPU kernel.

Done for every step: so it is compiled, which takes a tenth of the time of NumPy's calls.
"""

import ctypes
from typing import NamedTuple

import numpy as np

from jitney.kernels.cpu.compiled import compile_function
from jitney.kernels.cpu.layout import SPLIT_TOKENS, TILE_ROWS, Work
from jitney.kernels.cpu.products import GROUP_TOKENS

_FIELDS = ctypes.sizeof(Work) // 8


class Plan(NamedTuple):
    """A step's works for layers of one window and one number of query heads per KV head."""

    works: np.ndarray
    """int64 [works, fields of ``Work``], the longest first."""
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
    return Plan(*_cut(query_start, context_len, tile, reach, SPLIT_TOKENS, GROUP_TOKENS))


@compile_function
def _cut(query_start, context_len, tile, reach, split_tokens, group_tokens):
    """The fields of a plan, for queries that see ``reach`` keys at most."""
    most = np.sum(context_len // split_tokens + 2) + query_start[-1] // tile
    works = np.empty((most, _FIELDS), np.int64)
    done = parts = split_rows = 0
    for row in range(len(context_len)):
        start, context = np.int64(query_start[row]), np.int64(context_len[row])
        length = np.int64(query_start[row + 1]) - start
        for offset in range(0, length, tile):
            position = context - length + offset
            begin = max(position + 1 - reach, 0) // group_tokens * group_tokens
            end = min(position + tile, context)
            tokens, size, count = end - position, end - begin, 1
            if length == 1:
                size, count = split_tokens, -(-(end - begin) // split_tokens)
            for part in range(count):
                works[done] = (
                    row, start + offset, tokens, position, begin + part * size,
                    min(begin + (part + 1) * size, end), part, count, parts, split_rows,
                )  # fmt: skip
                done += 1
            if count > 1:
                parts += count
                split_rows += 1
    works = works[:done]
    cost = works[:, 2] * (works[:, 5] - works[:, 4])
    return works[np.argsort(-cost, kind="mergesort")], parts, split_rows  # a stable order
