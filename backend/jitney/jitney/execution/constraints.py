"""What a request forbids, prefers or penalizes: edits of its logits before the temperature.

Called by the sampler only, in vLLM's order: allowed ids, bad words, ids that would end the sequence
too early, bias, then repetition, frequency and presence penalties. Each edit gathers the few
(row, token) places that it changes and touches only those, so its cost does not grow with the
vocabulary; only ``allowed_token_ids`` masks whole rows.
"""

import math
from collections import Counter
from collections.abc import Iterable

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
        or _ends_too_early(row)
        or _penalizes(row)
    )


def constrain(logits: Tensor, rows: list[Row]) -> None:
    """Edit ``logits`` [S, V] (f32) in place; ``rows`` are parallel to its first dimension."""
    _keep_allowed(logits, rows)
    _forbid(logits, rows)
    _add_bias(logits, rows)
    _penalize(logits, rows)


def _ends_too_early(row: Row) -> bool:
    return bool(row.stop_ids) and len(row.output) < row.params.min_tokens


def _penalizes(row: Row) -> bool:
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
        places.add(place, _bad_endings(row.bad_words_ids, row.output))
        if _ends_too_early(row):
            places.add(place, row.stop_ids)
    if places.tokens:
        logits[places.on(logits)] = _FORBIDDEN


def _bad_endings(bad_words: list[list[int]], output: list[int]) -> list[int]:
    """Last ids of the bad words whose other ids are the end of ``output``."""
    endings = []
    for word in bad_words:
        *beginning, last = word
        if not beginning or output[-len(beginning) :] == beginning:
            endings.append(last)
    return endings


def _add_bias(logits: Tensor, rows: list[Row]) -> None:
    places = _Places()
    biases: list[float] = []
    for place, row in enumerate(rows):
        if row.params.logit_bias:
            places.add(place, row.params.logit_bias)
            biases.extend(row.params.logit_bias.values())
    if biases:
        logits[places.on(logits)] += logits.new_tensor(biases)


def _penalize(logits: Tensor, rows: list[Row]) -> None:
    """Repetition: over prompt and output, divides what is positive and multiplies what is not.
    Frequency and presence: over the output alone, subtract per occurrence and once."""
    repeated, made = _Places(), _Places()
    factors: list[float] = []
    penalties: list[float] = []
    for place, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0:
            seen = set(row.prompt).union(row.output)
            repeated.add(place, seen)
            factors.extend([params.repetition_penalty] * len(seen))
        if (params.frequency_penalty or params.presence_penalty) and row.output:
            counts = Counter(row.output)
            made.add(place, counts)
            penalties.extend(
                params.frequency_penalty * count + params.presence_penalty
                for count in counts.values()
            )
    if factors:
        index = repeated.on(logits)
        factor = logits.new_tensor(factors)
        values = logits[index]
        logits[index] = torch.where(values > 0, values / factor, values * factor)
    if penalties:
        logits[made.on(logits)] -= logits.new_tensor(penalties)


class _Places:
    """(row, token) index pairs, gathered on the host. A pair may come twice only if what is
    written there does not depend on what it held."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.tokens: list[int] = []

    def add(self, row: int, tokens: Iterable[int]) -> None:
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.rows.extend([row] * (len(self.tokens) - before))

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs as an index into ``logits``."""
        both = torch.tensor((self.rows, self.tokens), dtype=torch.long, device=logits.device)
        return both[0], both[1]
