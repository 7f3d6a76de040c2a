"""The journal of a job: what it reads, how it is set, and which rows are in which committed part.

A file of JSON lines, appended and synced, in the folder ``_job`` of the output. A part counts if
and only if it is here: it is written first, then renamed, then noted. So after ``kill -9`` at any
moment the journal says which rows are done; parts that it does not name are removed by whoever
goes on. A last line without its end was torn, and is ignored. Locks exclude two runs; they end
with their process.
"""

import fcntl
import io
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import msgspec
from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.job import Job, differences, due_at

VERSION = 2
_MANY = 1 << 17
"""So many intervals of rows are gathered before those that touch are joined."""
Interval = tuple[int, int, int]
"""Rows of a file: (file, first, end)."""


class InputFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of the input, as it was when the job began. ``changed`` is in ns since 1970."""

    path: str
    size: int
    changed: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first line: of which job this is the journal. ``whole``: each file is a row, and all of
    them together count as the file 0."""

    version: int
    job: Job
    files: list[InputFile]
    whole: bool
    at: float = 0.0
    """In seconds since 1970."""


class FileRows(msgspec.Struct, frozen=True, tag="file"):
    """The input's file ``file`` (its index) was read to its end, and has so many rows."""

    file: int
    rows: int


class OutputPart(msgspec.Struct, frozen=True, tag="part"):
    """A committed part: names and bytes of its files, and its rows."""

    number: int
    files: dict[str, int]
    rows: list[Interval]
    written: int
    failed: int
    figures: dict[str, float]
    """Of this run so far, in seconds and counts: ``pipeline.py``."""
    schema: bytes | None = None
    """The output's, as Arrow serializes it; with the first rows of Parquet."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Every row is in a part. ``at``: in seconds since 1970."""

    at: float = 0.0


Line = Begin | FileRows | OutputPart | End


class Ranges:
    """Rows as disjoint intervals, sorted."""

    def __init__(self, pieces: Iterable[Interval] = ()) -> None:
        self.pieces: list[Interval] = []
        for file, first, end in sorted(pieces):
            last = self.pieces[-1] if self.pieces else (-1, 0, 0)
            if file == last[0] and first <= last[2]:
                self.pieces[-1] = file, last[1], max(end, last[2])
            else:
                self.pieces.append((file, first, end))

    def covers(self, file: int, first: int, end: int) -> bool:
        """Whether every row of [first, end) is here."""
        # If a piece has all of the rows, it is the last one that begins at `first` or before.
        at = bisect_right(self.pieces, (file, first, sys.maxsize))
        before = self.pieces[at - 1] if at else (-1, 0, 0)
        return first >= end or (before[0] == file and before[2] >= end)


