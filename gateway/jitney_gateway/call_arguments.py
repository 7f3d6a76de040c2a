"""The arguments of a tool call, read while the model writes them.

The parser makes a reader once it is certain that a text is a call of one of the request's tools.
The reader turns the text into JSON piece by piece. What it gives, joined, does not depend on how
the text was cut, and is a beginning of JSON that clients can read.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import regex

from jitney_gateway.call_body import (
    GEMMA_QUOTES,
    PARSE_ERRORS,
    MalformedCallError,
    is_surely_text,
    may_be_null,
    python_values,
    typed_value,
)

_MAX_DEPTH = 100
"""Most brackets that may be open in the arguments: clients' parsers have bounds, too."""
_SPACE = r"[ \t\r\n]*+"
_ANY_SPACE = regex.compile(_SPACE)


class Progress(NamedTuple):
    """What a reader made of a text."""

    size: int
    """Characters at the beginning of the text that are read, and need not be given again."""
    arguments: str
    """What they add to the arguments."""
    end: Literal["complete", "cut"] | None = None
    """Cut: the text behind cannot belong to the arguments, which are not complete."""


# ------------------------------------------------------------------------------- JSON

_ESCAPE = r"""(?x)
    \\ (?: ["\\/bfnrt]
    | u (?: [0-9a-ce-fA-CE-F] [0-9a-fA-F]{3}
        | [dD] [0-7] [0-9a-fA-F]{2}
        # A surrogate and its pair: no client could read one alone.
        | [dD] [89abAB] [0-9a-fA-F]{2} \\u [dD] [c-fC-F] [0-9a-fA-F]{2} ) )
    """
_WHOLE_ESCAPE = regex.compile(_ESCAPE)
_IN_STRING = regex.compile(rf"""(?: [^"\\\x00-\x1f] | {_ESCAPE[4:]} )*+""", regex.VERBOSE)
_VALUE = (
    r'(?P<open>[{\[]) | (?P<quote>") | (?P<scalar> true | false | null'
    # A number has ended where something else begins.
    r"| -? (?: 0 | [1-9][0-9]* ) (?: \.[0-9]+ )? (?: [eE][+-]?[0-9]+ )? (?= [ \t\r\n,\]}] ) )"
)
_EXPECTED = {
    "value": _VALUE,
    "first item": rf"{_VALUE} | (?P<close>\])",
    "first key": r'(?P<quote>") | (?P<close>\})',
    "key": r'(?P<quote>")',
    "colon": r"(?P<colon>:)",
    "next": r"(?P<comma>,) | (?P<close>[}\]])",
}
_TOKENS = {expected: regex.compile(tokens, regex.VERBOSE) for expected, tokens in _EXPECTED.items()}
"""What the grammar of JSON expects -> the tokens that are possible there."""
_CLOSING = {"{": "}", "[": "]"}


