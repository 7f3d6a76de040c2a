"""What a journal says, read line by line: the job, its files, the committed rows.

Every line is held against its checksum, and every part against its own counts, the files, and the
parts before it. So a journal that was damaged is refused instead of losing or doubling rows.
"""

from pathlib import Path
from typing import BinaryIO

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.job import Job
from jitney_jobs.journal_entries import (
    ERRORS,
    READ_VERSIONS,
    VERSION,
    Again,
    Begin,
    Claim,
    Elsewhere,
    End,
    Entry,
    FileRows,
    InputFile,
    InputNow,
    Interval,
    OutputPart,
    Released,
    Reopened,
    Sealed,
    Undone,
    decode,
    was_reopened,
)
from jitney_jobs.row_ranges import Ranges, ShardRows, row_count_of
from jitney_jobs.times import due_at

MANY = 1 << 17
"""While a journal is read, its intervals of rows are gathered in a list. Whenever the list has so
many, those that touch are joined, so that it stays small."""
_REPAIR = (
    "put back a copy of the journal; or delete this line of it: what the line noted is then done "
    "again, once"
)

REPLACE = "put back a copy of the journal; without one, do the job anew with another output"
"""What to do if it is not known what the job was."""


def without_errors(part: OutputPart) -> OutputPart:
    """A part whose bad rows are done again."""
    files = {name: size for name, size in part.files.items() if not name.startswith(ERRORS)}
    return msgspec.structs.replace(part, files=files, failed=0)


