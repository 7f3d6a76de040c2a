"""What a request forbids, prefers or penalizes: changes to its logits before the temperature.

Called by the sampler only. :func:`process_logits` applies the processors in vLLM's order. Grammars
and ``allowed_token_ids`` mask whole rows. All others touch only the few tokens that they change, so
their cost does not grow with the vocabulary. No processor goes through token ids in a Python loop:
they come in arrays, which are made once for each request.
"""

import math
from array import array
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.batch import Row
from jitney.execution.machine import to_device
from jitney.named_tokens import NamedTokens
from jitney.token_counts import TokenCounts

_FORBIDDEN = -math.inf
_Tokens = Collection[int] | npt.NDArray[np.int64]
_BITS_OF_A_BYTE = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)


def needs_processing(row: Row) -> bool:
    """Whether :func:`process_logits` would change this row's logits."""
    return row.grammar is not None or _is_changed_beside_grammar(row)


def sole_mask(row: Row) -> bytes | None:
    """The mask of a greedy row's grammar, if nothing but this mask changes the row's logits."""
    if row.grammar is None or not row.params.greedy:
        return None
    if _is_changed_beside_grammar(row):
        return None
    return row.grammar.mask()


def _is_changed_beside_grammar(row: Row) -> bool:
    """Whether a processor other than the grammar's changes the row's logits."""
    params = row.params
    if params.allowed_token_ids is not None or params.logit_bias or row.bad_words_ids:
        return True
    return _must_go_on(row) or is_penalized(row)


def is_penalized(row: Row) -> bool:
    """Whether a penalty changes the row's logits. If so, it reads the row's :func:`counts_of`."""
    return row.params.repetition_penalty != 1.0 or _penalizes_output(row)


def process_logits(logits: Tensor, rows: list[Row]) -> None:
    """Change ``logits`` [S, V] (f32) in place; ``rows`` are parallel to its first dimension."""
    _apply_grammars(logits, rows)
    _apply_allowed_ids(logits, rows)
    _apply_bad_words_and_min_tokens(logits, rows)
    _apply_bias(logits, rows)
    _apply_repetition_penalty(logits, rows)
    _apply_output_penalties(logits, rows)


# ------------------------------------------------------------------ masks of whole rows


def _apply_grammars(logits: Tensor, rows: list[Row]) -> None:
    masks = {i: row.grammar.mask() for i, row in enumerate(rows) if row.grammar is not None}
    if not masks:
        return
    packed = np.frombuffer(b"".join(masks.values()), np.uint8).reshape(len(masks), -1)
    forbidden = _unpack_bits(~packed, logits.shape[1], logits.device)
    if len(masks) == len(logits):
        logits.masked_fill_(forbidden, _FORBIDDEN)
    else:
        index = to_device(list(masks), logits.device)
        logits[index] = logits[index].masked_fill_(forbidden, _FORBIDDEN)


