"""Divides the text of gpt-oss into content, reasoning and tool calls, while it streams.

Its format is called harmony: an answer is a row of messages, each a header and a body.

    <|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary
    to=functions.find <|constrain|>json<|message|>{"n": 1}<|call|>

(The prompt ends with the first ``<|start|>assistant``.) The channel ``analysis`` is reasoning,
``final`` and ``commentary`` are content, and a message to a function is a call. The pieces, joined,
do not depend on how the text was cut. Text that is no message is content, and so is a call whose
arguments are malformed or unfinished, with its header.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import regex

from jitney_gateway.call_body import CallBody, MalformedCallError
from jitney_gateway.formats import AnswerFormats
from jitney_gateway.parsers import AnswerParser, Parser, Piece, PieceKind

_RECIPIENT = r"to=(?P<recipient>[\w.:/-]{1,256})"
_HEADER = regex.compile(
    rf"""(?x)
    \s{{0,4}} (?: <\|start\|> )? (?: assistant )? \s?
    (?: {_RECIPIENT} \s? )?
    (?:
        <\|channel\|> (?P<channel> \w{{1,32}} ) \s?
        (?: {_RECIPIENT} \s? )?
        (?: (?: <\|constrain\|> )? \w{{1,32}} \s? )?
    )?
    <\|message\|>
    """
)
"""A recipient may stand before the channel or behind it; then comes the kind of the body."""
_END = regex.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
"""What ends a body."""
_START = "<|start|>"
_FUNCTIONS = "functions."
_BETWEEN_MESSAGES = "\n"
"""Between the texts of two messages that are content, or reasoning."""


def make_parser(formats: AnswerFormats, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
    """The parser of a sequence whose model writes in these formats. ``tools``: the request's."""
    if "harmony" in (formats.tool, formats.reasoning):
        return HarmonyParser(reads_calls=formats.tool is not None)
    return Parser(formats.tool, formats.reasoning, tools)


class _InHeader(NamedTuple):
    """A message may begin."""


class _InBody(NamedTuple):
    """The text up to the end of the message is of one kind."""

    kind: PieceKind


class _InCall(NamedTuple):
    """The text is held until the arguments are complete."""

    body: CallBody


class _BehindCall(NamedTuple):
    """The text up to the end of the message is dropped."""


class HarmonyParser:
    """Parses the text of one sequence. It is in one of four states, which are the classes above."""

    def __init__(self, *, reads_calls: bool) -> None:
        """``reads_calls`` is false if the request has no tools: then a call is content."""
        self._reads_calls = reads_calls
        self._held = ""
        self._pieces: list[Piece] = []
        self._sent: set[PieceKind] = set()
        """The kinds that earlier messages had."""
        self._is_new = False
        """The message that is read has had no text yet."""
        self._state: _InHeader | _InBody | _InCall | _BehindCall = _InHeader()

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the sequence. Returns what it adds, in order."""
        self._held += text
        while self._held and self._step():
            pass
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """The sequence has ended. Returns what was held back."""
        match self._state:
            case _InHeader():
                if "<" not in self._held and self._held.strip():  # else a part of a header
                    self._send("text", self._held)
            case _InBody(kind=kind):
                self._send(kind, self._held)
            case _InCall():
                self._send("text", self._held)
        self._held = ""
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _step(self) -> bool:
        """Read to the end of the present state. Returns False if that needs more text."""
        match self._state:
            case _InHeader():
                return self._read_header()
            case _InBody(kind=kind):
                return self._read_body(kind)
            case _InCall(body=body):
                return self._complete_call(body)
            case _BehindCall():
                return self._read_body(None)

    def _read_header(self) -> bool:
        match = _HEADER.match(self._held, partial=True)
        self._is_new = True
        if match is None:
            self._held = self._held.removeprefix(_START)  # or the body would end before it
            self._state = _InBody("text")
            return True
        if match.partial:
            return False
        recipient = match["recipient"] or ""
        if self._reads_calls and recipient.startswith(_FUNCTIONS):
            name = recipient.removeprefix(_FUNCTIONS)
            self._state = _InCall(CallBody("json", match.end(), name))
            return True
        is_reasoning = match["channel"] == "analysis"
        self._held = self._held[match.end() :]
        self._state = _InBody("reasoning" if is_reasoning else "text")
        return True

    def _read_body(self, kind: PieceKind | None) -> bool:
        """Send the body up to its end; None: drop it."""
        match = _END.search(self._held, partial=True)
        end = len(self._held) if match is None else match.start()
        if kind is not None:
            self._send(kind, self._held[:end])
        self._held = self._held[end:]
        if match is None or match.partial:
            return False
        self._held = self._held[len(match[0]) :]
        self._state = _InHeader()
        return True

    def _complete_call(self, body: CallBody) -> bool:
        """Make a piece of a call that is complete."""
        try:
            end = body.find_end(self._held)
            if end is None:
                return False
            calls = body.parse(self._held[body.start : end].strip(), {})
        except MalformedCallError:
            self._send("text", self._held[: body.start])
            self._held = self._held[body.start :]
            self._state = _InBody("text")
            return True
        for call in calls:
            self._pieces.append(Piece("call", call.arguments, call.name))
        self._held = self._held[end:]
        self._state = _BehindCall()
        return True

    def _send(self, kind: PieceKind, text: str) -> None:
        """Make a piece of a text."""
        if not text:
            return
        if self._is_new and kind in self._sent:
            text = _BETWEEN_MESSAGES + text
        self._is_new = False
        self._sent.add(kind)
        self._pieces.append(Piece(kind, text))
