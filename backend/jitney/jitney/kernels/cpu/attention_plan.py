"""The plan of a step for attention: which tokens meet which keys, and in what order.

The rows of the batch are cut into *entries*, so that threads get pieces of like size. An entry is
some tokens of one row, and the keys that they see. There are two ways to cut a row::

    a decode: one new token, here at position 1,199. It is cut by its keys, into splits of 512
        entry   0      token 1,199     keys    0 to   511
        entry   1      token 1,199     keys  512 to 1,023
        entry   2      token 1,199     keys 1,024 to 1,199

    a prefill, or a chunk of one: here 70 tokens. It is cut by its tokens, 24 to an entry
        entry   0      tokens  0 to 23     keys 0 to 23
        entry   1      tokens 24 to 47     keys 0 to 47
        entry   2      tokens 48 to 69     keys 0 to 69

How a row is cut does not depend on the other rows. An entry and one KV head make one item of the
kernel (``attention_kernel``); threads take items in the plan's order.

Called by ``paged_attention``, once for each step and kind of layer. Compiled: in NumPy it takes ten
times as long.
"""

import ctypes
from typing import NamedTuple

import numpy as np

from jitney.kernels.cpu.compiled import compile_function, record


@record
class PlanEntry(ctypes.Structure):
    """Some tokens of one row, and the keys that they see."""

    row: int
    """Index of the row in the batch."""
    first_token: int
    """Index of the first token among the T tokens of the step."""
    num_tokens: int
    position: int
    """Position of the first token in its sequence."""
    keys_begin: int
    """Position of the first key: a multiple of 16 (a group begins there)."""
    keys_end: int
    """Position behind the last key."""

    # The keys of a decode may be spread over several entries, its splits.
    split: int
    """Which of the row's splits this entry is, from 0 on."""
    num_splits: int
    """How many splits the row has. With 1, the entry has all keys that its tokens see."""
    first_split: int
    """How many splits the split rows before this one have. So the splits of a step have indices:
    ``first_split`` + ``split``. (The states of a split are kept at its index: see
    ``AttentionArguments.split_states``.)"""
    split_row: int
    """Index of the row among the rows that have several splits."""


class AttentionPlan(NamedTuple):
    """The entries of a step, and how many results its split rows give."""

    entries: np.ndarray
    """int64 [entries, fields of :class:`PlanEntry`], those with the most work first."""
    splits: int
    """How many splits there are, summed over the rows that have several."""
    split_rows: int
    """How many rows have several splits."""


ENTRY_BYTES = ctypes.sizeof(PlanEntry)
_FIELD_NAMES = list(PlanEntry.__annotations__)
_FIELDS = len(_FIELD_NAMES)

# Columns of ``AttentionPlan.entries``.
_NUM_TOKENS = _FIELD_NAMES.index("num_tokens")
_KEYS_BEGIN = _FIELD_NAMES.index("keys_begin")
_KEYS_END = _FIELD_NAMES.index("keys_end")


def plan_step(
    query_start: np.ndarray,
    context_len: np.ndarray,
    *,
    entry_tokens: int,
    reach: int,
    split_tokens: int,
    group_tokens: int,
) -> AttentionPlan:
    """Plan a step.

    ``query_start`` and ``context_len`` are int32 arrays as in ``AttentionMetadata``. An entry has
    at most ``entry_tokens`` tokens. A token sees at most ``reach`` keys (the window, if there is
    one). The keys of a decode are split at each multiple of ``split_tokens``. Entries begin at a
    multiple of ``group_tokens`` keys.
    """
    entries, splits, split_rows = _cut_rows(
        query_start, context_len, entry_tokens, reach, split_tokens, group_tokens
    )
    if len(entries) > 1:
        num_keys = entries[:, _KEYS_END] - entries[:, _KEYS_BEGIN]
        cost = entries[:, _NUM_TOKENS] * num_keys
        entries = entries[np.argsort(-cost, kind="stable")]
    return AttentionPlan(entries=entries, splits=splits, split_rows=split_rows)


@compile_function
def _cut_rows(query_start, context_len, entry_tokens, reach, split_tokens, group_tokens):
    """The three fields of an :class:`AttentionPlan`, its entries in the order of the rows.

    The arguments are those of :func:`plan_step`. Two things are left out for the sake of compile
    time, which would be three seconds longer at the first start: entries are not sorted here, and
    they are written field by field.
    """
    # The array is made before the entries are counted, so it must be large enough for any number.
    # All tokens of the step fill so many entries at most. Beside full entries, a row has one that
    # is not full; or it has its splits, of which the first and the last may be shorter.
    most_entries = query_start[-1] // entry_tokens
    for context in context_len:
        most_entries += context // split_tokens + 2
    entries = np.empty((most_entries, _FIELDS), np.int64)
    num_entries = 0
    splits = 0
    split_rows = 0
    for row in range(len(context_len)):
        row_start = np.int64(query_start[row])
        context = np.int64(context_len[row])
        length = np.int64(query_start[row + 1]) - row_start
        # Only a decode is split by its keys. A longer row has enough entries without: its whole
        # context counts as one split.
        split_size = split_tokens if length == 1 else context
        for offset in range(0, length, entry_tokens):
            position = context - length + offset
            # A token sees the keys up to its own: the last token's position is the last key's.
            keys_end = min(position + entry_tokens, context)
            keys_begin = max(position + 1 - reach, 0) // group_tokens * group_tokens
            # Splits are numbered from key 0 on here; a window hides the first ones.
            first_seen = keys_begin // split_size
            last_seen = (keys_end - 1) // split_size
            num_splits = last_seen + 1 - first_seen
            for split in range(num_splits):
                split_begin = (first_seen + split) * split_size
                split_end = split_begin + split_size
                fields = (
                    row,
                    row_start + offset,  # first_token
                    keys_end - position,  # num_tokens
                    position,
                    max(keys_begin, split_begin),
                    min(keys_end, split_end),
                    split,
                    num_splits,
                    splits,  # first_split: those of the rows before
                    split_rows,  # split_row: the rows before
                )
                for field, value in enumerate(fields):
                    entries[num_entries, field] = value
                num_entries += 1
            if num_splits > 1:
                splits += num_splits
                split_rows += 1
    return entries[:num_entries], splits, split_rows
