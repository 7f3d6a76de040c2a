"""Reads lines of JSON and CSV as batches of rows."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa
from jitney_jobs.cr_lines import LINE_ENDS, CrLines, has_cr_lines
from jitney_jobs.csv_records import CsvRecord, csv_records
from jitney_jobs.delimiters import SAMPLE_BYTES, delimiter_of, delimiter_stated
from jitney_jobs.encodings import Encoding
from jitney_jobs.file_batches import (
    BEGINNING,
    BUFFER_BYTES,
    Batch,
    RowCount,
    check_names,
    is_full,
)
from jitney_jobs.file_signs import check_is_text
from jitney_jobs.input_files import compression_of
from jitney_jobs.journal import InputFile
from jitney_jobs.journal_entries import ReadStart
from jitney_jobs.json_values import Located, lines_from, lines_or_values
from jitney_jobs.rows import LINE, Unreadable

_START_BYTES = 1 << 20
"""Between two places in a file where a shard's reader can begin."""


class TextForm(NamedTuple):
    """How the job says that lines and CSV are written."""

    encoding: Encoding
    delimiter: str | None
    """None: as the beginning of each file shows."""


class _TextFile:
    """A file's bytes without compression, as UTF-8."""

    def __init__(self, raw: BinaryIO, path: str, form: TextForm) -> None:
        """Raises InvalidArgumentError for an encoding that must be named."""
        self._path = path
        self._form = form
        self._source: Any = io.BufferedReader(raw, BUFFER_BYTES)
        codec = compression_of(path)
        text = self._source
        if codec is not None:
            text = io.BufferedReader(pa.CompressedInputStream(self._source, codec))
        try:
            self.text = form.encoding.open(text)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"input {path}: {error}") from None
        self._is_as_stored = self.text is self._source
        self._head: bytes = self.text.peek(SAMPLE_BYTES)[:SAMPLE_BYTES]
        check_is_text(self._head, path, is_unpacked=codec is not None)
        self._has_cr_lines = has_cr_lines(self._head)

    @property
    def delimiter(self) -> str:
        """What divides the fields of CSV."""
        return self._form.delimiter or delimiter_of(self._path, self._head)

    def _lines(self) -> Any:
        """The lines from where the file stands."""
        return CrLines(self.text) if self._has_cr_lines else self.text

    def records(self) -> Iterator[CsvRecord]:
        """The header of CSV and its records."""
        lines = self._lines()
        offset = 0
        if delimiter_stated(self._head) is not None:
            offset = len(lines.readline())  # Excel's line, which is no record
        return csv_records(lines, self.delimiter, self._form.encoding, offset=offset)

    def records_from(
        self, start: ReadStart, header: list[str], delimiter: str
    ) -> Iterator[CsvRecord]:
        """The records of CSV under the header, from ``start`` on."""
        self._source.seek(start.position)
        return csv_records(
            self._lines(), delimiter, self._form.encoding, header=header, offset=start.position
        )

    def lines(self) -> Iterator[Located]:
        """Lines, or values of JSON."""
        return lines_or_values(self._lines(), self._path)

    def lines_from(self, start: ReadStart) -> Iterator[Located]:
        """Lines, from ``start`` on."""
        self._source.seek(start.position)
        return lines_from(self._lines(), start.position)

    @property
    def can_start_anywhere(self) -> bool:
        """Whether a reader can seek to the offset of a line: the file is read as it is stored."""
        return self._is_as_stored and bool(self._source.seekable())

    def share_read(self, file: InputFile, offset: int) -> float:
        """How much of the file has been read at an ``offset`` of its text, 0 to 1. If it is decoded
        or unpacked, how much that has read of it."""
        read = offset if self._is_as_stored else self._source.tell()
        return min(1.0, read / max(1, file.size))


def line_batches(
    raw: BinaryIO, file: InputFile, size: int, form: TextForm, start: ReadStart = BEGINNING
) -> Iterator[Batch]:
    """Lines, or values of JSON, in the column ``line``. A line of nothing but space is no row."""
    source = _TextFile(raw, file.path, form)
    taken: list[bytes] = []
    offsets: list[int] = []
    first = 0
    nbytes = 0
    replaced: dict[int, int] = {}
    located = source.lines()
    if start != BEGINNING and source.can_start_anywhere:
        first = start.row
        located = source.lines_from(start)
    for found in located:
        line, count = form.encoding.replace(found.text)
        if count:
            replaced[len(taken)] = count
        taken.append(line)
        offsets.append(found.offset)
        nbytes += len(line)
        if is_full(len(taken), nbytes, size):
            share = source.share_read(file, found.offset + len(found.text))
            batch = _batch_of_lines(first, taken, offsets, nbytes, share)
            yield replace(batch, replaced=replaced)
            first += len(taken)
            taken = []
            offsets = []
            nbytes = 0
            replaced = {}
    if taken:
        batch = _batch_of_lines(first, taken, offsets, nbytes, 1.0)
        yield replace(batch, replaced=replaced)


