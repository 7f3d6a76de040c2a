"""A job's input: files in a fixed order, read as a stream of chunks of rows.

A row is known by (index of its file, index in that file), whoever reads it and how often. Files are
local or on object storage, by pyarrow's file systems; a chunk travels to a worker process as it was
read, and becomes rows there. Committed rows are skipped: whole files and Parquet's row groups
unread, others row by row. A storage that fails is tried again, and then ends the job.
"""

import codecs
import csv
import fnmatch
import io
import posixpath
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

import msgspec
from jitney.errors import (
    InstallationError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
    install_extra,
)

from jitney_jobs.job import InputFormat, Job
from jitney_jobs.journal import FileRows, InputFile, Ranges, Record

try:
    import pyarrow as pa
    import pyarrow.fs as pafs
    import pyarrow.parquet as pq
except ImportError:
    raise InstallationError(
        f"jobs need pyarrow, which is not installed: {install_extra('jobs')}"
    ) from None

RowValues = dict[str, Any]
_SUFFIXES: dict[str, InputFormat] = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"), "image"),
}
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
LINES = ("jsonl", "openai")
_OF_THE_FILE = (FileNotFoundError, PermissionError, IsADirectoryError)
"""Errors that are the file's fault, not the storage's: another try would meet them again."""
_ERRORS = (OSError, pa.ArrowInvalid, csv.Error)
_PARTITION = re.compile(r"([^=]+)=(.*)")
_BUFFER = 1 << 20
_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
"""Arrow cannot take single rows from columns of these types. They are read as the types that stand
beside them."""
_CHUNK_BYTES = 8 << 20
"""A chunk ends when its rows have so many bytes. It has one row at least."""


