"""Reads JSON files that are no lines: an array of objects, or objects that go over several lines.

Each value becomes a row, as a line would. They are found while the file is read, so that it is
never in memory as a whole.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.json_lines import with_nulls

_BLOCK_BYTES = 1 << 20
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|["\[\]{},]', re.DOTALL)
"""A whole string, or one character of structure. A quote alone is a string whose end is missing."""
_IS_JSON = re.compile(r"\.json(\.\w+)?$", re.IGNORECASE)
"""Names of files that are said to be JSON, and not JSON lines."""
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
"""What msgspec says if something follows a value. The number counts bytes up to the first byte of
what follows, and with it."""
_OPENING = b"[{"
_CLOSING = b"]}"


class Located(NamedTuple):
    """A line, or a value of JSON."""

    offset: int
    """Where it begins, in bytes of the text."""
    text: bytes


def lines_or_values(source: Iterable[bytes], path: str) -> Iterator[Located]:
    """The lines of a file, but for empty ones. Its values instead, if it begins with an array, or
    is called ``.json`` and begins with an object over several lines, or with several in one. Raises
    InvalidArgumentError for a file that breaks off in such a value."""
    lines = iter(source)
    head: list[bytes] = []
    for line in lines:
        head.append(line)
        if line.removeprefix(codecs.BOM_UTF8).strip():
            break
    rest = chain(head, lines)
    if head and _is_no_line(head[-1], _IS_JSON.search(path) is not None):
        return values(rest, path)
    return lines_from(rest, 0)


def lines_from(lines: Iterable[bytes], offset: int) -> Iterator[Located]:
    """Those that are not empty. ``offset``: of the first one."""
    for line in lines:
        if line.strip():
            yield Located(offset, line)
        offset += len(line)


def _is_no_line(line: bytes, may_be_object: bool) -> bool:
    """Whether a file's first line is an array or begins with one. If it ``may_be_object``, also
    whether it is the beginning of an object, or has several."""
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    if text.startswith(b"["):
        return True
    if not may_be_object or not text.startswith(b"{"):
        return False
    try:
        text = with_nulls(text)
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        trailing = _TRAILING.search(str(error))
        if trailing is not None:
            return text[: int(trailing[1])].endswith(b"{")
        return "truncated" in str(error)
    except RecursionError:
        return False
    return False


def values(blocks: Iterable[bytes], path: str) -> Iterator[Located]:
    """The elements of arrays, and values beside them, in the text that the blocks make."""
    scanner = _Scanner(path)
    gathered: list[bytes] = []
    size = 0
    for block in blocks:
        gathered.append(block)
        size += len(block)
        if size >= scanner.next_bytes:
            yield from scanner.feed(b"".join(gathered))
            gathered = []
            size = 0
    yield from scanner.feed(b"".join(gathered))
    scanner.close()


class _Scanner:
    """Finds where values begin and end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text = b""
        """What has come, from the beginning of the value that is looked for."""
        self._offset = 0
        """Where ``_text`` begins in the file."""
        self._at = 0
        """Where the search for the next token begins in ``_text``."""
        self._first = 0
        """Where the value begins in ``_text``."""
        self._closers: list[int] = []
        """The brackets that are open, innermost last: the character that closes each."""
        self._is_array = False
        """Whether the outermost open bracket is an array's, whose elements are the values."""
        self.next_bytes = _BLOCK_BYTES
        """So many bytes should come next: more, the longer the string that has no end yet."""

    def feed(self, block: bytes) -> Iterator[Located]:
        """The values that end in the next block of the file."""
        text = self._text[self._first :] + block
        self._offset += self._first
        self._at -= self._first
        self._first = 0
        self._text = text
        while True:
            match = _TOKEN.search(text, self._at)
            if match is None:
                if self._closers:  # inside of a value: nothing here is of interest
                    self._at = len(text)
                break
            token = match[0]
            if token == b'"':  # the string ends in a later block
                self._at = match.start()
                break
            self._at = match.end()
            if len(token) == 1:
                yield from self._take(token[0], match.start())
        self.next_bytes = max(_BLOCK_BYTES, len(text) - self._first)

    def _take(self, token: int, position: int) -> Iterator[Located]:
        """Note a bracket, a brace or a comma at ``position``. Gives the value that it ends."""
        depth = len(self._closers)
        if token in _OPENING:
            if depth == 0:
                self._check_nothing_before(position)
                self._is_array = token == _OPENING[0]
                self._first = position + 1 if self._is_array else position
            self._closers.append(_CLOSING[_OPENING.index(token)])
        elif token in _CLOSING:
            if depth == 0 or self._closers.pop() != token:
                self._fail("a bracket closes nothing", position)
            if depth == 1:
                end = position if self._is_array else position + 1
                yield from self._value(end)
                self._first = position + 1
        elif depth == 1 and self._is_array:  # a comma
            yield from self._value(position)
            self._first = position + 1

    def _value(self, end: int) -> Iterator[Located]:
        """The value that ends at ``end``, unless it is empty."""
        value = self._text[self._first : end].lstrip()
        if value:
            offset = self._offset + end - len(value)
            # Line breaks are between its parts: a string of JSON has none. A value is one line.
            one_line = value.rstrip().replace(b"\n", b" ").replace(b"\r", b" ")
            yield Located(offset, one_line)

    def _check_nothing_before(self, position: int) -> None:
        between = self._text[self._first : position].removeprefix(codecs.BOM_UTF8).strip()
        if between:
            self._fail(f"{between[:20]!r} stands between values", position)

    def close(self) -> None:
        """Raises InvalidArgumentError if the text ends inside of a value."""
        if self._closers:
            self._fail("the file ends inside of a value", len(self._text))
        self._check_nothing_before(len(self._text))

    def _fail(self, why: str, position: int) -> None:
        near = self._text[max(0, position - 40) : position + 20]
        raise InvalidArgumentError(f"input {self._path} is no JSON: {why}, near {near!r}")
