"""Divides a language model's text into content, reasoning and tool calls, while it streams.

Pure: text in, pieces out. The gateway makes a parser for each sequence of an answer. The pieces,
joined, do not depend on how the text was cut. What may become a marker is held back, with the space
before it, and so is a call until it is complete: a client can always parse the calls that it gets.
A call that is malformed or unfinished is content, to the letter, and a call behind it is still
found.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import regex  # unlike `re`, it finds a match that the text has only the beginning of

from jitney_gateway.call_body import MALFORMED, CallBody
from jitney_gateway.formats import (
    TOOL_FORMATS,
    ReasoningMarkers,
    ToolFormat,
    begins_with_reasoning,
    reasoning_markers,
)

_SPACE = r"\s{0,4}"
"""Chat templates put one or two ends of lines around markers. More space is the model's own."""
_NEVER = r"(?!)"
"""A regular expression that matches nothing."""


PieceKind = Literal["reasoning", "text", "call"]


class Piece(NamedTuple):
    """What a text added: more reasoning, more content, or a whole call."""

    kind: PieceKind
    text: str
    """Of a call: its arguments, as JSON."""
    name: str | None = None
    """Of a call: its function."""


class Parser:
    """Parses the text of one sequence.

    It is in one of four states; ``_step`` asks for them in this order:

    - skipping (``_skipping`` is not None): space and closing markers are dropped, after a call or
      after a marker of reasoning;
    - in a call (``_body`` is not None): the text is held until the call is complete;
    - in reasoning (``_in_reasoning``): the text up to the end marker is reasoning;
    - else in content: the text up to the next head of a call is content. At the beginning the
      begin marker of reasoning counts too, and a head without a marker.
    """

    def __init__(
        self,
        tool_format: str | None,
        reasoning_format: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """``tool_format``: a key of TOOL_FORMATS, or None if the request has no tools.
        ``reasoning_format``: one of REASONING_FORMATS, or None. ``tools``: the request's. The
        format ``qwen_xml`` needs their schemas, to know which values are no strings.
        """
        functions = [tool["function"] for tool in tools]
        self._schemas = {function["name"]: function.get("parameters") for function in functions}
        self._format = None if tool_format is None else TOOL_FORMATS[tool_format]
        markers = reasoning_markers(reasoning_format)
        self._head = _head_pattern(self._format)
        self._head_at_beginning = _head_pattern_at_beginning(self._format, markers)
        end = "" if markers is None else markers.end
        self._reasoning_end = regex.compile(_SPACE + regex.escape(end))
        self._held = ""
        self._pieces: list[Piece] = []
        self._in_reasoning = begins_with_reasoning(reasoning_format)
        self._body: CallBody | None = None
        self._skipping: tuple[str, ...] | None = None
        """Markers to drop beside space; there may be none. None: nothing is dropped."""
        if self._in_reasoning and markers is not None:
            # The begin marker ended the prompt; a model may repeat it.
            self._skipping = (markers.begin,)
        self._at_beginning = True
        """No content has come, or none since the last reasoning or call."""
        self._has_content = False
        """Content has come, at any time."""

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the sequence. Returns what it adds, in order."""
        self._held += text
        while self._held and self._step():
            pass
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """The sequence has ended. Returns what was held back."""
        if self._skipping is not None:
            self._held = self._held.lstrip()
        self._send(len(self._held))
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _send(self, size: int) -> None:
        """Make a piece of the first ``size`` characters of the text that is held."""
        text = self._held[:size]
        self._held = self._held[size:]
        if not text:
            return
        if self._in_reasoning:
            self._pieces.append(Piece("reasoning", text))
            return
        self._at_beginning = False
        self._has_content = True
        self._pieces.append(Piece("text", text))

    def _step(self) -> bool:
        """Read to the end of the present state. Returns False if that needs more text."""
        if self._skipping is not None:
            return self._skip(self._skipping)
        if self._body is not None:
            return self._complete_call(self._body)
        marker = self._pattern().search(self._held, partial=True)
        if marker is None:
            self._send(len(self._held))
            return False
        self._send(marker.start())
        if marker.partial:
            return False
        size = len(marker[0])
        groups = marker.groupdict()
        if self._in_reasoning or groups.get("think"):
            self._held = self._held[size:]
            self._in_reasoning = not self._in_reasoning
            self._skipping = ()
        else:
            assert self._format is not None
            self._body = CallBody(self._format.body, size, groups.get("name"))
        return True

    def _pattern(self) -> regex.Pattern[str]:
        """What ends the present state."""
        if self._in_reasoning:
            return self._reasoning_end
        return self._head_at_beginning if self._at_beginning else self._head

    def _skip(self, markers: tuple[str, ...]) -> bool:
        """Drop space and any of ``markers``. Returns False if that needs more text."""
        text = self._held.lstrip()
        for marker in markers:
            if text.startswith(marker):
                self._held = text.removeprefix(marker)
                return True
        if not text or any(marker.startswith(text) for marker in markers):
            return False
        if self._in_reasoning or not self._has_content:
            self._held = text
        # Otherwise the space is kept: it divides this content from the content before the call.
        self._skipping = None
        self._at_beginning = True
        return True

    def _complete_call(self, body: CallBody) -> bool:
        """Make a piece of a call that is complete. Returns False if it is not complete yet."""
        assert self._format is not None
        try:
            end = body.find_end(self._held)
            if end is None:
                return False
            calls = body.parse(self._held[body.start : end], self._schemas)
        except MALFORMED:
            # It was no call: its head is content, and a real head may follow at once. A bare head
            # may be empty. Then `_send` changes nothing, and it must not be found here once more.
            self._body = None
            self._at_beginning = False
            self._send(body.start)
            return True
        for call in calls:
            self._pieces.append(Piece("call", call.arguments, call.name))
        self._held = self._held[end:]
        self._body = None
        self._skipping = self._format.closing
        return True


def _head_pattern(tool_format: ToolFormat | None) -> regex.Pattern[str]:
    """The head of a call, wherever it stands."""
    if tool_format is None:
        return regex.compile(_NEVER)
    return regex.compile(_SPACE + tool_format.head)


def _head_pattern_at_beginning(
    tool_format: ToolFormat | None, markers: ReasoningMarkers | None
) -> regex.Pattern[str]:
    """What can end content while there is none: what stands at the very beginning, with any space
    before it, or a head that stands anywhere."""
    alternatives = []
    if markers is not None:
        alternatives.append(rf"\A\s*(?P<think>{regex.escape(markers.begin)})")
    if tool_format is not None:
        alternatives.append(rf"\A\s*{tool_format.head}")
        if tool_format.bare_head is not None:
            alternatives.append(rf"\A\s*{tool_format.bare_head}")
        alternatives.append(_SPACE + tool_format.head)
    return regex.compile("|".join(alternatives) or _NEVER)