class Record:
    """What a journal says."""

    def __init__(self, folder: Path | None, where: str | None = None) -> None:
        """What an empty journal in ``folder`` says: nothing."""
        self.folder = folder
        """None for a journal on object storage."""
        self.where = str(folder) if where is None else where
        """For errors."""
        self.begin: Begin | None = None
        """With the settings and the files as later runs have noted them."""
        self.shard_rows: ShardRows | None = None
        """The rows that the job has. None: all rows of its files."""
        self.row_counts: dict[int, int] = {}
        """Rows of each file that was read to its end, by the file's index; of a bad file those that
        are known."""
        self.bad_files: dict[int, str] = {}
        """Why files cannot be read to their end, by the file's index."""
        self.schema: bytes | None = None
        self.has_final_columns = True
        """As in :class:`OutputPart`: that of the last part."""
        self.parts: list[OutputPart] = []
        """Their intervals are left out here: there may be as many as rows."""
        self.written = 0
        """Good rows in parts."""
        self.failed = 0
        """Bad rows in parts."""
        self.end: End | None = None
        self.claim: Claim | None = None
        """Of the last run, unless it has ended and has said so."""
        self.elsewhere: Elsewhere | None = None
        self.is_sealed = False
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
        record, _ = read_file(path)
        return record

    def apply(self, entry: Entry) -> None:
        """Add an entry. Raises InvalidArgumentError for a journal of another version."""
        match entry:
            case Begin():
                self._begin_with(entry)
            case Again() if self.begin is not None:
                job = entry.job
                self.begin = msgspec.structs.replace(self.begin, job=job, prints=entry.prints)
            case InputNow() if self.begin is not None:
                self.begin.files[entry.index] = entry.file
                if self.shard_rows is not None:
                    self.shard_rows.note_replaced(entry.index)
                self.row_counts.pop(entry.index, None)
                self.bad_files.pop(entry.index, None)
            case FileRows():
                self.row_counts[entry.file] = entry.row_count
                self.bad_files.pop(entry.file, None)
                if entry.why_bad is not None:
                    self.bad_files[entry.file] = entry.why_bad
            case OutputPart():
                self.parts.append(msgspec.structs.replace(entry, intervals=[]))
                self.written += entry.written
                self.failed += entry.failed
                self.schema = self.schema or entry.schema
                self.has_final_columns = entry.has_final_columns
            case End():
                self.end = entry
            case Reopened():
                self._reopen(entry)
            case Undone():
                self._forget_parts()
            case Claim():
                self.claim = entry
            case Released() if self.claim is not None and self.claim.token == entry.token:
                self.claim = None
            case Elsewhere():
                self.elsewhere = entry
            case Sealed():
                self.is_sealed = True

    def _begin_with(self, entry: Begin) -> None:
        if entry.version not in READ_VERSIONS:
            bound = f"not {VERSION}: go on with the version of Jitney that began the job"
            raise InvalidArgumentError(
                f"the journal in {self.where} is of version {entry.version}, {bound}"
            )
        # On object storage the lines of a job that begins anew come after those of the one before.
        self.begin = entry
        self.shard_rows = None if entry.ranges is None else ShardRows(entry.ranges)
        self.row_counts = {}
        self.bad_files = {}
        self._forget_parts()
        self.schema = entry.result_schema

    def _forget_parts(self) -> None:
        self.schema = None
        self.has_final_columns = True
        self.parts = []
        self.written = 0
        self.failed = 0
        self.done = Ranges()
        self.end = None

    def _reopen(self, entry: Reopened) -> None:
        """Forget that rows and files are bad. The rows of a bad file are not all known."""
        self.end = None
        self.failed = 0
        self.parts = [without_errors(part) for part in self.parts]
        self.done = self.done.without(entry.intervals)
        for file in self.bad_files:
            del self.row_counts[file]
        self.bad_files = {}

    @property
    def has_bad(self) -> bool:
        """Whether rows or files are bad."""
        return self.failed > 0 or bool(self.bad_files)

    @property
    def listed_files(self) -> list[InputFile] | None:
        """The input of the job that must go on. None if no good row is committed: then the job may
        begin anew."""
        return self.begin.files if self.begin is not None and self.written else None

    def is_done(self, file: int) -> bool:
        """Whether all rows of a file were committed when the journal was read."""
        if file not in self.row_counts:
            return False
        first = 0
        if self.shard_rows is not None:
            first = self.shard_rows.ranges[file].first
        return self.done.covers(file, first, self.row_counts[file])

    @property
    def left_out(self) -> Ranges:
        """The rows that are not read: those that were committed, and those of other shards."""
        if self.shard_rows is None:
            return self.done
        return Ranges([*self.done.intervals, *self.shard_rows.outside])

    def beyond_end(self, entry: FileRows) -> str | None:
        """What is wrong if a part has rows beyond the end of a file. None if no part has."""
        last = self.done.last_of(entry.file)
        if last is None or last.end <= entry.row_count:
            return None
        rows = f"rows {last.first:,} to {last.end - 1:,} of {self.path_of(entry.file)}"
        return f"it has {rows}, which has {entry.row_count:,} rows"

    def path_of(self, file: int) -> str:
        """For errors."""
        if self.begin is None or self.begin.files_are_rows:
            return "the input"
        return self.begin.files[file].path

    @property
    def total(self) -> int | None:
        """Rows of the input, or of the shard. Of a shard they are known from the beginning, of any
        other job once all files were read to their end; None before."""
        if self.shard_rows is not None:
            return self.shard_rows.total(self.row_counts)
        if len(self.row_counts) < self.file_count:
            return None
        return sum(self.row_counts.values())

    @property
    def file_count(self) -> int:
        """How many files have rows: one, if the files are rows."""
        assert self.begin is not None, "the job has begun"
        return 1 if self.begin.files_are_rows else len(self.begin.files)

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


