"""How many tokens of an answer are reasoning: counted by the tokens that begin and end it. Pure."""

from collections.abc import Iterable, Mapping

from jitney_gateway.formats import find_reasoning

_MOST_BEFORE_BEGIN = 3
"""Tokens that may come before the begin marker: it counts at the beginning only, after space."""


class ReasoningCounter:
    """Counts the reasoning of one sequence, without its markers."""

    def __init__(self, begin_id: int, end_id: int, *, is_open: bool) -> None:
        """``is_open``: the prompt ends with the begin marker."""
        self.count = 0
        self._begin_id = begin_id
        self._end_id = end_id
        self._is_reasoning = is_open
        self._num_before = 0
        self._has_ended = False

    def add(self, ids: Iterable[int]) -> None:
        """Take the sequence's next tokens."""
        for token_id in ids:
            if self._has_ended:
                return
            if token_id == self._end_id:
                self._has_ended = True
            elif token_id == self._begin_id:
                self._is_reasoning = True
            elif self._is_reasoning:
                self.count += 1
            else:
                self._num_before += 1
                self._has_ended = self._num_before > _MOST_BEFORE_BEGIN


def reasoning_counter(
    reasoning_format: str | None, token_ids: Mapping[str, int]
) -> ReasoningCounter | None:
    """What counts the reasoning of that format; None if there is none, or if its markers are no
    tokens of the model. ``token_ids``: text of a special token -> its id."""
    reasoning = find_reasoning(reasoning_format)
    if reasoning is None:
        return None
    begin_id = token_ids.get(reasoning.begin)
    end_id = token_ids.get(reasoning.end)
    if begin_id is None or end_id is None:
        return None
    return ReasoningCounter(begin_id, end_id, is_open=reasoning.is_open)