def _batch_of_lines(
    first: int, lines: list[bytes], offsets: list[int], nbytes: int, share: float
) -> Batch:
    data = pa.record_batch({LINE: pa.array(lines, pa.large_binary())})
    return Batch(first, first + len(lines), data, share, nbytes, offsets)


def csv_header(raw: BinaryIO, path: str, form: TextForm) -> pa.Schema:
    """The columns of a CSV file, which are texts."""
    record = next(_TextFile(raw, path, form).records(), None)
    names = [] if record is None or record.fields is None else record.fields
    check_names(names, path)
    return pa.schema([(name, pa.string()) for name in names])


def csv_batches(
    raw: BinaryIO, file: InputFile, size: int, form: TextForm, start: ReadStart = BEGINNING
) -> Iterator[Batch]:
    """Records under their header. A row that cannot be read has nulls."""
    source = _TextFile(raw, file.path, form)
    delimiter = source.delimiter
    records = source.records()
    head = next(records, None)
    if head is None or head.fields is None:
        return
    check_names(head.fields, file.path)
    taken: list[CsvRecord] = []
    first = 0
    nbytes = 0
    if start != BEGINNING and source.can_start_anywhere:
        first = start.row
        records = source.records_from(start, head.fields, delimiter)
    for record in records:
        taken.append(record)
        nbytes += len(record.raw) + sum(map(len, record.fields or ()))
        if is_full(len(taken), nbytes, size):
            share = source.share_read(file, record.offset)
            yield _batch_of_records(first, head.fields, taken, nbytes, share)
            first += len(taken)
            taken = []
            nbytes = 0
    if taken:
        yield _batch_of_records(first, head.fields, taken, nbytes, 1.0)


def _batch_of_records(
    first: int, names: list[str], records: list[CsvRecord], nbytes: int, share: float
) -> Batch:
    unreadable = {}
    nothing = [None] * len(names)
    rows: list[Sequence[str | None]] = []
    for index, record in enumerate(records):
        if record.fields is None:
            unreadable[index] = Unreadable(str(record.error), record.raw)
        rows.append(nothing if record.fields is None else record.fields)
    arrays = [pa.array(values, pa.string()) for values in zip(*rows, strict=True)]
    data = pa.RecordBatch.from_arrays(arrays, names=names)
    offsets = [record.offset for record in records]
    replaced = {index: each.replaced for index, each in enumerate(records) if each.replaced}
    return Batch(first, first + len(records), data, share, nbytes, offsets, unreadable, replaced)


# ------------------------------------------------------------------ counting


def count_records(raw: BinaryIO, file: InputFile, form: TextForm, counted: RowCount) -> None:
    """Of CSV, as :func:`csv_batches` gives them. ``counted`` has what was read if this raises."""
    source = _TextFile(raw, file.path, form)
    records = source.records()
    next(records, None)  # the header
    _count_located(((record.offset, True) for record in records), source, counted)


def count_lines(raw: BinaryIO, file: InputFile, form: TextForm, counted: RowCount) -> None:
    """As :func:`line_batches` gives them. ``counted`` has what was read if this raises."""
    source = _TextFile(raw, file.path, form)
    # A value of JSON that is no line has no end of a line.
    located = ((line.offset, line.text.endswith(LINE_ENDS)) for line in source.lines())
    _count_located(located, source, counted)


def _count_located(
    located: Iterator[tuple[int, bool]], source: _TextFile, counted: RowCount
) -> None:
    """``located``: where each row begins, and whether a reader may begin there."""
    can_start = source.can_start_anywhere
    next_start = _START_BYTES
    for offset, may_start in located:
        if can_start and may_start and offset >= next_start:
            counted.starts.append(ReadStart(counted.rows, offset))
            next_start = offset + _START_BYTES
        counted.rows += 1
