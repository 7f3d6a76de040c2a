"""A job's output: parts, which a thread writes and commits.

A part is written under a temporary name, synced and renamed; on object storage it appears when it
is closed. Then it is noted in the journal; until then it does not count. Bad rows are in files of
their own.
"""

import contextlib
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from jitney.errors import InvalidArgumentError

from jitney_jobs.dataset import LINES, Dataset, Place, Row, file_system, reason
from jitney_jobs.job import Job
from jitney_jobs.journal import JobJournal, OutputPart, Ranges, sync

_BLOCK = 512
"""Rows that are encoded together."""
ERRORS = "_errors"
"""Folder of the bad rows: readers of data sets pass over names that begin so."""
_ENCODER = msgspec.json.Encoder(
    enc_hook=lambda v: v.tolist() if isinstance(v, np.ndarray | np.generic) else str(v)
)


class BadRow(msgspec.Struct, frozen=True):
    """A line of an error file. ``row`` is the index in the file."""

    file: str
    row: int
    error: str
    input: Any = None


Ended = tuple[Place, Row | BadRow]
"""What is written of a row, or why it is bad."""


class Output:
    """The folder of the parts."""

    def __init__(self, job: Job, dataset: Dataset, journal: JobJournal) -> None:
        """Raises InvalidArgumentError if there are parts, but no journal."""
        lines = job.output_format == "auto" and dataset.format in LINES
        self._parquet = job.output_format != "jsonl" and not lines
        self._job = job
        self._dataset = dataset
        self._journal = journal
        self.misfits = 0
        """Rows that did not fit into a part."""
        self.last_bad: BadRow | None = None
        self._fs, self._folder = file_system(job.output)
        self._fs.create_dir(f"{self._folder}/{ERRORS}", recursive=True)
        there = self._parts()
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

    def expect(self, fields: pa.Schema | None) -> None:
        """Take the types of the result's columns, where known. Raises InvalidArgumentError if one
        of them is a column of the input too."""
        fields = fields or pa.schema([])
        of_input = self._dataset.schema or pa.schema([])
        # `keep` can be checked only if the files state the input's columns.
        for name in self._job.keep or () if of_input.names else ():
            if name not in of_input.names:
                raise InvalidArgumentError.of("keep", name, f"one of {', '.join(of_input.names)}")
        kept = self.merged(dict.fromkeys(of_input.names), {}).keys()
        # Raises for a column of both.
        self.merged(dict.fromkeys(of_input.names), dict.fromkeys(fields.names))
        columns = [f.with_nullable(True) for f in of_input if f.name in kept]
        self._known = pa.schema([*columns, *fields])
        if self._parquet:
            try:
                pq.write_metadata(self._known, pa.BufferOutputStream())
            except pa.ArrowException as error:
                raise InvalidArgumentError(f"Parquet cannot hold the columns: {error}") from None
        schema = self._journal.record.schema
        self._schema = None if schema is None else pa.ipc.read_schema(pa.py_buffer(schema))

    def merged(self, row: Row, made: Row) -> Row:
        """A row of the output: the columns of the input that are kept, and the result's. Raises
        InvalidArgumentError if both have one of the same name."""
        keep = self._job.keep
        kept = row if keep is None else {name: row.get(name) for name in keep}
        if both := kept.keys() & made.keys():
            raise InvalidArgumentError(
                f"column {min(both)!r} is both of the input and of the result: choose the "
                "input's columns with keep"
            )
        return {**kept, **made}

    def bad_row(self, place: Place, why: str, row: Row | None) -> BadRow:
        """Its line in an error file."""
        self.last_bad = BadRow(self._dataset.path_of(*place), place[1], why, row)
        return self.last_bad

    def write(self, part: list[Ended], figures: dict[str, float]) -> None:
        """Write a part and commit it. Rows that do not fit become bad ones. ``part`` is emptied
        while it is encoded, so that the next part can have its memory."""
        number = self._journal.record.next_number
        total = len(part)
        pieces = Ranges((file, row, row + 1) for (file, row), _ in part).pieces
        new = None
        if self._parquet and self._schema is None:
            rows = [row for _, row in part if not isinstance(row, BadRow)]
            if rows:
                self._schema = _infer_schema(rows, self._known)
                new = self._schema.serialize().to_pybytes()
            del rows
        good: list[Any] = []
        bad: list[BadRow] = []
        while part:
            block = part[:_BLOCK]
            part[:_BLOCK] = []
            bad += [row for _, row in block if isinstance(row, BadRow)]
            self._encode([(at, row) for at, row in block if not isinstance(row, BadRow)], good, bad)
        name = f"part-{number:05}.{'parquet' if self._parquet else 'jsonl'}"
        files = {name: self._joined(good)} if total > len(bad) else {}
        if bad:
            files[f"{ERRORS}/part-{number:05}.jsonl"] = b"".join(map(_bad_line, bad))
        for name, data in files.items():
            self._write(f"{self._folder}/{name}", data)
        sizes = {name: len(data) for name, data in files.items()}
        counts = total - len(bad), len(bad)
        self._journal.append(OutputPart(number, sizes, pieces, *counts, figures, new))
        pa.default_memory_pool().release_unused()  # what the threads of writing had

    def _encode(self, rows: list[tuple[Place, Row]], good: list[Any], bad: list[BadRow]) -> None:
        """Append rows to ``good`` as a record batch or as lines, or each that raises to ``bad``."""
        try:
            good.append(self._encoded([row for _, row in rows]))
        except Exception as error:  # a value may be anything
            if len(rows) > 1:
                for one in rows:
                    self._encode([one], good, bad)
            else:
                bad.append(self.bad_row(rows[0][0], reason(error), rows[0][1]))
                self.misfits += 1

    def _encoded(self, rows: list[Row]) -> pa.RecordBatch | bytes:
        """Raises whatever the values raise."""
        if self._schema is None:
            return b"".join(map(_line, rows))
        if extra := {name for row in rows for name in row} - set(self._schema.names):
            bound = "in the output, whose columns the first part set"
            raise InvalidArgumentError(f"column {min(extra, key=str)!r} is not {bound}")
        for field in self._schema:
            if loses := _loss(field.type):
                for row in rows:
                    value = row.get(field.name)
                    if value is not None and loses(value):
                        raise InvalidArgumentError.of(field.name, value, f"of type {field.type}")
        return pa.RecordBatch.from_pylist(rows, self._schema)

    def _joined(self, encoded: list[Any]) -> bytes | pa.Buffer:
        """The bytes of a part."""
        if self._schema is None:
            return b"".join(encoded)
        sink = pa.BufferOutputStream()
        table = pa.Table.from_batches(encoded, self._schema)
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue()

    def _write(self, path: str, data: bytes | pa.Buffer) -> None:
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


