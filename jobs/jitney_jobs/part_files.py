"""The files of a part: rows as lines of JSON, Parquet or CSV.

A writer takes rows of one chunk with their results, and gives the bytes of files. Columns of the
input are taken from the chunk as they are. A row whose result cannot be written is left out, and
the writer returns its index and why.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pa_csv, pc, pq
from jitney_jobs.columns import Columns, Errors, in_schema, of_values, rows_of, taken, values_of
from jitney_jobs.json_lines import encoded, joined, kept
from jitney_jobs.non_finite import NonFinite, has_non_finite
from jitney_jobs.rows import LINES, Chunk, RowValues, reason
from jitney_jobs.schemas import in_microseconds, is_list
from jitney_jobs.tasks import MapResult

_MOST_PARTITIONS = 1000
"""Most files of one part. A column with more values is refused as one to divide by."""
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class RowBlock:
    """Good rows of one chunk with their results, in the order of the input."""

    chunk: Chunk
    rows: Sequence[int]
    """Their indices in the chunk."""
    columns: pa.RecordBatch | None
    """The result's columns, if the model gave columns."""
    results: Sequence[RowValues | MapResult]
    """Otherwise what it gave for each row."""


class PartWriter(Protocol):
    """Makes the files of one part."""

    def add(self, block: RowBlock) -> Errors:
        """Returns the rows that cannot be written, by their index in the block."""

    def files(self) -> dict[str, "bytes | pa.Buffer"]:
        """The bytes of each file by its name, in which ``{}`` stands for the part's number."""


# ------------------------------------------------------------------ lines of JSON


class LinesWriter:
    """A line of the input is written as it came, with the result's columns behind its own."""

    def __init__(self, keep: Sequence[str] | None, non_finite: NonFinite) -> None:
        self._keep = keep
        self._non_finite = non_finite
        self._sink = io.BytesIO()

    def add(self, block: RowBlock) -> Errors:
        errors: Errors = {}
        given = self._given(block)
        results = self._results(block)
        for index in range(len(block.rows)):
            try:
                row = self._object(given[index])
                result = self._object(results[index])
                line = joined(row, result)
                self._sink.write(line)
                self._sink.write(b"\n")
            except Exception as error:  # a value may be anything
                errors[index] = reason(error)
        return errors

    def _object(self, value: bytes | RowValues | MapResult | Exception) -> bytes:
        """As an object of JSON."""
        if isinstance(value, Exception):
            raise value
        if isinstance(value, MapResult):
            self._non_finite.count += value.non_finite
            return value.data
        if isinstance(value, bytes):
            return value
        return encoded(value)

    def _given(self, block: RowBlock) -> Sequence[bytes | RowValues | Exception]:
        """What each line has of the input; an exception for a row that cannot be written."""
        chunk = block.chunk
        if chunk.format in LINES:
            if self._keep == []:
                return [b"{}"] * len(block.rows)
            lines = taken(chunk.data, block.rows).column(0).to_pylist()
            return [self._kept(line, chunk) for line in lines]
        data = chunk.data if chunk.columns is None else chunk.columns
        if self._keep is not None:
            data = data.select([name for name in data.schema.names if name in self._keep])
        return self._values(taken(data, block.rows))

    def _kept(self, line: bytes, chunk: Chunk) -> bytes | Exception:
        try:
            return kept(line, self._keep, chunk.further, self._non_finite)
        except Exception as error:
            return error

    def _results(self, block: RowBlock) -> Sequence[RowValues | MapResult | Exception]:
        if block.columns is not None:
            return self._values(block.columns)
        return [self._replaced(result) for result in block.results]

    def _values(self, data: pa.RecordBatch) -> list[RowValues | Exception]:
        """The rows as Python's values. Instead of a row that Python cannot hold, the exception."""
        try:
            rows: list[RowValues | Exception] = [*rows_of(_with_exact_times(data))]
        except Exception as error:  # such as a date after the year 9999
            if len(data) == 1:
                return [error]
            one_by_one: list[RowValues | Exception] = []
            for index in range(len(data)):
                one_by_one += self._values(data.slice(index, 1))
            return one_by_one
        if any(map(has_non_finite, data.columns)):
            return [self._replaced(row) for row in rows]
        return rows

    def _replaced(self, row: Any) -> Any:
        if isinstance(row, MapResult | Exception):
            return row
        try:
            return self._non_finite.replaced(row)
        except InvalidArgumentError as error:
            return error

    def files(self) -> dict[str, bytes | pa.Buffer]:
        data = self._sink.getvalue()
        return {"part-{}.jsonl": data} if data else {}


def _with_exact_times(data: pa.RecordBatch) -> pa.RecordBatch:
    if not data.num_columns:
        return data
    arrays = [_exact_times(array) for array in data.columns]
    return pa.RecordBatch.from_arrays(arrays, data.schema.names)


def _exact_times(array: pa.Array) -> pa.Array:
    """Times in microseconds, as Python has them. If that would cut one of them, all as texts."""
    kind = array.type
    if kind.equals(in_microseconds(kind)):
        return array
    types = pa.types
    if types.is_struct(kind):
        children = [_exact_times(child) for child in array.flatten()]
        names = [field.name for field in kind]
        return pa.StructArray.from_arrays(children, names, mask=array.is_null())
    if is_list(kind) and not array.offset and not types.is_fixed_size_list(kind):
        make = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
        return make.from_arrays(array.offsets, _exact_times(array.values), mask=array.is_null())
    try:
        return array.cast(in_microseconds(kind))
    except pa.ArrowException:
        pass  # one of them is finer
    if types.is_timestamp(kind):
        zone = "%Ez" if kind.tz else ""
        return pc.strftime(array, format=f"%Y-%m-%dT%H:%M:%S{zone}")
    if types.is_duration(kind):
        nanoseconds = array.cast(pa.int64()).to_pylist()
        return pa.array([None if n is None else f"PT{n / 10**9:.9f}S" for n in nanoseconds])
    return array.cast(pa.string())