class JsonArguments:
    """Arguments that are written as a JSON object: they leave as they come, to the letter."""

    _tokens: ClassVar[Mapping[str, regex.Pattern[str]]] = _TOKENS

    def __init__(self, markers: Sequence[str]) -> None:
        """``markers`` of the model's format may stand in a string. More often the string was never
        closed: so what follows a marker is held until the string has an end that JSON allows."""
        self._marker = regex.compile("|".join(map(regex.escape, markers)) or r"(?!)")
        self._expected = "value"
        self._due: list[str] = []
        """Closing brackets that are due."""
        self._in_string = False
        self._is_complete = False
        # Indices in the text that the next call gets.
        self._scanned = 0
        """The text before is a beginning of JSON."""
        self._searched = 0
        """No marker begins before, in this string."""
        self._marker_at: int | None = None

    def read(self, text: str) -> Progress:
        """Take more text: each must begin with what the one before had behind its ``size``."""
        try:
            while not self._is_complete and self._scan(text):
                pass
        except MalformedCallError:
            return self._progress(text, "cut")
        return self._progress(text, "complete" if self._is_complete else None)

    def finish(self, text: str) -> Progress:
        """The sequence has ended with ``text``."""
        size = len(text) if self._marker_at is None else self._marker_at
        return Progress(size, text[:size], "cut")

    def _progress(self, text: str, end: Literal["complete", "cut"] | None) -> Progress:
        size = self._scanned
        if self._marker_at is not None:
            size = self._marker_at
        elif self._in_string:
            size = self._searched
        self._scanned -= size
        self._searched -= size
        if self._marker_at is not None:
            self._marker_at = 0
        return Progress(size, text[:size], end)

    def _scan(self, text: str) -> bool:
        """Read a token, or more of a string. Returns False if that needs more text. Raises
        MalformedCallError."""
        if self._in_string:
            return self._scan_string(text)
        self._skip_space(text)
        match = self._tokens[self._expected].match(text, self._scanned, partial=True)
        if match is None:
            raise MalformedCallError(f"no {self._expected}")
        if match.partial:
            return False
        kind = str(match.lastgroup)
        self._take_token(kind, match[kind])
        self._scanned = match.end()
        self._searched = match.end()
        if kind != "quote":
            self._marker_at = None  # the string before has its end
        return True

    def _skip_space(self, text: str) -> None:
        # It is not looked at again with each piece: a model may write space without end.
        space = _ANY_SPACE.match(text, self._scanned)
        assert space is not None
        self._scanned = space.end()

    def _take_token(self, kind: str, token: str) -> None:
        if kind == "open":
            if len(self._due) == _MAX_DEPTH:
                raise MalformedCallError(f"more than {_MAX_DEPTH} open brackets")
            self._due.append(_CLOSING[token])
            self._expected = "first key" if token == "{" else "first item"
        elif kind == "quote":
            self._in_string = True
            is_key = "key" in self._expected
            self._expected = "colon" if is_key else "next"
        elif kind == "scalar":
            _check_number(token)
            self._expected = "next"
        elif kind == "colon":
            self._expected = "value"
        elif kind == "comma":
            self._expected = "key" if self._due[-1] == "}" else "value"
        else:
            if self._due[-1] != token:
                raise MalformedCallError(f"{token} closes nothing")
            self._due.pop()
            self._expected = "next"
            self._is_complete = not self._due

    def _scan_string(self, text: str) -> bool:
        inside = _IN_STRING.match(text, self._scanned)
        assert inside is not None
        self._scanned = inside.end()
        is_at_end = self._scanned == len(text)
        if self._marker_at is None:
            marker = self._marker.search(text, self._searched, self._scanned, partial=is_at_end)
            self._searched = self._scanned if marker is None else marker.start()
            if marker is not None and not marker.partial:
                self._marker_at = marker.start()
        if is_at_end:
            return False
        if text[self._scanned] == '"':
            self._scanned += 1
            self._in_string = False
            return True
        if _WHOLE_ESCAPE.fullmatch(text, self._scanned, partial=True) is None:
            raise MalformedCallError("a character that no string may hold")
        return False


def _check_number(token: str) -> None:
    """Raises MalformedCallError for a number that clients could not read."""
    try:
        msgspec.json.decode(token)
    except PARSE_ERRORS as error:
        raise MalformedCallError(str(error)) from None


# ------------------------------------------------------------------------------- Gemma

_ANY_QUOTE = "|".join(map(regex.escape, GEMMA_QUOTES))
_GEMMA_VALUE = _VALUE.replace('(?P<quote>")', f"(?P<quote> {_ANY_QUOTE} )")
_GEMMA_KEY = rf"(?P<name> [\w.$-]+ (?= {_SPACE} : ) ) | (?P<quote> {_ANY_QUOTE} )"
_GEMMA_EXPECTED = {
    **_EXPECTED,
    "value": _GEMMA_VALUE,
    "first item": rf"{_GEMMA_VALUE} | (?P<close>\])",
    "first key": rf"{_GEMMA_KEY} | (?P<close>\}})",
    "key": _GEMMA_KEY,
}
_SCALAR = regex.compile(rf"{_SPACE}[\w.+-]+")
"""A value that is no string, or a part of one."""


