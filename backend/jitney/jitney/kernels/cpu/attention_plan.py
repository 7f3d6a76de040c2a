"""The plan of a step for attention: which tokens meet which keys, and in what order.

The rows of the batch are cut into *pieces*, so that threads get work of like size. A piece is some
tokens of one row of the batch, and the keys that they see. There are two ways to cut a row::

    a decode: one new token, here at position 1,199. It is cut by its keys, into splits of 512
        piece   0      token 1,199     keys    0 to   511
        piece   1      token 1,199     keys  512 to 1,023
        piece   2      token 1,199     keys 1,024 to 1,199

    a prefill, or a chunk of one: here 70 tokens. It is cut by its tokens, 24 to a piece: with 4
    query heads to a KV head these are 96 rows of the kernel (``attention_records.ITEM_ROWS``)
        piece   0      tokens  0 to 23     keys 0 to 23
        piece   1      tokens 24 to 47     keys 0 to 47
        piece   2      tokens 48 to 69     keys 0 to 69

How a row is cut does not depend on the other rows. A piece and one KV head make one item of the
kernel (``attention_kernel``); threads take items in the plan's order.

Called by ``paged_attention``, once for each step and kind of layer. It is compiled, as it loops
over the rows of the batch.
"""

import ctypes
from typing import NamedTuple

import numpy as np

from jitney.kernels.cpu.compiled import compile_function, record


@record
class PlanPiece(ctypes.Structure):
    """Some tokens of one row of the batch, and the keys that they see."""

    batch_row: int
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

    # The keys of a decode may be spread over several pieces, its splits.
    split: int
    """Which of the row's splits this piece is, from 0 on."""
    num_splits: int
    """How many splits the row has. With 1, the piece has all keys that its tokens see."""
    first_split: int
    """How many splits the earlier rows have together; a row with a single split counts as none.
    Split s of this row has index ``first_split`` + s in ``AttentionArguments.split_states``."""
    split_batch_row: int
    """Index of the row among the rows that have several splits."""


class AttentionPlan(NamedTuple):
    """The pieces of a step, and how many of its rows have splits."""

    pieces: np.ndarray
    """int64 [pieces, fields of :class:`PlanPiece`], those with the most work first."""
    splits: int
    """How many splits there are, summed over the rows that have several."""
    split_batch_rows: int
    """How many rows have several splits."""


PIECE_BYTES = ctypes.sizeof(PlanPiece)
_FIELD_NAMES = list(PlanPiece.__annotations__)
_FIELDS = len(_FIELD_NAMES)
# :func:`_cut_rows` writes the fields in this order.
assert _FIELD_NAMES == [
    "batch_row",
    "first_token",
    "num_tokens",
    "position",
    "keys_begin",
    "keys_end",
    "split",
    "num_splits",
    "first_split",
    "split_batch_row",
]

# Columns of ``AttentionPlan.pieces``.
_NUM_TOKENS = _FIELD_NAMES.index("num_tokens")
_KEYS_BEGIN = _FIELD_NAMES.index("keys_begin")
_KEYS_END = _FIELD_NAMES.index("keys_end")


def plan_step(
    query_start: np.ndarray,
    context_len: np.ndarray,
    *,
    piece_tokens: int,
    reach: int,
    split_tokens: int,
    group_tokens: int,
) -> AttentionPlan:
    """Plan a step.

    ``query_start`` and ``context_len`` are int32 arrays as in ``AttentionMetadata``. A piece has at
    most ``piece_tokens`` tokens. A token sees at most ``reach`` keys (the window, if there is
    one). The keys of a decode are split at each multiple of ``split_tokens``. Pieces begin at a
    multiple of ``group_tokens`` keys.
    """
    pieces, splits, split_batch_rows = _cut_rows(
        query_start, context_len, piece_tokens, reach, split_tokens, group_tokens
    )
    if len(pieces) > 1:
        num_keys = pieces[:, _KEYS_END] - pieces[:, _KEYS_BEGIN]
        cost = pieces[:, _NUM_TOKENS] * num_keys
        pieces = pieces[np.argsort(-cost, kind="stable")]
    return AttentionPlan(pieces=pieces, splits=splits, split_batch_rows=split_batch_rows)


@compile_function
def _cut_rows(query_start, context_len, piece_tokens, reach, split_tokens, group_tokens):
    """``pieces``, ``splits`` and ``split_batch_rows`` of an :class:`AttentionPlan`, its pieces in
    the order of the rows.

    The arguments are those of :func:`plan_step`. Pieces are not sorted here, and they are written
    field by field: otherwise this would take longer to compile.
    """
    # The array is made before the pieces are counted, so it must be large enough in any case:
    # - All rows together have at most so many pieces of ``piece_tokens`` tokens as the step's
    #   tokens fill. Besides these, a row that is cut by its tokens has one piece of fewer tokens.
    # - A row that is cut by its keys has at most context // split_tokens whole splits, and a
    #   shorter one at either end.
    most_pieces = query_start[-1] // piece_tokens
    for context in context_len:
        most_pieces += context // split_tokens + 2
    pieces = np.empty((most_pieces, _FIELDS), np.int64)
    num_pieces = 0
    splits = 0
    split_batch_rows = 0
    for batch_row in range(len(context_len)):
        row_start = np.int64(query_start[batch_row])
        context = np.int64(context_len[batch_row])
        length = np.int64(query_start[batch_row + 1]) - row_start
        # Only a decode is split by its keys. A longer row has enough pieces without: its whole
        # context counts as one split.
        split_size = split_tokens if length == 1 else context
        for offset in range(0, length, piece_tokens):
            position = context - length + offset
            # A token sees the keys up to its own: the last token's position is the last key's.
            keys_end = min(position + piece_tokens, context)
            keys_begin = max(position + 1 - reach, 0) // group_tokens * group_tokens
            # Splits are numbered from key 0 on here; a window hides the first ones.
            first_seen = keys_begin // split_size
            last_seen = (keys_end - 1) // split_size
            num_splits = last_seen + 1 - first_seen
            for split in range(num_splits):
                split_begin = (first_seen + split) * split_size
                split_end = split_begin + split_size
                fields = (
                    batch_row,
                    row_start + offset,  # first_token
                    keys_end - position,  # num_tokens
                    position,
                    max(keys_begin, split_begin),  # keys_begin
                    min(keys_end, split_end),  # keys_end
                    split,
                    num_splits,
                    splits,  # first_split: the splits of earlier rows
                    split_batch_rows,  # split_batch_row: the number of earlier rows
                )
                for field, value in enumerate(fields):
                    pieces[num_pieces, field] = value
                num_pieces += 1
            if num_splits > 1:
                splits += num_splits
                split_batch_rows += 1
    return pieces[:num_pieces], splits, split_batch_rows
