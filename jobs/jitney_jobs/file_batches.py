"""Reads one file of a job's input as batches of rows, format by format.

A file gives the same batches each time it is read, so that a reader who begins again can leave out
those that it has had.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pq
from jitney_jobs.columns import compact, without_columns, without_views
from jitney_jobs.csv_records import CsvRecord, csv_records
from jitney_jobs.delimiters import SAMPLE_BYTES, delimiter_of
from jitney_jobs.encodings import Encoding
from jitney_jobs.input_files import compression_of
from jitney_jobs.job import InputFormat
from jitney_jobs.journal import InputFile, Ranges
from jitney_jobs.journal_entries import ReadStart
from jitney_jobs.json_values import Located, lines_from, lines_or_values
from jitney_jobs.rows import LINE, PATH, Unreadable

READ_ERRORS = (OSError, pa.ArrowInvalid, csv.Error)
"""What reading a file may raise, if the file is damaged or the storage fails."""
_BUFFER_BYTES = 1 << 20
_BATCH_BYTES = 2 << 20
"""A batch ends when its rows have so many bytes. It has one row at least."""
_ARROW_FILE = b"ARROW1"
"""How Arrow's files begin; its streams do not."""
_PROBED_ROWS = 16
_START_BYTES = 1 << 20
"""Between two places in a file where a shard's reader can begin."""
BEGINNING = ReadStart(0, 0)
"""Of a file."""


@dataclass(frozen=True)
class Batch:
    """The rows [first, end) of a file."""

    first: int
    end: int
    data: pa.RecordBatch | None
    """None if all rows are committed: then they were not read."""
    share: float
    """The share of the file that has been read with this batch, 0 to 1."""
    nbytes: int = 0
    """Size of the rows as they were read."""
    offsets: Sequence[int] = ()
    """As in :class:`~jitney_jobs.rows.Chunk`; ``unreadable`` and ``replaced``, too."""
    unreadable: dict[int, Unreadable] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)


# ------------------------------------------------------------------ formats with types


def parquet_schema(raw: BinaryIO) -> pa.Schema:
    return pq.read_schema(raw)


def has_larger(raw: BinaryIO, name: str, most: int) -> bool:
    """Whether a column of integers in Parquet has one above ``most``, or below its negative, as far
    as the file states its ranges."""
    metadata = pq.read_metadata(raw)
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            ranges = column.statistics
            if column.path_in_schema != name or ranges is None or not ranges.has_min_max:
                continue
            if ranges.max > most or ranges.min < -most:
                return True
    return False


def parquet_batches(
    raw: BinaryIO,
    file: InputFile,
    index: int,
    done: Ranges,
    size: int,
    columns: Sequence[str] | None,
) -> Iterator[Batch]:
    """A row group whose rows are all committed is not read. It is one batch, whatever ``size``.
    Only these ``columns`` are read."""
    # Page by page: otherwise the whole of a row group would be held.
    parquet = pq.ParquetFile(
        raw, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
    )
    names = parquet.schema_arrow.names
    check_names(names, file.path)
    chosen = names if columns is None else [name for name in names if name in columns]
    total = max(1, parquet.metadata.num_rows)
    first = 0
    for group in range(parquet.num_row_groups):
        row_count = parquet.metadata.row_group(group).num_rows
        end_of_group = first + row_count
        if done.covers(index, first, end_of_group):
            yield Batch(first, end_of_group, None, end_of_group / total)
            first = end_of_group
            continue
        if not chosen:
            yield from _without_columns(first, end_of_group, total, size)
            first = end_of_group
            continue
        batch_size = _batch_rows(size, row_count, _bytes_of_group(parquet, group, chosen))
        for data in parquet.iter_batches(batch_size, [group], chosen):
            end = first + len(data)
            data = without_views(data)
            yield Batch(first, end, data, end / total, data.nbytes)
            first = end


def _without_columns(first: int, end: int, total: int, size: int) -> Iterator[Batch]:
    """For a job that reads no column of this file."""
    for start in range(first, end, size):
        stop = min(end, start + size)
        yield Batch(start, stop, without_columns(stop - start), stop / total)


def _bytes_of_group(parquet: pq.ParquetFile, group: int, columns: Sequence[str]) -> int:
    """Size of a row group's columns in memory. Parquet states how large they are as they are
    encoded: a text that many rows have counts once there. So a few rows are read."""
    metadata = parquet.metadata.row_group(group)
    stated = 0
    is_dictionary_of_texts = False
    for number in range(metadata.num_columns):
        column = metadata.column(number)
        if column.path_in_schema.split(".")[0] not in columns:
            continue
        stated += column.total_uncompressed_size
        if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page:
            is_dictionary_of_texts = True
    if not is_dictionary_of_texts:
        return stated
    few = next(parquet.iter_batches(_PROBED_ROWS, [group], columns), None)
    if few is None or not len(few):
        return stated
    return max(stated, few.nbytes * metadata.num_rows // len(few))


def arrow_schema(raw: BinaryIO) -> pa.Schema:
    """Of a file or a stream of Arrow's."""
    return _open_arrow(raw).schema


def _open_arrow(raw: BinaryIO) -> Any:
    is_file = raw.read(len(_ARROW_FILE)) == _ARROW_FILE
    raw.seek(0)
    return pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)