def _line(row: Any) -> bytes:
    """As JSON. Raises whatever its values raise."""
    return _ENCODER.encode(row) + b"\n"


def _bad_line(bad: BadRow) -> bytes:
    try:
        return _line(bad)
    except Exception:  # what JSON cannot hold may be why it is bad
        return _line(BadRow(bad.file, bad.row, ascii(bad.error), ascii(bad.input)))


def _loss(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """A test: whether Arrow would round a value, or leave some of it out, without a word, to make
    it of this type. None if it does so with no value."""
    if pa.types.is_integer(kind):
        # A float with a fraction would be cut.
        return lambda value: isinstance(value, float | np.floating) and value != int(value)
    if pa.types.is_struct(kind):
        # A name that the type lacks would be left out; the value of another may lose something.
        fields = {field.name: _loss(field.type) for field in kind}
        return lambda value: (
            isinstance(value, Mapping)
            and any(
                name not in fields or (each is not None and (loses := fields[name]) and loses(each))
                for name, each in value.items()
            )
        )
    is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    # A list loses something if an element does. Integers alone never do: none is looked at then.
    loses = _loss(kind.value_type) if any(each(kind) for each in is_list) else None
    return loses and (
        lambda value: (
            {*map(type, value)} != {int} and any(loses(each) for each in value if each is not None)
        )
    )


def _infer_schema(rows: Sequence[Row], known: pa.Schema) -> pa.Schema:
    """``known``, and the columns that it lacks with the types of their values, or of the first that
    has one. A column without a value is of text; one without a proper name is left out."""
    for name in dict.fromkeys(name for row in rows for name in row if name not in known.names):
        values = [row[name] for row in rows if row.get(name) is not None]
        kind = pa.string()
        # All values together; if they have no common type, each alone until one has a type.
        for some in (values, *([each] for each in values)) if values else ():
            with contextlib.suppress(Exception):
                found = pa.array(some).type
                pq.write_metadata(pa.schema({name: found}), pa.BufferOutputStream())
                kind = found
                break
        with contextlib.suppress(Exception):
            known = known.append(pa.field(name, kind))
    return known
