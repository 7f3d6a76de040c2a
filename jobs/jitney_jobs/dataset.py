"""A job's input: files in a fixed order, read as a stream of chunks of rows.

A row is known by (index of its file, index in that file), whichever process reads it and however
often. Rows that are committed do not come again. A file that is committed as a whole is not opened,
and a row group of Parquet is not read; in other files committed rows are read and left out. A
storage that fails is tried again, and then ends the job.

:class:`Dataset` is used by the reader's thread of ``pipeline``, and by tasks of ``ray_data``.
"""

from collections.abc import Iterable, Iterator

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pq
from jitney_jobs.file_batches import (
    READ_ERRORS,
    Batch,
    arrow_batches,
    line_batches,
    parquet_batches,
    path_batches,
    take_rows,
)
from jitney_jobs.input_files import columns_of_folders, common_format, find_files, format_of
from jitney_jobs.job import Job
from jitney_jobs.journal import FileRows, InputFile, Ranges, Record
from jitney_jobs.rows import Chunk, RowId
from jitney_jobs.storage import file_system, read_error, wait_for_retry


class Dataset:
    """The input of one job."""

    def __init__(self, job: Job) -> None:
        """Find the files of a file, a folder or a glob, but for those in the output. Raises
        InvalidArgumentError, and UnavailableError if the storage fails."""
        self._fs, path = file_system(job.input)
        self._retries = job.retries
        _, output = file_system(job.output)
        try:
            self._base, found = find_files(self._fs, path)
        except OSError as error:
            raise read_error(job.input, error) from error
        found = [info for info in found if not info.path.startswith(f"{output}/")]
        self.format = job.input_format
        if self.format == "auto":
            self.format = common_format(job.input, found)
            found = [info for info in found if format_of(info.path) == self.format]
        if not found:
            raise InvalidArgumentError(f"input {job.input} has no files")
        self.files = [InputFile(info.path, info.size, info.mtime_ns or 0) for info in found]
        self.files.sort(key=lambda file: file.path)
        self.files_are_rows = self.format in ("text", "image")
        """Whether each file is a row. If so, all of them count as one file, whose index is 0, and
        the index of a row in it is an index of ``files``."""

    def read_schema(self) -> pa.Schema | None:
        """The columns' types, as the first file states them; None for formats whose files state
        none. Raises InvalidArgumentError if the file is damaged, and UnavailableError if the
        storage fails."""
        if self.format not in ("parquet", "arrow"):
            return None
        path = self.files[0].path
        try:
            with self._fs.open_input_file(path) as source:
                if self.format == "parquet":
                    schema = pq.read_schema(source)
                else:
                    schema = pa.ipc.open_file(source).schema
        except READ_ERRORS as error:
            raise read_error(path, error) from error
        types = {field.name: field.type for field in schema}
        types |= dict.fromkeys(columns_of_folders(path, self._base), pa.string())
        return pa.schema(types)

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
        of its rows, unless the journal knows it.

        Raises InvalidArgumentError for a file that is damaged. Raises UnavailableError if the
        storage fails although it was tried again, or if compressed bytes are damaged
        (:func:`~jitney_jobs.storage.read_error`).
        """
        sizes = self.sizes
        total = max(1, sum(sizes))
        bytes_before = 0  # of the files before this one
        indices = range(len(sizes)) if files is None else files
        for index in indices:
            if not record.is_done(index):
                row_count = 0
                for batch in self._batches_with_retries(index, record.done, size):
                    position = (bytes_before + batch.share * sizes[index]) / total
                    chunk = self._chunk_of(index, batch, record.done, position)
                    if chunk is not None:
                        yield chunk
                    row_count = batch.end
                if index not in record.row_counts:
                    yield FileRows(index, row_count)
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
        tries = 0
        while True:
            try:
                for batch in self._batches(index, done, size):
                    if batch.end > rows_given:
                        rows_given = batch.end
                        yield batch
                return
            except READ_ERRORS as error:
                wait_for_retry(tries, self._retries, self.files[index].path, error)
                tries += 1

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