class GemmaArguments(JsonArguments):
    """Arguments in Gemma's notation: JSON with bare names, and with a marker around strings, which
    have no escapes."""

    _tokens: ClassVar[Mapping[str, regex.Pattern[str]]] = {
        expected: regex.compile(tokens, regex.VERBOSE)
        for expected, tokens in _GEMMA_EXPECTED.items()
    }

    def __init__(self, markers: Sequence[str]) -> None:
        """``markers``: as JsonArguments has them."""
        others = [marker for marker in markers if marker not in GEMMA_QUOTES]
        super().__init__(others)
        self._in_quotes = {
            quote: regex.compile("|".join(map(regex.escape, [quote, *others])))
            for quote in GEMMA_QUOTES
        }
        self._quote = ""
        self._json = ""
        """Of the last token."""
        self._parts: list[tuple[int, str | None]] = []
        """What has not left yet: where each part ends in the text that the next call gets, and its
        JSON. None: it is the inside of a string."""

    def finish(self, text: str) -> Progress:
        """The sequence has ended with ``text``."""
        if self._marker_at is not None:
            return Progress(self._marker_at, "", "cut")
        is_scalar = self._expected in ("value", "first item") and _SCALAR.fullmatch(text)
        arguments = text if is_scalar and not self._in_string else ""
        return Progress(len(text), arguments, "cut")

    def _progress(self, text: str, end: Literal["complete", "cut"] | None) -> Progress:
        progress = super()._progress(text, end)
        return progress._replace(arguments=self._take_json(text, progress.size))

    def _take_json(self, text: str, size: int) -> str:
        """JSON of the first ``size`` characters."""
        pieces = []
        begin = 0
        num_whole = 0
        for end, part in self._parts:
            if end > size:
                break
            pieces.append(_inside_quotes(text[begin:end]) if part is None else part)
            begin = end
            num_whole += 1
        if begin < size:  # in a string, which goes on
            pieces.append(_inside_quotes(text[begin:size]))
        self._parts = [(end - size, part) for end, part in self._parts[num_whole:]]
        return "".join(pieces)

    def _scan(self, text: str) -> bool:
        if self._in_string:
            return self._scan_string(text)
        if not super()._scan(text):
            return False
        self._parts.append((self._scanned, self._json))
        return True

    def _skip_space(self, text: str) -> None:
        super()._skip_space(text)
        self._parts.append((self._scanned, ""))

    def _take_token(self, kind: str, token: str) -> None:
        self._json = token
        if kind == "name":
            self._json = json.dumps(token)
            self._expected = "colon"
            return
        super()._take_token(kind, token)
        if kind == "quote":
            self._json = '"'
            self._quote = token

    def _scan_string(self, text: str) -> bool:
        while True:
            mark = self._in_quotes[self._quote].search(text, self._scanned, partial=True)
            if mark is None or mark.partial:
                self._scanned = len(text) if mark is None else mark.start()
                self._searched = self._scanned
                return False
            self._scanned = mark.end()
            if mark[0] == self._quote:
                self._parts += [(mark.start(), None), (mark.end(), '"')]
                self._in_string = False
                return True
            if self._marker_at is None:
                self._marker_at = mark.start()


# ------------------------------------------------------------------------------- tags

_HEAD_OF_PARAMETER = regex.compile(r"\s*+<parameter=(?P<name>[^>\n]+)>(?:\n|(?=[^\n]))")
_END_OF_VALUE = regex.compile(r"\n?</parameter>(?=\s*+(?:<parameter=|</function>))")
_END_OF_FUNCTION = regex.compile(r"\s*+</function>")


