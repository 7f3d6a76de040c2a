"""Makes parts of finished rows: their files, and what the journal is to say of them.

A part is written under a temporary name, synced and renamed; on object storage it appears when it
is closed. It counts once the journal names it, which is ``output``'s. What is in the files is
``part_files``'. A run on this machine has one maker of parts, a run on a cluster one in each actor.
"""

import contextlib
import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pafs
from jitney_jobs.columns import NonFinite
from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.journal import ERRORS, Interval, Ranges
from jitney_jobs.json_lines import check_no_common_name, encoded
from jitney_jobs.part_files import (
    CsvPart,
    LinesWriter,
    ParquetPart,
    PartWriter,
    RowBlock,
    TableWriter,
    runs_of,
)
from jitney_jobs.rows import LINES, Chunk, RowValues
from jitney_jobs.schemas import SeenTypes, check_storable
from jitney_jobs.storage import file_system, objects_of
from jitney_jobs.tasks import Context, MapResult
from jitney_jobs.whole_files import sync

_BLOCK_ROWS = 512
"""Most rows that are encoded together."""
_BLOCK_BYTES = 4 << 20
"""Most bytes of their results."""
_SAMPLE_ROWS = 256
"""So many results of ``map`` set the types of the columns that it makes."""
_SAMPLE_BYTES = 16 << 20


class BadRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of an error file. ``row`` is the index in the file, ``offset`` where it begins there,
    in bytes without compression; ``input`` the row's values, or its line if it has none."""

    file: str
    row: int
    error: str
    offset: int | None = None
    input: Any = None
    answer: RowValues | None = None
    """Of a line for OpenAI's API: the service's own line, which stands beside the others then, in
    place of ``error``."""

    @property
    def text(self) -> str:
        """For an error that gives an example."""
        return f"row {self.row} of {self.file}: {self.error}"


@dataclass(frozen=True)
class Ended:
    """Rows of one chunk that the model is done with."""

    chunk: Chunk
    rows: Sequence[int]
    """Their indices in the chunk."""
    columns: pa.RecordBatch | None = None
    """The result's columns, if the model gave columns."""
    results: Sequence[RowValues | MapResult] = ()
    """Otherwise what it gave for each row."""
    error: str | None = None
    """Why they are bad. Then there are no results."""
    answer: RowValues | None = None
    """Only of a bad line for OpenAI's API, which is alone then: the line that the service has."""
    result_bytes: int = 0
    """Size of the results in memory, about."""
    is_long_text: bool = False
    """Only of one row: whether its text is longer than the encoder takes at once."""

    @property
    def replaced(self) -> int:
        """How many U+FFFD were put in place of what is no text in these rows."""
        counts = self.chunk.replaced
        return sum(counts.get(row, 0) for row in self.rows) if counts else 0

    def slice(self, first: int, end: int) -> "Ended":
        """The rows [first, end) of these."""
        if first == 0 and end >= len(self.rows):
            return self
        rows = self.rows[first:end]
        columns = None if self.columns is None else self.columns.slice(first, end - first)
        return replace(
            self,
            rows=rows,
            columns=columns,
            results=self.results[first:end],
            result_bytes=self.result_bytes * len(rows) // len(self.rows),
        )


class WrittenPart(msgspec.Struct, frozen=True):
    """The files of a part, which do not count until the journal names them."""

    files: dict[str, int]
    """Their names and bytes."""
    intervals: list[Interval]
    """Its rows, good and bad."""
    written: int
    """Good rows."""
    failed: int
    """Bad rows."""
    misfits: int
    """Those of the bad rows whose results could not be written."""
    misfit: str | None
    """An example of these: its place, and why."""
    non_finite: int
    """NaN and infinities that were written as something else."""
    replaced: int
    """U+FFFD that were put in place of what is no text."""
    long_texts: int
    """Texts with more tokens than the encoder takes at once."""


def output_format_of(job: Job, dataset: Dataset) -> str:
    """Of the parts. Raises InvalidArgumentError if they cannot be divided as the job says."""
    output_format = job.output_format
    if output_format == "auto":
        output_format = "jsonl" if dataset.format in LINES else "parquet"
    if job.partition_by and output_format != "parquet":
        bound = "unset, or output_format must be parquet"
        raise InvalidArgumentError.of("partition_by", ", ".join(job.partition_by), bound)
    return output_format


