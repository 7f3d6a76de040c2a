"""The plan of a step for attention: which queries meet which keys, and in what order.

A step's rows are cut so that threads get pieces of like size, and so that each row is computed
alike whatever else is in the batch::

    a row of one token (decode)       keys      |--- split 0 ---|--- split 1 ---|- split 2 -|
                                                 0             512            1024

    a longer row (prefill, chunk)     tokens    |-- entry --|-- entry --|-- entry --|
                                                 each sees the keys up to its own last token

An entry of the plan, times one KV head, is one item of the kernel.

Called by ``paged_attention``, once for each step and kind of layer. Compiled: in NumPy it takes ten
times as long.
"""

import ctypes
from typing import NamedTuple

import numpy as np

from jitney.kernels.cpu.compiled import compile_function, record


@record
class PlanEntry(ctypes.Structure):
    """Some tokens of one row, and the keys they are to see."""

    row: int
    first_token: int
    """Of the flattened T."""
    num_tokens: int
    position: int
    """Of the first token."""
    keys_begin: int
    """A multiple of 16."""
    keys_end: int
    split: int
    """Index among the splits of a row of one token."""
    num_splits: int
    """1: the entry has all keys of its tokens."""
    first_split: int
    """Of the row's split 0 among the splits of all rows."""
    split_row: int
    """Index of the row among those that are split."""


class StepPlan(NamedTuple):
    """The entries of a step, and how much memory the splits of its decodes need."""

    entries: np.ndarray
    """int64 [entries, fields of :class:`PlanEntry`], those with the most work first."""
    splits: int
    """Splits of all rows that are split."""
    split_rows: int
    """Rows that are split."""


ENTRY_BYTES = ctypes.sizeof(PlanEntry)
_FIELDS = len(PlanEntry.__annotations__)
_NUM_TOKENS = list(PlanEntry.__annotations__).index("num_tokens")
_KEYS_BEGIN = list(PlanEntry.__annotations__).index("keys_begin")
_KEYS_END = list(PlanEntry.__annotations__).index("keys_end")


def plan_step(
    query_start: np.ndarray,
    context_len: np.ndarray,
    *,
    entry_tokens: int,
    reach: int,
    split_tokens: int,
    group_tokens: int,
) -> StepPlan:
    """Plan a step, whose queries see ``reach`` keys at most. The arrays are int32.

    A row of one token is split by its keys at every multiple of ``split_tokens``, a longer one by
    its tokens, ``entry_tokens`` in each entry. How a row is cut does not depend on other rows.
    """
    entries, splits, split_rows = _plan(
        query_start, context_len, entry_tokens, reach, split_tokens, group_tokens
    )
    if len(entries) > 1:
        cost = entries[:, _NUM_TOKENS] * (entries[:, _KEYS_END] - entries[:, _KEYS_BEGIN])
        entries = entries[np.argsort(-cost, kind="stable")]
    return StepPlan(entries, splits, split_rows)


@compile_function
def _plan(query_start, context_len, entry_tokens, reach, split_tokens, group_tokens):
    """See :func:`plan_step`; the entries in their rows' order.

    To sort here, or to assign a whole row, would cost the first start three seconds of compiling.
    """
    # Enough for all entries: of a row, those full of tokens (at most the first number, over all
    # rows) and one that is not, or its splits, of which the first and the last may be cut.
    most = query_start[-1] // entry_tokens
    for context in context_len:
        most += context // split_tokens + 2
    plan = np.empty((most, _FIELDS), np.int64)
    done = 0
    splits = 0
    split_rows = 0
    for row in range(len(context_len)):
        start = np.int64(query_start[row])
        context = np.int64(context_len[row])
        length = np.int64(query_start[row + 1]) - start
        # A longer row is not split by its keys: it has enough entries, each with all its keys.
        size = split_tokens if length == 1 else context
        for offset in range(0, length, entry_tokens):
            position = context - length + offset
            begin = max(position + 1 - reach, 0) // group_tokens * group_tokens
            end = min(position + entry_tokens, context)
            first = begin // size
            count = (end - 1) // size + 1 - first
            for split in range(count):
                fields = (
                    row,
                    start + offset,  # first_token
                    end - position,  # num_tokens
                    position,
                    max(begin, (first + split) * size),  # keys_begin
                    min((first + split + 1) * size, end),  # keys_end
                    split,
                    count,  # num_splits
                    splits,  # first_split
                    split_rows,  # split_row
                )
                for field, value in enumerate(fields):
                    plan[done, field] = value
                done += 1
            if count > 1:
                splits += count
                split_rows += 1
    return plan[:done], splits, split_rows
