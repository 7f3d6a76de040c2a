"""Records of a CSV file, read strictly.

A record may have line breaks between quotes. So a quote that is not closed would take all that
follows for one record. Where a record cannot be, its first line alone is a bad row, and reading
goes on with the line behind it. ``pyarrow.csv`` cannot do that: it knows no offsets, and ends at a
record that it cannot parse.
"""

import codecs
import csv
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from jitney_jobs.encodings import Encoding

_MOST_BYTES = 32 << 20
"""Of a record. A quote that is not closed is noticed then, at the latest."""


_REASONS = {
    "new-line character seen in unquoted field": "a carriage return stands in a field without "
    "quotes",
}
"""What Python says of a record, in words that fit here."""


class CsvRecord(NamedTuple):
    """A record, or a line that cannot be read as one."""

    fields: list[str] | None
    """None if it cannot be read."""
    error: str | None
    raw: bytes
    """The line that cannot be read. Empty for a record."""
    offset: int
    """Where it begins, in bytes of the file's text: without compression, and as UTF-8."""
    replaced: int = 0
    """How many U+FFFD were put in place of what is no text."""


class _Lines:
    """The lines of a file for ``csv.reader``, which are kept until their record is known."""

    def __init__(self, source: BinaryIO, encoding: Encoding, offset: int) -> None:
        self._source = source
        self._encoding = encoding
        self._again: deque[bytes] = deque()
        """Lines behind one that was bad: they come once more."""
        self.of_record: list[bytes] = []
        self.offset = offset
        """Where the record begins."""
        self._bytes = 0
        self.replaced = 0
        """How many U+FFFD the record has in place of what is no text."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._bytes > _MOST_BYTES:
            raise csv.Error(f"the record has more than {_MOST_BYTES >> 20} MB")
        line = self._again.popleft() if self._again else self._source.readline()
        if not line:
            raise StopIteration
        is_first = self.offset + self._bytes == 0
        self.of_record.append(line)
        self._bytes += len(line)
        if is_first:
            line = line.removeprefix(codecs.BOM_UTF8)
        line, replaced = self._encoding.replace(line)
        self.replaced += replaced
        return line.decode("utf-8", "surrogateescape")

    def end_record(self) -> None:
        self.offset += self._bytes
        self.of_record = []
        self._bytes = 0
        self.replaced = 0

    def reject(self) -> bytes:
        """The record's first line, which is bad; the others come again."""
        first, *others = self.of_record
        self._again.extendleft(reversed(others))
        self.of_record = []
        self.offset += len(first)
        self._bytes = 0
        self.replaced = 0
        return first


def csv_records(
    source: BinaryIO,
    delimiter: str,
    encoding: Encoding,
    header: list[str] | None = None,
    offset: int = 0,
) -> Iterator[CsvRecord]:
    """The header, and the records under it, without empty lines. A record is bad if it has more or
    fewer fields than the header. If a ``header`` is given, only records come, from ``offset`` on,
    where the source stands. Raises csv.Error for a header that cannot be read."""
    csv.field_size_limit(1 << 30)
    lines = _Lines(source, encoding, offset)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        error = None
        fields: list[str] | None = None
        try:
            fields = next(reader, None)
        except csv.Error as why:
            error = _REASONS.get(str(why).partition(" - ")[0], str(why))
        if fields is None and error is None:
            return
        if fields is not None:
            error = _fault(fields, header)
        offset = lines.offset
        if error is None:
            assert fields is not None, "a record without an error has fields"
            replaced = lines.replaced
            lines.end_record()
            if not fields:
                continue  # an empty line
            if header is None:
                header = fields
            yield CsvRecord(fields, None, b"", offset, replaced)
            continue
        if header is None:
            raise csv.Error(f"its header: {error}")
        if len(lines.of_record) > 1:
            error = f"a quote is not closed, or {error}"
        raw = lines.reject()
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        yield CsvRecord(None, error, raw, offset)


def _fault(fields: list[str], header: list[str] | None) -> str | None:
    """Why a record is bad. ``header``: None if it is the header."""
    if not fields:
        return None
    if header is not None and len(fields) != len(header):
        return f"{len(fields)} fields, but the header has {len(header)}"
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        return "it has bytes that are no text in the file's encoding (UTF-8, if none is named)"
    return None