class TaggedArguments:
    """Arguments that are written between tags. A value that is certainly text leaves as it comes,
    any other once it is complete."""

    def __init__(self, schema: Any) -> None:
        """``schema``: the JSON schema of the arguments."""
        self._schema = schema if isinstance(schema, Mapping) else {}
        self._name: str | None = None
        """Of the parameter whose value is being read."""
        self._is_text = False
        """That value is text, but for ``null``."""
        self._may_be_null = False
        self._is_begun = False
        """A part of that value has left."""
        self._searched = 0
        """In the text that the next call gets: the value does not end before."""
        self._separator = "{"

    def read(self, text: str) -> Progress:
        """Take more text: each must begin with what the one before had behind its ``size``."""
        size = 0
        pieces = []
        end: Literal["complete", "cut"] | None = None
        while end is None:
            progress = self._read_next(text[size:])
            pieces.append(progress.arguments)
            size += progress.size
            end = progress.end
            if progress.size == 0:
                break
        return Progress(size, "".join(pieces), end)

    def _read_next(self, text: str) -> Progress:
        """Read a tag or a value. ``size`` is 0 if that needs more text."""
        if self._name is not None:
            return self._read_value(text, self._name)
        last = _END_OF_FUNCTION.match(text, partial=True)
        if last is not None and not last.partial:
            end = "{}" if self._separator == "{" else "}"
            return Progress(len(last[0]), end, "complete")
        head = _HEAD_OF_PARAMETER.match(text, partial=True)
        if head is None and last is None:
            return Progress(0, "", "cut")
        if head is None or head.partial:
            return Progress(0, "")
        self._name = head["name"]
        self._find_type(head["name"])
        self._is_begun = False
        self._searched = 0
        return Progress(len(head[0]), "")

    def _find_type(self, name: str) -> None:
        """Find out once what the value of a parameter may be: its schema may be long."""
        try:
            schema = self._schema_of(name)
            self._is_text = is_surely_text(schema, self._schema)
            self._may_be_null = may_be_null(schema, self._schema)
        except PARSE_ERRORS:  # it is no JSON schema
            self._is_text = True
            self._may_be_null = False

    def _schema_of(self, name: str) -> Any:
        properties = self._schema.get("properties") or {}
        return properties.get(name) or {}

    def _read_value(self, text: str, name: str) -> Progress:
        end = _END_OF_VALUE.search(text, self._searched, partial=True)
        is_whole = end is not None and not end.partial
        size = len(text) if end is None else end.start()
        if is_whole:
            arguments = self._end_of_value(text[:size], name)
            assert end is not None
            return Progress(end.end(), arguments)
        may_be_null = self._may_be_null and "null".startswith(text[:size])
        if not self._is_begun and (may_be_null or not self._is_text):
            self._searched = size
            return Progress(0, "")
        begin = "" if self._is_begun else f'{self._key(name)}"'
        self._is_begun = True
        self._searched = 0
        return Progress(size, begin + _inside_quotes(text[:size]))

    def _end_of_value(self, text: str, name: str) -> str:
        """What a value whose last text is ``text`` adds."""
        self._name = None
        if self._is_begun:
            return f'{_inside_quotes(text)}"'
        value: str | msgspec.Raw = text
        if not self._is_text or self._may_be_null:
            with contextlib.suppress(*PARSE_ERRORS):  # else it is no JSON schema
                value = typed_value(text, self._schema_of(name), self._schema)
        return self._key(name) + msgspec.json.encode(value).decode()

    def _key(self, name: str) -> str:
        """The beginning of a member, with what divides it from the one before."""
        separator = self._separator
        self._separator = ","
        return f"{separator}{msgspec.json.encode(name).decode()}:"

    def finish(self, text: str) -> Progress:
        """The sequence has ended with ``text``. A value without its end is there as far as it was
        certainly text."""
        arguments = ""
        if self._name is not None:
            end = _END_OF_VALUE.search(text, partial=True)
            value = text if end is None else text[: end.start()]
            if end is not None and "</parameter>" in end[0]:
                arguments = self._end_of_value(value, self._name)
            elif self._is_begun:
                arguments = _inside_quotes(value)
        return Progress(len(text), arguments, "cut")


def _inside_quotes(text: str) -> str:
    """A text as a part of a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


# ------------------------------------------------------------------------------- Python


class PythonArguments:
    """Arguments that are written as keywords of a call in Python. Each leaves once it is
    complete."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        # The scanner's state, in the text that the next call gets.
        self._scanned = 0
        self._depth = 0
        self._open_quote = ""
        self._is_escaped = False

    def read(self, text: str) -> Progress:
        """Take more text: each must begin with what the one before had behind its ``size``."""
        size = 0
        pieces = []
        while self._scanned < len(text):
            character = text[self._scanned]
            is_end = self._scan(character)
            self._scanned += 1
            if not is_end:
                continue
            try:
                pieces.append(self._argument(text[size : self._scanned - 1], character == ")"))
            except PARSE_ERRORS:
                self._scanned -= size
                return Progress(size, "".join(pieces), "cut")
            size = self._scanned
            if character == ")":
                return Progress(size, "".join(pieces), "complete")
        self._scanned -= size
        return Progress(size, "".join(pieces))

    def _scan(self, character: str) -> bool:
        """Whether an argument ends before this character."""
        if self._open_quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._open_quote:
                self._open_quote = ""
            return False
        if character in "\"'":
            self._open_quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            if self._depth == 0:
                return True
            self._depth -= 1
        return character == "," and self._depth == 0

    def _argument(self, text: str, is_last: bool) -> str:
        """What an argument adds. Raises one of PARSE_ERRORS."""
        begin = ", " if self._names else "{"
        if is_last and not text.strip():
            return "}" if self._names else "{}"
        values = python_values(f"f({text})")
        (name,) = values
        if name in self._names:
            raise ValueError(f"{name} is given twice")
        self._names.add(name)
        members = json.dumps(values, ensure_ascii=False)[1:-1]
        return begin + members + ("}" if is_last else "")

    def finish(self, text: str) -> Progress:
        """The sequence has ended with ``text``."""
        return Progress(len(text), "", "cut")


ArgumentsReader = JsonArguments | GemmaArguments | TaggedArguments | PythonArguments
