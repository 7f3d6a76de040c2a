"""Divides the text of gpt-oss into content, reasoning and tool calls, while it streams.

Its format is called harmony: an answer is a row of messages, each a header and a body.

    <|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary
    to=functions.find <|constrain|>json<|message|>{"n": 1}<|call|>

(The prompt ends with the first ``<|start|>assistant``.) The channel ``analysis`` is reasoning,
``final`` and ``commentary`` are content, and a message to a function is a call. The pieces, joined,
do not depend on how the text was cut. Text that is no message is content.

The arguments of a call leave as they come, once they have begun. If they are unfinished, or go on
as no JSON can, the call ends there. A call of a function that is none of the request's is held
until it is complete; if it is malformed or unfinished, it is content, with its header.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import regex

from jitney_gateway.call_arguments import JsonArguments
from jitney_gateway.call_body import CallBody, MalformedCallError
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats
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
_OBJECT = regex.compile(r"\s*(?=\{)")
"""What stands before the arguments of a call."""
_START = "<|start|>"
_FUNCTIONS = "functions."
_BETWEEN_MESSAGES = "\n"
"""Between the texts of two messages that are content, or reasoning."""


def make_parser(formats: AnswerFormats, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
    """The parser of a sequence whose model writes in these formats. ``tools``: the request's."""
    if "harmony" in (formats.tool, formats.reasoning):
        return HarmonyParser(None if formats.tool is None else tools)
    return Parser(formats.tool, formats.reasoning, tools)


class _InHeader(NamedTuple):
    """A message may begin."""


class _InBody(NamedTuple):
    """The text up to the end of the message is of one kind."""

    kind: PieceKind


class _InCall(NamedTuple):
    """The text is held until the arguments are complete."""

    body: CallBody


class _BeforeArguments(NamedTuple):
    """The text is held until the arguments of a call begin."""

    name: str
    size_of_header: int


class _InArguments(NamedTuple):
    """The text is the arguments of a call."""

    name: str | None
    """Its function, until the first piece of the call."""
    reader: JsonArguments


class _BehindCall(NamedTuple):
    """The text up to the end of the message is dropped."""


class HarmonyParser:
    """Parses the text of one sequence. It is in one of six states, which are the classes above."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """``tools``: the request's. None if it may not call: then a call is content."""
        self._reads_calls = tools is not None
        self._known = {tool["function"]["name"] for tool in tools or ()}
        self._held = ""
        self._pieces: list[Piece] = []
        self._sent: set[PieceKind] = set()
        """The kinds that earlier messages had."""
        self._is_new = False
        """The message that is read has had no text yet."""
        self._state: _InHeader | _InBody | _InCall | _BeforeArguments | _InArguments | _BehindCall
        self._state = _InHeader()

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
            case _BeforeArguments(name=name):
                self._pieces.append(Piece("call", "", name))
            case _InArguments(name=name, reader=reader):
                progress = reader.finish(self._held)
                if progress.arguments or name is not None:
                    self._pieces.append(Piece("call", progress.arguments, name))
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
            case _BeforeArguments():
                return self._begin_arguments(self._state)
            case _InArguments():
                return self._read_arguments(self._state)
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
            if name in self._known:
                self._state = _BeforeArguments(name, match.end())
            else:
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

    def _begin_arguments(self, state: _BeforeArguments) -> bool:
        """Read the arguments from now on, if they are a JSON object."""
        match = _OBJECT.match(self._held, state.size_of_header, partial=True)
        if match is None:
            self._send_as_text(state.size_of_header)
            return True
        if match.partial:
            return False
        self._held = self._held[match.end() :]
        self._state = _InArguments(state.name, JsonArguments(TOOL_FORMATS["harmony"].markers))
        return True

    def _read_arguments(self, state: _InArguments) -> bool:
        """Make a piece of more arguments."""
        progress = state.reader.read(self._held)
        self._held = self._held[progress.size :]
        is_complete = progress.end == "complete"
        if progress.arguments or is_complete:
            self._pieces.append(Piece("call", progress.arguments, state.name, is_complete))
            self._state = state._replace(name=None)
        if progress.end is not None:
            self._state = _BehindCall()
        return progress.end is not None

    def _send_as_text(self, size: int) -> None:
        """A header of ``size`` characters has no call behind it: the message is content."""
        self._send("text", self._held[:size])
        self._held = self._held[size:]
        self._state = _InBody("text")

    def _complete_call(self, body: CallBody) -> bool:
        """Make a piece of a call that is complete."""
        try:
            end = body.find_end(self._held)
            if end is None:
                return False
            calls = body.parse(self._held[body.start : end].strip(), {})
        except MalformedCallError:
            self._send_as_text(body.start)
            return True
        for call in calls:
            self._pieces.append(Piece("call", call.arguments, call.name, completes_call=True))
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
