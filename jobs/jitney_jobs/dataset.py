"""A job's input: files in a fixed order, their common schema, and their rows as a stream of chunks.

A row is known by (index of its file, index in that file), whichever process reads it and however
often. Rows that are committed do not come again. A file that is committed as a whole is not opened,
and a row group of Parquet is not read; in other files committed rows are read and left out. A
storage that fails is tried again, and then ends the job.

:class:`Dataset` is used by the reader's thread of ``pipeline``, and by the tasks of ``ray_reader``.
The files are ``input_listing``'s, their schema ``look_ahead``'s, and ``file_reader`` reads each.
``pyarrow.dataset`` reads the columns that the folders' names state. It does not read the rows: its
scanner neither tells which row of which file a row is, nor leaves out row groups that the journal
has, nor does it try a storage again.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError

from jitney_jobs.addresses import text_without_keys
from jitney_jobs.arrow import pa, pafs
from jitney_jobs.columns import in_schema, shown_row, taken, without_columns
from jitney_jobs.file_batches import BEGINNING, Batch, RowCount, path_batches
from jitney_jobs.file_reader import FileReader
from jitney_jobs.input_changes import InputChange
from jitney_jobs.input_files import FolderColumns
from jitney_jobs.input_listing import InputListing
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, InputFile, Ranges, Record
from jitney_jobs.look_ahead import schema_of_files, schema_of_lines
from jitney_jobs.rows import LINES, Chunk, RowId, Unreadable
from jitney_jobs.schemas import unified
from jitney_jobs.storage import open_inputs
from jitney_jobs.written_types import written_schema


class Dataset:
    """The input of one job."""

    def __init__(self, job: Job, listed: list[InputFile] | None = None) -> None:
        """Find the files of a file, a folder or a glob, but for those in the output. ``listed``:
        those that a journal has, which are read whatever else is there now. Raises
        InvalidArgumentError, and UnavailableError if the storage fails."""
        fs, paths = open_inputs(job)
        self.job = job
        self._is_local = isinstance(fs, pafs.LocalFileSystem)
        self._listing = InputListing(job, fs, paths, listed)
        self.format = self._listing.format
        self._reader = FileReader(job, fs, self.format)
        self.files_are_rows = self.format in ("text", "image")
        """Whether each file is a row. If so, all of them count as one file, whose index is 0, and
        the index of a row in it is an index of ``files``."""
        with_folders = [] if self.files_are_rows else self.files
        self._folders = FolderColumns(self._listing.bases, with_folders)
        self.written_schema = written_schema(job.schema or "{}")
        """The types that the job names."""
        self._columns: Sequence[str] | None = None
        self.schema: pa.Schema | None = None
        """The columns of all files. None until :meth:`set_schema`, and for lines of JSON whose
        values are written as they came."""

    # ------------------------------------------------------------------ the files

    @property
    def files(self) -> list[InputFile]:
        """The files that are read, in their order."""
        return self._listing.files

    @property
    def passed_over(self) -> dict[str, int]:
        """Kinds of files below the input that are not read, with counts."""
        return self._listing.passed_over

    @property
    def summary(self) -> str:
        """What was found, for the user."""
        return self._listing.summary

    def changes(self) -> list[InputChange]:
        """How the input differs from the files that are read. Raises InvalidArgumentError if
        nothing of it is there, and UnavailableError if the storage fails."""
        return self._listing.changes()

    def changes_meanwhile(self) -> list[InputChange]:
        """As :meth:`changes`, after another look at the input."""
        return self._listing.changes_meanwhile()

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

    # ------------------------------------------------------------------ the schema

    def look_ahead(self, is_typed: bool) -> pa.Schema | None:
        """The columns of all files together, with types that hold the values of all.

        - Parquet and Arrow files state their types.
        - Columns of CSV are texts.
        - Lines of JSON are read: all of them, or on object storage the first 16 MB of each file.
          Unless ``is_typed``, which says that the output is a table, they are not, and there is no
          schema: the output has the lines' values as they came.

        Types that the job names replace those found. A file that cannot be read is left out here,
        and named when its rows are read. Raises UnavailableError if the storage fails.
        """
        if self.files_are_rows:
            texts = ("path", "text") if self.format == "text" else ("path",)
            found = pa.schema([(name, pa.string()) for name in texts])
        elif self.format not in LINES:
            found = schema_of_files(self._reader, self.files)
        elif is_typed:
            found = schema_of_lines(self._reader, self.files, self._is_local)
        else:
            return None
        fields = {field.name: field for field in found}
        for field in self._folders.schema:
            fields[field.name] = field
        for field in self.written_schema:
            if field.name in fields:
                fields[field.name] = fields[field.name].with_type(field.type)
            elif self.format in LINES and not self._is_local:
                fields[field.name] = field  # only the files' heads were looked at
        return pa.schema(list(fields.values()), found.metadata)

    def set_schema(self, schema: pa.Schema | None, columns: Sequence[str] | None = None) -> None:
        """Read rows with these types from now on: of these columns, or of all."""
        self.schema = schema
        self._columns = columns

    # ------------------------------------------------------------------ the rows

    def chunks(
        self,
        record: Record,
        size: int,
        files: Iterable[int] | None = None,
        skips_bad_files: bool | None = None,
    ) -> Iterator[Chunk | FileRows]:
        """All rows that are not committed, in order: those of the files with these indices, or of
        all files. A chunk has at most ``size`` rows. After the chunks of a file comes the number
        of its rows, unless the journal knows it. A file that is damaged ends early: the number is
        that of the rows until there, and says why.

        Raises InvalidArgumentError for such a file if the job does not skip them
        (``skips_bad_files`` replaces what the job says), and UnavailableError if the storage fails
        for longer than the job's patience.
        """
        if skips_bad_files is None:
            skips_bad_files = self.job.skip_bad_files
        shares = _shares_of(self.sizes)
        left_out = record.left_out
        if files is None:
            files = range(len(shares)) if record.shard_rows is None else record.shard_rows.files
        for index in files:
            if record.is_done(index):
                continue
            row_count = 0
            why_bad = None
            try:
                for batch in self._batches_of_file(index, record, left_out, size):
                    position = shares[index].until(batch.share)
                    if record.shard_rows is not None:
                        position = record.shard_rows.share_before(index, batch.end)
                    chunk = self._chunk_of(index, batch, left_out, position)
                    if chunk is not None:
                        yield chunk
                    row_count = batch.end
            except InvalidArgumentError as error:
                if not skips_bad_files:
                    raise
                why_bad = text_without_keys(str(error))
            count = self._count_of_file(index, record, row_count, why_bad)
            if count is not None:
                yield count

    def _batches_of_file(
        self, index: int, record: Record, left_out: Ranges, size: int
    ) -> Iterator[Batch]:
        """The batches of a file: of a shard's job only those with its rows. Raises
        InvalidArgumentError for a file that is damaged, or lacks rows of the shard."""
        if self.files_are_rows:
            yield from path_batches(self.files, size)
            return
        file = self.files[index]
        start = BEGINNING
        end = None
        if record.shard_rows is not None:
            start = record.shard_rows.start_in(index) or BEGINNING
            end = record.shard_rows.end_in(index)
        row_count = 0
        for batch in self._reader.batches(file, index, left_out, size, self._columns, start):
            yield batch
            row_count = batch.end
            if end is not None and row_count >= end:
                return
        if end is not None and row_count < end:
            raise InvalidArgumentError(
                f"input {file.path} ends behind {row_count:,} rows: it had {end:,} or more when "
                "the job was divided into shards"
            )

    def _count_of_file(
        self, index: int, record: Record, row_count: int, why_bad: str | None
    ) -> FileRows | None:
        """What the journal is to note of a file whose end has been reached, or that cannot be read
        any further (``why_bad``). None if it knows that. ``row_count``: rows that were read."""
        if record.shard_rows is not None and why_bad is None:
            end = record.shard_rows.end_in(index)
            row_count = row_count if end is None else end
        if why_bad is not None:
            # Committed rows count, though the file may be damaged before them by now.
            last = record.done.last_of(index)
            row_count = max(row_count, 0 if last is None else last.end)
        elif index in record.row_counts and index not in record.bad_files:
            return None
        return FileRows(index, row_count, why_bad)

    def count_rows(self, index: int) -> tuple[RowCount, bool]:
        """The rows of a file, and whether it cannot be read any further. Raises
        InvalidArgumentError for such a file if the job does not skip them, and UnavailableError if
        the storage fails."""
        if self.files_are_rows:
            return RowCount(len(self.files)), False
        counted = RowCount()
        try:
            self._reader.count_rows(self.files[index], counted)
        except InvalidArgumentError:
            if not self.job.skip_bad_files:
                raise
            return counted, True
        return counted, False

    def _chunk_of(self, index: int, batch: Batch, done: Ranges, position: float) -> Chunk | None:
        """The rows of a batch that are not committed. None if there are none."""
        if batch.data is None or done.covers(index, batch.first, batch.end):
            return None
        count = batch.end - batch.first
        left = []  # indices in the batch of the rows that are not committed
        for i in range(count):
            row = batch.first + i
            if not done.covers(index, row, row + 1):
                left.append(i)
        data = batch.data
        unreadable = dict(batch.unreadable)
        is_table = self.format not in LINES and not self.files_are_rows
        if is_table:
            of_folders = self._folders.values_of(self.files[index].path)
            data = self._in_schema(data, of_folders, unreadable)
        if len(left) < count:
            data = taken(data, left)
        # Index in the batch -> index in the chunk.
        in_chunk = {i: number for number, i in enumerate(left)}
        return Chunk(
            file=index,
            indices=[batch.first + i for i in left],
            format=self.format,
            data=data,
            further=self.further_columns_of(index),
            offsets=[batch.offsets[i] for i in left] if batch.offsets else (),
            unreadable={in_chunk[i]: row for i, row in unreadable.items() if i in in_chunk},
            read_bytes=(max(batch.nbytes, data.nbytes) * len(left)) // count,
            position=position,
            replaced={in_chunk[i]: n for i, n in batch.replaced.items() if i in in_chunk},
        )

    def further_columns_of(self, file: int) -> dict[str, Any]:
        """As in :class:`~jitney_jobs.rows.Chunk`."""
        if self.format in LINES:
            return self._folders.values_of(self.files[file].path)
        return {}

    def _in_schema(
        self, data: pa.RecordBatch, further: dict[str, Any], unreadable: dict[int, Unreadable]
    ) -> pa.RecordBatch:
        """The rows with the columns and types of the schema. ``further``: the columns that the
        folders' names state. Rows whose values cannot have these types are added to
        ``unreadable``."""
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
            unreadable.setdefault(index, Unreadable(error, b"", shown_row(data, index)))
        return found.data


class _Share(NamedTuple):
    """How much of the input's bytes a file is, and the files before it: shares of the whole."""

    before: float
    """Of the files before it."""
    of_file: float

    def until(self, share: float) -> float:
        """The share of the input that has been read once ``share`` of this file has."""
        return self.before + share * self.of_file


def _shares_of(sizes: Sequence[int]) -> list[_Share]:
    """Of each file."""
    total = max(1, sum(sizes))
    before = accumulate(sizes, initial=0)
    return [_Share(first / total, size / total) for first, size in zip(before, sizes, strict=False)]
