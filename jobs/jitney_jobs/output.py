"""A job's output: parts, which a thread writes and commits.

A part is written under a temporary name, synced and renamed; on object storage it appears when it
is closed. Then it is noted in the journal; until then it does not count. Bad rows are in files of
their own.
"""

import contextlib
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.arrow import pa, pafs, pq
from jitney_jobs.column_names import check_no_common_name
from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.journal import ERRORS, Interval, JobJournal, OutputPart, Ranges, sync
from jitney_jobs.rows import LINES, RowId, RowValues, reason
from jitney_jobs.storage import file_system

_BAD_FILES = "files.jsonl"
"""In the folder of the bad rows: the files that could not be read to their end."""
_BLOCK = 512
"""Rows that are encoded together."""


class BadRow(msgspec.Struct, frozen=True):
    """A line of an error file. ``row`` is the index in the file."""

    file: str
    row: int
    error: str
    input: Any = None


class EndedRow(NamedTuple):
    """A row that the model is done with."""

    id: RowId
    value: RowValues | BadRow
    """What is written of it."""
    read_bytes: int
    """Approximate size of the row as it was read."""


@contextlib.contextmanager
def write_errors(job: Job) -> Iterator[None]:
    """Around what writes to the output or the journal: an OSError becomes an UnavailableError that
    names the output."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"output {job.output} cannot be written: {error}; when it can be, `jitney "
            "batch resume` goes on"
        ) from error


class Output:
    """The folder of the parts."""

    def __init__(self, job: Job, dataset: Dataset, journal: JobJournal) -> None:
        """Raises InvalidArgumentError if there are parts, but no journal."""
        output_format = job.output_format
        if output_format == "auto":
            output_format = "jsonl" if dataset.format in LINES else "parquet"
        self._parquet = output_format == "parquet"
        self._job = job
        self._dataset = dataset
        self._journal = journal
        self._known = pa.schema([])
        """The columns whose types are known before the first row."""
        self._schema: pa.Schema | None = None
        """The columns of Parquet, once the first part has set them."""
        self.misfits = 0
        """Rows that could not be written with the others of their part."""
        self.last_bad: BadRow | None = None
        """For the error of a job that has too many."""
        self._fs, self._folder = file_system(job.output)
        self._fs.create_dir(f"{self._folder}/{ERRORS}", recursive=True)
        there = [name for name in self._parts() if not name.startswith(ERRORS)]
        if there and journal.record.begin is None:
            bad = f"output {self._folder} has {min(there)}, but no journal: choose another"
            raise InvalidArgumentError(bad)

    def recover(self) -> None:
        """Remove what the journal does not name, and check that what it names is there. Raises
        InvalidArgumentError."""
        there = self._parts()
        parts = self._journal.record.parts
        committed = {name: size for part in parts for name, size in part.files.items()}
        for name in there.keys() - committed.keys():
            self._fs.delete_file(f"{self._folder}/{name}")
        for name, size in committed.items():
            if there.get(name) != size:
                raise InvalidArgumentError(
                    f"the committed part {name} of {self._folder} has {there.get(name, 0):,} "
                    f"bytes, but had {size:,}"
                )

    def _parts(self) -> dict[str, int]:
        """Names and bytes of all parts, finished or not."""
        there = {}
        for folder in (self._folder, f"{self._folder}/{ERRORS}"):
            for info in self._fs.get_file_info(pafs.FileSelector(folder)):
                name = posixpath.basename(info.path)
                if info.type == pafs.FileType.File and name.startswith(("part-", ".part-")):
                    there[posixpath.relpath(info.path, self._folder)] = info.size
        return there

    def bad_rows(self) -> Iterator[Interval]:
        """The bad rows in the error files of all parts. Raises InvalidArgumentError for one that is
        damaged."""
        files = {file.path: index for index, file in enumerate(self._dataset.files)}
        decoder = msgspec.json.Decoder(BadRow)
        for part in self._journal.record.parts:
            for name in part.files:
                if not name.startswith(ERRORS):
                    continue
                with self._fs.open_input_stream(f"{self._folder}/{name}") as source:
                    lines = source.read().splitlines()
                for line in lines:
                    try:
                        bad = decoder.decode(line)
                    except msgspec.DecodeError as error:
                        raise InvalidArgumentError(f"{name} is damaged: {error}") from None
                    file = 0 if self._dataset.files_are_rows else files[bad.file]
                    yield Interval(file, bad.row, bad.row + 1)

    def list_bad_files(self) -> None:
        """Write their list beside the bad rows, or remove one that was there."""
        files = self._dataset.files
        reasons = self._journal.record.bad_files
        path = f"{self._folder}/{ERRORS}/{_BAD_FILES}"
        lines = [_line({"file": files[index].path, "error": why}) for index, why in reasons.items()]
        if lines:
            self._write_file(path, b"".join(lines))
        elif self._fs.get_file_info(path).type == pafs.FileType.File:
            self._fs.delete_file(path)

    def set_columns(self, of_result: pa.Schema | None) -> None:
        """The result's columns with their types; None if they are known only once there are rows.
        Call it before the first :meth:`write`. Raises InvalidArgumentError if one of them is a
        column of the input too."""
        of_result = of_result or pa.schema([])
        of_input = self._dataset.read_schema() or pa.schema([])
        keep = self._job.keep
        if of_input.names and keep is not None:  # else the files do not state their columns
            for name in keep:
                if name not in of_input.names:
                    bound = f"one of {', '.join(of_input.names)}"
                    raise InvalidArgumentError.of("keep", name, bound)
        kept = of_input.names if keep is None else keep
        check_no_common_name(kept, of_result.names)
        columns = [field.with_nullable(True) for field in of_input if field.name in kept]
        self._known = pa.schema([*columns, *of_result])
        if self._parquet:
            try:
                pq.write_metadata(self._known, pa.BufferOutputStream())
            except pa.ArrowException as error:
                raise InvalidArgumentError(f"Parquet cannot hold the columns: {error}") from None
        schema = self._journal.record.schema
        if schema is not None:
            self._schema = pa.ipc.read_schema(pa.py_buffer(schema))

    def merged(self, row: RowValues, result: RowValues) -> RowValues:
        """A row of the output: the columns of the input that are kept, and the result's. Raises
        InvalidArgumentError if both have one of the same name."""
        keep = self._job.keep
        kept = row if keep is None else {name: row.get(name) for name in keep}
        check_no_common_name(kept, result)
        return {**kept, **result}

    def record_bad_row(self, row: RowId, why: str, given: RowValues | None) -> BadRow:
        """Its line in an error file. ``given``: the row as it was read, if it could be."""
        self.last_bad = BadRow(self._dataset.path_of(row), row.row, why, given)
        return self.last_bad

    def write(self, part: list[EndedRow], figures: dict[str, float]) -> None:
        """Write a part and commit it. Rows that do not fit become bad ones. ``part`` is emptied
        while it is encoded, so that the next part can have its memory."""
        number = self._journal.record.next_number
        total = len(part)
        ids = [ended.id for ended in part]
        intervals = Ranges(Interval(id_.file, id_.row, id_.row + 1) for id_ in ids).intervals
        new_schema = self._set_schema(part)
        good: list[Any] = []  # encoded
        bad: list[BadRow] = []
        while part:
            block = part[:_BLOCK]
            del part[:_BLOCK]
            bad += [ended.value for ended in block if isinstance(ended.value, BadRow)]
            good_rows = [ended for ended in block if not isinstance(ended.value, BadRow)]
            self._encode(good_rows, good, bad)
        files = self._files_of_part(number, good, bad)
        for name, data in files.items():
            self._write_file(f"{self._folder}/{name}", data)
        committed = OutputPart(
            number=number,
            files={name: len(data) for name, data in files.items()},
            intervals=intervals,
            written=total - len(bad),
            failed=len(bad),
            figures=figures,
            schema=new_schema,
        )
        self._journal.append(committed)
        # Each part is written in a new thread: give back what Arrow's pool keeps of its memory.
        pa.default_memory_pool().release_unused()

    def _files_of_part(
        self, number: int, good: list[Any], bad: list[BadRow]
    ) -> dict[str, bytes | pa.Buffer]:
        """Name -> data. A part has one file of good rows, which are encoded, and one of bad rows.
        Without such rows there is no such file."""
        files: dict[str, bytes | pa.Buffer] = {}
        if good:
            suffix = "parquet" if self._parquet else "jsonl"
            files[f"part-{number:05}.{suffix}"] = self._joined(good)
        if bad:
            files[f"{ERRORS}/part-{number:05}.jsonl"] = b"".join(map(_bad_line, bad))
        return files

    def _set_schema(self, part: list[EndedRow]) -> bytes | None:
        """Have the first good rows set the columns of Parquet. Returns the schema for the journal;
        None if there is none, or if the journal has it."""
        if not self._parquet:
            return None
        if self._schema is None:
            rows = [ended.value for ended in part if not isinstance(ended.value, BadRow)]
            if not rows:
                return None
            self._schema = _infer_schema(rows, self._known)
        # The journal has the schema once a part with it is committed. Until then each part brings
        # it: the one that set the columns may have been lost.
        if self._journal.record.schema is not None:
            return None
        return self._schema.serialize().to_pybytes()

    def _encode(self, rows: list[EndedRow], good: list[Any], bad: list[BadRow]) -> None:
        """Append rows to ``good``, as a record batch or as lines. Those that cannot be encoded go
        to ``bad``."""
        if not rows:
            return
        try:
            good.append(self._encoded([ended.value for ended in rows]))
        except Exception as error:  # a value may be anything
            if len(rows) > 1:
                for ended in rows:
                    self._encode([ended], good, bad)
                return
            (ended,) = rows
            assert not isinstance(ended.value, BadRow), "only good rows are encoded"
            bad.append(self.record_bad_row(ended.id, reason(error), ended.value))
            self.misfits += 1

    def _encoded(self, rows: list[Any]) -> pa.RecordBatch | bytes:
        """Raises whatever the values raise."""
        schema = self._schema
        if schema is None:
            return b"".join(map(_line, rows))
        known = set(schema.names)
        for row in rows:
            unknown = row.keys() - known
            if unknown:
                bound = "in the output, whose columns the first part set"
                name = min(unknown, key=str)
                raise InvalidArgumentError(f"column {name!r} is not {bound}")
        for field in schema:
            if not _can_lose(field.type):
                continue
            for row in rows:
                value = row.get(field.name)
                if _loses(value, field.type):
                    raise InvalidArgumentError.of(field.name, value, f"of type {field.type}")
        return pa.RecordBatch.from_pylist(rows, schema)

    def _joined(self, encoded: list[Any]) -> bytes | pa.Buffer:
        """The bytes of a part."""
        if self._schema is None:
            return b"".join(encoded)
        sink = pa.BufferOutputStream()
        table = pa.Table.from_batches(encoded, self._schema)
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue()

    def _write_file(self, path: str, data: bytes | pa.Buffer) -> None:
        folder, name = posixpath.split(path)
        local = isinstance(self._fs, pafs.LocalFileSystem)
        temporary = f"{folder}/.{name}" if local else path
        try:
            with self._fs.open_output_stream(temporary) as sink:
                sink.write(data)
            if local:
                sync(Path(temporary))
                os.rename(temporary, path)
                sync(Path(folder))
        except OSError:
            with contextlib.suppress(OSError):
                self._fs.delete_file(temporary)
            raise


def _for_json(value: Any) -> Any:
    """What is written of a value that JSON does not have."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_for_json)


