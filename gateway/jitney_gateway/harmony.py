"""Divides the text of gpt-oss into content, reasoning and tool calls, while it streams.

Its format is called harmony. An answer is a row of messages, and each has a header and a body:

    <|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary
    to=functions.find <|constrain|>json<|message|>{"n": 1}<|call|>

The first ``<|start|>assistant`` is the end of the prompt. The channel ``analysis`` is reasoning.
The channels ``final`` and ``commentary`` are content. A message to a function is a call. Text that
is no message is content. However the text was cut, the pieces are the same together.

The arguments of a call leave as the model writes them. The call ends early if the model stops, or
writes what no JSON can have. A call of a function that is none of the request's is held until it is
complete. If it is malformed or unfinished, it is content, with its header.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import regex

from jitney_gateway.call_body import CallBody, MalformedCallError
from jitney_gateway.formats import TOOL_FORMATS
from jitney_gateway.json_arguments import ArgumentsLikeJson, PlainJson
from jitney_gateway.pieces import Piece, PieceBuffer, PieceKind

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


class _InHeader(NamedTuple):
    """The header of a message may come."""


class _InBody(NamedTuple):
    """The text up to the end of the message is of one kind."""

    kind: PieceKind


class _InUnknownCall(NamedTuple):
    """A call of a function that is none of the request's: it is held until it is complete."""

    body: CallBody


class _BeforeArguments(NamedTuple):
    """A call of one of the request's functions. It is held until the arguments begin."""

    name: str
    size_of_header: int


class _InArguments(NamedTuple):
    """The text is the arguments of a call."""

    name: str | None
    """The function, until the first piece of the call is made."""
    reader: ArgumentsLikeJson


class _BehindCall(NamedTuple):
    """The text up to the end of the message is dropped."""


class HarmonyParser:
    """Parses the text of one sequence. It is in one of six states, which are the classes above."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """``tools``: the request's. None if it may not call: then a call is content."""
        self._reads_calls = tools is not None
        self._known = {tool["function"]["name"] for tool in tools or ()}
        self._buffer = PieceBuffer()
        self._kinds_before: set[PieceKind] = set()
        """The kinds of the texts that have come."""
        self._is_new = False
        """Whether the message that is read has had no text yet."""
        self._state: (
            _InHeader | _InBody | _InUnknownCall | _BeforeArguments | _InArguments | _BehindCall
        )
        self._state = _InHeader()

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the sequence. Returns what it adds, in order."""
        return self._buffer.push(text, self._step)

    def finish(self) -> list[Piece]:
        """The sequence has ended. Returns what was held back."""
        rest = self._buffer.held
        match self._state:
            case _InHeader():
                # Every header has a marker. What is held here without one is the beginning of a
                # text, such as the word `assistant`.
                is_part_of_header = "<" in rest
                if rest.strip() and not is_part_of_header:
                    self._send("text", rest)
            case _InBody(kind=kind):
                self._send(kind, rest)
            case _InUnknownCall():
                self._send("text", rest)
            case _BeforeArguments(name=name):
                self._buffer.add(Piece("call", "", name))
            case _InArguments(name=name, reader=reader):
                progress = reader.finish(rest)
                if progress.arguments or name is not None:
                    self._buffer.add(Piece("call", progress.arguments, name))
        self._buffer.held = ""
        return self._buffer.take_pieces()

    def _step(self) -> bool:
        """Read to the end of the present state. Returns False if that needs more text."""
        match self._state:
            case _InHeader():
                return self._read_header()
            case _InBody(kind=kind):
                return self._read_body(send_as=kind)
            case _InUnknownCall(body=body):
                return self._complete_call(body)
            case _BeforeArguments():
                return self._begin_arguments(self._state)
            case _InArguments():
                return self._read_arguments(self._state)
            case _BehindCall():
                return self._read_body(send_as=None)

    def _read_header(self) -> bool:
        buffer = self._buffer
        match = _HEADER.match(buffer.held, partial=True)
        self._is_new = True
        if match is None:
            # The text is no message. A start marker would end it at once, so it is dropped.
            buffer.held = buffer.held.removeprefix(_START)
            self._state = _InBody("text")
            return True
        if match.partial:
            return False
        recipient = match["recipient"] or ""
        if self._reads_calls and recipient.startswith(_FUNCTIONS):
            name = recipient.removeprefix(_FUNCTIONS)
            if name in self._known:
                self._state = _BeforeArguments(name, size_of_header=match.end())
            else:
                body = CallBody("json", start=match.end(), name=name)
                self._state = _InUnknownCall(body)
            return True
        is_reasoning = match["channel"] == "analysis"
        buffer.take(match.end())
        self._state = _InBody("reasoning" if is_reasoning else "text")
        return True

    def _read_body(self, send_as: PieceKind | None) -> bool:
        """Read to the end of a message. Its text is sent as pieces of the kind ``send_as``; it is
        dropped if that is None."""
        held = self._buffer.held
        match = _END.search(held, partial=True)
        text = self._buffer.take(len(held) if match is None else match.start())
        if send_as is not None:
            self._send(send_as, text)
        if match is None or match.partial:
            return False
        self._buffer.take(len(match[0]))
        self._state = _InHeader()
        return True

    def _begin_arguments(self, state: _BeforeArguments) -> bool:
        """Read the arguments from now on, if they are a JSON object."""
        match = _OBJECT.match(self._buffer.held, state.size_of_header, partial=True)
        if match is None:
            self._send_as_text(state.size_of_header)
            return True
        if match.partial:
            return False
        self._buffer.take(match.end())
        reader = ArgumentsLikeJson(PlainJson(), TOOL_FORMATS["harmony"].markers)
        self._state = _InArguments(state.name, reader)
        return True

    def _read_arguments(self, state: _InArguments) -> bool:
        """Make a piece of more arguments."""
        progress = state.reader.read(self._buffer.held)
        self._buffer.take(progress.size)
        is_complete = progress.end == "complete"
        if progress.arguments:
            self._buffer.add(Piece("call", progress.arguments, state.name, is_complete))
            self._state = state._replace(name=None)
        if progress.end is None:
            return False
        self._state = _BehindCall()
        return True

    def _send_as_text(self, size: int) -> None:
        """A header of ``size`` characters has no call behind it: the message is content."""
        self._send("text", self._buffer.take(size))
        self._state = _InBody("text")

    def _complete_call(self, body: CallBody) -> bool:
        """Make a piece of a call that is complete."""
        held = self._buffer.held
        try:
            end = body.find_end(held)
            if end is None:
                return False
            calls = body.parse(held[body.start : end].strip(), {})
        except MalformedCallError:
            self._send_as_text(body.start)
            return True
        for call in calls:
            self._buffer.add(Piece("call", call.arguments, call.name, completes_call=True))
        self._buffer.take(end)
        self._state = _BehindCall()
        return True

    def _send(self, kind: PieceKind, text: str) -> None:
        """Make a piece of a text."""
        if not text:
            return
        if self._is_new and kind in self._kinds_before:
            text = _BETWEEN_MESSAGES + text
        self._is_new = False
        self._kinds_before.add(kind)
        self._buffer.add(Piece(kind, text))
