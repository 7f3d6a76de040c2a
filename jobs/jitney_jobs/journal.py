"""The journal of a job: what it reads, how it is set, and which rows are in which committed part.

A file of JSON lines, appended and synced, in the folder ``_job`` of the output. A part counts if
and only if it is here: it is written first, then renamed, then noted. So after ``kill -9`` at any
moment the journal says which rows are done; parts that it does not name are removed by whoever
goes on. A last line without its end was torn, and is ignored. Locks exclude two runs; they end
with their process.
"""

import fcntl
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.job import Job, differences
from jitney_jobs.times import due_at

VERSION = 2
ERRORS = "_errors"
"""Folder of the bad rows: readers of data sets pass over names that begin so."""
_MANY = 1 << 17
"""While a journal is read, its intervals of rows are gathered in a list. Whenever the list has so
many, those that touch are joined, so that it stays small."""


class Interval(NamedTuple):
    """The rows [first, end) of a file, which is known by its index."""

    file: int
    first: int
    end: int


class InputFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of the input, as it was when the job began. ``changed`` is in ns since 1970."""

    path: str
    size: int
    changed: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first line: the job that the journal belongs to."""

    version: int
    job: Job
    files: list[InputFile]
    files_are_rows: bool = msgspec.field(name="whole")
    """Whether each file is a row. All files together then count as one file, whose index is 0."""
    at: float = 0.0
    """When the job began, in seconds since 1970."""
    schema: bytes | None = None
    """The input's columns with the types that all of its files get, as Arrow serializes them. None
    if its lines are written as they came, and in journals of earlier versions."""
    passed_over: dict[str, int] = {}
    """Kinds of files below the input that are not read, with counts."""


class FileRows(msgspec.Struct, frozen=True, tag="file", omit_defaults=True):
    """A file of the input was read to its end, or as far as it can be. ``file`` is its index."""

    file: int
    row_count: int = msgspec.field(name="rows")
    why_bad: str | None = None
    """Why it cannot be read any further."""


class OutputPart(msgspec.Struct, frozen=True, tag="part"):
    """A committed part: names and bytes of its files, and its rows."""

    number: int
    files: dict[str, int]
    intervals: list[Interval] = msgspec.field(name="rows")
    written: int
    """Good rows."""
    failed: int
    """Bad rows."""
    figures: dict[str, float]
    """Of this run until this part: ``RunFigures`` in ``gathering.py``."""
    schema: bytes | None = None
    """The output's schema, as Arrow serializes it. Only the first part of Parquet has it."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Every row is in a part. ``at``: in seconds since 1970."""

    at: float = 0.0


class Reopened(msgspec.Struct, frozen=True, tag="reopened"):
    """The bad rows of all parts so far, and the bad files, are done again. Error files of these
    parts count no more."""

    intervals: list[Interval] = msgspec.field(name="rows")
    """The bad rows."""


Entry = Begin | FileRows | OutputPart | End | Reopened
"""A line of the journal."""


