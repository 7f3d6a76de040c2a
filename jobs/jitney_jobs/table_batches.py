"""Reads Parquet and Arrow files, which state the types of their columns, as batches of rows."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from jitney_jobs.arrow import pa, pq
from jitney_jobs.columns import compact, is_exact, without_columns, without_views
from jitney_jobs.file_batches import (
    BEGINNING,
    BUFFER_BYTES,
    Batch,
    RowCount,
    batch_rows,
    check_names,
)
from jitney_jobs.job import InputFormat
from jitney_jobs.journal import InputFile, Ranges
from jitney_jobs.journal_entries import ReadStart
from jitney_jobs.schemas import MOST_EXACT

_ARROW_FILE = b"ARROW1"
"""How Arrow's files begin; its streams do not."""
_PROBED_ROWS = 16


def parquet_schema(raw: BinaryIO) -> pa.Schema:
    return pq.read_schema(raw)


def holds_all(raw: BinaryIO, format: InputFormat, name: str, kind: pa.DataType) -> bool:
    """Whether a type holds each value of a column of a Parquet or Arrow file without loss. If each
    row group of Parquet states its smallest and largest value, these tell it. Otherwise the column
    is read."""
    if format == "parquet":
        parquet = pq.ParquetFile(raw, pre_buffer=False, buffer_size=BUFFER_BYTES)
        own = parquet.schema_arrow.field(name).type
        if pa.types.is_integer(own) and pa.types.is_floating(kind):
            largest = _largest_stated(parquet.metadata, name)
            if largest is not None:
                return largest <= MOST_EXACT
        columns = (data.column(0) for data in parquet.iter_batches(columns=[name]))
    else:
        reader = _open_arrow(raw)
        columns = (data.column(name) for data in _record_batches(reader, 0))
    return all(is_exact(column, kind) for column in columns)


def _largest_stated(metadata: pq.FileMetaData, name: str) -> int | None:
    """The largest absolute value in a column of integers. None if a row group does not state its
    smallest and largest value."""
    largest = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        columns = [row_group.column(number) for number in range(row_group.num_columns)]
        own = [column for column in columns if column.path_in_schema == name]
        if len(own) != 1:
            return None
        stated = own[0].statistics
        if stated is None or not stated.has_min_max:
            return None
        largest = max(largest, abs(stated.max), abs(stated.min))
    return largest


def parquet_batches(
    raw: BinaryIO,
    file: InputFile,
    index: int,
    done: Ranges,
    size: int,
    columns: Sequence[str] | None,
) -> Iterator[Batch]:
    """The rows of a Parquet file; only these ``columns`` are read. A row group whose rows are all
    committed is not read: it is one batch without data, whatever ``size`` says."""
    # Page by page: otherwise the whole of a row group would be held.
    parquet = pq.ParquetFile(
        raw, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
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
        batch_size = batch_rows(size, row_count, _bytes_of_group(parquet, group, chosen))
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
    """About how many bytes a row group's columns take in memory. Parquet states their encoded size,
    in which a text that many rows have counts once. So a few rows are read if there are such
    texts."""
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
        batch_size = batch_rows(size, len(whole), of_columns.nbytes)
        for offset in range(0, len(whole), batch_size):
            data = without_views(of_columns.slice(offset, batch_size))
            if len(data) < len(whole):
                data = compact(data)  # else the chunk would hold the whole
            end = first + len(data)
            yield Batch(first, end, data, min(1.0, share), data.nbytes)
            first = end


def _record_batches(reader: Any, first: int) -> Iterator[pa.RecordBatch]:
    """The record batches, from the one with the number ``first`` on. A stream gives all."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(first, reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def count_parquet_rows(raw: BinaryIO, counted: RowCount) -> None:
    """The file states them."""
    counted.rows = pq.read_metadata(raw).num_rows


def count_arrow_rows(raw: BinaryIO, counted: RowCount) -> None:
    """Of all record batches. ``counted`` has what was read if this raises."""
    reader = _open_arrow(raw)
    can_start = isinstance(reader, pa.ipc.RecordBatchFileReader)
    for number, batch in enumerate(_record_batches(reader, 0)):
        if can_start:
            counted.starts.append(ReadStart(counted.rows, number))
        counted.rows += batch.num_rows