class PartMaker:
    """Makes the parts of one run, or those of one actor. For one thread at a time."""

    def __init__(self, job: Job, dataset: Dataset) -> None:
        """Raises InvalidArgumentError for settings that exclude each other."""
        self._format = output_format_of(job, dataset)
        self.is_table = self._format != "jsonl"
        """Whether parts have columns with types, and not lines of JSON."""
        self._job = job
        self._dataset = dataset
        self._known: pa.Schema | None = pa.schema([])
        """The columns, once they are known. None if ``map`` makes some: the first rows set them."""
        self._of_input = pa.schema([])
        """The columns of the input that are written, so far as they are known before its rows."""
        self.schema: bytes | None = None
        """The columns of a table, for the journal, as Arrow serializes them. None until they are
        known."""
        self._fs, self._folder = file_system(job.output)
        self._objects = objects_of(job)
        """Parts go there, each in one request. None: they go to the file system."""

    # ------------------------------------------------------------------ the columns

    def set_columns(self, of_result: pa.Schema | None, stated: bytes | None = None) -> None:
        """The result's columns with their types; None if they are known only once there are rows.
        ``stated``: those of the parts that are there, as the journal has them. Call it before the
        first :meth:`write`. Raises InvalidArgumentError if one of them is a column of the input
        too, and for a column to keep or divide by that is not there."""
        of_input = self._dataset.schema or pa.schema([])
        keep = self._job.keep
        if of_input.names and keep is not None:  # else the input does not state its columns
            for name in keep:
                if name not in of_input.names:
                    bound = f"one of {', '.join(of_input.names)}"
                    raise InvalidArgumentError.of("keep", name, bound)
        columns = [field for field in of_input if keep is None or field.name in keep]
        self._of_input = pa.schema(columns, of_input.metadata)
        fields = [] if of_result is None else list(of_result)
        self._check_written_schema(is_whole=of_result is not None)
        check_no_common_name(self._of_input.names, [field.name for field in fields])
        if self.is_table:
            self._set_table(fields, of_result is not None, stated)

    def _check_written_schema(self, is_whole: bool) -> None:
        """Raises InvalidArgumentError if the setting ``schema`` names a column that is not there.
        ``is_whole``: all columns of the result are known."""
        schema = self._dataset.schema
        for name in self._dataset.written_schema.names:
            if schema is None:
                bound = "unset: values of JSON lines are written as they came"
                raise InvalidArgumentError.of("schema", name, bound)
            if is_whole and name not in schema.names:
                bound = f"of {', '.join(schema.names)}"
                raise InvalidArgumentError.of("schema", name, bound)

    def _set_table(self, fields: list[pa.Field], is_whole: bool, stated: bytes | None) -> None:
        """``fields``: of the result; empty unless ``is_whole``, which says that they are known."""
        self._known = pa.schema([*self._of_input, *fields], self._of_input.metadata)
        if self._format == "parquet":
            check_storable(self._known)
        if stated is not None:
            self.schema = stated
            self._known = pa.ipc.read_schema(pa.py_buffer(stated))
        elif is_whole:
            self.schema = self._known.serialize().to_pybytes()
        else:
            self._known = None
        if self._known is not None:
            self._check_partition_by(self._known)

    def _check_partition_by(self, schema: pa.Schema) -> None:
        for name in self._job.partition_by:
            if name not in schema.names:
                bound = f"one of {', '.join(schema.names)}"
                raise InvalidArgumentError.of("partition_by", name, bound)

    def completed(self, context: Context) -> Context:
        """The context, with what the workers must know of the output. Call it once the input has
        its schema."""
        makes_columns = self._dataset.format == "text"
        if self._dataset.format in LINES and self.is_table:
            makes_columns = True
        schema = self._dataset.schema
        keep = self._job.keep
        kept = None
        if schema is not None:
            kept = [name for name in schema.names if keep is None or name in keep]
        columns = None
        if makes_columns:
            assert schema is not None, "the input was looked at"
            columns = pa.schema([schema.field(name) for name in kept or []])
        return msgspec.structs.replace(
            context, writes_table=self.is_table, kept=kept, columns=columns
        )

    def columns_to_read(self, of_task: Sequence[str] | None) -> list[str] | None:
        """The columns of the input that are needed: those that the task reads, and those that are
        written. None: all."""
        keep = self._job.keep
        if of_task is None or keep is None:
            return None
        return list(dict.fromkeys([*keep, *of_task]))

    def knows_columns(self, part: Sequence[Ended]) -> bool:
        """Whether the columns are known, or this part has enough rows to set them: the first rows
        of the input, however long they take, so that the columns do not depend on the time. A part
        of bad rows alone needs none."""
        if self._known is not None:
            return True
        row_count = sum(len(ended.results) for ended in part)
        if not row_count:
            return True
        nbytes = sum(ended.result_bytes for ended in part)
        return row_count >= _SAMPLE_ROWS or nbytes >= _SAMPLE_BYTES

    def learn_columns(self, part: Sequence[Ended]) -> None:
        """Have the first results of ``map`` set the types of its columns, unless they are known."""
        if self._known is not None:
            return
        rows = sample_of(result for ended in _in_order(part) for result in ended.results)
        if rows:
            self.learn_columns_of(rows)

    def learn_columns_of(self, rows: Sequence[RowValues]) -> None:
        """Have these first results of ``map`` set the types of its columns. Raises
        InvalidArgumentError for types that the output cannot have."""
        seen = SeenTypes()
        seen.add(rows)
        written = self._dataset.written_schema
        fields = []
        for field in seen.schema():
            if field.name in self._of_input.names:
                continue
            if field.name in written.names:
                field = field.with_type(written.field(field.name).type)
            fields.append(field)
        there = {*self._of_input.names, *seen.schema().names}
        missing = [field for field in written if field.name not in there]
        known = pa.schema([*self._of_input, *fields, *missing], self._of_input.metadata)
        if self._format == "parquet":
            check_storable(known)
        self._check_partition_by(known)
        self._known = known
        self.schema = known.serialize().to_pybytes()

    # ------------------------------------------------------------------ a part

    def written_bytes(self, ended: Ended) -> int:
        """Size in memory of what is written of these rows' input, about."""
        chunk = ended.chunk
        if not ended.rows or self._job.keep == []:
            return 0
        nbytes = chunk.read_bytes
        if self._job.keep is not None and chunk.format not in LINES:
            data = chunk.data if chunk.columns is None else chunk.columns
            nbytes = data.select([n for n in data.schema.names if n in self._job.keep]).nbytes
        return nbytes * len(ended.rows) // len(chunk)

    def bad_row(
        self, chunk: Chunk, index: int, why: str, answer: RowValues | None = None
    ) -> BadRow:
        """Its line in an error file."""
        row = chunk.id_of(index)
        path = self._dataset.path_of(row)
        return BadRow(path, row.row, why, chunk.offset_of(index), chunk.given(index), answer)

    def write(self, part: Iterable[Ended], number: str) -> WrittenPart:
        """Write the files of a part. Rows that do not fit become bad ones. ``number`` is in the
        files' names. Raises OSError, and InvalidArgumentError if they would be too many."""
        part = _in_order(part)
        total = sum(len(ended.rows) for ended in part)
        self.learn_columns(part)
        bad: list[BadRow] = []
        for ended in part:
            if ended.error is not None:
                for index in ended.rows:
                    bad.append(self.bad_row(ended.chunk, index, ended.error, ended.answer))
        misfits: list[BadRow] = []
        non_finite = NonFinite(self._job.non_finite)
        writer = self._writer(non_finite)
        for block in _blocks(part):
            for index, why in writer.add(block).items():
                misfits.append(self.bad_row(block.chunk, block.rows[index], why))
        files = {name.format(number): data for name, data in writer.files().items()}
        bad += misfits
        if bad:
            files[f"{ERRORS}/part-{number}.jsonl"] = b"".join(map(_bad_line, bad))
        for name, data in files.items():
            self.write_file(name, data)
        # On this machine each part has a new thread: give back what Arrow's pool keeps of its
        # memory.
        pa.default_memory_pool().release_unused()
        return WrittenPart(
            files={name: len(data) for name, data in files.items()},
            intervals=_intervals(part),
            written=total - len(bad),
            failed=len(bad),
            misfits=len(misfits),
            misfit=misfits[-1].text if misfits else None,
            non_finite=non_finite.count,
            replaced=sum(ended.replaced for ended in part),
            long_texts=sum(1 for ended in part if ended.is_long_text),
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of a part that does not count. What cannot be removed is left to the next
        run."""
        for name in names:
            with contextlib.suppress(OSError):
                self._fs.delete_file(f"{self._folder}/{name}")

    def _writer(self, non_finite: NonFinite) -> PartWriter:
        if not self.is_table:
            return LinesWriter(self._job.keep, non_finite)
        schema = pa.schema([]) if self._known is None else self._known
        file_type = ParquetPart if self._format == "parquet" else CsvPart
        return TableWriter(schema, file_type, self._job.partition_by)

    def write_file(self, name: str, data: bytes | pa.Buffer) -> None:
        """A file of the output. Raises OSError."""
        if self._objects is not None:
            self._objects.put(name, data)
            return
        path = f"{self._folder}/{name}"
        folder, name = posixpath.split(path)
        local = isinstance(self._fs, pafs.LocalFileSystem)
        temporary = f"{folder}/.{name}" if local else path
        try:
            if local and not os.path.isdir(folder):
                os.makedirs(folder)
                sync(Path(folder).parent)
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


def _in_order(part: Iterable[Ended]) -> list[Ended]:
    """As their rows are in the input."""
    return sorted(part, key=lambda ended: (ended.chunk.first, ended.rows[0]))


def sample_of(results: Iterable[RowValues | MapResult]) -> list[RowValues]:
    """So many of the first results as set the types of columns, as values."""
    rows: list[RowValues] = []
    nbytes = 0
    for result in results:
        if isinstance(result, MapResult):
            nbytes += len(result.data)
            rows.append(result.values())
        else:
            rows.append(result)
        if len(rows) == _SAMPLE_ROWS or nbytes >= _SAMPLE_BYTES:
            break
    return rows


def _blocks(part: Sequence[Ended]) -> Iterator[RowBlock]:
    """The good rows of a part, sorted by chunk: those of one chunk together, up to a size."""
    together: list[Ended] = []
    rows = 0
    nbytes = 0
    for ended in part:
        if ended.error is not None:
            continue
        is_other = bool(together) and together[0].chunk.first != ended.chunk.first
        is_full = rows + len(ended.rows) > _BLOCK_ROWS or nbytes >= _BLOCK_BYTES
        if together and (is_other or is_full):
            yield _joined(together)
            together = []
            rows = 0
            nbytes = 0
        together.append(ended)
        rows += len(ended.rows)
        nbytes += ended.result_bytes
    if together:
        yield _joined(together)


def _joined(together: list[Ended]) -> RowBlock:
    chunk = together[0].chunk
    rows = [row for ended in together for row in ended.rows]
    columns = [ended.columns for ended in together if ended.columns is not None]
    results = [result for ended in together for result in ended.results]
    return RowBlock(chunk, rows, pa.concat_batches(columns) if columns else None, results)


def _intervals(part: Sequence[Ended]) -> list[Interval]:
    """The rows of a part, good and bad."""
    found = []
    for ended in part:
        indices = [ended.chunk.indices[row] for row in ended.rows]
        found += [Interval(ended.chunk.file, *run) for run in runs_of(indices)]
    return Ranges(found).intervals


def _bad_line(bad: BadRow) -> bytes:
    try:
        return encoded(_shown(bad, bad.error, bad.answer, bad.input)) + b"\n"
    except Exception:  # what JSON cannot hold may be why it is bad
        return encoded(_shown(bad, ascii(bad.error), None, ascii(bad.input))) + b"\n"


def _shown(bad: BadRow, error: str, answer: RowValues | None, given: Any) -> RowValues:
    offset = {} if bad.offset is None else {"offset": bad.offset}
    place = {"file": bad.file, "row": bad.row}
    return {**place, **(answer or {"error": error}), **offset, "input": given}
