"""A job's input: files in a fixed order, their common schema, and their rows as a stream of chunks.

A row is known by (index of its file, index in that file), whichever process reads it and however
often. Rows that are committed do not come again. A file that is committed as a whole is not opened,
and a row group of Parquet is not read; in other files committed rows are read and left out. A
storage that fails is tried again, and then ends the job.

:class:`Dataset` is used by the reader's thread of ``pipeline``, and by the tasks of ``ray_reader``.
``pyarrow.dataset`` reads the columns that the folders' names state. It does not read the rows: its
scanner neither tells which row of which file a row is, nor leaves out row groups that the journal
has, nor does it try a storage again.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.addresses import text_without_keys
from jitney_jobs.arrow import pa, pafs
from jitney_jobs.columns import in_schema, taken, without_columns
from jitney_jobs.delimiters import check_delimiter
from jitney_jobs.encodings import Encoding
from jitney_jobs.file_batches import (
    BEGINNING,
    READ_ERRORS,
    Batch,
    RowCount,
    TextForm,
    arrow_batches,
    arrow_schema,
    count_rows,
    csv_batches,
    csv_header,
    has_larger,
    line_batches,
    parquet_batches,
    parquet_schema,
    path_batches,
)
from jitney_jobs.input_changes import (
    InputChange,
    input_changes,
    up_to_listed_end,
    with_digests,
)
from jitney_jobs.input_files import (
    FolderColumns,
    Found,
    common_format,
    find_files,
    folder_of_glob,
    format_of,
    kinds_of,
    kinds_text,
)
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, InputFile, Ranges, Record
from jitney_jobs.journal_entries import ReadStart
from jitney_jobs.json_lines import decoded
from jitney_jobs.outcome import Trouble
from jitney_jobs.rows import LINE, LINES, Chunk, RowId, Unreadable
from jitney_jobs.schemas import SeenTypes, most_exact, plain, unified, written_schema
from jitney_jobs.storage import file_system, open_inputs, read_error

_FOOTERS_AT_ONCE = 16
_LOOK_AHEAD_BYTES = 16 << 20
"""Of lines of JSON on object storage, so much of each file is looked at. Files on this machine are
looked at as a whole."""
_LOOK_AHEAD_ROWS = 1024
"""So many lines are looked at together."""


class Dataset:
    """The input of one job."""

    def __init__(self, job: Job, listed: list[InputFile] | None = None) -> None:
        """Find the files of a file, a folder or a glob, but for those in the output. ``listed``:
        those that a journal has, which are read whatever else is there now. Raises
        InvalidArgumentError, and UnavailableError if the storage fails."""
        self._fs, self._paths = open_inputs(job)
        self.job = job
        self._retry_policy = job.make_retry_policy()
        self._skips_bad_files = job.skip_bad_files
        self._form = TextForm(
            encoding=Encoding(job.encoding, job.decode_errors),
            delimiter=None if job.delimiter is None else check_delimiter(job.delimiter),
        )
        self.format = job.input_format
        self._bases: list[str] = []
        self.passed_over: dict[str, int] = {}
        """Kinds of files below the input that are not read, with counts."""
        self.found = self._find(listed)
        """The files that are there now."""
        self.files = listed or with_digests(self._fs, self.found)
        """The files that are read."""
        self.files_are_rows = self.format in ("text", "image")
        """Whether each file is a row. If so, all of them count as one file, whose index is 0, and
        the index of a row in it is an index of ``files``."""
        self._folders = FolderColumns(self._bases, [] if self.files_are_rows else self.files)
        self.written_schema = written_schema(job.schema or "{}")
        """The types that the job names."""
        self._columns: Sequence[str] | None = None
        self.schema: pa.Schema | None = None
        """The columns of all files. None until :meth:`set_schema`, and for lines of JSON whose
        values are written as they came."""

    # ------------------------------------------------------------------ the files

    def _find(self, listed: list[InputFile] | None) -> list[InputFile]:
        """The files of the input, sorted. Sets the format, by the files that are read, and notes
        what is passed over."""
        _, output = file_system(self.job.output)
        bases: list[str] = []
        passed_over: Counter[str] = Counter()
        by_path: dict[str, pafs.FileInfo] = {}
        missing: InvalidArgumentError | None = None
        for path in self._paths:
            try:
                search = find_files(self._fs, path)
            except OSError as error:
                raise read_error(path, error) from error
            except InvalidArgumentError as error:
                if listed is None:
                    raise
                missing = missing or error
                search = Found(folder_of_glob(path), [])
            bases.append(search.base)
            by_path |= {info.path: info for info in search.files}
            passed_over.update(search.passed_over)
        if missing is not None and not by_path:
            raise missing
        self._bases = bases
        found = [info for info in by_path.values() if not info.path.startswith(f"{output}/")]
        if self.format == "auto":
            self.format = common_format(self.job.input, listed or found)
        unknown: list[pafs.FileInfo] = []
        if self.job.input_format == "auto":
            unknown = [info for info in found if format_of(info.path) != self.format]
            found = [info for info in found if format_of(info.path) == self.format]
        if not found and not listed:
            raise InvalidArgumentError(f"input {self.job.input} has no files")
        self.passed_over = {**kinds_of(unknown), **passed_over}
        files = [InputFile(info.path, info.size, info.mtime_ns or 0) for info in found]
        return sorted(files, key=lambda file: file.path)

    @property
    def summary(self) -> str:
        """What was found, for the user: kinds of files with counts, bytes, and what is passed
        over."""
        size = sum(file.size for file in self.files)
        text = f"{kinds_text(kinds_of(self.files))} as {self.format}, {size:,} bytes"
        if self.passed_over:
            text += f"; passed over: {kinds_text(self.passed_over)}"
        return text

    def changes(self) -> list[InputChange]:
        """How the input differs from the files that are read. Raises InvalidArgumentError if
        nothing of it is there, and UnavailableError if the storage fails."""
        are_lines = self.format in ("jsonl", "csv", "openai")
        try:
            return input_changes(self._fs, self.files, self.found, are_lines)
        except OSError as error:
            raise read_error(self.job.input, error) from error

    def changes_meanwhile(self) -> list[InputChange]:
        """As :meth:`changes`, after another look at the input."""
        self.found = self._find(self.files)
        return self.changes()

    # ------------------------------------------------------------------ the schema

    def look_ahead(self, is_typed: bool) -> pa.Schema | None:
        """The columns that all files have in common, with types that hold the values of all.

        Parquet and Arrow files state their types. Columns of CSV are texts. Lines of JSON are read:
        all of them, but on object storage only the first 16 MB of each file; they are not if the
        output is no table (``is_typed``), since it has their values as they came. A file that
        cannot be read is left out here, and named when its rows are read. Types that the job
        names replace those found. Raises UnavailableError if the storage fails.
        """
        if self.files_are_rows:
            texts = ("path", "text") if self.format == "text" else ("path",)
            found = pa.schema([(name, pa.string()) for name in texts])
        elif self.format not in LINES:
            found = self._schema_of_files()
        elif is_typed:
            found = self._schema_of_lines()
        else:
            return None
        fields = {field.name: field for field in found}
        for field in self._folders.schema:
            fields[field.name] = field
        for field in self.written_schema:
            if field.name in fields:
                fields[field.name] = fields[field.name].with_type(field.type)
            elif self.format in LINES and self._looks_at_heads:
                fields[field.name] = field
        return pa.schema(list(fields.values()), found.metadata)

    def set_schema(self, schema: pa.Schema | None, columns: Sequence[str] | None = None) -> None:
        """Read rows with these types from now on: of these columns, or of all."""
        self.schema = schema
        self._columns = columns

    @property
    def _looks_at_heads(self) -> bool:
        """Whether only the head of each file of lines is looked at."""
        return not isinstance(self._fs, pafs.LocalFileSystem)

    def _schema_of_files(self) -> pa.Schema:
        schemas: dict[str, pa.Schema] = {}
        first_error: JitneyError | None = None
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            found_of_files = pool.map(self._schema_of_file, self.files)
            for file, schema in zip(self.files, found_of_files, strict=True):
                if isinstance(schema, JitneyError):
                    first_error = first_error or schema
                else:
                    schemas[file.path] = schema
        if not schemas and first_error is not None:
            raise first_error
        found = unified(schemas.values())
        if self.format == "parquet":
            found = self._with_exact_integers(found, schemas)
        return pa.schema([field.with_type(plain(field.type)) for field in found], found.metadata)

    def _with_exact_integers(self, found: pa.Schema, schemas: dict[str, pa.Schema]) -> pa.Schema:
        """With text for integers that the type of all files would not hold: an id of 19 digits,
        where another file has doubles. ``schemas``: path -> the file's own columns."""
        fields = []
        for field in found:
            for path, schema in schemas.items():
                index = schema.get_field_index(field.name)
                most = None if index < 0 else most_exact(schema.field(index).type, field.type)
                if most is not None and self._has_larger(path, field.name, most):
                    field = field.with_type(pa.string())
            fields.append(field)
        return pa.schema(fields, found.metadata)

    def _has_larger(self, path: str, name: str, most: int) -> bool:
        """Raises UnavailableError if the storage fails."""
        try:
            with self._fs.open_input_file(path) as raw:
                return has_larger(raw, name, most)
        except READ_ERRORS as error:
            raise read_error(path, error) from error

    def _schema_of_file(self, file: InputFile) -> pa.Schema | JitneyError:
        """An error if the file is at fault. Raises UnavailableError if the storage is."""
        trouble = Trouble()
        while True:
            try:
                with self._fs.open_input_file(file.path) as raw:
                    if self.format == "parquet":
                        return parquet_schema(raw)
                    if self.format == "arrow":
                        return arrow_schema(raw)
                    return csv_header(raw, file.path, self._form)
            except InvalidArgumentError as error:
                return error
            except READ_ERRORS as error:
                try:
                    trouble.wait(self._retry_policy, read_error(file.path, error))
                except InvalidArgumentError as fault:
                    return fault

    def _schema_of_lines(self) -> pa.Schema:
        seen = SeenTypes()
        for index in range(len(self.files)):
            # A file that cannot be read is named when its rows are.
            with contextlib.suppress(InvalidArgumentError):
                self._look_at_lines(index, seen)
        return seen.schema()

    def _look_at_lines(self, index: int, seen: SeenTypes) -> None:
        """Of one file. Raises InvalidArgumentError if it is damaged."""
        nbytes = 0
        for batch in self._batches_with_retries(index, Ranges(), _LOOK_AHEAD_ROWS):
            assert batch.data is not None, "no row is committed"
            seen.add(_decodable(batch.data.column(LINE).to_pylist()))
            nbytes += batch.nbytes
            if self._looks_at_heads and nbytes >= _LOOK_AHEAD_BYTES:
                return

    # ------------------------------------------------------------------ the rows

    def path_of(self, row: RowId) -> str:
        """The file that a row is in, or is."""
        index = row.row if self.files_are_rows else row.file
        return self.files[index].path

    @property
    def sizes(self) -> list[int]:
        """What each file counts for in shares of the input: its bytes. If the files are rows, they
        count as one file, so there is one number."""
        if self.files_are_rows:
            return [1]
        return [file.size for file in self.files]

    def chunks(
        self,
        record: Record,
        size: int,
        files: Iterable[int] | None = None,
        skips_bad_files: bool | None = None,
    ) -> Iterator[Chunk | FileRows]:
        """All rows that are not committed, in order: those of the files with these indices, or of
        all files. A chunk has at most ``size`` rows. Behind the chunks of a file comes the number
        of its rows, unless the journal knows it. A file that is damaged ends early: then the
        number of its rows comes with the reason.

        Raises InvalidArgumentError for such a file if the job does not skip them
        (``skips_bad_files`` replaces what the job says), and UnavailableError if the storage fails
        for longer than the job's patience.
        """
        if skips_bad_files is None:
            skips_bad_files = self._skips_bad_files
        sizes = self.sizes
        total = max(1, sum(sizes))
        bytes_before = 0  # of the files before this one
        left_out = record.left_out
        shard_rows = record.shard_rows
        if files is not None:
            indices = files
        else:
            indices = range(len(sizes)) if shard_rows is None else shard_rows.files
        for index in indices:
            if not record.is_done(index):
                row_count = 0
                why_bad = None
                start = None if shard_rows is None else shard_rows.start_in(index)
                end = None if shard_rows is None else shard_rows.end_in(index)
                batches = self._batches_with_retries(index, left_out, size, start or BEGINNING)
                try:
                    for batch in batches:
                        position = (bytes_before + batch.share * sizes[index]) / total
                        if shard_rows is not None:
                            position = shard_rows.share_before(index, batch.end)
                        chunk = self._chunk_of(index, batch, left_out, position)
                        if chunk is not None:
                            yield chunk
                        row_count = batch.end
                        if end is not None and row_count >= end:
                            break
                    if end is not None:
                        self._check_has(index, row_count, end)
                        row_count = end
                except InvalidArgumentError as error:
                    if not skips_bad_files:
                        raise
                    why_bad = text_without_keys(str(error))
                    # It had more when these were committed.
                    last = record.done.last_of(index)
                    row_count = max(row_count, 0 if last is None else last.end)
                is_known = index in record.row_counts and index not in record.bad_files
                if not is_known or why_bad is not None:
                    yield FileRows(index, row_count, why_bad)
            bytes_before += sizes[index]

    def _check_has(self, index: int, row_count: int, end: int) -> None:
        """Raises InvalidArgumentError if a file has fewer rows than those of a shard."""
        if row_count < end:
            raise InvalidArgumentError(
                f"input {self.files[index].path} ends behind {row_count:,} rows: it had "
                f"{end:,} or more when the job was divided into shards"
            )

    def count_rows(self, index: int) -> tuple[RowCount, bool]:
        """The rows of a file, and whether it cannot be read any further. Raises
        InvalidArgumentError for such a file if the job does not skip them, and UnavailableError if
        the storage fails."""
        if self.files_are_rows:
            return RowCount(len(self.files)), False
        file = self.files[index]
        trouble = Trouble()
        while True:
            counted = RowCount()
            try:
                with self._fs.open_input_file(file.path) as raw:
                    if self.format != "parquet" and self.format != "arrow":
                        raw = up_to_listed_end(raw, file, self._form.encoding)
                    count_rows(raw, file, self.format, self._form, counted)
                return counted, False
            except InvalidArgumentError:
                if not self._skips_bad_files:
                    raise
                return counted, True
            except READ_ERRORS as error:
                try:
                    trouble.wait(self._retry_policy, read_error(file.path, error))
                except InvalidArgumentError:
                    if not self._skips_bad_files:
                        raise
                    return counted, True

    def _chunk_of(self, index: int, batch: Batch, done: Ranges, position: float) -> Chunk | None:
        """The rows of a batch that are not committed. None if there are none."""
        if batch.data is None or done.covers(index, batch.first, batch.end):
            return None
        count = batch.end - batch.first
        left = [
            i for i in range(count) if not done.covers(index, batch.first + i, batch.first + i + 1)
        ]
        data = batch.data
        unreadable = dict(batch.unreadable)
        is_table = self.format not in LINES and not self.files_are_rows
        if is_table:
            of_folders = self._folders.values_of(self.files[index].path)
            data = self._in_schema(data, of_folders, unreadable)
        if len(left) < count:
            data = taken(data, left)
        places = {i: number for number, i in enumerate(left)}
        return Chunk(
            file=index,
            indices=[batch.first + i for i in left],
            format=self.format,
            data=data,
            further=self.further_columns_of(index),
            offsets=[batch.offsets[i] for i in left] if batch.offsets else (),
            unreadable={places[i]: row for i, row in unreadable.items() if i in places},
            read_bytes=(max(batch.nbytes, data.nbytes) * len(left)) // count,
            position=position,
            replaced={places[i]: count for i, count in batch.replaced.items() if i in places},
        )

    def further_columns_of(self, file: int) -> dict[str, Any]:
        """As in :class:`~jitney_jobs.rows.Chunk`."""
        if self.format in LINES:
            return self._folders.values_of(self.files[file].path)
        return {}

    def _in_schema(
        self, data: pa.RecordBatch, further: dict[str, Any], unreadable: dict[int, Unreadable]
    ) -> pa.RecordBatch:
        """With the columns and types of the schema, and those of the folders. Rows whose values
        cannot have these types are noted."""
        schema = self.schema
        if schema is None:  # the job has none: the file's own
            schema = unified([data.schema, self._folders.schema])
        if self._columns is not None:
            chosen = [field for field in schema if field.name in self._columns]
            schema = pa.schema(chosen, schema.metadata)
        if not schema.names:
            return without_columns(data.num_rows)
        for name, value in further.items():
            kind = self._folders.schema.field(name).type
            array = pa.repeat(pa.scalar(value, kind), data.num_rows)
            if name in data.schema.names:
                data = data.drop_columns([name])
            data = data.append_column(name, array)
        found = in_schema(data, schema)
        for index, error in found.errors.items():
            unreadable.setdefault(index, Unreadable(error, b""))
        return found.data

    def _batches_with_retries(
        self, index: int, done: Ranges, size: int, start: ReadStart = BEGINNING
    ) -> Iterator[Batch]:
        """Each batch of a file once. After a failure of the storage the file is read again from
        ``start``; the batches are the same then, and those that were given are left out."""
        rows_given = 0
        trouble = Trouble()
        while True:
            try:
                for batch in self._batches(index, done, size, start):
                    if batch.end > rows_given:
                        rows_given = batch.end
                        trouble = Trouble()  # what failed before works again
                        yield batch
                return
            except READ_ERRORS as error:
                trouble.wait(self._retry_policy, read_error(self.files[index].path, error))

    def _batches(self, index: int, done: Ranges, size: int, start: ReadStart) -> Iterator[Batch]:
        """A file's rows in order, from ``start`` on where the format allows that; at most ``size``
        in a batch."""
        if self.files_are_rows:
            yield from path_batches(self.files, size)
            return
        file = self.files[index]
        with self._fs.open_input_file(file.path) as raw:
            if self.format == "parquet":
                yield from parquet_batches(raw, file, index, done, size, self._columns)
            elif self.format == "arrow":
                yield from arrow_batches(raw, file, size, self._columns, start)
            elif self.format == "csv":
                listed = up_to_listed_end(raw, file, self._form.encoding)
                yield from csv_batches(listed, file, size, self._form, start)
            else:
                listed = up_to_listed_end(raw, file, self._form.encoding)
                yield from line_batches(listed, file, size, self._form, start)


def _decodable(lines: list[bytes]) -> list[dict[str, Any]]:
    """The lines that are objects of JSON. The others will be bad rows."""
    rows = []
    for line in lines:
        try:
            rows.append(decoded(line))
        except Exception:  # a line may be anything
            continue
    return rows
