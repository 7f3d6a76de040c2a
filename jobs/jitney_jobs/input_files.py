"""The files of a job's input: found by a path, a folder or a glob; their format, and the columns
that the names of their folders state.
"""

import fnmatch
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pafs
from jitney_jobs.job import InputFormat

_SUFFIXES: dict[str, InputFormat] = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"), "image"),
}
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_PARTITION = re.compile(r"([^=]+)=(.*)")
"""A folder's name that states a column: ``year=2026``."""


class Found(NamedTuple):
    """What a path leads to."""

    base: str
    """The folder that was searched. If the path is that of one file, the path."""
    files: list[pafs.FileInfo]
    hidden: int = 0
    """Files whose names, or those of their folders, begin with ``_`` or ``.``."""


def find_files(fs: pafs.FileSystem, path: str) -> Found:
    """The files that a path means: that of a file, of a folder, or a glob. Below the folder, names
    that begin with ``_`` or ``.`` are passed over. Raises InvalidArgumentError if there is
    nothing, and OSError."""
    info = fs.get_file_info(path)
    if info.type == pafs.FileType.File:
        return Found(path, [info])
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
    hidden = 0
    for info in infos:
        is_file = info.type == pafs.FileType.File
        is_meant = glob is None or _matches(info.path, glob)
        if not is_file or not is_meant:
            continue
        if _is_hidden(info.path.removeprefix(base)):
            hidden += 1
        else:
            found.append(info)
    return Found(base, found, hidden)


def kinds_of(files: Iterable[pafs.FileInfo]) -> dict[str, int]:
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


def _is_hidden(path: str) -> bool:
    return any(name[:1] in ("_", ".") for name in path.split("/"))


def _matches(path: str, glob: str) -> bool:
    """``*`` crosses folders only if the glob has ``**``."""
    if "**" not in glob and path.count("/") != glob.count("/"):
        return False
    return fnmatch.fnmatchcase(path, glob)


def common_format(source: str, found: list[pafs.FileInfo]) -> InputFormat:
    """By the files' names. Raises InvalidArgumentError if they have several formats, or none."""
    formats = {format_of(info.path) for info in found} - {None}
    if len(formats) == 1:
        (format,) = formats
        assert format is not None
        return format
    known = ", ".join(sorted(map(str, formats))) or "no known kind"
    there = kinds_text(kinds_of(found)) or "no files"
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


def columns_of_folders(path: str, base: str) -> dict[str, str]:
    """The columns that the names of a file's folders below ``base`` state: ``year=2026``."""
    columns: dict[str, str] = {}
    for folder in posixpath.dirname(path.removeprefix(base)).split("/"):
        match = _PARTITION.fullmatch(folder)
        if match is not None:
            name = unquote(match[1])
            columns[name] = unquote(match[2])
    return columns