def _line(row: Any) -> bytes:
    """As JSON. Raises whatever its values raise."""
    return _ENCODER.encode(row) + b"\n"


def _bad_line(bad: BadRow) -> bytes:
    try:
        return _line(bad)
    except Exception:  # what JSON cannot hold may be why it is bad
        return _line(BadRow(bad.file, bad.row, ascii(bad.error), ascii(bad.input)))


# ------------------------------------------------------------------ values and types


def _can_lose(kind: pa.DataType) -> bool:
    """Whether there are values of which Arrow drops a part, without an error, to make them of this
    type: a fraction, or a key of a struct."""
    if _is_list(kind):
        return _can_lose(kind.value_type)
    return pa.types.is_integer(kind) or pa.types.is_struct(kind)


def _loses(value: Any, kind: pa.DataType) -> bool:
    """Whether Arrow would drop a part of this value to make it of this type."""
    if value is None:
        return False
    if pa.types.is_integer(kind):
        # The fraction of a float would be cut.
        return isinstance(value, float | np.floating) and value != int(value)
    if pa.types.is_struct(kind):
        return isinstance(value, Mapping) and _struct_loses(value, kind)
    if _is_list(kind):
        return _list_loses(value, kind.value_type)
    return False


def _struct_loses(value: Mapping[str, Any], kind: pa.StructType) -> bool:
    types = {field.name: field.type for field in kind}
    for name, item in value.items():
        if name not in types:
            return True  # it would be left out
        if _loses(item, types[name]):
            return True
    return False