class RecordReader:
    """Makes a record of a journal's lines."""

    def __init__(self, record: Record, repair: str = _REPAIR) -> None:
        """``repair``: what to do about a damaged line."""
        self._record = record
        self._repair = repair
        self._intervals: list[Interval] = []

    def add(self, line: bytes, where: str) -> None:
        """A whole line. Raises InvalidArgumentError, which says ``where`` the line is, if it is
        damaged or does not fit those before it."""
        try:
            entry, has_checksum = decode(line)
            self._check(entry, has_checksum)
        except ValueError as error:
            # Without this line the bad rows that have become good would be in two parts.
            repair = REPLACE if was_reopened(line) else self._repair
            raise self._damaged(where, str(error), repair) from None
        self._record.apply(entry)
        if isinstance(entry, Begin | Undone):
            self._intervals = []
        elif isinstance(entry, OutputPart):
            self._intervals += entry.intervals
        elif isinstance(entry, Reopened):
            self._intervals = self._joined().without(entry.intervals).intervals
        if len(self._intervals) >= MANY:
            self._intervals = self._joined().intervals

    def finish(self) -> None:
        """All lines were read. Raises InvalidArgumentError if the parts do not fit together."""
        record = self._record
        record.done = self._joined()
        if record.end is not None:
            row_count = record.total if record.end.rows is None else record.end.rows
            # The line of a part was deleted since: its rows are to be done again.
            if row_count is not None and row_count != record.written + record.failed:
                record.end = None
        for entry in record.row_counts.items():
            why = record.beyond_end(FileRows(*entry))
            if why is not None:
                raise self._damaged(record.where, why)

    def _joined(self) -> Ranges:
        """Raises InvalidArgumentError if a row is in two parts."""
        ranges = Ranges(self._intervals)
        if ranges.twice is not None:
            file, first, end = ranges.twice
            rows = f"rows {first:,} to {end - 1:,} of {self._record.path_of(file)}"
            # Which of the lines is at fault, or whether one is missing, is not known.
            raise self._damaged(self._record.where, f"{rows} are in two parts", REPLACE)
        return ranges

    def _check(self, entry: Entry, has_checksum: bool) -> None:
        """Raises ValueError if an entry cannot stand where it does."""
        record = self._record
        begin = entry if isinstance(entry, Begin) else record.begin
        if not has_checksum and (begin is None or begin.version == VERSION):
            raise ValueError("it has no checksum")
        if isinstance(entry, Begin):
            if record.written:
                raise ValueError("a second job begins there")
        elif isinstance(entry, Claim | Released | Elsewhere | Sealed):
            pass
        elif begin is None:
            raise ValueError("the line before it, with the job, is missing")
        elif isinstance(entry, InputNow) and not 0 <= entry.index < len(begin.files):
            raise ValueError(f"there is no file {entry.index}")
        elif isinstance(entry, FileRows):
            self._check_file(entry.file)
            before = record.row_counts.get(entry.file, entry.row_count)
            if entry.why_bad is not None or entry.file in record.bad_files:
                before = entry.row_count  # how far a damaged file is read may differ
            if entry.row_count < 0 or before != entry.row_count:
                raise ValueError(f"{entry.row_count:,} rows are noted, and {before:,} before")
        elif isinstance(entry, OutputPart):
            self._check_part(entry)
        elif isinstance(entry, Reopened):
            self._rows_of(entry.intervals)

    def _check_part(self, part: OutputPart) -> None:
        if part.number < self._record.next_number:
            raise ValueError(f"part {part.number} comes after part {self._record.next_number - 1}")
        row_count = self._rows_of(part.intervals)
        if min(part.written, part.failed) < 0 or part.written + part.failed != row_count:
            counts = f"{part.written:,} written and {part.failed:,} bad rows"
            raise ValueError(f"part {part.number} has {counts}, but ranges of {row_count:,} rows")

    def _rows_of(self, intervals: list[Interval]) -> int:
        """How many rows they are. Raises ValueError for one that cannot be."""
        for file, first, end in intervals:
            self._check_file(file)
            if not 0 <= first < end:
                raise ValueError(f"rows {first:,} to {end - 1:,} are no range")
        return row_count_of(intervals)

    def _check_file(self, file: int) -> None:
        if not 0 <= file < self._record.file_count:
            raise ValueError(f"there is no file {file}")

    def _damaged(self, where: str, why: str, repair: str | None = None) -> InvalidArgumentError:
        if repair is None:
            repair = self._repair
        if self._record.begin is None:
            repair = REPLACE
        return InvalidArgumentError(f"{where} is damaged: {why}; {repair}")


def read_file(path: Path) -> tuple[Record, int]:
    """What a journal in a file says, and the bytes of its whole lines. An empty record if the file
    is not there. Raises InvalidArgumentError as :meth:`Record.read`."""
    record = Record(path.parent)
    if not path.is_file():
        return record, 0
    reader = RecordReader(record)
    with path.open("rb") as lines:
        size = _read_lines(lines, path, reader)
    reader.finish()
    return record, size


def _read_lines(lines: BinaryIO, path: Path, reader: RecordReader) -> int:
    """The bytes of the whole lines."""
    size = 0
    for number, line in enumerate(lines, 1):
        is_last = not lines.peek(1)  # type: ignore[attr-defined]
        # What a loss of power has torn may be without its end, or have a block of zeros in it.
        if is_last and (not line.endswith(b"\n") or b"\0" in line):
            break
        reader.add(line, f"line {number} of {path}")
        size += len(line)
    return size
