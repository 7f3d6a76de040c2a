"""The files of a job's input: found by a path, a folder or a glob; their format, and the columns
that the names of their folders state.
"""

import fnmatch
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import ds, pa, pafs
from jitney_jobs.job import InputFormat

_SUFFIXES: dict[str, InputFormat] = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".jfif", ".jp2", ".webp", ".bmp", ".gif"), "image"),
    **dict.fromkeys((".tif", ".tiff", ".avif", ".heic", ".heif", ".pgm", ".ppm"), "image"),
}
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


class Found(NamedTuple):
    """What a path leads to."""

    base: str
    """The folder that was searched. If the path is that of one file, the path."""
    files: list[pafs.FileInfo]
    passed_over: Mapping[str, int] = {}
    """What is no file to be read, whatever its kind: what it is, with counts."""


def find_files(fs: pafs.FileSystem, path: str) -> Found:
    """The files that a path means: that of a file, of a folder, or a glob. Below the folder, names
    that begin with ``_`` or ``.`` are passed over, and so is what a link leads to that leads back
    to a folder above it: its files would be there many times. Raises InvalidArgumentError if there
    is nothing, and OSError."""
    info = fs.get_file_info(path)
    if info.type == pafs.FileType.File:
        return Found(path, [info])
    if info.type == pafs.FileType.Unknown:
        bound = "a file, a folder or a glob, and no pipe or device"
        raise InvalidArgumentError.of("input", path, bound)
    base = path
    glob = None
    if info.type != pafs.FileType.Directory:
        base = folder_of_glob(path)
        if base != path:
            glob = path
    try:
        infos = list(_below(fs, base))
    except FileNotFoundError:
        raise InvalidArgumentError(f"input {path} is not there") from None
    found = []
    passed_over: Counter[str] = Counter()
    for info in infos:
        if isinstance(info, str):
            passed_over[info] += 1
            continue
        is_meant = glob is None or _matches(info.path, glob)
        if info.type == pafs.FileType.Directory or not is_meant:
            continue
        if _is_hidden(info.path.removeprefix(base)):
            passed_over["hidden (_ or .)"] += 1
        elif info.type != pafs.FileType.File:
            passed_over["no file"] += 1
        else:
            found.append(info)
    return Found(base, found, passed_over)


def _below(fs: pafs.FileSystem, base: str) -> Iterator[pafs.FileInfo | str]:
    """What is below a folder; or a text that says why something is left out."""
    if not isinstance(fs, pafs.LocalFileSystem):
        yield from fs.get_file_info(pafs.FileSelector(base, recursive=True))
        return
    # Folder by folder: pyarrow would follow a link that leads back forty times, and several such
    # links for ever.
    left: list[tuple[str, tuple[str, ...]]] = [(base, (os.path.realpath(base),))]
    while left:
        folder, places = left.pop()  # where it is, and where those above it are
        for entry in os.scandir(folder):
            if entry.is_symlink() and not os.path.exists(entry.path):
                yield "link to nothing"  # pyarrow does not list it
        for info in fs.get_file_info(pafs.FileSelector(folder)):
            try:
                path = info.path
            except UnicodeDecodeError:
                yield "with a name that is no UTF-8"
                continue
            if info.type != pafs.FileType.Directory:
                yield info
                continue
            place = os.path.realpath(path)
            if place in places:
                yield "link to a folder above it"
            else:
                left.append((path, (*places, place)))


def kinds_of(files: Iterable["HasPath"]) -> dict[str, int]:
    """Kinds of files, by their names, with counts: ``.parquet``, ``.csv.gz``."""
    kinds: Counter[str] = Counter()
    for info in files:
        name, suffix = posixpath.splitext(posixpath.basename(info.path).lower())
        if suffix in _COMPRESSED:
            suffix = posixpath.splitext(name)[1] + suffix
        kinds[suffix or "without a suffix"] += 1
    return dict(kinds)


