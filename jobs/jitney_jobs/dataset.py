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
from typing import Any
from urllib.parse import unquote

import msgspec
from jitney.errors import InstallationError, InvalidArgumentError, JitneyError, UnavailableError

from jitney_jobs.job import InputFormat, Job
from jitney_jobs.journal import FileRows, InputFile, Ranges, Record

try:
    import pyarrow as pa
    import pyarrow.fs as pafs
    import pyarrow.parquet as pq
except ImportError:
    raise InstallationError(
        "jobs need pyarrow, which is not installed: pip install 'triton-jitney[jobs]'"
    ) from None

Row = dict[str, Any]
Place = tuple[int, int]
"""(index of the file, index of the row in it)."""
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
"""Types from whose columns Arrow cannot take single rows -> the types that stand for them here."""
_CHUNK_BYTES = 8 << 20
"""About the most of a chunk."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file, as they were read. Picklable."""

    file: int
    rows: list[int]
    """Their numbers in the file, ascending."""
    format: InputFormat
    data: Any
    """Lines; records of a CSV file under its header; paths of files; or a record batch."""
    columns: dict[str, str]
    """Of the partition: the same in every row."""
    position: float = 0.0
    """The share of the whole input that has been read with this chunk, 0 to 1."""

    @property
    def nbytes(self) -> int:
        """About, as they were read; 0 for paths and CSV."""
        if isinstance(self.data, pa.RecordBatch):
            return self.data.nbytes
        return sum(map(len, self.data)) if self.format in LINES else 0

    def only(self, index: int) -> "Chunk":
        """One of the rows."""
        one = slice(index, index + 1)
        return replace(self, rows=self.rows[one], data=self.data[one])

    def items(self) -> list[Any]:
        """What its rows are made of, in a worker process."""
        return self.data.to_pylist() if isinstance(self.data, pa.RecordBatch) else self.data

    def row(self, item: Any, storage: "Storage") -> Row:
        """One of the rows. Raises UnavailableError if the storage fails, anything for a bad row."""
        row: Row = item
        if self.format in LINES:
            row = msgspec.json.decode(item.removeprefix(codecs.BOM_UTF8), type=dict)
        elif self.format == "csv":
            head, record = item
            if len(head) != len(record):
                raise InvalidArgumentError(f"{len(record)} fields, but the header has {len(head)}")
            "".join(record).encode()  # what was not UTF-8 raises
            row = dict(zip(head, record, strict=True))
        elif self.format in ("text", "image"):
            row = {"path": item}
            if self.format == "text":
                row["text"] = storage.read(item).decode()
        return {**row, **self.columns}


class Storage:
    """The file system of an input: a file of a row is read whole."""

    def __init__(self, job: Job) -> None:
        self._fs = file_system(job.input)[0]
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
                wait_or_raise(tries, self._retries, path, error)
                tries += 1


def wait_or_raise(tries: int, retries: int, path: str, error: Exception) -> None:
    """After an error in reading, wait before the next try, longer each time. Raises
    InvalidArgumentError if the file is at fault, and UnavailableError after the last try."""
    said = f"input {path} cannot be read: {error}"
    if not isinstance(error, OSError) or isinstance(error, _OF_THE_FILE):
        raise InvalidArgumentError(said) from error
    if tries >= retries:
        raise UnavailableError(said) from error
    time.sleep(pause(tries))


def pause(tries: int) -> float:
    """Seconds before the next try of what was tried again ``tries`` times."""
    return float(2**tries)


