"""The setting ``schema``: types of columns as users write them, in the words in which Arrow prints
them: ``list<item: struct<a: int64>>``."""

import re

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa

_TOKEN = re.compile(r"[A-Za-z_][\w.]*|\"[^\"]*\"|\d+|[^\s]")


def written_schema(text: str) -> pa.Schema:
    """The columns that the setting names with their types: an object of JSON, name -> type. Raises
    InvalidArgumentError."""
    try:
        given = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise InvalidArgumentError(f"schema is no object of names and types: {error}") from None
    fields = []
    for name, kind in given.items():
        fields.append((name, _written_type(name, kind)))
    return pa.schema(fields)


def _written_type(name: str, text: str) -> pa.DataType:
    parser = _TypeParser([token.strip('"') for token in _TOKEN.findall(text)])
    try:
        kind = parser.type()
        parser.end()
    except (ValueError, IndexError, TypeError, pa.ArrowException):
        bound = "a type of Arrow's, such as int64, list<double> or struct<a: string>"
        raise InvalidArgumentError.of(f"schema.{name}", text, bound) from None
    return kind


class _TypeParser:
    """Reads types as Arrow prints them: ``list<item: struct<a: int64>>``."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def _next(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _peek(self, offset: int = 0) -> str:
        index = self._at + offset
        return self._tokens[index] if index < len(self._tokens) else ""

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise ValueError(token)

    def end(self) -> None:
        if self._peek():
            raise ValueError(self._peek())

    def type(self) -> pa.DataType:
        name = self._next()
        if name in ("list", "large_list", "fixed_size_list"):
            return self._list(name)
        if name == "struct":
            self._expect("<")
            fields = [self._field()]
            while self._peek() == ",":
                self._next()
                fields.append(self._field())
            self._expect(">")
            return pa.struct(fields)
        if name == "map":
            self._expect("<")
            key = self.type()
            self._expect(",")
            item = self.type()
            self._expect(">")
            return pa.map_(key, item)
        if name in ("decimal", "decimal128", "decimal256"):
            self._expect("(")
            precision = int(self._next())
            self._expect(",")
            scale = int(self._next())
            self._expect(")")
            make = pa.decimal256 if name == "decimal256" else pa.decimal128
            return make(precision, scale)
        if name == "timestamp" and self._peek() == "[":
            return self._timestamp()
        if self._peek() == "[":
            self._expect("[")
            name = f"{name}[{self._next()}]"
            self._expect("]")
        return pa.type_for_alias(name)

    def _list(self, name: str) -> pa.DataType:
        self._expect("<")
        if self._peek(1) == ":":
            self._next()  # the name of the elements, as Arrow prints it
            self._expect(":")
        item = self.type()
        self._expect(">")
        if name == "large_list":
            return pa.large_list(item)
        if self._peek() == "[":
            self._expect("[")
            size = int(self._next())
            self._expect("]")
            return pa.list_(item, size)
        return pa.list_(item)

    def _field(self) -> pa.Field:
        name = self._next()
        self._expect(":")
        return pa.field(name, self.type())

    def _timestamp(self) -> pa.DataType:
        self._expect("[")
        unit = self._next()
        zone = ""
        if self._peek() == ",":
            self._next()
            if self._peek() == "tz":
                self._next()
        while self._peek() not in ("]", ""):
            zone += self._next()
        self._expect("]")
        return pa.timestamp(unit, zone.lstrip("=") or None)
