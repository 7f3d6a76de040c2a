"""Reads the arguments of a call that are written as a JSON object, or in a notation like JSON."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import regex

from jitney_gateway.call_arguments import ReadResult
from jitney_gateway.json_syntax import (
    ESCAPE,
    IN_STRING,
    SPACE,
    Expected,
    JsonSyntax,
    NotJsonError,
    TokenPatterns,
    make_tokens,
)

_ANY_SPACE = regex.compile(SPACE)
_ESCAPE = regex.compile(ESCAPE, regex.VERBOSE)
_IN_STRING = regex.compile(IN_STRING, regex.VERBOSE)
_NEVER = r"(?!)"
"""A regular expression that matches nothing."""


class InsideOfString(NamedTuple):
    """How far the inside of a string goes in a text."""

    end: int
    """Index in the text."""
    closing: str | None
    """The quote that stands there. None: the string may go on with the next text."""
    is_malformed: bool = False
    """Whether a character stands there that no string may hold."""


class Notation(Protocol):
    """How a format writes a JSON object."""

    tokens: TokenPatterns

    def json_of_space(self, space: str) -> str:
        """JSON for the space between two tokens."""

    def json_of_token(self, kind: str, token: str) -> str:
        """JSON for a token. Of a string, the token is the quote."""

    def json_in_string(self, text: str) -> str:
        """JSON for a part of a string's inside."""

    def find_end_of_string(self, text: str, start: int, quote: str) -> InsideOfString:
        """How far a string goes that began with ``quote``; ``start`` is an index in its inside."""

    def json_of_cut_token(self, text: str, expected: Expected) -> str:
        """JSON for a token of which the model has written the beginning only."""


class ArgumentsLikeJson:
    """Reads arguments in any notation of JSON objects."""

    def __init__(self, notation: Notation, markers: Sequence[str]) -> None:
        """``markers``: those of the model's format.

        A string may hold a marker. More often, the model forgot to close the string, and the marker
        ends the call. So what follows a marker is held back until the string has ended and a token
        follows that JSON allows there.
        """
        self._notation = notation
        self._marker = regex.compile("|".join(map(regex.escape, markers)) or _NEVER)
        self._syntax = JsonSyntax()
        self._quote: str | None = None
        """What the string that is being read began with."""
        self._ready: list[str] = []
        """JSON that can leave."""
        self._held: list[str] = []
        """JSON of what follows a marker in a string."""
        # Indices in the text that `read` gets next.
        self._scanned = 0
        """The text before it is the beginning of a JSON object."""
        self._converted = 0
        """The text before it is in `_ready` or in `_held`."""
        self._marker_at: int | None = None
        """Where the text begins whose JSON is in `_held`."""

    def read(self, text: str) -> ReadResult:
        """As in ArgumentsReader."""
        try:
            has_read = True
            while has_read and not self._syntax.is_complete:
                has_read = self._scan(text)
        except NotJsonError:
            return self._take_ready()._replace(end="cut")
        if self._syntax.is_complete:
            return self._take_ready()._replace(end="complete")
        return self._take_ready()

    def finish(self, text: str) -> ReadResult:
        """As in ArgumentsReader."""
        if self._marker_at is not None:
            return ReadResult(self._marker_at, "", "cut")
        arguments = self._notation.json_of_cut_token(text, self._syntax.expected)
        return ReadResult(len(text), arguments, "cut")

    def _take_ready(self) -> ReadResult:
        """What can leave, and how much of the text that is."""
        size = self._converted if self._marker_at is None else self._marker_at
        self._scanned -= size
        self._converted -= size
        if self._marker_at is not None:
            self._marker_at = 0
        arguments = "".join(self._ready)
        self._ready = []
        return ReadResult(size, arguments)

    def _scan(self, text: str) -> bool:
        """Read a token, or more of a string. Returns False if that needs more text. Raises
        NotJsonError."""
        if self._quote is not None:
            return self._scan_string(text, self._quote)
        self._skip_space(text)
        match = self._syntax.find_token(self._notation.tokens, text, self._scanned)
        if match.partial:
            return False
        kind = str(match.lastgroup)
        token = match[kind]
        self._syntax.take(kind, token)
        self._add(self._notation.json_of_token(kind, token), match.end())
        self._scanned = match.end()
        if kind == "quote":
            self._quote = token
            return True
        # The last string has ended as JSON allows: the marker in it, if any, was text.
        self._ready += self._held
        self._held = []
        self._marker_at = None
        return True

    def _skip_space(self, text: str) -> None:
        # Space is done with at once, and not read again with each piece: a model may write space
        # without end.
        match = _ANY_SPACE.match(text, self._scanned)
        assert match is not None
        self._add(self._notation.json_of_space(match[0]), match.end())
        self._scanned = match.end()

    def _scan_string(self, text: str, quote: str) -> bool:
        inside = self._notation.find_end_of_string(text, self._scanned, quote)
        self._scanned = inside.end
        self._convert_string(text, inside.end)
        if inside.is_malformed:
            raise NotJsonError("a character that no string may hold")
        if inside.closing is None:
            return False
        self._scanned += len(inside.closing)
        self._add('"', self._scanned)
        self._quote = None
        return True

    def _convert_string(self, text: str, end: int) -> None:
        """Convert the inside of a string up to ``end``, or up to what may be a marker there."""
        if self._marker_at is None:
            # Only what stands at the end of the text can go on as a marker: behind the string comes
            # its quote.
            may_go_on = end == len(text)
            marker = self._marker.search(text, self._converted, end, partial=may_go_on)
            if marker is not None:
                before = text[self._converted : marker.start()]
                self._add(self._notation.json_in_string(before), marker.start())
                if marker.partial:
                    return
                self._marker_at = marker.start()
        rest = text[self._converted : end]
        self._add(self._notation.json_in_string(rest), end)

    def _add(self, json: str, end: int) -> None:
        """Add the JSON of the text up to the index ``end``."""
        if self._marker_at is None:
            self._ready.append(json)
        else:
            self._held.append(json)
        self._converted = end


class PlainJson:
    """JSON itself, which leaves as it is written."""

    tokens = make_tokens()

    def json_of_space(self, space: str) -> str:
        """As in Notation."""
        return space

    def json_of_token(self, kind: str, token: str) -> str:
        """As in Notation."""
        return token

    def json_in_string(self, text: str) -> str:
        """As in Notation."""
        return text

    def find_end_of_string(self, text: str, start: int, quote: str) -> InsideOfString:
        """As in Notation."""
        inside = _IN_STRING.match(text, start)
        assert inside is not None
        end = inside.end()
        if end == len(text):
            return InsideOfString(end, None)
        if text[end] == quote:
            return InsideOfString(end, quote)
        begins_escape = _ESCAPE.fullmatch(text, end, partial=True) is not None
        return InsideOfString(end, None, is_malformed=not begins_escape)

    def json_of_cut_token(self, text: str, expected: Expected) -> str:
        """As in Notation."""
        return text