class Ranges:
    """Rows as disjoint intervals, sorted."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self.intervals: list[Interval] = []
        for interval in sorted(intervals):
            self._append(interval)

    def _append(self, interval: Interval) -> None:
        """Add an interval that begins no earlier than the last one. They are joined if they
        touch."""
        last = self.intervals[-1] if self.intervals else None
        if last is None or last.file != interval.file or last.end < interval.first:
            self.intervals.append(interval)
        else:
            self.intervals[-1] = last._replace(end=max(last.end, interval.end))

    def without(self, taken: Iterable[Interval]) -> "Ranges":
        """These rows, but for ``taken``, whose intervals are disjoint."""
        left: list[Interval] = []
        rest = deque(sorted(taken))
        for interval in self.intervals:
            first = interval.first
            while rest and rest[0] < (interval.file, interval.end, 0):
                hole = rest[0]
                if hole.file == interval.file and hole.end > first:
                    if hole.first > first:
                        left.append(Interval(interval.file, first, hole.first))
                    first = hole.end
                    if hole.end > interval.end:
                        break  # it goes on in the next interval
                rest.popleft()
            if first < interval.end:
                left.append(Interval(interval.file, first, interval.end))
        return Ranges(left)

    def covers(self, file: int, first: int, end: int) -> bool:
        """Whether every row of [first, end) is here."""
        if first >= end:
            return True
        # If an interval has all of the rows, it is the last one that begins at `first` or before.
        index = bisect_right(self.intervals, (file, first, sys.maxsize)) - 1
        if index < 0:
            return False
        before = self.intervals[index]
        return before.file == file and before.end >= end


def _without_errors(part: OutputPart) -> OutputPart:
    files = {name: size for name, size in part.files.items() if not name.startswith(ERRORS)}
    return msgspec.structs.replace(part, files=files, failed=0)


class Record:
    """What a journal says."""

    def __init__(self, folder: Path) -> None:
        """What an empty journal in ``folder`` says: nothing."""
        self.folder = folder
        self.size = 0
        """Bytes of whole lines."""
        self.begin: Begin | None = None
        self.row_counts: dict[int, int] = {}
        """Rows of each file that was read to its end, by the file's index."""
        self.bad_files: dict[int, str] = {}
        """Why files cannot be read to their end, by the file's index."""
        self.schema: bytes | None = None
        self.parts: list[OutputPart] = []
        """Without their intervals, of which there may be as many as rows."""
        self.written = 0
        """Good rows in parts."""
        self.failed = 0
        """Bad rows in parts."""
        self.end: End | None = None
        self.done = Ranges()
        """The rows that were committed when the journal was read."""

    @classmethod
    def empty(cls) -> "Record":
        """For reading an input without a job."""
        return cls(Path())

    @classmethod
    def read(cls, path: Path) -> "Record":
        """An empty record if the file is not there. Raises InvalidArgumentError for a whole line
        that is damaged, and for a journal of another version."""
        record = cls(path.parent)
        if path.is_file():
            with path.open("rb") as lines:
                record._read(lines, path)
        return record

    def _read(self, lines: BinaryIO, path: Path) -> None:
        decoder = msgspec.json.Decoder(Entry)
        intervals: list[Interval] = []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # the last line, which was torn
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError as error:
                damaged = f"line {number} of {path} is damaged: {error}"
                raise InvalidArgumentError(damaged) from None
            self.apply(entry, len(line))
            if isinstance(entry, OutputPart):
                intervals += entry.intervals
            elif isinstance(entry, Reopened):
                intervals = Ranges(intervals).without(entry.intervals).intervals
            if len(intervals) >= _MANY:
                intervals = Ranges(intervals).intervals
        self.done = Ranges(intervals)

    def apply(self, entry: Entry, size: int) -> None:
        """Add an entry, whose line has ``size`` bytes."""
        self.size += size
        if isinstance(entry, Begin):
            if entry.version != VERSION:
                raise InvalidArgumentError(
                    f"the journal in {self.folder} is of version {entry.version}, not {VERSION}"
                )
            self.begin = entry
        elif isinstance(entry, FileRows):
            self.row_counts[entry.file] = entry.row_count
            if entry.why_bad is not None:
                self.bad_files[entry.file] = entry.why_bad
        elif isinstance(entry, OutputPart):
            self.parts.append(msgspec.structs.replace(entry, intervals=[]))
            self.written += entry.written
            self.failed += entry.failed
            self.schema = self.schema or entry.schema
        elif isinstance(entry, Reopened):
            self._reopen()
        else:
            self.end = entry

    def _reopen(self) -> None:
        """Forget that rows and files are bad. The rows of a bad file are not all known."""
        self.end = None
        self.failed = 0
        self.parts = [_without_errors(part) for part in self.parts]
        for file in self.bad_files:
            del self.row_counts[file]
        self.bad_files.clear()

    def is_done(self, file: int) -> bool:
        """Whether all rows of a file were committed when the journal was read."""
        if file not in self.row_counts:
            return False
        return self.done.covers(file, 0, self.row_counts[file])

    @property
    def total(self) -> int | None:
        """Rows of the input. None until all of it has been read."""
        assert self.begin is not None, "the job has begun"
        file_count = 1 if self.begin.files_are_rows else len(self.begin.files)
        if len(self.row_counts) < file_count:
            return None
        return sum(self.row_counts.values())

    def due(self, job: Job) -> float | None:
        """The deadline of ``job``, whose ``within`` counts from the first run. ``job`` has the
        settings of this run; its deadline may differ from that of the run before."""
        assert self.begin is not None, "the job has begun"
        return due_at(job.finish_by, job.within, self.begin.at)

    def is_late(self, job: Job) -> bool:
        """Whether the job has ended after the deadline of ``job``."""
        due = self.due(job)
        return self.end is not None and due is not None and self.end.at > due

    @property
    def next_number(self) -> int:
        """The number of the next part."""
        return self.parts[-1].number + 1 if self.parts else 0