class Record:
    """What a journal says."""

    def __init__(self, path: Path) -> None:
        """Read it, if it is there. Raises InvalidArgumentError for a whole line that is not one of
        ours."""
        self.folder = path.parent
        self.size = 0
        """Bytes of whole lines."""
        self.begin: Begin | None = None
        self.rows: dict[int, int] = {}
        """File -> its rows, of those read to the end."""
        self.schema: bytes | None = None
        self.parts: list[OutputPart] = []
        """Without their rows, of which there may be as many intervals as rows."""
        self.written = self.failed = 0
        """Rows in parts, and bad rows."""
        self.ended: End | None = None
        decoder = msgspec.json.Decoder(Line)
        pieces = list[Interval]()
        with path.open("rb") if path.is_file() else io.BytesIO() as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):  # else it was torn
                    try:
                        said = decoder.decode(line)
                    except msgspec.DecodeError as error:
                        bad = f"line {number} of {path} is damaged: {error}"
                        raise InvalidArgumentError(bad) from None
                    self.apply(said, len(line))
                    pieces += said.rows if isinstance(said, OutputPart) else ()
                    pieces = pieces if len(pieces) < _MANY else Ranges(pieces).pieces
        self.done = Ranges(pieces)
        """The rows that were committed when the journal was read."""

    def apply(self, line: Line, size: int) -> None:
        """Take a line of so many bytes in."""
        self.size += size
        if isinstance(line, Begin):
            if line.version != VERSION:
                raise InvalidArgumentError(
                    f"the journal in {self.folder} is of version {line.version}, not {VERSION}"
                )
            self.begin = line
        elif isinstance(line, FileRows):
            self.rows[line.file] = line.rows
        elif isinstance(line, OutputPart):
            self.parts.append(msgspec.structs.replace(line, rows=[]))
            self.written += line.written
            self.failed += line.failed
            self.schema = self.schema or line.schema
        else:
            self.ended = line

    def is_done(self, file: int) -> bool:
        """Whether all rows of a file were committed when the journal was read."""
        return file in self.rows and self.done.covers(file, 0, self.rows[file])

    @property
    def total(self) -> int | None:
        """Rows of the input, once all of it has been read."""
        assert self.begin is not None
        known = len(self.rows) == (1 if self.begin.whole else len(self.begin.files))
        return sum(self.rows.values()) if known else None

    def late(self, job: Job) -> bool:
        """Whether the job has ended later than it was to."""
        due = self.due(job)
        return self.ended is not None and due is not None and self.ended.at > due

    def due(self, job: Job) -> float | None:
        """Until when the job is to end, counted from its beginning."""
        assert self.begin is not None
        return due_at(job.finish_by, job.within, self.begin.at)

    @property
    def next_number(self) -> int:
        """Of the next part."""
        return self.parts[-1].number + 1 if self.parts else 0


class JobJournal:
    """The journal, open for one run."""

    def __init__(self, job: Job) -> None:
        """Take the locks and read what is there. Raises UnavailableError if another run has one:
        for this output, whatever its journal's folder, or for this journal."""
        folders = [job.journal_folder, *([] if "://" in job.output else [Path(job.output, "_job")])]
        self._path = folders[0] / "journal.jsonl"
        self._locks: list[int] = []
        for each in {folder.resolve() for folder in folders}:
            each.mkdir(parents=True, exist_ok=True)
            self._locks.append(os.open(each / "lock", os.O_RDWR | os.O_CREAT, 0o644))
            try:
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.close()
                raise UnavailableError(f"another run writes to {each.parent}") from None
        self._writing = threading.Lock()
        self.record = Record(self._path)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._locks.append(self._file)
        os.ftruncate(self._file, self.record.size)
        sync(self._path.parent)

    def begin(self, job: Job, files: list[InputFile], whole: bool) -> None:
        """Write the first line, or check that the one that is there says the same. Raises
        InvalidArgumentError that says what differs, if any row is committed; else begins anew."""
        begun = self.record.begin
        changes = differences(begun.job, job) + _changed(begun.files, files) if begun else []
        if changes and self.record.parts:
            raise InvalidArgumentError(
                f"{self._path.parent.parent} holds another job: {'; '.join(changes[:5])}"
            )
        if changes:
            os.ftruncate(self._file, 0)
            self.record = Record(self._path)
        if begun is None or changes:
            self.append(Begin(VERSION, job, files, whole, time.time()))
        else:  # the lists of files are equal: one of them in memory is enough
            self.record.begin = msgspec.structs.replace(begun, files=files)

    def append(self, line: Line) -> None:
        """For any thread. Returns when the line is on the disk. After an OSError nothing of it is
        there."""
        data = msgspec.json.encode(line) + b"\n"
        with self._writing:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self.record.size)
                raise
            self.record.apply(line, len(data))

    def close(self) -> None:
        """Give the locks back."""
        for descriptor in self._locks:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Make a local file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _changed(before: list[InputFile], now: list[InputFile]) -> list[str]:
    """How the input differs from what it was."""
    old, new = ({file.path: file for file in files} for files in (before, now))
    changes = [f"input {path} is gone" for path in old if path not in new]
    changes += [f"input {path} is new" for path in new if path not in old]
    return changes + [
        f"input {path} was {was.size:,} bytes, is {new[path].size:,}; changed at "
        f"{new[path].changed / 1e9:.3f}"
        for path, was in old.items()
        if path in new and new[path] != was
    ]
