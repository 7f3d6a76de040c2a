"""How many tokens of an answer are reasoning. Pure.

``language.py`` makes a counter for an answer of one sequence, and ``answers.Usage`` feeds it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from jitney_gateway.formats import Reasoning, find_reasoning

_MOST_BEFORE_BEGIN = 3
"""Tokens of space that a model may write before the begin marker. Behind them, or behind any text,
the marker begins no reasoning."""
_MESSAGE = "<|message|>"
_CHANNEL = "<|channel|>"
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s?(\w+)")


class ReasoningCounter(Protocol):
    """Counts the reasoning of one sequence, without its markers."""

    @property
    def count(self) -> int:
        """Tokens of reasoning so far."""

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Take the sequence's next tokens, and the text of the same step."""


def reasoning_counter(
    reasoning_format: str | None, token_ids: Mapping[str, int]
) -> ReasoningCounter | None:
    """What counts the reasoning of that format. None if there is none, or if its markers do not
    begin with tokens of the model. ``token_ids``: text of a special token -> its id."""
    reasoning = find_reasoning(reasoning_format)
    if reasoning is None:
        return None
    if reasoning_format == "harmony":
        has_ids = all(marker in token_ids for marker in reasoning.markers)
        return HarmonyCounter(reasoning, token_ids) if has_ids else None
    begin_id = _id_of_first_token(reasoning.begin, token_ids)
    end_id = _id_of_first_token(reasoning.end, token_ids)
    if begin_id is None or end_id is None:
        return None
    return CounterBetweenMarkers(begin_id, end_id, is_open=reasoning.is_open)


def _id_of_first_token(marker: str, token_ids: Mapping[str, int]) -> int | None:
    """The id of the special token with which a marker begins; None if it begins with none."""
    for text, token_id in token_ids.items():
        if marker.startswith(text):
            return token_id
    return None


class CounterBetweenMarkers:
    """Counts the tokens between a marker that begins the reasoning and one that ends it.

    Where a marker is more than one token, the others count as reasoning: such as the word
    ``thought`` in Gemma's.
    """

    def __init__(self, begin_id: int, end_id: int, *, is_open: bool) -> None:
        """``is_open``: the prompt ends with the begin marker."""
        self.count = 0
        self._begin_id = begin_id
        self._end_id = end_id
        self._is_reasoning = is_open
        self._num_before = 0
        self._has_ended = False

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """As in ReasoningCounter."""
        for token_id in token_ids:
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


class HarmonyCounter:
    """Counts the tokens of gpt-oss's messages that are reasoning.

    The token ids tell where the body of a message begins and ends. Its channel is a word in the
    header, whose ids are not known: the text tells it.
    """

    def __init__(self, reasoning: Reasoning, token_ids: Mapping[str, int]) -> None:
        self._message_id = token_ids[_MESSAGE]
        self._marker_ids = {token_ids[marker] for marker in reasoning.markers}
        self._sizes: list[int] = []
        """Tokens in the body of each message."""
        self._is_in_body = False
        self._channels: list[str] = []
        """The channel of each message."""
        self._text = ""
        """The text behind the last header, as far as it may belong to the next one."""

    @property
    def count(self) -> int:
        """Tokens of reasoning so far."""
        # One of the lists may be ahead: a text may come a step later than its tokens.
        pairs = zip(self._sizes, self._channels, strict=False)
        return sum(size for size, channel in pairs if channel == "analysis")

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """As in ReasoningCounter."""
        for token_id in token_ids:
            if token_id == self._message_id:
                self._is_in_body = True
                self._sizes.append(0)
            elif token_id in self._marker_ids:
                self._is_in_body = False
            elif self._is_in_body:
                self._sizes[-1] += 1
        self._add_text(text)

    def _add_text(self, text: str) -> None:
        *headers, rest = (self._text + text).split(_MESSAGE)
        for header in headers:
            names = _CHANNEL_NAME.findall(header)
            self._channels.append(names[-1] if names else "")
        # The body of the message is not kept: it may be long.
        start = rest.rfind(_CHANNEL)
        if start < 0:
            start = max(len(rest) - len(_CHANNEL), 0)
        self._text = rest[start:]
