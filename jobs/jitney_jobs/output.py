"""A job's output: parts, which a thread writes and commits.

A part is written under a temporary name, synced and renamed; on object storage it appears when it
is closed. Then it is noted in the journal; until then it does not count. Bad rows are in files of
their own. What is in the files is ``part_files``'.
"""

import contextlib
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.addresses import without_keys
from jitney_jobs.arrow import pa, pafs
from jitney_jobs.columns import NonFinite
from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.journal import ERRORS, InputFile, Interval, OutputPart, Ranges, Record, sync
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
from jitney_jobs.shards import Shard
from jitney_jobs.storage import file_system, objects_of
from jitney_jobs.tasks import Context, MapResult

_BLOCK_ROWS = 512
"""Most rows that are encoded together."""
_BLOCK_BYTES = 4 << 20
"""Most bytes of their results."""
_SAMPLE_ROWS = 256
"""So many results of ``map`` set the types of the columns that it makes."""
_SAMPLE_BYTES = 16 << 20


class _Place(msgspec.Struct):
    """What every line of an error file has: the row's file, and its index there."""

    file: str
    row: int


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


@contextlib.contextmanager
def write_errors(job: Job) -> Iterator[None]:
    """Around what writes to the output or the journal: an OSError becomes an UnavailableError that
    names the output."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"output {without_keys(job.output)} cannot be written: {error}; when it can be, "
            "`jitney batch resume` goes on"
        ) from error


class PartJournal(Protocol):
    """What an output needs of its job's journal."""

    @property
    def record(self) -> Record: ...

    def append(self, entry: OutputPart) -> None: ...

    def next_part(self) -> tuple[int, str]: ...

    def may_remove(self, part: str) -> bool: ...


