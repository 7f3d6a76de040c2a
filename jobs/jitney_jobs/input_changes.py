"""How the input of a job differs from the list of files in its journal.

Files may come, be touched, grow or be replaced while a job is down or runs. The job goes on with
its list: what is not on it is not read, and what has grown is read as far as it went. What differs
is said when a run begins, and at the end.
"""

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from jitney_jobs.arrow import pafs
from jitney_jobs.encodings import Encoding
from jitney_jobs.input_files import compression_of
from jitney_jobs.journal_entries import InputFile

_END_BYTES = 64 << 10
_MOST_DIGESTS = 10_000
_MOST_REMOTE_DIGESTS = 100
"""Files whose ends are read for a digest when the job begins. If there are more, none is: then
files are compared by size and time alone."""
_READERS = 16
_MOST_SHOWN = 10


class ChangeKind(StrEnum):
    NEW = "new"
    GONE = "gone"
    TOUCHED = "touched"
    REWRITTEN = "rewritten"
    """Of the same size as before. Whether the bytes are the same is not known."""
    GROWN = "grown"
    REPLACED = "replaced"


@dataclass(frozen=True)
class InputChange:
    """A file that is not as it is in the list."""

    kind: ChangeKind
    index: int | None
    """In the list. None if it is not there."""
    before: InputFile | None
    now: InputFile | None

    @property
    def text(self) -> str:
        file = self.now or self.before
        assert file is not None
        match self.kind:
            case ChangeKind.NEW:
                return f"{file.path} has come since, and is not read"
            case ChangeKind.GONE:
                return f"{file.path} is gone"
            case ChangeKind.TOUCHED:
                return f"{file.path} was touched {_clock(file)}; its bytes are the same"
            case ChangeKind.REWRITTEN:
                return f"{file.path} was written anew {_clock(file)}, with as many bytes"
        assert self.before is not None
        sizes = f"{self.before.size:,} bytes, is {file.size:,}"
        if self.kind is ChangeKind.GROWN:
            return f"{file.path} was {sizes}: rows beyond these are not done"
        return f"{file.path} was replaced {_clock(file)}: it was {sizes}"


def with_digests(fs: pafs.FileSystem, files: list[InputFile]) -> list[InputFile]:
    """The files with digests of their ends, unless there are too many. A file that cannot be read
    gets none: the reader of its rows says so."""
    is_local = isinstance(fs, pafs.LocalFileSystem)
    if len(files) > (_MOST_DIGESTS if is_local else _MOST_REMOTE_DIGESTS):
        return files

    def with_digest(file: InputFile) -> InputFile:
        try:
            ends = _digest_of_ends(fs, file.path, file.size)
        except OSError:
            return file
        return InputFile(file.path, file.size, file.changed, ends)

    with ThreadPoolExecutor(1 if is_local else _READERS) as pool:
        return list(pool.map(with_digest, files))


def input_changes(
    fs: pafs.FileSystem, listed: list[InputFile], found: list[InputFile], are_lines: bool
) -> list[InputChange]:
    """``found``: the input as it is now. ``are_lines``: the files may be appended to. Raises
    OSError."""
    now = {file.path: file for file in found}
    paths = {file.path for file in listed}
    changes = []
    for index, file in enumerate(listed):
        there = now.get(file.path)
        if there is None:
            changes.append(InputChange(ChangeKind.GONE, index, file, None))
        elif (there.size, there.changed) != (file.size, file.changed):
            kind = _kind_of(fs, file, there, are_lines)
            if kind in (ChangeKind.REPLACED, ChangeKind.GROWN):
                (there,) = with_digests(fs, [there])
            changes.append(InputChange(kind, index, file, there))
    changes += [
        InputChange(ChangeKind.NEW, None, None, file) for file in found if file.path not in paths
    ]
    return changes


def texts_of(changes: list[InputChange]) -> list[str]:
    """A few lines for the user."""
    texts = [change.text for change in changes[:_MOST_SHOWN]]
    if len(changes) > _MOST_SHOWN:
        counts = {kind: sum(change.kind is kind for change in changes) for kind in ChangeKind}
        shown = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        texts.append(f"files that differ in all: {shown}")
    return texts


def _kind_of(fs: pafs.FileSystem, before: InputFile, now: InputFile, are_lines: bool) -> ChangeKind:
    has_grown = now.size > before.size
    if now.size < before.size or (has_grown and not are_lines):
        return ChangeKind.REPLACED
    if before.ends and _digest_of_ends(fs, before.path, before.size) != before.ends:
        return ChangeKind.REPLACED
    if has_grown:
        return ChangeKind.GROWN
    return ChangeKind.TOUCHED if before.ends else ChangeKind.REWRITTEN


def _digest_of_ends(fs: pafs.FileSystem, path: str, size: int) -> str:
    """Of the first and last bytes of the first ``size`` bytes."""
    digest = hashlib.sha256()
    with fs.open_input_file(path) as file:
        digest.update(file.read_at(min(size, _END_BYTES), 0))
        tail = max(_END_BYTES, size - _END_BYTES)
        if tail < size:
            digest.update(file.read_at(size - tail, tail))
    return digest.hexdigest()[:32]


def _clock(file: InputFile) -> str:
    return f"at {datetime.fromtimestamp(file.changed / 1e9):%Y-%m-%d %H:%M:%S}"


def up_to_listed_end(raw: Any, file: InputFile, encoding: Encoding) -> Any:
    """A file of lines, as far as it went when it was listed. A line that was begun then is read to
    its end."""
    if raw.size() <= file.size:
        return raw
    newline = b""
    if compression_of(file.path) is None:
        newline = encoding.newline(raw.read(4))
        raw.seek(0)
    return _ListedBytes(raw, file.size, newline)


class _ListedBytes(io.RawIOBase):
    """The first bytes of a file that has grown."""

    def __init__(self, raw: Any, size: int, newline: bytes) -> None:
        """``newline``: the end of a line in the file's encoding. Empty: a line that is begun is not
        read to its end."""
        self._raw = raw
        self._left = size
        self._newline = newline
        self._read_bytes = 0
        self._last = newline
        """The last character that was read, or a part of it."""

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._raw.tell())

    def readinto(self, buffer: Any) -> int:
        width = len(self._newline)
        if self._left > 0:
            data = self._raw.read(min(self._left, len(buffer)))
            self._left -= len(data)
        elif self._last != self._newline or (width > 1 and self._read_bytes % width):
            data = self._raw.read(len(buffer))
            data = data[: self._end_of_line(data)]
        else:
            return 0
        self._read_bytes += len(data)
        self._last = (self._last + data)[-width:] if width and data else self._newline
        buffer[: len(data)] = data
        return len(data)

    def _end_of_line(self, data: bytes) -> int:
        """Where the first line ends in what is read next, in bytes. Characters may have several:
        then an end begins at a multiple of them in the file."""
        width = len(self._newline)
        known = self._read_bytes % width
        whole = self._last[width - known :] + data if known else data
        at = whole.find(self._newline)
        while at >= 0 and at % width:
            at = whole.find(self._newline, at + 1)
        return len(data) if at < 0 else at + width - known
