"""Reads one file of a job's input as batches of rows, format by format.

A file gives the same batches each time it is read, so that a reader who begins again can leave out
those that it has had.
"""

import csv
import io
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, BinaryIO

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pq
from jitney_jobs.input_files import compression_of
from jitney_jobs.job import InputFormat
from jitney_jobs.journal import InputFile, Ranges
from jitney_jobs.json_values import lines_or_values
from jitney_jobs.rows import line_bytes

READ_ERRORS = (OSError, pa.ArrowInvalid, csv.Error)
"""What reading a file may raise, if the file is damaged or the storage fails."""
_BUFFER_BYTES = 1 << 20
_OTHER_DELIMITERS = ";\t|"
"""What divides the fields of CSV files beside commas."""
_BATCH_BYTES = 8 << 20
"""A batch ends when its rows have so many bytes. It has one row at least."""
_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
"""Arrow cannot take single rows from columns of these types. They are read as the types that stand
beside them."""


@dataclass(frozen=True)
class Batch:
    """The rows [first, end) of a file."""

    first: int
    end: int
    data: Any
    """As in :class:`~jitney_jobs.rows.Chunk`. None if all rows are committed: then they were not
    read."""
    share: float
    """The share of the file that has been read with this batch, 0 to 1."""


def parquet_batches(
    raw: BinaryIO, file: InputFile, index: int, done: Ranges, size: int
) -> Iterator[Batch]:
    """A row group whose rows are all committed is not read. It is one batch, whatever ``size``."""
    # Page by page: otherwise the whole of a row group would be held.
    parquet = pq.ParquetFile(raw, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    _check_names(parquet.schema_arrow.names, file.path)
    total = max(1, parquet.metadata.num_rows)
    first = 0
    for group in range(parquet.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        end_of_group = first + metadata.num_rows
        if done.covers(index, first, end_of_group):
            yield Batch(first, end_of_group, None, end_of_group / total)
            first = end_of_group
            continue
        batch_size = _batch_rows(size, metadata.num_rows, metadata.total_byte_size)
        for data in parquet.iter_batches(batch_size, [group]):
            end = first + len(data)
            yield Batch(first, end, _without_views(data), end / total)
            first = end


def arrow_batches(raw: BinaryIO, file: InputFile, size: int) -> Iterator[Batch]:
    """Slices of the file's record batches."""
    reader = pa.ipc.open_file(raw)
    _check_names(reader.schema.names, file.path)
    count = reader.num_record_batches
    first = 0
    for number in range(count):
        whole = reader.get_batch(number)
        batch_size = _batch_rows(size, len(whole), whole.nbytes)
        for start in range(0, len(whole), batch_size):
            data = whole.slice(start, batch_size)
            end = first + len(data)
            yield Batch(first, end, _without_views(data), (number + 1) / count)
            first = end


def line_batches(raw: BinaryIO, file: InputFile, format: InputFormat, size: int) -> Iterator[Batch]:
    """Lines, or CSV records with their header."""
    source: io.BufferedReader[Any] = io.BufferedReader(raw, _BUFFER_BYTES)
    codec = compression_of(file.path)
    text = source
    if codec is not None:
        text = io.BufferedReader(pa.CompressedInputStream(source, codec))
    # A line of nothing but space is no row.
    make_lines: Callable[[Any, str], Iterator[Any]] = lines_or_values
    if format == "csv":
        make_lines = _csv_records
    lines = make_lines(text, file.path)
    first = 0
    while data := _next_of(lines, size):
        end = first + len(data)
        # When the generator of `_csv_records` is exhausted, its TextIOWrapper is freed and closes
        # the file: `tell` would then raise.
        share = 1.0 if raw.closed else source.tell() / file.size
        yield Batch(first, end, data, share)
        first = end


def path_batches(files: list[InputFile], size: int) -> Iterator[Batch]:
    """For files that are rows. The index of a file is the index of its row."""
    count = len(files)
    for first in range(0, count, size):
        paths = [file.path for file in files[first : first + size]]
        end = first + len(paths)
        yield Batch(first, end, paths, end / count)


def take_rows(data: Any, indices: list[int]) -> Any:
    """Some rows of a batch's data. Of a record batch it is a copy: a slice would be pickled as the
    whole batch."""
    if isinstance(data, pa.RecordBatch):
        return data.take(pa.array(indices, pa.int64()))
    return [data[index] for index in indices]


def _without_views(data: pa.RecordBatch) -> pa.RecordBatch:
    """With the types of ``_PLAIN``."""
    types = {field.name: _PLAIN.get(field.type, field.type) for field in data.schema}
    return data.cast(pa.schema(types))


def _csv_records(source: io.BufferedReader, path: str) -> Iterator[tuple[list[str], list[str]]]:
    """Each record of a CSV file, under its header."""
    csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="")
    first_line = text.readline()
    delimiter = _delimiter_of(first_line, path)
    records = csv.reader(chain([first_line], text), delimiter=delimiter)
    head = next(records, [])
    _check_names(head, path)
    return ((head, record) for record in records if record)


def _delimiter_of(first_line: str, path: str) -> str:
    """A comma, if the header has one. Else what divides it; tabs for ``.tsv``."""
    if ".tsv" in posixpath.basename(path):
        return "\t"
    unquoted = re.sub('"[^"]*"', "", first_line)
    if "," in unquoted:
        return ","
    found = [delimiter for delimiter in _OTHER_DELIMITERS if delimiter in unquoted]
    return found[0] if len(found) == 1 else ","


def _batch_rows(size: int, row_count: int, nbytes: int) -> int:
    """``size``, or as many rows as ``_BATCH_BYTES`` hold, if that is fewer. ``row_count`` rows have
    ``nbytes``."""
    rows_of_most_bytes = _BATCH_BYTES * row_count // max(1, nbytes)
    return min(size, max(1, rows_of_most_bytes))


def _next_of(lines: Iterator[Any], size: int) -> list[Any]:
    """The next ``size`` lines, or fewer if they are large; none at the end."""
    taken = []
    nbytes = 0
    for line in islice(lines, size):
        taken.append(line)
        nbytes += line_bytes(line)
        if nbytes >= _BATCH_BYTES:
            break
    return taken


def _check_names(names: list[str], path: str) -> None:
    """A row would have only one of two columns of the same name. Raises InvalidArgumentError."""
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"input {path} has two columns {name!r}")
