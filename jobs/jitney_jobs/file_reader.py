"""Reads one file of a job's input at a time, of whichever format, and tries again when the storage
fails. ``table_batches`` and ``text_batches`` read the formats."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import BinaryIO, TypeVar

from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.arrow import pa, pafs
from jitney_jobs.delimiters import check_delimiter
from jitney_jobs.encodings import Encoding
from jitney_jobs.file_batches import BEGINNING, READ_ERRORS, Batch, RowCount
from jitney_jobs.file_signs import SIGN_BYTES, kind_error
from jitney_jobs.input_changes import up_to_listed_end
from jitney_jobs.job import InputFormat, Job
from jitney_jobs.journal import InputFile, Ranges
from jitney_jobs.journal_entries import ReadStart
from jitney_jobs.outcome import Trouble
from jitney_jobs.storage import read_error
from jitney_jobs.table_batches import (
    arrow_batches,
    arrow_schema,
    count_arrow_rows,
    count_parquet_rows,
    holds_all,
    parquet_batches,
    parquet_schema,
)
from jitney_jobs.text_batches import (
    TextForm,
    count_lines,
    count_records,
    csv_batches,
    csv_header,
    line_batches,
)

T = TypeVar("T")
_TABLES = {"parquet": "Parquet", "arrow": "Arrow"}
"""Formats that state their columns, as ``file_signs`` calls them."""


class FileReader:
    """Of files of one format. Everything raises InvalidArgumentError if the file is at fault, and
    UnavailableError if the storage fails for longer than the job's patience."""

    def __init__(self, job: Job, fs: pafs.FileSystem, format: InputFormat) -> None:
        self._fs = fs
        self._format = format
        self._retry_policy = job.make_retry_policy()
        self._form = TextForm(
            encoding=Encoding(job.encoding, job.decode_errors),
            delimiter=None if job.delimiter is None else check_delimiter(job.delimiter),
        )

    def _retried(self, path: str, read: Callable[[BinaryIO], T]) -> T:
        """What ``read`` returns for the open file. It is called again if the storage fails."""
        trouble = Trouble()
        while True:
            try:
                with self._fs.open_input_file(path) as raw:
                    return read(raw)
            except READ_ERRORS as error:
                trouble.wait(self._retry_policy, self._error_of(path, error))

    def _error_of(self, path: str, error: Exception) -> JitneyError:
        """What an error in reading means. A table's file may be of another kind, which its first
        bytes tell. (For lines and CSV, ``text_batches`` looks at them before it reads.)"""
        found = read_error(path, error)
        if isinstance(found, InvalidArgumentError) and self._format in _TABLES:
            with contextlib.suppress(OSError), self._fs.open_input_file(path) as raw:
                return kind_error(raw.read(SIGN_BYTES), path, _TABLES[self._format]) or found
        return found

    def schema(self, file: InputFile) -> pa.Schema:
        """The columns that the file states."""
        if self._format == "parquet":
            return self._retried(file.path, parquet_schema)
        if self._format == "arrow":
            return self._retried(file.path, arrow_schema)
        return self._retried(file.path, partial(csv_header, path=file.path, form=self._form))

    def holds_all(self, file: InputFile, name: str, kind: pa.DataType) -> bool:
        """Whether a type holds each value of a column, without loss. Only of Parquet and Arrow
        files."""
        of_column = partial(holds_all, format=self._format, name=name, kind=kind)
        return self._retried(file.path, of_column)

    def count_rows(self, file: InputFile, counted: RowCount) -> None:
        """Count the rows that :meth:`batches` gives, into ``counted``, which has what was read if
        this raises."""
        self._retried(file.path, partial(self._count_rows, file=file, counted=counted))

    def _count_rows(self, raw: BinaryIO, file: InputFile, counted: RowCount) -> None:
        counted.begin_anew()
        if self._format == "parquet":
            count_parquet_rows(raw, counted)
        elif self._format == "arrow":
            count_arrow_rows(raw, counted)
        elif self._format == "csv":
            count_records(self._as_listed(raw, file), file, self._form, counted)
        else:
            count_lines(self._as_listed(raw, file), file, self._form, counted)

    def batches(
        self,
        file: InputFile,
        index: int,
        done: Ranges,
        size: int,
        columns: Sequence[str] | None = None,
        start: ReadStart = BEGINNING,
    ) -> Iterator[Batch]:
        """The file's rows in order, at most ``size`` in a batch. They begin at ``start`` where the
        format allows that. ``done`` has the rows that need not be read, by the file's ``index``.
        Only these ``columns`` are read, where the format has columns.

        After a failure of the storage the file is read again from ``start``. The batches are the
        same then, and those that were given before are left out."""
        rows_given = 0
        trouble = Trouble()
        while True:
            try:
                for batch in self._batches(file, index, done, size, columns, start):
                    if batch.end > rows_given:
                        rows_given = batch.end
                        trouble = Trouble()  # what failed before works again
                        yield batch
                return
            except READ_ERRORS as error:
                trouble.wait(self._retry_policy, self._error_of(file.path, error))

    def _batches(
        self,
        file: InputFile,
        index: int,
        done: Ranges,
        size: int,
        columns: Sequence[str] | None,
        start: ReadStart,
    ) -> Iterator[Batch]:
        with self._fs.open_input_file(file.path) as raw:
            if self._format == "parquet":
                yield from parquet_batches(raw, file, index, done, size, columns)
            elif self._format == "arrow":
                yield from arrow_batches(raw, file, size, columns, start)
            elif self._format == "csv":
                yield from csv_batches(self._as_listed(raw, file), file, size, self._form, start)
            else:
                yield from line_batches(self._as_listed(raw, file), file, size, self._form, start)

    def _as_listed(self, raw: BinaryIO, file: InputFile) -> BinaryIO:
        """A file of lines or CSV as it was when it was listed: without what was appended since."""
        listed: BinaryIO = up_to_listed_end(raw, file, self._form.encoding)
        return listed


def bad_file_or(read: Callable[[], T]) -> T | InvalidArgumentError:
    """What ``read`` gives, or why the file cannot be read. Raises UnavailableError."""
    try:
        return read()
    except InvalidArgumentError as error:
        return error