class RowId(NamedTuple):
    """A row of the input: the index of its file, and its index in that file."""

    file: int
    row: int


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file, as they were read. Picklable."""

    file: int
    indices: list[int]
    """Of the rows in the file, ascending."""
    format: InputFormat
    data: Any
    """Lines; CSV records, each with its header; paths of files; or a record batch."""
    columns: dict[str, str]
    """Of the partition: the same in every row."""
    position: float = 0.0
    """The share of the whole input that has been read with this chunk, 0 to 1."""

    @property
    def row_bytes(self) -> int:
        """About the bytes of each row as it was read: an equal share of the chunk. 0 for paths."""
        if isinstance(self.data, pa.RecordBatch):
            nbytes = self.data.nbytes
        elif self.format in ("text", "image"):
            nbytes = 0
        else:
            nbytes = sum(map(_line_bytes, self.data))
        return nbytes // len(self.indices)

    def only(self, number: int) -> "Chunk":
        """A chunk of one of the rows: number 0 is the first row here."""
        part = slice(number, number + 1)
        return replace(self, indices=self.indices[part], data=self.data[part])

    def raw_rows(self) -> list[Any]:
        """One value a row, of which :meth:`row` makes the row."""
        if isinstance(self.data, pa.RecordBatch):
            return self.data.to_pylist()
        return self.data

    def row(self, raw: Any, storage: "Storage") -> RowValues:
        """A row. Raises UnavailableError if the storage fails, and any exception for a bad row."""
        if self.format in LINES:
            row = msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8), type=dict)
        elif self.format == "csv":
            row = _csv_row(*raw)
        elif self.format == "text":
            row = {"path": raw, "text": storage.read(raw).decode()}
        elif self.format == "image":
            row = {"path": raw}
        else:
            row = raw
        return {**row, **self.columns}


def _csv_row(head: list[str], record: list[str]) -> RowValues:
    if len(head) != len(record):
        raise InvalidArgumentError(f"{len(record)} fields, but the header has {len(head)}")
    "".join(record).encode()  # raises for bytes that are not UTF-8
    return dict(zip(head, record, strict=True))


def _line_bytes(line: Any) -> int:
    """About the bytes of a line, or of a CSV record, which comes with its header."""
    if isinstance(line, bytes):
        return len(line)
    _, record = line
    return sum(map(len, record))


class Storage:
    """The file system of an input. Files that are rows are read from it as a whole."""

    def __init__(self, job: Job) -> None:
        self._fs, _ = file_system(job.input)
        self._retries = job.retries

    def read(self, path: str) -> bytes:
        """Raises InvalidArgumentError if the file is at fault, and UnavailableError if the storage
        fails although it was tried again."""
        tries = 0
        while True:
            try:
                with self._fs.open_input_stream(path, compression=None) as source:
                    return bytes(source.read())
            except OSError as error:
                wait_for_retry(tries, self._retries, path, error)
                tries += 1


def read_error(path: str, error: Exception) -> JitneyError:
    """What an error in reading a file means: InvalidArgumentError if the file is at fault,
    UnavailableError if the storage is. For damaged compressed bytes Arrow raises an OSError, as for
    a storage that fails: then the storage counts as at fault."""
    text = f"input {path} cannot be read: {error}"
    if not isinstance(error, OSError) or isinstance(error, _OF_THE_FILE):
        return InvalidArgumentError(text)
    return UnavailableError(text)


def wait_for_retry(tries: int, retries: int, path: str, error: Exception) -> None:
    """After an error in reading, wait before the next try, longer each time. Raises what
    :func:`read_error` says if the file is at fault, or if that was the last try."""
    meaning = read_error(path, error)
    if isinstance(meaning, InvalidArgumentError) or tries >= retries:
        raise meaning from error
    time.sleep(pause(tries))


def pause(tries: int) -> float:
    """Seconds before the next try of what was tried again ``tries`` times."""
    return float(2**tries)


def file_system(path: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or address, and the path on it. Raises InvalidArgumentError."""
    if "://" not in path:
        return pafs.LocalFileSystem(), posixpath.abspath(path)
    try:
        return pafs.FileSystem.from_uri(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidArgumentError(f"{path} cannot be opened: {error}") from None


@dataclass(frozen=True)
class _Batch:
    """The rows [first, end) of a file."""

    first: int
    end: int
    data: Any
    """As in :class:`Chunk`. None if all rows are committed: then they were not read."""
    share: float
    """The share of the file that has been read with this batch, 0 to 1."""


class Dataset:
    """The input of one job."""

    def __init__(self, job: Job) -> None:
        """Find the files of a file, a folder or a glob, but for those in the output. Raises
        InvalidArgumentError, and UnavailableError if the storage fails."""
        self._fs, path = file_system(job.input)
        self._retries = job.retries
        _, output = file_system(job.output)
        try:
            self._base, found = _found(self._fs, path)
        except OSError as error:
            raise read_error(job.input, error) from error
        found = [info for info in found if not info.path.startswith(f"{output}/")]
        self.format = job.input_format
        if self.format == "auto":
            self.format = _common_format(job.input, found)
            found = [info for info in found if _format_of(info.path) == self.format]
        if not found:
            raise InvalidArgumentError(f"input {job.input} has no files")
        self.files = [InputFile(info.path, info.size, info.mtime_ns or 0) for info in found]
        self.files.sort(key=lambda file: file.path)
        self.whole = self.format in ("text", "image")
        """Whether each file is a row. All of them together are then the file 0, and the index of a
        file is the index of its row."""

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
        except _ERRORS as error:
            raise read_error(path, error) from error
        types = {field.name: field.type for field in schema}
        types |= dict.fromkeys(self._partition(path), pa.string())
        return pa.schema(types)

    def path_of(self, row: RowId) -> str:
        """The file that a row is in, or is."""
        return self.files[row.row if self.whole else row.file].path

    @property
    def sizes(self) -> list[int]:
        """The bytes of each file; [1] if each file is a row, for then they count as one file. Used
        for shares of the input."""
        return [1] if self.whole else [file.size for file in self.files]

    def chunks(
        self, record: Record, size: int, files: Iterable[int] | None = None
    ) -> Iterator[Chunk | FileRows]:
        """All rows of the files (None: of all of them) that are not committed, in order, at most
        ``size`` in a chunk; after each file its number of rows, unless the journal knows it. Raises
        InvalidArgumentError for a file that is damaged, and UnavailableError if the storage fails
        although it was tried again, or if compressed bytes are damaged (:func:`read_error`)."""
        sizes = self.sizes
        total = max(1, sum(sizes))
        bytes_before = 0  # of the files before this one
        for index in range(len(sizes)) if files is None else files:
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

    def _chunk_of(self, index: int, batch: _Batch, done: Ranges, position: float) -> Chunk | None:
        """The rows of a batch that are not committed. None if there are none."""
        if batch.data is None or done.covers(index, batch.first, batch.end):
            return None
        rows = range(batch.first, batch.end)
        left = [row for row in rows if not done.covers(index, row, row + 1)]
        return Chunk(
            file=index,
            indices=left,
            format=self.format,
            data=_taken(batch.data, [row - batch.first for row in left]),
            columns={} if self.whole else self._partition(self.files[index].path),
            position=position,
        )

    def _batches_with_retries(self, index: int, done: Ranges, size: int) -> Iterator[_Batch]:
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
            except _ERRORS as error:
                wait_for_retry(tries, self._retries, self.files[index].path, error)
                tries += 1

    def _batches(self, index: int, done: Ranges, size: int) -> Iterator[_Batch]:
        """A file's rows in order, at most ``size`` in a batch, each time the same batches."""
        if self.whole:
            yield from self._path_batches(size)
            return
        file = self.files[index]
        with self._fs.open_input_file(file.path) as raw:
            if self.format == "parquet":
                yield from _parquet_batches(raw, file, index, done, size)
            elif self.format == "arrow":
                yield from _arrow_batches(raw, file, size)
            else:
                yield from _line_batches(raw, file, self.format, size)

    def _path_batches(self, size: int) -> Iterator[_Batch]:
        count = len(self.files)
        for first in range(0, count, size):
            paths = [file.path for file in self.files[first : first + size]]
            end = first + len(paths)
            yield _Batch(first, end, paths, end / count)

    def _partition(self, path: str) -> dict[str, str]:
        """Columns from folders such as ``year=2026``, below the input."""
        folders = posixpath.dirname(path.removeprefix(self._base)).split("/")
        found = (_PARTITION.fullmatch(folder) for folder in folders)
        return {unquote(match[1]): unquote(match[2]) for match in found if match}


def _parquet_batches(
    raw: BinaryIO, file: InputFile, index: int, done: Ranges, size: int
) -> Iterator[_Batch]:
    """A row group whose rows are all committed is not read. It is one batch, whatever ``size``."""
    # Page by page: otherwise the whole of a row group would be held.
    parquet = pq.ParquetFile(raw, pre_buffer=False, buffer_size=_BUFFER)
    _check_names(parquet.schema_arrow.names, file.path)
    total = max(1, parquet.metadata.num_rows)
    first = 0
    for group in range(parquet.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        end_of_group = first + metadata.num_rows
        if done.covers(index, first, end_of_group):
            yield _Batch(first, end_of_group, None, end_of_group / total)
            first = end_of_group
            continue
        batch_size = _rows_of_a_chunk(size, metadata.num_rows, metadata.total_byte_size)
        for data in parquet.iter_batches(batch_size, [group]):
            end = first + len(data)
            yield _Batch(first, end, _without_views(data), end / total)
            first = end


def _arrow_batches(raw: BinaryIO, file: InputFile, size: int) -> Iterator[_Batch]:
    reader = pa.ipc.open_file(raw)
    _check_names(reader.schema.names, file.path)
    count = reader.num_record_batches
    first = 0
    for number in range(count):
        whole = reader.get_batch(number)
        batch_size = _rows_of_a_chunk(size, len(whole), whole.nbytes)
        for start in range(0, len(whole), batch_size):
            data = whole.slice(start, batch_size)
            end = first + len(data)
            yield _Batch(first, end, _without_views(data), (number + 1) / count)
            first = end


def _line_batches(
    raw: BinaryIO, file: InputFile, format: InputFormat, size: int
) -> Iterator[_Batch]:
    """Lines, or CSV records with their header."""
    source: io.BufferedReader[Any] = io.BufferedReader(raw, _BUFFER)
    codec = _COMPRESSED.get(posixpath.splitext(file.path.lower())[1])
    text = source
    if codec is not None:
        text = io.BufferedReader(pa.CompressedInputStream(source, codec))
    # A line of nothing but space is no row.
    lines = _records(text, file.path) if format == "csv" else filter(bytes.strip, text)
    first = 0
    while data := _next_of(lines, size):
        end = first + len(data)
        # When the generator of `_records` is exhausted, its TextIOWrapper is freed and closes the
        # file: `tell` would then raise.
        share = 1.0 if raw.closed else source.tell() / file.size
        yield _Batch(first, end, data, share)
        first = end


def _without_views(data: pa.RecordBatch) -> pa.RecordBatch:
    types = {field.name: _PLAIN.get(field.type, field.type) for field in data.schema}
    return data.cast(pa.schema(types))


def _records(source: io.BufferedReader, path: str) -> Iterator[tuple[list[str], list[str]]]:
    """Each record of a CSV file, under its header."""
    csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="")
    records = csv.reader(text, delimiter="\t" if ".tsv" in posixpath.basename(path) else ",")
    head = next(records, [])
    _check_names(head, path)
    return ((head, record) for record in records if record)


def _rows_of_a_chunk(size: int, row_count: int, nbytes: int) -> int:
    """``size``, or fewer if so many rows have so many bytes."""
    return min(size, max(1, _CHUNK_BYTES * row_count // max(1, nbytes)))


def _next_of(lines: Iterator[Any], size: int) -> list[Any]:
    """The next ``size`` lines, or fewer if they are large; none at the end."""
    taken = []
    nbytes = 0
    for line in islice(lines, size):
        taken.append(line)
        nbytes += _line_bytes(line)
        if nbytes >= _CHUNK_BYTES:
            break
    return taken


def _check_names(names: list[str], path: str) -> None:
    """A row would have only one of two columns of the same name. Raises InvalidArgumentError."""
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"input {path} has two columns {name!r}")


def _taken(data: Any, indices: list[int]) -> Any:
    """Some rows of a batch's data. Of a record batch it is a copy: a slice would be pickled as the
    whole batch."""
    if isinstance(data, pa.RecordBatch):
        return data.take(pa.array(indices, pa.int64()))
    return [data[index] for index in indices]


def column_of(row: RowValues, name: str) -> Any:
    """A value of the row. Raises InvalidArgumentError if there is none."""
    if row.get(name) is None:
        state = "is empty" if name in row else "is missing"
        raise InvalidArgumentError(f"column {name!r} {state}")
    return row[name]


def reason(error: BaseException) -> str:
    """Why a row is bad, for its line in the error file."""
    return str(error) if isinstance(error, JitneyError) else f"{type(error).__name__}: {error}"


def _found(fs: pafs.FileSystem, path: str) -> tuple[str, list[pafs.FileInfo]]:
    """The folder that is searched (of a single file its path), and the files of a path, folder or
    glob in it. Names below that folder that begin with ``_`` or ``.`` are passed over. Raises
    InvalidArgumentError if there is nothing."""
    info = fs.get_file_info(path)
    if info.type == pafs.FileType.File:
        return path, [info]
    base = path
    glob = None
    if info.type != pafs.FileType.Directory:
        wild = re.search(r"[*?\[]", path)
        if wild is not None:
            base = path[: wild.start()].rpartition("/")[0]
            glob = path
    try:
        infos = fs.get_file_info(pafs.FileSelector(base, recursive=True))
    except FileNotFoundError:
        raise InvalidArgumentError(f"input {path} is not there") from None
    found = []
    for info in infos:
        is_file = info.type == pafs.FileType.File
        is_meant = glob is None or _matches(info.path, glob)
        if is_file and is_meant and not _is_hidden(info.path.removeprefix(base)):
            found.append(info)
    return base, found


def _is_hidden(path: str) -> bool:
    return any(name[:1] in ("_", ".") for name in path.split("/"))


def _matches(path: str, glob: str) -> bool:
    """``*`` crosses folders only if the glob has ``**``."""
    if "**" not in glob and path.count("/") != glob.count("/"):
        return False
    return fnmatch.fnmatchcase(path, glob)


def _common_format(source: str, found: list[pafs.FileInfo]) -> InputFormat:
    """By the files' names. Raises InvalidArgumentError if they have several formats, or none."""
    formats = {_format_of(info.path) for info in found} - {None}
    if len(formats) == 1:
        (format,) = formats
        assert format is not None
        return format
    known = ", ".join(sorted(map(str, formats))) or "no known kind"
    raise InvalidArgumentError(f"input {source} has files of {known}: name input_format")


def _format_of(path: str) -> InputFormat | None:
    stem, suffix = posixpath.splitext(path.lower())
    return _SUFFIXES.get(posixpath.splitext(stem)[1] if suffix in _COMPRESSED else suffix)