def _unpack_bits(packed: npt.NDArray[np.uint8], size: int, device: torch.device) -> Tensor:
    """The first ``size`` bits of each row of bytes, the lowest bit of a byte first: bool
    [rows, size]."""
    if device.type == "cpu":  # NumPy needs a third of torch's time
        bits = np.unpackbits(packed, axis=1, count=size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    one_bit_each = to_device(_BITS_OF_A_BYTE, device)
    bits_of_bytes = to_device(packed, device).unsqueeze(-1) & one_bit_each
    return bits_of_bytes.flatten(1)[:, :size] != 0


def _apply_allowed_ids(logits: Tensor, rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        if row.params.allowed_token_ids is None:
            continue
        ids = named_tokens_of(row).allowed
        assert ids is not None
        allowed = to_device(np.asarray(ids), logits.device)
        kept = logits[i, allowed]
        logits[i].fill_(_FORBIDDEN)
        logits[i, allowed] = kept


# ------------------------------------------------------------------ changes to single tokens


def _apply_bad_words_and_min_tokens(logits: Tensor, rows: list[Row]) -> None:
    forbidden = _TokenValues()
    for i, row in enumerate(rows):
        if row.bad_words_ids:
            for ids in named_tokens_of(row).bad_words.endings(row.output):
                forbidden.add(i, ids, _FORBIDDEN)
        if _must_go_on(row):
            forbidden.add(i, named_tokens_of(row).stops, _FORBIDDEN)
    if forbidden:
        logits[forbidden.index(logits)] = _FORBIDDEN


def _must_go_on(row: Row) -> bool:
    """Whether the output has fewer than ``min_tokens``, so that stop ids are forbidden."""
    if not row.stop_ids:
        return False
    # ``row.output`` may lack a token that the step before is still sampling; ``row.end`` counts it.
    num_output = row.end - len(row.prompt)
    return num_output < row.params.min_tokens


def _apply_bias(logits: Tensor, rows: list[Row]) -> None:
    bias = _TokenValues()
    for i, row in enumerate(rows):
        if row.params.logit_bias:
            named = named_tokens_of(row)
            bias.add_each(i, named.biased, np.asarray(named.biases))
    if bias:
        logits[bias.index(logits)] += bias.values(logits)


def _apply_repetition_penalty(logits: Tensor, rows: list[Row]) -> None:
    """Make each token of prompt and output less probable, however often it occurs: a positive logit
    is divided by the penalty, another one multiplied."""
    penalties = _TokenValues()
    for i, row in enumerate(rows):
        penalty = row.params.repetition_penalty
        if penalty != 1.0:
            counts = counts_of(row)
            penalties.add(i, counts.prompt_ids, penalty)
            penalties.add(i, counts.output_ids, penalty)
            penalties.add(i, counts.ahead, penalty)
    if penalties:
        # A token may be in several of these. Then the same value is written several times.
        index = penalties.index(logits)
        penalty_of = penalties.values(logits)
        before = logits[index]
        logits[index] = torch.where(before > 0, before / penalty_of, before * penalty_of)


def _apply_output_penalties(logits: Tensor, rows: list[Row]) -> None:
    """Subtract, for each token of the output, the presence penalty once and the frequency penalty
    for each time that it occurs."""
    penalties = _TokenValues()
    for i, row in enumerate(rows):
        if not _penalizes_output(row):
            continue
        params = row.params
        found = _occurrences(counts_of(row))
        totals = params.presence_penalty + params.frequency_penalty * found.counts
        penalties.add_each(i, found.token_ids, totals.astype(np.float32))
    if penalties:
        logits[penalties.index(logits)] -= penalties.values(logits)


class _Occurrences(NamedTuple):
    """The distinct tokens of an output."""

    token_ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.float64]
    """How often each occurs."""


def _occurrences(counts: TokenCounts) -> _Occurrences:
    """The tokens of the output, and those that are ahead of it. Each is there once."""
    token_ids = np.array(counts.output_ids, np.int64)
    occurrences = np.array(counts.output_counts, np.float64)
    new_ids: list[int] = []
    new_counts: list[int] = []
    for token, count in counts.ahead.items():
        index = counts.index_of(token)
        if index is None:
            new_ids.append(token)
            new_counts.append(count)
        else:
            occurrences[index] += count
    if new_ids:
        token_ids = np.append(token_ids, new_ids)
        occurrences = np.append(occurrences, new_counts)
    return _Occurrences(token_ids, occurrences)


def _penalizes_output(row: Row) -> bool:
    """Whether presence and frequency penalties change the row's logits."""
    if not row.output:
        return False
    return row.params.presence_penalty != 0.0 or row.params.frequency_penalty != 0.0


def counts_of(row: Row) -> TokenCounts:
    """How often each token occurs in prompt and output of a row with penalties."""
    if row.counts is None:  # the row was not made by a scheduler, but by a probe, for example
        return TokenCounts.of(row.prompt, row.output)
    return row.counts


def named_tokens_of(row: Row) -> NamedTokens:
    """The tokens that the parameters of a row's request name."""
    if row.named_tokens is None:  # the row was not made by a scheduler
        return NamedTokens.of(row.params, row.stop_ids, row.bad_words_ids)
    return row.named_tokens


class _TokenValues:
    """Numbers for single tokens of the step's rows, gathered on the host.

    Kept as arrays, because a penalized row has a number for each distinct token of its context, in
    every step: a tensor made of a list takes three times as long as one of an array.
    """

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []  # the three are parallel
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, tokens: Collection[int], value: float) -> None:
        """Add ``value`` for each of these tokens of ``row``."""
        self.add_each(row, tokens, np.full(len(tokens), value, np.float32))

    def add_each(self, row: int, tokens: _Tokens, values: npt.NDArray[np.float32]) -> None:
        """Add a value of its own for each of these tokens of ``row``."""
        size = len(tokens)
        if not size:
            return
        if isinstance(tokens, array | np.ndarray):
            ids = np.array(tokens, np.int64)  # a copy: more tokens may be added to the array
        else:
            ids = np.fromiter(tokens, np.int64, size)
        self._rows.append(np.full(size, row))
        self._tokens.append(ids)
        self._values.append(values)

    def index(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and tokens, to index ``logits`` with."""
        pairs = np.stack((np.concatenate(self._rows), np.concatenate(self._tokens)))
        rows, tokens = to_device(pairs, logits.device).unbind()
        return rows, tokens

    def values(self, logits: Tensor) -> Tensor:
        """The values, f32, on the device of ``logits``."""
        return to_device(np.concatenate(self._values), logits.device)