def kinds_text(kinds: Mapping[str, int]) -> str:
    """``3 .parquet, 1 .csv``: the most frequent first."""
    most_first = sorted(kinds.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{count:,} {kind}" for kind, count in most_first)


def folder_of_glob(path: str) -> str:
    """The folder that a glob is looked for in. The path itself if it is none."""
    wild = re.search(r"[*?\[]", path)
    return path if wild is None else path[: wild.start()].rpartition("/")[0]


def _is_hidden(path: str) -> bool:
    return any(name[:1] in ("_", ".") for name in path.split("/"))


def _matches(path: str, glob: str) -> bool:
    """``*`` crosses folders only if the glob has ``**``."""
    if "**" not in glob and path.count("/") != glob.count("/"):
        return False
    return fnmatch.fnmatchcase(path, glob)


class HasPath(Protocol):
    """A file, found or listed."""

    @property
    def path(self) -> str: ...


def common_format(
    source: str, found: Sequence[HasPath], passed_over: Mapping[str, int]
) -> InputFormat:
    """By the files' names. Raises InvalidArgumentError, which says what was ``passed_over``, if
    they have several formats, or none."""
    formats = {format_of(info.path) for info in found} - {None}
    if len(formats) == 1:
        (format,) = formats
        assert format is not None
        return format
    known = ", ".join(sorted(map(str, formats))) or "no known kind"
    there = kinds_text(kinds_of(found)) or "no files"
    if passed_over:
        there += f"; passed over: {kinds_text(passed_over)}"
    raise InvalidArgumentError(
        f"input {source} has files of {known}: name input_format; there are {there}"
    )


def format_of(path: str) -> InputFormat | None:
    """By a file's name. None: it is no known one."""
    name = path.lower()
    if compression_of(path) is not None:
        name, _ = posixpath.splitext(name)
    _, suffix = posixpath.splitext(name)
    return _SUFFIXES.get(suffix)


def compression_of(path: str) -> str | None:
    """Arrow's name of a file's compression, by the file's name. None: it is not compressed."""
    _, suffix = posixpath.splitext(path.lower())
    return _COMPRESSED.get(suffix)


class FolderColumns:
    """The columns that the names of the files' folders below one of ``bases`` state, such as
    ``year=2026``: numbers if all values are, else texts. ``__HIVE_DEFAULT_PARTITION__`` is null."""

    def __init__(self, bases: Sequence[str], found: Sequence[HasPath]) -> None:
        self._bases = bases
        folders = sorted({self._folder_of(info.path) for info in found})
        self.schema = pa.schema([])
        if any("=" in folder for folder in folders):
            self.schema = _schema_of_paths([f"/{folder}file" for folder in folders])

    def _folder_of(self, path: str) -> str:
        # A file of the journal's list may be below none of them: a list of inputs was changed.
        base = next((base for base in self._bases if _is_below(path, base)), "")
        folder = posixpath.dirname(path.removeprefix(base)).strip("/")
        return f"{folder}/" if folder else ""

    def values_of(self, path: str) -> dict[str, Any]:
        """Of a file: column -> value. All columns of the folders are there, some of them None."""
        values: dict[str, Any] = dict.fromkeys(self.schema.names)
        if values:
            partitioning = ds.HivePartitioning(self.schema)
            stated = partitioning.parse(f"/{self._folder_of(path)}")
            values |= ds.get_partition_keys(stated)
        return values


def _is_below(path: str, base: str) -> bool:
    """Whether the path is that of ``base``, or of something in it."""
    return path == base or path.startswith(f"{base.rstrip('/')}/")


def _schema_of_paths(paths: Sequence[str]) -> pa.Schema:
    """What pyarrow takes the columns for that folders' names state. It opens no file for that; but
    it wants to know a format and a file system. Raises InvalidArgumentError."""
    hive = ds.HivePartitioning.discover()
    options = ds.FileSystemFactoryOptions(partition_base_dir="/", partitioning=hive)
    system = pafs.LocalFileSystem()
    factory = ds.FileSystemDatasetFactory(system, list(paths), ds.CsvFileFormat(), options)
    try:
        return factory.inspect(fragments=0)
    except pa.ArrowInvalid as error:
        raise InvalidArgumentError(f"the names of the input's folders: {error}") from None