def _list_loses(values: Any, kind: pa.DataType) -> bool:
    """``kind``: of the elements."""
    if not _can_lose(kind):
        return False
    # Integers alone lose nothing. Lists of token ids are long, so that this is asked first.
    if set(map(type, values)) == {int}:
        return False
    return any(_loses(value, kind) for value in values)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _infer_schema(rows: Sequence[Any], known: pa.Schema) -> pa.Schema:
    """``known``, and the columns that it lacks, with types that their values have. A name that
    Arrow cannot take is left out; the rows that have it become bad ones."""
    names: dict[Any, None] = {}  # in the order in which they come
    for row in rows:
        names |= dict.fromkeys(row)
    schema = known
    for name in names:
        if name not in known.names and _is_column_name(name):
            values = [row[name] for row in rows if row.get(name) is not None]
            schema = schema.append(pa.field(name, _common_type(values)))
    return schema


def _is_column_name(name: Any) -> bool:
    try:
        pa.field(name, pa.string())
    except Exception:  # it is no text, or none that UTF-8 can hold
        return False
    return True


def _common_type(values: list[Any]) -> pa.DataType:
    """The type of all values; if they have none in common, that of the first value that has one;
    text if none has."""
    if not values:
        return pa.string()
    kind = _type_of(values)
    if kind is not None:
        return kind
    for value in values:
        kind = _type_of([value])
        if kind is not None:
            return kind
    return pa.string()


def _type_of(values: list[Any]) -> pa.DataType | None:
    """None if Arrow has no type for them, or one that Parquet cannot hold."""
    try:
        kind = pa.array(values).type
        pq.write_metadata(pa.schema({"values": kind}), pa.BufferOutputStream())
    except Exception:  # a value may be anything
        return None
    return kind