class Output:
    """The folder of the parts."""

    def __init__(self, job: Job, dataset: Dataset, journal: PartJournal) -> None:
        """Raises InvalidArgumentError if there are parts, but no journal."""
        output_format = job.output_format
        if output_format == "auto":
            output_format = "jsonl" if dataset.format in LINES else "parquet"
        if job.partition_by and output_format != "parquet":
            bound = "unset, or output_format must be parquet"
            raise InvalidArgumentError.of("partition_by", ", ".join(job.partition_by), bound)
        self._format = output_format
        self.is_table = output_format != "jsonl"
        """Whether it has columns with types, and not lines of JSON."""
        self._job = job
        self._dataset = dataset
        self._journal = journal
        self._known: pa.Schema | None = pa.schema([])
        """The columns, once they are known. None if ``map`` makes some: the first rows set them."""
        self._of_input = pa.schema([])
        """The columns of the input that are written, so far as they are known before its rows."""
        self._new_schema: bytes | None = None
        """The columns, until the journal has them."""
        self._non_finite = NonFinite(job.non_finite)
        self.misfits = 0
        """Rows whose results could not be written."""
        self.last_bad: BadRow | None = None
        """For the error of a job that has too many."""
        self._fs, self._folder = file_system(job.output)
        shard = job.its_shard
        self._mark = "" if shard is None else shard.part_mark
        """What the names of this run's parts have before the number."""
        self._objects = objects_of(job)
        """Parts go there, each in one request. None: they go to the file system."""
        self._fs.create_dir(f"{self._folder}/{ERRORS}", recursive=True)
        there = [name for name in self._parts() if not name.startswith(ERRORS)]
        if there and journal.record.begin is None:
            bad = f"output {self._folder} has {min(there)}, but no journal: choose another"
            raise InvalidArgumentError(bad)

    @property
    def non_finite(self) -> int:
        """NaN and infinities that were written as something else."""
        return self._non_finite.count

    def recover(self) -> None:
        """Remove what the journal does not name, and check that what it names is there. Raises
        InvalidArgumentError."""
        there = self.remove_strays()
        for name, size in self._committed().items():
            if there.get(name) != size:
                raise InvalidArgumentError(
                    f"the committed part {name} of {self._folder} has {there.get(name, 0):,} "
                    f"bytes, but had {size:,}"
                )

    def remove_strays(self) -> dict[str, int]:
        """Remove parts that the journal does not name, of runs that can commit no more. Returns
        names and bytes of all that were there."""
        there = self._parts()
        for name in there.keys() - self._committed().keys():
            if self._journal.may_remove(name):
                self._fs.delete_file(f"{self._folder}/{name}")
        return there

    def _committed(self) -> dict[str, int]:
        """Names and bytes of all parts that the journal names."""
        parts = self._journal.record.parts
        return {name: size for part in parts for name, size in part.files.items()}

    def _parts(self) -> dict[str, int]:
        """Names and bytes of all parts of the job, finished or not; of a shard only its own."""
        return parts_in(self._fs, self._folder, self._mark)

    def bad_rows(self) -> Iterator[Interval]:
        """The bad rows in the error files of all parts. Raises InvalidArgumentError for one that is
        damaged."""
        files = {file.path: index for index, file in enumerate(self._dataset.files)}
        decoder = msgspec.json.Decoder(_Place)
        for part in self._journal.record.parts:
            for name in part.files:
                if not name.startswith(ERRORS):
                    continue
                with self._fs.open_input_stream(f"{self._folder}/{name}") as source:
                    lines = source.read().splitlines()
                for line in lines:
                    try:
                        bad = decoder.decode(line)
                        file = 0 if self._dataset.files_are_rows else files[bad.file]
                    except (msgspec.DecodeError, KeyError) as error:
                        raise InvalidArgumentError(f"{name} is damaged: {error}") from None
                    yield Interval(file, bad.row, bad.row + 1)

    def list_bad_files(self) -> None:
        """Write their list beside the bad rows, or remove one that was there."""
        files = self._dataset.files
        reasons = self._journal.record.bad_files
        name = name_of_bad_files(self._job.its_shard)
        path = f"{self._folder}/{name}"
        if reasons:
            self._write_file(name, lines_of_bad_files(files, reasons))
        elif self._fs.get_file_info(path).type == pafs.FileType.File:
            self._fs.delete_file(path)

    # ------------------------------------------------------------------ the columns

    def set_columns(self, of_result: pa.Schema | None) -> None:
        """The result's columns with their types; None if they are known only once there are rows.
        Call it before the first :meth:`write`. Raises InvalidArgumentError if one of them is a
        column of the input too, and for a column to keep or divide by that is not there."""
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
            self._set_table(fields, is_whole=of_result is not None)

    def _check_written_schema(self, is_whole: bool) -> None:
        """Whether the types that the job names are of columns that there are."""
        schema = self._dataset.schema
        for name in self._dataset.written_schema.names:
            if schema is None:
                bound = "unset: values of JSON lines are written as they came"
                raise InvalidArgumentError.of("schema", name, bound)
            if is_whole and name not in schema.names:
                bound = f"of {', '.join(schema.names)}"
                raise InvalidArgumentError.of("schema", name, bound)

    def _set_table(self, fields: list[pa.Field], is_whole: bool) -> None:
        """``fields``: of the result, if they are ``is_whole``."""
        self._known = pa.schema([*self._of_input, *fields], self._of_input.metadata)
        if self._format == "parquet":
            check_storable(self._known)
        journaled = self._journal.record.schema
        if journaled is not None:
            self._known = pa.ipc.read_schema(pa.py_buffer(journaled))
        elif is_whole:
            self._new_schema = self._known.serialize().to_pybytes()
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
        """With what the workers must know of the output. Call it once the input has its schema."""
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
        of the input, however long they take, so that the columns do not depend on the time."""
        if self._known is not None:
            return True
        row_count = sum(len(ended.results) for ended in part)
        nbytes = sum(ended.result_bytes for ended in part)
        return row_count >= _SAMPLE_ROWS or nbytes >= _SAMPLE_BYTES

    def _learn_columns(self, part: Sequence[Ended]) -> None:
        """Have the first results of ``map`` set the types of its columns."""
        if self._known is not None:
            return
        rows = _sample(part)
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
            if field.name not in self._of_input.names:
                kind = written.field(field.name).type if field.name in written.names else field.type
                fields.append(field.with_type(kind))
        there = {*self._of_input.names, *seen.schema().names}
        missing = [field for field in written if field.name not in there]
        known = pa.schema([*self._of_input, *fields, *missing], self._of_input.metadata)
        if self._format == "parquet":
            check_storable(known)
        self._check_partition_by(known)
        self._known = known
        self._new_schema = known.serialize().to_pybytes()

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

    def write(self, part: Sequence[Ended], figures: dict[str, float]) -> None:
        """Write a part and commit it. Rows that do not fit become bad ones."""
        number, mark = self._journal.next_part()
        part = sorted(part, key=lambda ended: (ended.chunk.first, ended.rows[0]))
        total = sum(len(ended.rows) for ended in part)
        self._learn_columns(part)
        bad = [
            self.bad_row(ended.chunk, index, ended.error, ended.answer)
            for ended in part
            if ended.error is not None
            for index in ended.rows
        ]
        writer = self._writer()
        for block in _blocks(part):
            for index, why in writer.add(block).items():
                self.last_bad = self.bad_row(block.chunk, block.rows[index], why)
                bad.append(self.last_bad)
                self.misfits += 1
        number_in_names = f"{self._mark}{number:05}{mark}"
        files = {name.format(number_in_names): data for name, data in writer.files().items()}
        if bad:
            files[f"{ERRORS}/part-{number_in_names}.jsonl"] = b"".join(map(_bad_line, bad))
        for name, data in files.items():
            self._write_file(name, data)
        committed = OutputPart(
            number=number,
            files={name: len(data) for name, data in files.items()},
            intervals=_intervals(part),
            written=total - len(bad),
            failed=len(bad),
            figures={**figures, "non_finite": float(self.non_finite)},
            schema=self._schema_for_journal(),
        )
        try:
            self._journal.append(committed)
        except UnavailableError:  # another run has taken over: it does these rows
            for name in files:
                with contextlib.suppress(OSError):
                    self._fs.delete_file(f"{self._folder}/{name}")
            raise
        # Each part is written in a new thread: give back what Arrow's pool keeps of its memory.
        pa.default_memory_pool().release_unused()

    def _writer(self) -> PartWriter:
        if not self.is_table:
            return LinesWriter(self._job.keep, self._non_finite)
        schema = pa.schema([]) if self._known is None else self._known
        file_type = ParquetPart if self._format == "parquet" else CsvPart
        return TableWriter(schema, file_type, self._job.partition_by)

    @property
    def new_schema(self) -> bytes | None:
        """The columns, as Arrow serializes them, once they are known."""
        return self._new_schema

    def _schema_for_journal(self) -> bytes | None:
        """None if there is none, or if the journal has it. Until it has, each part brings it: the
        part that set it may have been lost."""
        return None if self._journal.record.schema is not None else self._new_schema

    def _write_file(self, name: str, data: bytes | pa.Buffer) -> None:
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


def _sample(part: Sequence[Ended]) -> list[RowValues]:
    """The first results of a part, as values."""
    return sample_of(result for ended in part for result in ended.results)


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


def parts_in(fs: pafs.FileSystem, folder: str, mark: str = "") -> dict[str, int]:
    """Names and bytes of the parts in an output, finished or not: those that have ``mark`` before
    their number."""
    there = {}
    for info in fs.get_file_info(pafs.FileSelector(folder, recursive=True)):
        name = posixpath.basename(info.path)
        if info.type == pafs.FileType.File and name.removeprefix(".").startswith(f"part-{mark}"):
            there[posixpath.relpath(info.path, folder)] = info.size
    return there


def name_of_bad_files(shard: Shard | None) -> str:
    """Of the list of files that could not be read to their end, in an output."""
    mark = "" if shard is None else f"-{shard.name}"
    return f"{ERRORS}/files{mark}.jsonl"


def lines_of_bad_files(files: Sequence[InputFile], reasons: Mapping[int, str]) -> bytes:
    """``reasons``: by the file's index."""
    rows = [{"file": files[index].path, "error": why} for index, why in reasons.items()]
    return b"".join(encoded(row) + b"\n" for row in rows)


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