def arrow_batches(
    raw: BinaryIO,
    file: InputFile,
    size: int,
    columns: Sequence[str] | None,
    start: ReadStart = BEGINNING,
) -> Iterator[Batch]:
    """Slices of the record batches of a file or a stream."""
    reader = _open_arrow(raw)
    names = reader.schema.names
    check_names(names, file.path)
    chosen = names if columns is None else [name for name in names if name in columns]
    first = start.row
    for whole in _record_batches(reader, start.position):
        share = raw.tell() / max(1, file.size)
        of_columns = whole.select(chosen) if chosen else without_columns(len(whole))
        batch_size = _batch_rows(size, len(whole), of_columns.nbytes)
        for offset in range(0, len(whole), batch_size):
            data = without_views(of_columns.slice(offset, batch_size))
            if len(data) < len(whole):
                data = compact(data)  # else the chunk would hold the whole
            end = first + len(data)
            yield Batch(first, end, data, min(1.0, share), data.nbytes)
            first = end


def _record_batches(reader: Any, first: int) -> Iterator[pa.RecordBatch]:
    """``first``: the number of the first one. A stream begins with its first."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(first, reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


# ------------------------------------------------------------------ lines, CSV and files


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
        self._source: Any = io.BufferedReader(raw, _BUFFER_BYTES)
        codec = compression_of(path)
        text = self._source
        if codec is not None:
            text = io.BufferedReader(pa.CompressedInputStream(self._source, codec))
        try:
            self.text = form.encoding.open(text)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"input {path}: {error}") from None
        self._is_as_stored = self.text is self._source

    @property
    def delimiter(self) -> str:
        """Of CSV. Ask before anything is read."""
        if self._form.delimiter is not None:
            return self._form.delimiter
        return delimiter_of(self._path, self.text.peek(SAMPLE_BYTES)[:SAMPLE_BYTES])

    def records(self) -> Iterator[CsvRecord]:
        """Of CSV, with the header."""
        return csv_records(self.text, self.delimiter, self._form.encoding)

    def records_from(
        self, start: ReadStart, header: list[str], delimiter: str
    ) -> Iterator[CsvRecord]:
        """Those under the header, from one of them on."""
        self._source.seek(start.position)
        return csv_records(
            self.text, delimiter, self._form.encoding, header=header, offset=start.position
        )

    def lines(self) -> Iterator[Located]:
        """Lines, or values of JSON."""
        return lines_or_values(self.text, self._path)

    def lines_from(self, start: ReadStart) -> Iterator[Located]:
        """Lines, from one of them on."""
        self._source.seek(start.position)
        return lines_from(self.text, start.position)

    @property
    def can_start_anywhere(self) -> bool:
        """Whether offsets of lines are offsets in the file, and one can be gone to."""
        return self._is_as_stored and bool(self._source.seekable())

    def share_read(self, file: InputFile, offset: int) -> float:
        """Of the file: by the offset, or if it is decoded, by what that has read."""
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
        if len(taken) == size or nbytes >= _BATCH_BYTES:
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
        if len(taken) == size or nbytes >= _BATCH_BYTES:
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


@dataclass
class RowCount:
    """Of a file, as far as it was read."""

    rows: int = 0
    starts: list[ReadStart] = field(default_factory=list)
    """Where a reader can begin, every few MB, ascending."""


def count_rows(
    raw: BinaryIO, file: InputFile, format: InputFormat, form: TextForm, counted: RowCount
) -> None:
    """Count the rows that the readers above give, into ``counted``, which has what was read if this
    raises. Parquet states its rows; of the others each one is found."""
    if format == "parquet":
        counted.rows = pq.read_metadata(raw).num_rows
    elif format == "arrow":
        _count_batches(_open_arrow(raw), counted)
    elif format == "csv":
        source = _TextFile(raw, file.path, form)
        records = source.records()
        next(records, None)  # the header
        _count_located(((record.offset, True) for record in records), source, counted)
    else:
        source = _TextFile(raw, file.path, form)
        # A value of JSON that is no line has no end of a line.
        located = ((line.offset, line.text.endswith(b"\n")) for line in source.lines())
        _count_located(located, source, counted)


def _count_batches(reader: Any, counted: RowCount) -> None:
    can_start = isinstance(reader, pa.ipc.RecordBatchFileReader)
    for number, batch in enumerate(_record_batches(reader, 0)):
        if can_start:
            counted.starts.append(ReadStart(counted.rows, number))
        counted.rows += batch.num_rows


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


def path_batches(files: list[InputFile], size: int) -> Iterator[Batch]:
    """For files that are rows, in the column ``path``. The index of a file is the index of its
    row."""
    count = len(files)
    first = 0
    while first < count:
        end = first
        nbytes = 0
        while end < count and end - first < size and (end == first or nbytes < _BATCH_BYTES):
            nbytes += files[end].size
            end += 1
        paths = [file.path for file in files[first:end]]
        data = pa.record_batch({PATH: pa.array(paths, pa.string())})
        yield Batch(first, end, data, end / count, nbytes)
        first = end


def _batch_rows(size: int, row_count: int, nbytes: int) -> int:
    """``size``, or as many rows as ``_BATCH_BYTES`` hold, if that is fewer. ``row_count`` rows have
    ``nbytes``."""
    rows_of_most_bytes = _BATCH_BYTES * row_count // max(1, nbytes)
    return min(size, max(1, rows_of_most_bytes))


def check_names(names: Sequence[str], path: str) -> None:
    """A row would have only one of two columns of the same name. Raises InvalidArgumentError."""
    if len(set(names)) == len(names):
        return
    for name in names:
        if list(names).count(name) > 1:
            raise InvalidArgumentError(f"input {path} has two columns {name!r}")