# ------------------------------------------------------------------ tables


class TableFile(Protocol):
    """A file that is written batch by batch."""

    suffix: str

    def __init__(self, schema: pa.Schema) -> None: ...

    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> pa.Buffer: ...


class TableWriter:
    """Parquet or CSV, with the columns of ``schema``; a file for each value of the columns
    ``partition_by``, which are not in the file."""

    def __init__(self, schema: pa.Schema, file_type: type[TableFile], partition_by: Sequence[str]):
        self._schema = schema
        self._file_type = file_type
        self._partition_by = partition_by
        self._files: dict[str, TableFile] = {}
        """By their folder, which is the part's own without ``partition_by``."""

    def add(self, block: RowBlock) -> Errors:
        """Raises InvalidArgumentError if the part would have too many files."""
        found = self._columns(block)
        data = found.data
        if found.errors:
            good = [index for index in range(data.num_rows) if index not in found.errors]
            data = taken(data, good)
        if not data.num_rows:
            return found.errors
        if not self._partition_by:
            self._write("", data)
            return found.errors
        for folder, rows in self._partitions(data).items():
            rest = data.drop_columns(list(self._partition_by))
            self._write(folder, rest.take(rows))
        return found.errors

    def _columns(self, block: RowBlock) -> Columns:
        """The columns of the input and of the result, with the types of the schema."""
        chunk = block.chunk
        given = chunk.data if chunk.columns is None else chunk.columns
        names = [name for name in given.schema.names if name in self._schema.names]
        given = taken(given.select(names), block.rows) if names else None
        if block.columns is not None:
            result = Columns(block.columns, {})
        else:
            fields = [field for field in self._schema if field.name not in names]
            rows = [
                each.values() if isinstance(each, MapResult) else each for each in block.results
            ]
            result = of_values(rows, pa.schema(fields))
        columns: dict[str, pa.Array] = {}
        for data in (given, result.data):
            if data is not None:
                columns |= dict(zip(data.schema.names, data.columns, strict=True))
        if not columns:
            return result
        together = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        found = in_schema(together, self._schema)
        return Columns(found.data, {**found.errors, **result.errors})

    def _partitions(self, data: pa.RecordBatch) -> dict[str, pa.Array]:
        """Folder -> indices of its rows."""
        texts = []
        for name in self._partition_by:
            values = data.column(name).cast(pa.string()).to_pylist()
            escaped = [_NULL_PARTITION if v is None else quote(v, safe=" ") for v in values]
            texts.append([f"{quote(name, safe=' ')}={value}/" for value in escaped])
        rows: dict[str, list[int]] = {}
        for index, steps in enumerate(zip(*texts, strict=True)):
            rows.setdefault("".join(steps), []).append(index)
        return {folder: pa.array(indices, pa.int64()) for folder, indices in rows.items()}

    def _write(self, folder: str, data: pa.RecordBatch) -> None:
        if folder not in self._files:
            if len(self._files) >= _MOST_PARTITIONS:
                bound = f"columns with at most {_MOST_PARTITIONS} values in a part"
                raise InvalidArgumentError.of("partition_by", ", ".join(self._partition_by), bound)
            self._files[folder] = self._file_type(data.schema)
        self._files[folder].write(data)

    def files(self) -> dict[str, bytes | pa.Buffer]:
        suffix = self._file_type.suffix
        return {f"{folder}part-{{}}.{suffix}": file.close() for folder, file in self._files.items()}


class ParquetPart:
    """A file of one row group. (Arrow begins another one after a million rows.)"""

    suffix = "parquet"

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd")

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> pa.Buffer:
        self._writer.close()
        return self._sink.getvalue()


class CsvPart:
    """With a header. Lists and objects are JSON, bytes are in base64."""

    suffix = "csv"

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        fields = [pa.field(field.name, _csv_type(field.type)) for field in schema]
        self._schema = pa.schema(fields)
        self._writer = pa_csv.CSVWriter(self._sink, self._schema)

    def write(self, batch: pa.RecordBatch) -> None:
        arrays = []
        for array, field in zip(batch.columns, self._schema, strict=True):
            if not array.type.equals(field.type):
                array = pa.array([_csv_text(value) for value in values_of(array)], pa.string())
            arrays.append(array)
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def close(self) -> pa.Buffer:
        self._writer.close()
        return self._sink.getvalue()


def _csv_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    is_plain = types.is_primitive(kind) or types.is_string(kind) or types.is_large_string(kind)
    return kind if is_plain or types.is_decimal(kind) else pa.string()


def _csv_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return encoded(value).decode()


def runs_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as intervals [first, end)."""
    array = np.asarray(indices)
    breaks = np.flatnonzero(np.diff(array) != 1) + 1
    firsts = array[np.concatenate([[0], breaks])]
    ends = array[np.concatenate([breaks - 1, [len(array) - 1]])] + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))
