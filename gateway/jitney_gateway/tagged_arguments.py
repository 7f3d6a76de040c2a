"""Reads the arguments of a call that are written between tags.

<parameter=city>
Rome
</parameter>
</function>
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import regex

from jitney_gateway.call_arguments import ReadResult
from jitney_gateway.call_body import PARSE_ERRORS
from jitney_gateway.json_syntax import inside_quotes
from jitney_gateway.schema_alternatives import schema_of_member
from jitney_gateway.tagged_value import is_surely_text, may_be_null, typed_value

_HEAD_OF_PARAMETER = regex.compile(r"\s*+<parameter=(?P<name>[^>\n]+)>(?:\n|(?=[^\n]))")
_LAST_TAG = "</parameter>"
END_OF_VALUE = regex.compile(rf"\n?{_LAST_TAG}(?=\s*+(?:<parameter=|</function>))")
"""A value may hold the tag that ends values. The real one is followed by another tag."""
_END_OF_FUNCTION = regex.compile(r"\s*+</function>")


class _Value(msgspec.Struct):
    """The value of a parameter that is being read."""

    name: str
    schema: Any
    is_text: bool
    """Whether it is text. If it ``may_be_null``: text, or the word ``null`` alone."""
    may_be_null: bool
    has_begun: bool = False
    """Whether the beginning of it has left."""
    searched: int = 0
    """Index in the text that ``read`` gets next. The value does not end before it."""


class TaggedArguments:
    """Reads such arguments. The value of a parameter leaves as it comes, if it certainly is text.
    Any other value leaves once it is complete: only then its type is known."""

    def __init__(self, schema: Any) -> None:
        """``schema``: the JSON schema of the arguments."""
        self._schema = schema if isinstance(schema, Mapping) else {}
        self._value: _Value | None = None
        self._has_members = False
        """Whether a parameter has left."""

    def read(self, text: str) -> ReadResult:
        """As in ArgumentsReader."""
        size = 0
        pieces: list[str] = []
        while True:
            progress = self._read_next(text[size:])
            if progress is None:
                return ReadResult(size, "".join(pieces))
            size += progress.size
            pieces.append(progress.arguments)
            if progress.end is not None:
                return ReadResult(size, "".join(pieces), progress.end)

    def _read_next(self, text: str) -> ReadResult | None:
        """Read a tag, or more of a value. None if that needs more text."""
        if self._value is not None:
            return self._read_value(text, self._value)
        last = _END_OF_FUNCTION.match(text, partial=True)
        if last is not None and not last.partial:
            closing = "}" if self._has_members else "{}"
            return ReadResult(len(last[0]), closing, "complete")
        head = _HEAD_OF_PARAMETER.match(text, partial=True)
        if head is not None and not head.partial:
            self._value = self._value_of(head["name"])
            return ReadResult(len(head[0]), "")
        may_be_tag = last is not None or head is not None
        return None if may_be_tag else ReadResult(0, "", "cut")

    def _value_of(self, name: str) -> _Value:
        """A value to read. What it may be is found out here, once: its schema may be long."""
        try:
            schema = schema_of_member(name, self._schema)
            return _Value(
                name=name,
                schema=schema,
                is_text=is_surely_text(schema, self._schema),
                may_be_null=may_be_null(schema, self._schema),
            )
        except PARSE_ERRORS:  # it is no JSON schema
            return _Value(name=name, schema={}, is_text=True, may_be_null=False)

    def _read_value(self, text: str, value: _Value) -> ReadResult | None:
        end = END_OF_VALUE.search(text, value.searched, partial=True)
        if end is not None and not end.partial:
            return ReadResult(end.end(), self._finish_value(value, text[: end.start()]))
        size = len(text) if end is None else end.start()
        more = text[:size]
        if value.has_begun:
            value.searched = 0
            return ReadResult(size, inside_quotes(more)) if more else None
        could_be_null = value.may_be_null and "null".startswith(more)
        if could_be_null or not value.is_text:
            value.searched = size
            return None
        value.has_begun = True
        value.searched = 0
        return ReadResult(size, f'{self._key(value.name)}"{inside_quotes(more)}')

    def _finish_value(self, value: _Value, rest: str) -> str:
        """The JSON that ``rest`` adds, with which the value is complete."""
        self._value = None
        if value.has_begun:
            return f'{inside_quotes(rest)}"'
        typed: str | msgspec.Raw = rest
        if value.may_be_null or not value.is_text:
            with contextlib.suppress(*PARSE_ERRORS):  # it is text if its schema is no JSON schema
                typed = typed_value(rest, value.schema, self._schema)
        return self._key(value.name) + msgspec.json.encode(typed).decode()

    def _key(self, name: str) -> str:
        """The beginning of a member, with what divides it from the one before."""
        separator = "," if self._has_members else "{"
        self._has_members = True
        return f"{separator}{msgspec.json.encode(name).decode()}:"

    def finish(self, text: str) -> ReadResult:
        """As in ArgumentsReader. A value that has its last tag is complete. Of a text without that
        tag, the rest leaves too, if its beginning has left."""
        value = self._value
        if value is None:
            return ReadResult(len(text), "", "cut")
        end = END_OF_VALUE.search(text, partial=True)
        rest = text if end is None else text[: end.start()]
        has_last_tag = end is not None and _LAST_TAG in end[0]
        arguments = ""
        if has_last_tag:
            # `read` has not finished this value, because it waits for the tag behind the last one.
            arguments = self._finish_value(value, rest)
        elif value.has_begun:
            arguments = inside_quotes(rest)
        return ReadResult(len(text), arguments, "cut")