class JobJournal:
    """The journal, open for one run."""

    def __init__(self, job: Job) -> None:
        """Take the locks and read what is there. Raises UnavailableError if another run has a lock
        of this output, wherever its journal is, or of this journal; InvalidArgumentError for a
        journal that is damaged."""
        self._path = job.journal_folder / "journal.jsonl"
        self._owner = job.output if job.journal is None else job.journal
        """What the journal is called in errors."""
        self._descriptors: list[int] = []
        """Of the locks and of the journal. A lock ends when its descriptor is closed."""
        self._writing = threading.Lock()
        try:
            self._lock(job.journal_folder, self._owner)
            own_folder = Path(job.output, "_job")
            is_local = "://" not in job.output
            if is_local and own_folder.resolve() != job.journal_folder.resolve():
                self._lock(own_folder, job.output)
            self.record = Record.read(self._path)
            self._file = self._open(self._path, os.O_APPEND)
            os.ftruncate(self._file, self.record.size)
            sync(self._path.parent)
        except BaseException:
            self.close()  # the next try, in the same process, can take the locks
            raise

    def _open(self, path: Path, flags: int = 0) -> int:
        """A descriptor that :meth:`close` closes."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
        self._descriptors.append(descriptor)
        return descriptor

    def _lock(self, folder: Path, owner: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lock = self._open(folder / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UnavailableError(f"another run writes to {owner}") from None

    def begin_or_resume(
        self,
        job: Job,
        files: list[InputFile],
        files_are_rows: bool,
        look_ahead: Callable[[], bytes | None] = lambda: None,
        passed_over: dict[str, int] | None = None,
    ) -> None:
        """Write the first line, or check that the one that is there has the same job and files.
        Raises InvalidArgumentError that says what differs, if any good row is committed. If none
        is, the journal begins anew. ``look_ahead`` gives the input's schema; it is called for a new
        line alone, and may raise."""
        begin = self.record.begin
        if begin is None:
            self._append_begin(job, files, files_are_rows, look_ahead, passed_over or {})
            return
        changes = differences(begin.job, job) + _changed(begin.files, files)
        if not changes:
            # The lists of files are equal: one of them in memory is enough.
            self.record.begin = msgspec.structs.replace(begin, files=files)
            return
        if self.record.written:
            raise InvalidArgumentError(f"{self._owner} holds another job: {'; '.join(changes[:5])}")
        os.ftruncate(self._file, 0)
        self.record = Record(self._path.parent)
        self._append_begin(job, files, files_are_rows, look_ahead, passed_over or {})

    def _append_begin(
        self,
        job: Job,
        files: list[InputFile],
        files_are_rows: bool,
        look_ahead: Callable[[], bytes | None],
        passed_over: dict[str, int],
    ) -> None:
        schema = look_ahead()
        begin = Begin(VERSION, job, files, files_are_rows, time.time(), schema, passed_over)
        self.append(begin)

    def reopen_bad(self, rows: Iterable[Interval]) -> None:
        """Have the bad rows, and the files that could not be read, done again. ``rows``: those that
        the error files list. For use before the run begins to read."""
        entry = Reopened(Ranges(rows).intervals)
        self.append(entry)
        self.record.done = self.record.done.without(entry.intervals)

    def append(self, entry: Entry) -> None:
        """For any thread. Returns when the line is on the disk. After an OSError nothing of it is
        there."""
        data = msgspec.json.encode(entry) + b"\n"
        with self._writing:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self.record.size)
                raise
            self.record.apply(entry, len(data))

    def close(self) -> None:
        """Give the locks back."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def sync(path: Path) -> None:
    """Make a local file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _changed(before: list[InputFile], now: list[InputFile]) -> list[str]:
    """How the input differs from what it was."""
    old = {file.path: file for file in before}
    new = {file.path: file for file in now}
    changes = [f"input {path} is gone" for path in old if path not in new]
    changes += [f"input {path} is new" for path in new if path not in old]
    return changes + [
        f"input {path} was {was.size:,} bytes, is {new[path].size:,}; changed at "
        f"{new[path].changed / 1e9:.3f}"
        for path, was in old.items()
        if path in new and new[path] != was
    ]
