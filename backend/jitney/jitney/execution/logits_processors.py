"""What a request forbids, prefers or penalizes: changes to its logits before the temperature.

Called by the sampler only, in vLLM's order: what a grammar allows, allowed ids, bad words, ids that
would end the sequence too early, bias, then repetition, frequency and presence penalties. Each
processor touches only the few (row, token) pairs that it changes, so its cost does not grow with
the vocabulary; only grammars and ``allowed_token_ids`` mask whole rows.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.batch import Row
from jitney.execution.machine import to_device

_FORBIDDEN = -math.inf
_BITS_OF_A_BYTE = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)


def needs_processing(row: Row) -> bool:
    """Whether :func:`process_logits` would change this row's logits."""
    return row.grammar is not None or _needs_more(row)


def lone_mask(row: Row) -> bytes | None:
    """The mask of a greedy row's grammar, if nothing else would change its logits."""
    if row.grammar is None or not row.params.greedy or _needs_more(row):
        return None
    return row.grammar.mask()


def _needs_more(row: Row) -> bool:
    """Whether something other than a grammar changes the row's logits."""
    params = row.params
    return bool(
        params.allowed_token_ids is not None
        or row.bad_words_ids
        or params.logit_bias
        or _ends_too_early(row)
        or params.repetition_penalty != 1.0
        or _counts_output(row)
    )


def process_logits(logits: Tensor, rows: list[Row]) -> None:
    """Change ``logits`` [S, V] (f32) in place; ``rows`` are parallel to its first dimension."""
    masks = {i: row.grammar.mask() for i, row in enumerate(rows) if row.grammar is not None}
    if masks:
        _apply_masks(logits, masks)
    forbidden = _Pairs()
    bias = _Pairs()
    repeated = _Pairs()
    counted = _Pairs()
    for index, row in enumerate(rows):
        params = row.params
        if params.allowed_token_ids is not None:
            _allow_only(logits[index], params.allowed_token_ids)
        forbidden.add(index, _bad_endings(row.bad_words_ids, row.output))
        if _ends_too_early(row):
            forbidden.add(index, row.stop_ids)
        if params.logit_bias:
            bias.add(index, params.logit_bias, params.logit_bias.values())
        if params.repetition_penalty != 1.0:
            # A token that occurs twice is written twice with the same value: penalized once.
            repeated.add(index, row.prompt, params.repetition_penalty)
            repeated.add(index, row.output, params.repetition_penalty)
        if _counts_output(row):
            counts = Counter(row.output)
            penalties = [
                params.frequency_penalty * count + params.presence_penalty
                for count in counts.values()
            ]
            counted.add(index, counts, penalties)
    if forbidden:
        logits[forbidden.on(logits)] = _FORBIDDEN
    if bias:
        logits[bias.on(logits)] += bias.values(logits)
    if repeated:  # over prompt and output: divides what is positive and multiplies what is not
        pairs = repeated.on(logits)
        factor = repeated.values(logits)
        values = logits[pairs]
        logits[pairs] = torch.where(values > 0, values / factor, values * factor)
    if counted:  # over the output alone: subtracts once, and for each occurrence
        logits[counted.on(logits)] -= counted.values(logits)


def _allow_only(logits: Tensor, token_ids: Sequence[int]) -> None:
    """Forbid all others in one row of logits [V]."""
    allowed = to_device(token_ids, logits.device)
    kept = logits[allowed]
    logits.fill_(_FORBIDDEN)
    logits[allowed] = kept


def _apply_masks(logits: Tensor, masks: dict[int, bytes]) -> None:
    """Forbid, in the rows with these indices, the tokens whose bits in the mask are 0. A mask has V
    bits or more: bit 0 of byte 0 is token 0's."""
    packed = ~np.frombuffer(b"".join(masks.values()), np.uint8).reshape(len(masks), -1)
    size = logits.shape[1]
    if logits.device.type == "cpu":  # NumPy needs a third of the time here
        bits = np.unpackbits(packed, axis=1, count=size, bitorder="little")
        forbidden = torch.from_numpy(bits.view(np.bool_))
    else:
        parts = to_device(packed, logits.device).unsqueeze(-1)
        forbidden = (parts & to_device(_BITS_OF_A_BYTE, logits.device)).flatten(1)[:, :size] != 0
    if len(masks) == len(logits):
        logits.masked_fill_(forbidden, _FORBIDDEN)
    else:
        index = to_device(list(masks), logits.device)
        logits[index] = logits[index].masked_fill_(forbidden, _FORBIDDEN)


def _ends_too_early(row: Row) -> bool:
    """Whether the next token may not be a stop id yet."""
    # Not len(row.output): that is one behind while the step before is in flight.
    return bool(row.stop_ids) and row.end - len(row.prompt) < row.params.min_tokens


def _counts_output(row: Row) -> bool:
    """Whether frequency and presence penalties change the row's logits."""
    return bool((row.params.frequency_penalty or row.params.presence_penalty) and row.output)


def _bad_endings(bad_words: list[list[int]], output: list[int]) -> list[int]:
    """Last ids of the bad words whose other ids are the end of ``output``."""
    endings = []
    for word in bad_words:
        *beginning, last = word
        if not beginning or output[-len(beginning) :] == beginning:
            endings.append(last)
    return endings


class _Pairs:
    """(row, token) pairs with a number each, gathered on the host. A pair may come twice only if
    what is written there is the same both times.

    Kept as arrays, because a penalized row names its whole context in every step: a tensor made of
    a list takes three times as long as one of an array.
    """

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []  # parallel to the two below
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, tokens: Collection[int], values: Iterable[float] | float = 0.0) -> None:
        """Add pairs of ``row``, if there are any, with one number for all or one for each."""
        size = len(tokens)
        if not size:
            return
        self._rows.append(np.full(size, row))
        self._tokens.append(np.fromiter(tokens, np.int64, size))
        if isinstance(values, (int, float)):
            self._values.append(np.full(size, values, np.float32))
        else:
            self._values.append(np.fromiter(values, np.float32, size))

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs as an index into ``logits``."""
        index = np.stack((np.concatenate(self._rows), np.concatenate(self._tokens)))
        rows, tokens = to_device(index, logits.device).unbind()
        return rows, tokens

    def values(self, logits: Tensor) -> Tensor:
        """The numbers, f32, where ``logits`` are."""
        return to_device(np.concatenate(self._values), logits.device)
