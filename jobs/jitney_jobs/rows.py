"""Rows of a job's input: how a row is known, what it holds, and chunks of rows on their way to a
worker process and into a part.

A chunk's rows are columns of Arrow, of which a worker gets those that the job's task reads. Lines
of JSON are one such column; the worker decodes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.addresses import text_without_keys
from jitney_jobs.arrow import pa
from jitney_jobs.columns import from_bytes, rows_of, shown_row, to_bytes
from jitney_jobs.job import InputFormat
from jitney_jobs.json_lines import decoded, strictly_decoded
from jitney_jobs.nested import value_at
from jitney_jobs.storage import Storage

T = TypeVar("T")
RowValues = dict[str, Any]
"""Column -> value."""
Arrays = dict[str, np.ndarray]
"""A row of a model's tensors, by their names: without the dimension of the batch."""
LINES = ("jsonl", "openai")
"""Formats in which a row is a line of JSON."""
LINE = "line"
"""The column of a chunk of lines."""
PATH = "path"
"""The column of a chunk of files that are rows."""


class RowId(NamedTuple):
    """A row of the input: the index of its file, and its index in that file."""

    file: int
    row: int


class Unreadable(NamedTuple):
    """A row that the reader could not read."""

    error: str
    raw: bytes
    values: RowValues | None = None
    """Its values, if only their types do not fit the columns."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file. If ``data`` is a slice of a batch, only the slice is pickled."""

    file: int
    indices: Sequence[int]
    """Of the rows in the file, ascending."""
    format: InputFormat
    data: pa.RecordBatch
    """A row for each index. Of lines it has the column ``line``, of files that are rows the column
    ``path``."""
    further: dict[str, Any] = field(default_factory=dict)
    """Only for lines: further columns, with a value that all rows have. The names of the file's
    folders state them, such as ``year=2026``."""
    columns: pa.RecordBatch | None = None
    """Only for lines and files: what is written of the rows, as a worker has made it."""
    offsets: Sequence[int] = ()
    """Only for lines and CSV: where each row begins, in bytes of the file without compression."""
    unreadable: dict[int, Unreadable] = field(default_factory=dict)
    """Index in this chunk -> why the row could not be read."""
    read_bytes: int = 0
    """Size of the rows as they were read; of files that are rows, the files' sizes."""
    position: float = 0.0
    """The share of the whole input that has been read with this chunk, 0 to 1."""
    replaced: dict[int, int] = field(default_factory=dict)
    """Index in this chunk -> how many U+FFFD were put in place of what is no text, if any were.
    Of files that are texts it is known once they are prepared."""
    results: dict[int, Any] = field(default_factory=dict)
    """Index in this chunk -> what an earlier run has prepared of the row."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def first(self) -> RowId:
        """Its first row, by which it is known."""
        return RowId(self.file, self.indices[0])

    def id_of(self, index: int) -> RowId:
        """``index``: of a row in this chunk."""
        return RowId(self.file, self.indices[index])

    def slice(self, first: int, end: int) -> "Chunk":
        """A chunk of the rows [first, end) of this one."""
        return replace(
            self,
            indices=self.indices[first:end],
            data=self.data.slice(first, end - first),
            columns=None if self.columns is None else self.columns.slice(first, end - first),
            offsets=self.offsets[first:end],
            unreadable=_between(self.unreadable, first, end),
            replaced=_between(self.replaced, first, end),
            results=_between(self.results, first, end),
            read_bytes=self.read_bytes * (end - first) // len(self),
        )

    def with_only(self, names: Sequence[str] | None) -> "Chunk":
        """With these columns alone, as far as they are there. Lines and files keep the one that
        they have."""
        if names is None or self.format in LINES or self.format in ("text", "image"):
            return self
        there = [name for name in self.data.schema.names if name in names]
        return replace(self, data=self.data.select(there))

    def lines(self) -> list[bytes]:
        """Of a chunk of lines."""
        return self.data.column(LINE).to_pylist()

    def rows(self, storage: Storage) -> Iterator[RowValues | Exception]:
        """Each row's values, or why it has none. Raises UnavailableError if the storage fails, and
        any exception if Python has not all of the values."""
        if self.format in LINES:
            values: Iterator[RowValues | Exception] = map(self._decoded, self.lines())
        elif self.format == "text":
            values = (_text_row(storage, path) for path in self.data.column(PATH).to_pylist())
        else:
            values = iter(rows_of(self.data))
        for index, row in enumerate(values):
            unreadable = self.unreadable.get(index)
            yield row if unreadable is None else InvalidArgumentError(unreadable.error)

    def _decoded(self, line: bytes) -> RowValues | Exception:
        try:
            if self.format == "openai":  # the service takes JSON alone
                return {**strictly_decoded(line), **self.further}
            return {**decoded(line), **self.further}
        except Exception as error:  # a line may be anything
            return error

    def given(self, index: int) -> Any:
        """A row for an error file: its values, or else its bytes."""
        if index in self.unreadable:
            unreadable = self.unreadable[index]
            return shown_bytes(unreadable.raw) if unreadable.values is None else unreadable.values
        if self.format in LINES:
            line = self.data.column(LINE)[index].as_py()
            row = self._decoded(line)
            return shown_bytes(line) if isinstance(row, Exception) else row
        return shown_row(self.data, index)

    def line_values(self, index: int) -> RowValues | None:
        """Of a row of a chunk of lines. None if it could not be read."""
        if index in self.unreadable:
            return None
        row = self._decoded(self.data.column(LINE)[index].as_py())
        return None if isinstance(row, Exception) else row

    def offset_of(self, index: int) -> int | None:
        """None for formats that have none."""
        return self.offsets[index] if self.offsets else None

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["data"] = to_bytes(self.data)
        state["columns"] = None if self.columns is None else to_bytes(self.columns)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["data"] = from_bytes(state["data"])
        if state["columns"] is not None:
            state["columns"] = from_bytes(state["columns"])
        self.__dict__.update(state)


def _between(by_index: Mapping[int, T], first: int, end: int) -> dict[int, T]:
    """The values of the rows [first, end), by the indices that the rows have in that slice."""
    return {index - first: value for index, value in by_index.items() if first <= index < end}


def _text_row(storage: Storage, path: str) -> RowValues | Exception:
    """Raises UnavailableError if the storage fails."""
    try:
        return {PATH: path, "text": storage.read_text(path)}
    except InvalidArgumentError as error:
        return error


def shown_bytes(raw: bytes) -> Any:
    """As JSON can hold them: as a text, or in base64 if they are no UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": raw}  # the encoder makes base64 of bytes


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """The value that a name leads to in a row: a column (``text``), a field in one (``doc.text``),
    or an element of a list (``pages.0``). Raises InvalidArgumentError if there is none."""
    return value_at(row, name)


def columns_named(names: Sequence[str]) -> list[str]:
    """The columns that names for :func:`column_of` may need: of ``a.b``, both ``a.b`` and ``a``."""
    columns: dict[str, None] = {}
    for name in names:
        steps = name.split(".")
        for count in range(len(steps), 0, -1):
            columns[".".join(steps[:count])] = None
    return list(columns)


def reason(error: BaseException) -> str:
    """Why a row is bad, for its line in the error file."""
    text = str(error) if isinstance(error, JitneyError) else f"{type(error).__name__}: {error}"
    return text_without_keys(text)
