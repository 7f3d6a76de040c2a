"""What a request forbids, prefers or penalizes: edits of its logits before the temperature.

Called by the sampler only, in vLLM's order: allowed ids, bad words, ids that would end the sequence
too early, bias, then repetition, frequency and presence penalties. Each edit gathers the few
(row, token) places that it changes and touches only those, so its cost does not grow with the
vocabulary; only ``allowed_token_ids`` masks whole rows.
"""

import math
from collections import Counter
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.request import Row

_FORBIDDEN = -math.inf


def constrains(row: Row) -> bool:
    """Whether :func:`constrain` would change this row's logits."""
    params = row.params
    return bool(
        params.allowed_token_ids is not None
        or row.bad_words_ids
        or params.logit_bias
        or ends_too_early(row)
        or penalizes(row)
    )


def constrain(logits: Tensor, rows: list[Row]) -> None:
    """Edit ``logits`` [S, V] (f32) in place; ``rows`` are parallel to its first dimension."""
    _keep_allowed(logits, rows)
    _forbid(logits, rows)
    _add_bias(logits, rows)
    _penalize(logits, rows)


def ends_too_early(row: Row) -> bool:
    """Whether the next token may not be a stop id yet."""
    # Not len(row.output): that is one behind while the step before is in flight.
    return bool(row.stop_ids) and row.end - len(row.prompt) < row.params.min_tokens


def penalizes(row: Row) -> bool:
    """Whether the row's context changes its logits."""
    params = row.params
    return bool(
        params.repetition_penalty != 1.0
        or ((params.frequency_penalty or params.presence_penalty) and row.output)
    )


def _keep_allowed(logits: Tensor, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            allowed = torch.tensor(row.params.allowed_token_ids, device=logits.device)
            kept = logits[place, allowed]
            logits[place] = _FORBIDDEN
            logits[place, allowed] = kept


def _forbid(logits: Tensor, rows: list[Row]) -> None:
    """Mask last tokens of bad words whose beginning was just made, and stop ids before their
    time."""
    places = _Places()
    for place, row in enumerate(rows):
        places.add(place, bad_endings(row.bad_words_ids, row.output))
        if ends_too_early(row):
            places.add(place, row.stop_ids)
    if places:
        logits[places.on(logits)] = _FORBIDDEN


def bad_endings(bad_words: list[list[int]], output: list[int]) -> list[int]:
    """Last ids of the bad words whose other ids are the end of ``output``."""
    endings = []
    for word in bad_words:
        *beginning, last = word
        if not beginning or output[-len(beginning) :] == beginning:
            endings.append(last)
    return endings


def _add_bias(logits: Tensor, rows: list[Row]) -> None:
    places = _Places()
    for place, row in enumerate(rows):
        bias = row.params.logit_bias
        if bias:
            places.add(place, bias, bias.values())
    if places:
        logits[places.on(logits)] += places.values(logits)


def _penalize(logits: Tensor, rows: list[Row]) -> None:
    """Repetition: over prompt and output, divides what is positive and multiplies what is not.
    Frequency and presence: over the output alone, subtract per occurrence and once."""
    repeated, made = _Places(), _Places()
    for place, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0:
            # A token that stands there twice is written twice, with the same value.
            repeated.add(place, row.prompt, params.repetition_penalty)
            repeated.add(place, row.output, params.repetition_penalty)
        if (params.frequency_penalty or params.presence_penalty) and row.output:
            counts = Counter(row.output)
            penalties = [
                params.frequency_penalty * count + params.presence_penalty
                for count in counts.values()
            ]
            made.add(place, counts, penalties)
    if repeated:
        index, factor = repeated.on(logits), repeated.values(logits)
        values = logits[index]
        logits[index] = torch.where(values > 0, values / factor, values * factor)
    if made:
        logits[made.on(logits)] -= made.values(logits)


class _Places:
    """(row, token) index pairs with a number each, gathered on the host. A pair may come twice only
    if what is written there is the same both times.

    Kept as arrays, because a penalized row names its whole context in every step: a tensor made of
    a list takes three times as long as one of an array.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []  # parallel to the two below
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(
        self, row: int, tokens: Collection[int], values: Collection[float] | float = 0.0
    ) -> None:
        """Add pairs of ``row``, if there are any, with one number for all or one for each."""
        size = len(tokens)
        if not size:
            return
        self._rows.append(row)
        self._tokens.append(np.fromiter(tokens, np.int64, size))
        if isinstance(values, (int, float)):
            self._values.append(np.full(size, values, np.float32))
        else:
            self._values.append(np.fromiter(values, np.float32, size))

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs as an index into ``logits``."""
        rows = np.repeat(self._rows, [tokens.size for tokens in self._tokens])
        both = np.stack((rows, np.concatenate(self._tokens)))
        index = torch.from_numpy(both).to(logits.device)
        return index[0], index[1]

    def values(self, logits: Tensor) -> Tensor:
        """The numbers, f32, where ``logits`` are."""
        return torch.from_numpy(np.concatenate(self._values)).to(logits.device)