def file_system(place: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or address, and the path on it. Raises InvalidArgumentError."""
    if "://" not in place:
        return pafs.LocalFileSystem(), posixpath.abspath(place)
    try:
        return pafs.FileSystem.from_uri(place)
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidArgumentError(f"{place} cannot be opened: {error}") from None


class Dataset:
    """The input of one job."""

    def __init__(self, job: Job) -> None:
        """Find the files of a file, a folder or a glob, but for those in the output. Raises
        InvalidArgumentError, and UnavailableError if the storage fails."""
        self._fs, path = file_system(job.input)
        self._retries = job.retries
        own = f"{file_system(job.output)[1]}/"
        try:
            self._base, found = _found(self._fs, path)
            found = [info for info in found if not info.path.startswith(own)]
        except OSError as error:
            wait_or_raise(0, 0, job.input, error)  # raises: there is no second try
        self.format = job.input_format
        if self.format == "auto":
            kinds = {_format_of(info.path) for info in found} - {None}
            if len(kinds) != 1:
                known = ", ".join(sorted(map(str, kinds))) or "no known kind"
                raise InvalidArgumentError(
                    f"input {job.input} has files of {known}: name input_format"
                )
            (self.format,) = kinds  # type: ignore[assignment]
            found = [info for info in found if _format_of(info.path) == self.format]
        if not found:
            raise InvalidArgumentError(f"input {job.input} has no files")
        self.files = [InputFile(info.path, info.size, info.mtime_ns or 0) for info in found]
        self.files.sort(key=lambda file: file.path)
        self.whole = self.format in ("text", "image")
        """Whether each file is a row. All of them together are then the file 0, and the index of a
        file is the index of its row."""

    @property
    def schema(self) -> pa.Schema | None:
        """The columns' types where the files state them: those of the first one. Raises as
        :meth:`chunks` does."""
        if self.format not in ("parquet", "arrow"):
            return None
        first = self.files[0].path
        try:
            with self._fs.open_input_file(first) as source:
                parquet = self.format == "parquet"
                schema = pq.read_schema(source) if parquet else pa.ipc.open_file(source).schema
        except _ERRORS as error:
            wait_or_raise(0, 0, first, error)  # raises: there is no second try
        fields = {field.name: field.type for field in schema}
        return pa.schema(fields | dict.fromkeys(self._partition(first), pa.string()))

    def path_of(self, file: int, row: int) -> str:
        """The file that a row is in, or is."""
        return self.files[row if self.whole else file].path

    @property
    def sizes(self) -> list[int]:
        """What the files weigh beside each other: their bytes."""
        return [1] if self.whole else [file.size for file in self.files]

    def chunks(
        self, record: Record, size: int, files: Iterable[int] | None = None
    ) -> Iterator[Chunk | FileRows]:
        """All rows of the files (None: of all of them) that are not committed, in order, at most
        ``size`` in a chunk; after each file its number of rows, unless the journal knows it. Raises
        InvalidArgumentError for a file that is damaged, and UnavailableError if the storage fails
        although it was tried again."""
        sizes = self.sizes
        done = record.done
        before = 0
        total = max(1, sum(sizes))
        for index in range(len(sizes)) if files is None else files:
            file = self.files[index]
            columns = {} if self.whole else self._partition(file.path)
            # After a failure a file is read from its beginning. `given`: rows of it that were given
            # before the failure; they are not given again.
            first = given = tries = 0
            while not record.is_done(index):
                try:
                    first = 0
                    for data, share in self._batches(index, done, size):
                        end = first + len(data)
                        if not done.covers(index, first, end) and given < end:
                            position = (before + share * sizes[index]) / total
                            left = [
                                row
                                for row in range(first, end)
                                if not done.covers(index, row, row + 1)
                            ]
                            data = _taken(data, [row - first for row in left])
                            yield Chunk(index, left, self.format, data, columns, position)
                        first = end
                        given = max(given, end)
                    break
                except _ERRORS as error:
                    wait_or_raise(tries, self._retries, file.path, error)
                    tries += 1
            before += sizes[index]
            if index not in record.rows:
                yield FileRows(index, first)

    def _batches(self, index: int, done: Ranges, size: int) -> Iterator[tuple[Any, float]]:
        """(at most ``size`` rows, the share of the file that is read), in order, each time the
        same. A Parquet row group whose rows are all done is not read: in place of the rows
        stands a range, as long as the group, whatever ``size`` is."""
        file = self.files[index]
        if self.whole:
            for first in range(0, len(self.files), size):
                paths = [each.path for each in self.files[first : first + size]]
                yield paths, (first + len(paths)) / len(self.files)
            return
        with self._fs.open_input_file(file.path) as raw:
            if self.format == "parquet":
                # Page by page: otherwise the whole of a row group would be held.
                parquet = pq.ParquetFile(raw, pre_buffer=False, buffer_size=_BUFFER)
                _check_names(parquet.schema_arrow.names, file.path)
                first = 0
                total = max(1, parquet.metadata.num_rows)
                for group in range(parquet.num_row_groups):
                    of_group = parquet.metadata.row_group(group)
                    rows = of_group.num_rows
                    skip = done.covers(index, first, first + rows)
                    few = _fewer(size, rows, of_group.total_byte_size)
                    batches = [range(rows)] if skip else parquet.iter_batches(few, [group])
                    for batch in batches:
                        first += len(batch)
                        yield batch, first / total
            elif self.format == "arrow":
                reader = pa.ipc.open_file(raw)
                _check_names(reader.schema.names, file.path)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    few = _fewer(size, len(batch), batch.nbytes)
                    for start in range(0, len(batch), few):
                        yield batch.slice(start, few), (number + 1) / reader.num_record_batches
            else:
                codec = _COMPRESSED.get(posixpath.splitext(file.path.lower())[1])
                source = text = io.BufferedReader(raw, _BUFFER)
                if codec:
                    text = io.BufferedReader(pa.CompressedInputStream(source, codec))
                of_csv = self.format == "csv"
                # Of lines, those with nothing but space are no rows.
                lines = _records(text, file.path) if of_csv else filter(bytes.strip, text)
                for data in iter(lambda: _next_of(lines, size), []):
                    yield data, 1.0 if raw.closed else source.tell() / file.size

    def _partition(self, path: str) -> dict[str, str]:
        """Columns from folders such as ``year=2026``, below the input."""
        folders = posixpath.dirname(path.removeprefix(self._base)).split("/")
        found = (_PARTITION.fullmatch(folder) for folder in folders)
        return {unquote(match[1]): unquote(match[2]) for match in found if match}


def _records(source: io.BufferedReader, path: str) -> Iterator[tuple[list[str], list[str]]]:
    """Each record of a CSV file, under its header."""
    csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="")
    records = csv.reader(text, delimiter="\t" if ".tsv" in posixpath.basename(path) else ",")
    head = next(records, [])
    _check_names(head, path)
    return ((head, record) for record in records if record)


def _fewer(size: int, rows: int, nbytes: int) -> int:
    """``size``, or fewer rows if they are large."""
    return min(size, max(1, _CHUNK_BYTES * rows // max(1, nbytes)))


def _next_of(lines: Iterator[Any], size: int) -> list[Any]:
    """``size`` lines, or fewer if they are large."""
    taken = []
    nbytes = 0
    for line in islice(lines, size):
        taken.append(line)
        nbytes += len(line)
        if nbytes >= _CHUNK_BYTES:
            break
    return taken


def _check_names(names: list[str], path: str) -> None:
    """A row would have only one of two columns of the same name. Raises InvalidArgumentError."""
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"input {path} has two columns {name!r}")


def _taken(data: Any, at: list[int]) -> Any:
    """Those of the rows. A copy: a slice of a record batch would be pickled as the whole batch."""
    if isinstance(data, pa.RecordBatch):
        plain = {field.name: _PLAIN.get(field.type, field.type) for field in data.schema}
        return data.cast(pa.schema(plain)).take(pa.array(at, pa.int64()))
    return [data[i] for i in at]


def column_of(row: Row, name: str) -> Any:
    """A value of the row. Raises InvalidArgumentError if there is none."""
    if row.get(name) is None:
        state = "is empty" if name in row else "is missing"
        raise InvalidArgumentError(f"column {name!r} {state}")
    return row[name]


def reason(error: BaseException) -> str:
    """Why a row is bad, for its line in the error file."""
    return str(error) if isinstance(error, JitneyError) else f"{type(error).__name__}: {error}"


def _found(fs: pafs.FileSystem, path: str) -> tuple[str, list[pafs.FileInfo]]:
    """The folder that is searched, and the files of a path or glob in it; of folders, those whose
    names do not begin with ``_`` or ``.``. Raises InvalidArgumentError if there is nothing."""
    info = fs.get_file_info(path)
    if info.type == pafs.FileType.File:
        return path, [info]
    wild = None if info.type == pafs.FileType.Directory else re.search(r"[*?\[]", path)
    base = path[: wild.start()].rpartition("/")[0] if wild else path
    try:
        infos = fs.get_file_info(pafs.FileSelector(base, recursive=True))
    except FileNotFoundError:
        raise InvalidArgumentError(f"input {path} is not there") from None
    return base, [
        info
        for info in infos
        if info.type == pafs.FileType.File
        and not any(p[:1] in ("_", ".") for p in info.path.removeprefix(base).split("/"))
        and (not wild or fnmatch.fnmatchcase(info.path, path))
        and (not wild or "**" in path or info.path.count("/") == path.count("/"))
    ]


def _format_of(path: str) -> InputFormat | None:
    stem, suffix = posixpath.splitext(path.lower())
    return _SUFFIXES.get(posixpath.splitext(stem)[1] if suffix in _COMPRESSED else suffix)
