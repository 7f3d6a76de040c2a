"""Rows of a job's input: how a row is known, what it holds, and chunks of rows on their way to a
worker process.

A chunk travels as it was read: lines, CSV records, paths or Arrow's columns. The worker makes rows
of it.
"""

import codecs
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.arrow import pa
from jitney_jobs.job import InputFormat
from jitney_jobs.storage import Storage

RowValues = dict[str, Any]
"""Column -> value."""
LINES = ("jsonl", "openai")
"""Formats in which a row is a line of JSON."""


class RowId(NamedTuple):
    """A row of the input: the index of its file, and its index in that file."""

    file: int
    row: int


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file, as they were read. Picklable."""

    file: int
    indices: list[int]
    """Of the rows in the file, ascending."""
    format: InputFormat
    data: Any
    """Lines; CSV records, each with its header; paths of files; or a record batch."""
    columns: dict[str, str]
    """Further columns, with a value that all rows have: those that the names of the file's folders
    state, such as ``year=2026``."""
    position: float = 0.0
    """The share of the whole input that has been read with this chunk, 0 to 1."""

    @property
    def row_bytes(self) -> int:
        """Approximate size of a row as it was read, in bytes: the mean of the chunk's rows. 0 for
        paths."""
        if isinstance(self.data, pa.RecordBatch):
            nbytes = self.data.nbytes
        elif self.format in ("text", "image"):
            nbytes = 0
        else:
            nbytes = sum(map(line_bytes, self.data))
        return nbytes // len(self.indices)

    def only(self, number: int) -> "Chunk":
        """A chunk of one of the rows: number 0 is the first row here."""
        return self._part(slice(number, number + 1))

    def first(self, count: int) -> "Chunk":
        """A chunk of at most so many rows, the first ones."""
        return self if count >= len(self.indices) else self._part(slice(0, count))

    def _part(self, part: slice) -> "Chunk":
        return replace(self, indices=self.indices[part], data=self.data[part])

    def raw_rows(self) -> list[Any]:
        """One value a row, of which :meth:`row` makes the row."""
        if isinstance(self.data, pa.RecordBatch):
            return self.data.to_pylist()
        return self.data

    def row(self, raw: Any, storage: Storage) -> RowValues:
        """A row. Raises UnavailableError if the storage fails, and any exception for a bad row."""
        if self.format in LINES:
            row = msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8), type=dict)
        elif self.format == "csv":
            row = _csv_row(*raw)
        elif self.format == "text":
            row = {"path": raw, "text": storage.read(raw).decode()}
        elif self.format == "image":
            row = {"path": raw}
        else:
            row = raw
        return {**row, **self.columns}


def _csv_row(head: list[str], record: list[str]) -> RowValues:
    if len(head) != len(record):
        raise InvalidArgumentError(f"{len(record)} fields, but the header has {len(head)}")
    "".join(record).encode()  # raises for bytes that are not UTF-8
    return dict(zip(head, record, strict=True))


def line_bytes(line: Any) -> int:
    """Approximate size in bytes of a line, or of a CSV record, which comes with its header."""
    if isinstance(line, bytes):
        return len(line)
    _, record = line
    return sum(map(len, record))


def column_of(row: RowValues, name: str) -> Any:
    """A value of the row. Raises InvalidArgumentError if there is none."""
    if row.get(name) is None:
        state = "is empty" if name in row else "is missing"
        raise InvalidArgumentError(f"column {name!r} {state}")
    return row[name]


def reason(error: BaseException) -> str:
    """Why a row is bad, for its line in the error file."""
    return str(error) if isinstance(error, JitneyError) else f"{type(error).__name__}: {error}"
