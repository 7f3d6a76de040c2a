"""A job's input: files in a fixed order, read as a stream of chunks of rows.

A row is known by (index of its file, index in that file), whichever process reads it and however
often. Rows that are committed do not come again. A file that is committed as a whole is not opened,
and a row group of Parquet is not read; in other files committed rows are read and left out. A
storage that fails is tried again, and then ends the job.

:class:`Dataset` is used by the reader's thread of ``pipeline``, and by tasks of ``ray_data``.
"""

from collections.abc import Iterable, Iterator

from jitney.errors import InvalidArgumentError, JitneyError

from jitney_jobs.arrow import pa, pafs, pq
from jitney_jobs.file_batches import (
    READ_ERRORS,
    Batch,
    arrow_batches,
    line_batches,
    parquet_batches,
    path_batches,
    take_rows,
)
from jitney_jobs.input_files import (
    columns_of_folders,
    common_format,
    find_files,
    format_of,
    kinds_of,
    kinds_text,
)
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, InputFile, Ranges, Record
from jitney_jobs.outcome import Trouble, may_pass
from jitney_jobs.rows import Chunk, RowId
from jitney_jobs.storage import file_system, read_error


class Dataset:
    """The input of one job."""

    def __init__(self, job: Job) -> None:
        """Find the files of a file, a folder or a glob, but for those in the output. Raises
        InvalidArgumentError, and UnavailableError if the storage fails."""
        self._fs, path = file_system(job.input)
        self._retry_policy = job.make_retry_policy()
        self._skips_bad_files = job.skip_bad_files
        _, output = file_system(job.output)
        try:
            search = find_files(self._fs, path)
        except OSError as error:
            raise read_error(job.input, error) from error
        self._base = search.base
        found = [info for info in search.files if not info.path.startswith(f"{output}/")]
        unknown: list[pafs.FileInfo] = []
        self.format = job.input_format
        if self.format == "auto":
            self.format = common_format(job.input, found)
            unknown = [info for info in found if format_of(info.path) != self.format]
            found = [info for info in found if format_of(info.path) == self.format]
        if not found:
            raise InvalidArgumentError(f"input {job.input} has no files")
        self.passed_over = kinds_of(unknown)
        """Kinds of files below the input that are not read, with counts."""
        if search.hidden:
            self.passed_over["hidden (_ or .)"] = search.hidden
        self.kinds = kinds_of(found)
        """Kinds of files that are read, with counts."""
        self.files = [InputFile(info.path, info.size, info.mtime_ns or 0) for info in found]
        self.files.sort(key=lambda file: file.path)
        self.files_are_rows = self.format in ("text", "image")
        """Whether each file is a row. If so, all of them count as one file, whose index is 0, and
        the index of a row in it is an index of ``files``."""

    @property
    def found(self) -> str:
        """What was found, for the user: kinds of files with counts, bytes, and what is passed
        over."""
        size = sum(file.size for file in self.files)
        text = f"{kinds_text(self.kinds)} as {self.format}, {size:,} bytes"
        if self.passed_over:
            text += f"; passed over: {kinds_text(self.passed_over)}"
        return text

    def read_schema(self) -> pa.Schema | None:
        """The columns' types, as the first file states them that can be read; None for formats
        whose files state none. Raises InvalidArgumentError if no file can be read, and
        UnavailableError if the storage fails."""
        if self.format not in ("parquet", "arrow"):
            return None
        path, schema = self._first_schema()
        types = {field.name: field.type for field in schema}
        types |= dict.fromkeys(columns_of_folders(path, self._base), pa.string())
        return pa.schema(types)

    def _first_schema(self) -> tuple[str, pa.Schema]:
        """A file that can be read, and its schema. Errors as of :meth:`read_schema`."""
        first_error: JitneyError | None = None
        for file in self.files:
            try:
                with self._fs.open_input_file(file.path) as source:
                    if self.format == "parquet":
                        return file.path, pq.read_schema(source)
                    return file.path, pa.ipc.open_file(source).schema
            except READ_ERRORS as error:
                meaning = read_error(file.path, error)
                if may_pass(meaning) or not self._skips_bad_files:
                    raise meaning from error
                first_error = first_error or meaning
        assert first_error is not None, "an input has files"
        raise first_error

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
        self, record: Record, size: int, files: Iterable[int] | None = None
    ) -> Iterator[Chunk | FileRows]:
        """All rows that are not committed, in order: those of the files with these indices, or of
        all files. A chunk has at most ``size`` rows. Behind the chunks of a file comes the number
        of its rows, unless the journal knows it. A file that is damaged ends early: then the
        number of its rows comes with the reason.

        Raises InvalidArgumentError for such a file if the job does not skip them, and
        UnavailableError if the storage fails for longer than the job's patience.
        """
        sizes = self.sizes
        total = max(1, sum(sizes))
        bytes_before = 0  # of the files before this one
        indices = range(len(sizes)) if files is None else files
        for index in indices:
            if not record.is_done(index):
                row_count = 0
                why_bad = None
                try:
                    for batch in self._batches_with_retries(index, record.done, size):
                        position = (bytes_before + batch.share * sizes[index]) / total
                        chunk = self._chunk_of(index, batch, record.done, position)
                        if chunk is not None:
                            yield chunk
                        row_count = batch.end
                except InvalidArgumentError as error:
                    if not self._skips_bad_files:
                        raise
                    why_bad = str(error)
                if index not in record.row_counts or why_bad is not None:
                    yield FileRows(index, row_count, why_bad)
            bytes_before += sizes[index]

    def _chunk_of(self, index: int, batch: Batch, done: Ranges, position: float) -> Chunk | None:
        """The rows of a batch that are not committed. None if there are none."""
        if batch.data is None or done.covers(index, batch.first, batch.end):
            return None
        rows = range(batch.first, batch.end)
        left = [row for row in rows if not done.covers(index, row, row + 1)]
        columns: dict[str, str] = {}
        if not self.files_are_rows:
            columns = columns_of_folders(self.files[index].path, self._base)
        return Chunk(
            file=index,
            indices=left,
            format=self.format,
            data=take_rows(batch.data, [row - batch.first for row in left]),
            columns=columns,
            position=position,
        )

    def _batches_with_retries(self, index: int, done: Ranges, size: int) -> Iterator[Batch]:
        """Each batch of a file once. After a failure of the storage the file is read again from its
        beginning; the batches are the same then, and those that were given are left out."""
        rows_given = 0
        trouble = Trouble()
        while True:
            try:
                for batch in self._batches(index, done, size):
                    if batch.end > rows_given:
                        rows_given = batch.end
                        trouble = Trouble()  # what failed before works again
                        yield batch
                return
            except READ_ERRORS as error:
                trouble.wait(self._retry_policy, read_error(self.files[index].path, error))

    def _batches(self, index: int, done: Ranges, size: int) -> Iterator[Batch]:
        """A file's rows in order, at most ``size`` in a batch."""
        if self.files_are_rows:
            yield from path_batches(self.files, size)
            return
        file = self.files[index]
        with self._fs.open_input_file(file.path) as raw:
            if self.format == "parquet":
                yield from parquet_batches(raw, file, index, done, size)
            elif self.format == "arrow":
                yield from arrow_batches(raw, file, size)
            else:
                yield from line_batches(raw, file, self.format, size)
