"""The journal of a job: what it reads, how it is set, and which rows are in which committed part.

A part counts if and only if it is here: it is written first, then noted. So after ``kill -9`` at
any moment the journal says which rows are done; the next run removes parts that it does not
name. It is a file in the folder ``_job`` of the output, or in a folder that the job names
(``journal_file.py``); beside an output on S3 it is objects (``journal_objects.py``).
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_jobs.addresses import without_keys
from jitney_jobs.fingerprints import print_differences
from jitney_jobs.job import Job, job_without_keys
from jitney_jobs.job_differences import differences, differences_text
from jitney_jobs.journal_entries import (
    ERRORS,
    VERSION,
    Again,
    Begin,
    End,
    Entry,
    FileRows,
    InputFile,
    InputNow,
    Interval,
    OutputPart,
    Reopened,
    Undone,
)
from jitney_jobs.journal_file import JournalFile
from jitney_jobs.journal_record import REPLACE, Record
from jitney_jobs.output_files import objects_at
from jitney_jobs.row_ranges import Ranges
from jitney_jobs.shard_plan import Plan
from jitney_jobs.shards import Shard

__all__ = [
    "ERRORS",
    "Begin",
    "End",
    "Entry",
    "FileRows",
    "InputFile",
    "InputNow",
    "Interval",
    "JobJournal",
    "OutputPart",
    "Ranges",
    "Record",
    "read_journal",
]


class _Store(Protocol):
    """Where the lines are. One run has it open."""

    record: Record
    """What is there. :meth:`append` adds to it."""

    @property
    def part_mark(self) -> str:
        """What the name of the next part ends with."""

    @property
    def mark_of_run(self) -> str:
        """What follows the number in the names of all parts of this run."""

    def may_remove(self, part: str) -> bool:
        """Whether a file of a part that no entry names is of a run that can commit no more."""

    def restart(self) -> None:
        """Begin anew: nothing of the job counts any more."""

    def append(self, entry: Entry) -> None:
        """Returns when the entry is there for good. Raises OSError."""

    def settle(self) -> None:
        """Find out whether the last :meth:`append` counts, if its error left that open. Raises as
        that."""

    def close(self) -> None:
        """Let another run have it."""


class JobJournal:
    """The journal, open for one run."""

    def __init__(self, job: Job, retries_bad: bool = False) -> None:
        """Exclude other runs, and read what is there. ``retries_bad``: this run does again what is
        bad, also of a job that is complete. Raises UnavailableError if another run writes
        to this output or this journal; InvalidArgumentError for a journal that is damaged; OSError
        if the storage fails."""
        self._owner = job_without_keys(job).output if job.journal is None else job.journal
        """What the journal is called in errors."""
        self._retries_bad = retries_bad
        self._writing = threading.Lock()
        self._folder = _local_folder(job.output, job.journal, job.its_shard)
        self._store: _Store
        if self._folder is not None:
            self._store = JournalFile(job, self._folder)
        else:
            from jitney_jobs.journal_objects import JournalObjects  # boto3 may be missing

            self._store = JournalObjects(job, retries_bad)

    @property
    def record(self) -> Record:
        """What the journal says now."""
        return self._store.record

    def begin_or_resume(
        self,
        job: Job,
        files: list[InputFile],
        files_are_rows: bool,
        prints: dict[str, str] | None = None,
        look_ahead: Callable[[], bytes | None] = lambda: None,
        passed_over: dict[str, int] | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Note the job, or check that the one that is there is the same. If no good row is
        committed, the journal begins anew. Otherwise it raises InvalidArgumentError that says what
        differs, if anything does.

        ``prints``: of ``fingerprints.py``. ``look_ahead`` gives the input's schema; it is called
        where the journal begins, and may raise. ``passed_over``: as in :class:`Begin`. ``plan``: of
        the shards, if the job is one of them."""
        prints = prints or {}
        begin = self.record.begin
        id = secrets.token_hex(8) if begin is None else begin.id
        if plan is not None:
            id = plan.id
        # What one run accepted, a run that resumes the job has not accepted.
        noted_job = msgspec.structs.replace(job_without_keys(job), accept_changes=False)
        entry = None
        if begin is None or not self.record.written:
            entry = Begin(
                version=VERSION,
                job=noted_job,
                files=files,
                files_are_rows=files_are_rows,
                at=time.time(),
                prints=prints,
                id=id,
                passed_over=passed_over or {},
            )
            if plan is not None:
                entry = plan.begin_shard(entry)
            elif begin is None or not _is_same(begin, entry):
                entry = msgspec.structs.replace(entry, schema=look_ahead())
        if self._folder is not None and _is_s3(job.output):
            from jitney_jobs.journal_objects import note_elsewhere  # boto3 may be missing

            note_elsewhere(job, id, self._folder)
        if entry is not None:
            self._begin(entry)
            return
        assert begin is not None, "rows are committed"
        self._go_on(begin, noted_job, id, prints, accepts_changes=job.accept_changes)

    def _go_on(
        self, begin: Begin, job: Job, id: str, prints: dict[str, str], accepts_changes: bool
    ) -> None:
        """Go on with the job that has begun, whose settings are now those of ``job``. Raises
        InvalidArgumentError that says what differs, if it is another job."""
        if begin.id != id:
            raise InvalidArgumentError(
                f"{self._owner} has rows of shard {job.shard} that belong to another plan: put "
                "that one back, or choose another output"
            )
        changes = differences(job_without_keys(begin.job), job)
        # Journals of version 2 have no fingerprints.
        changes_of_model = print_differences(begin.prints, prints) if begin.prints else []
        if not accepts_changes:
            changes += changes_of_model
        if changes:
            text = differences_text(changes)
            raise InvalidArgumentError(f"{self._owner} holds another job: {text}")
        goes_on = self.record.end is None or self.reopens
        if goes_on and (job != begin.job or changes_of_model):
            self.append(Again(job, prints, time.time()))
        rows = self.record.written + self.record.failed
        has_more = job.limit is None or job.limit > rows
        if not self.record.has_final_columns and has_more:
            self.append(Undone())

    def _begin(self, entry: Begin) -> None:
        before = self.record.begin
        if before is not None:
            if _is_same(before, entry):
                # The lists of files are equal: one of them in memory is enough.
                self.record.begin = msgspec.structs.replace(before, files=entry.files)
                return
            self._store.restart()
        self.append(entry)

    @property
    def reopens(self) -> bool:
        """Whether this run is to do again what is bad, and anything is."""
        return self._retries_bad and self.record.has_bad

    def reopen_bad(self, rows: Iterable[Interval]) -> None:
        """Have the bad rows, and the files that could not be read, done again. ``rows``: those that
        the error files list. For use before the run begins to read."""
        self.append(Reopened(Ranges(rows).intervals))

    def append(self, entry: Entry) -> None:
        """For any thread. Returns when the entry is there for good. After an OSError it does not
        count, or the next call finds out whether it does. Raises UnavailableError if another run
        has taken the job over, and InvalidArgumentError if a file turns out to be shorter than the
        journal says."""
        if isinstance(entry, FileRows):
            why = self.record.beyond_end(entry)
            if why is not None:
                raise InvalidArgumentError(f"{self.record.where} is damaged: {why}; {REPLACE}")
        with self._writing:
            self._store.append(entry)

    def next_part(self) -> tuple[int, str]:
        """The number of the next part, and what its name ends with. Raises as :meth:`append`."""
        with self._writing:
            self._store.settle()
            return self.record.next_number, self._store.part_mark

    @property
    def mark_of_run(self) -> str:
        """What follows the number in the names of parts that other processes write for this run. A
        mark of their own follows it."""
        return self._store.mark_of_run

    def may_remove(self, part: str) -> bool:
        """Whether a file of a part that is not in the journal may be removed."""
        return self._store.may_remove(part)

    def close(self) -> None:
        """Let another run have it."""
        self._store.close()


def _is_same(before: Begin, entry: Begin) -> bool:
    """Whether the journal can keep its first line: ``entry`` differs from it at most in its time
    and in what was found in the same files."""
    now = msgspec.structs.replace(
        entry,
        at=before.at,
        schema=before.schema,
        passed_over=before.passed_over,
        result_schema=before.result_schema,
    )
    return before == now


def read_journal(output: str, journal: str | None, shard: Shard | None = None) -> Record:
    """What the journal of an output says, or that of one of its shards; a run may have it open. An
    empty record if there is none. Raises InvalidArgumentError for a journal that is damaged, and
    OSError."""
    folder = _local_folder(output, journal, shard)
    if folder is not None:
        return Record.read(folder / "journal.jsonl")
    from jitney_jobs.journal_objects import read_objects  # boto3 may be missing

    record, _ = read_objects(objects_at(output), shard)
    if record.elsewhere is not None:
        raise InvalidArgumentError(f"its journal is {record.elsewhere.place}: name that folder")
    return record


def _local_folder(output: str, journal: str | None, shard: Shard | None) -> Path | None:
    """The folder of a journal in a file. None for one of objects beside the output. Raises
    InvalidArgumentError if the output's storage can have neither."""
    if journal is not None:
        return Path(journal)
    if "://" not in output:
        folder = Path(output, "_job")
        return folder if shard is None else folder / shard.folder
    if not _is_s3(output):
        raise InvalidArgumentError(
            f"output {without_keys(output)} is not local, and only s3:// can have the journal "
            "beside the output: name a local folder as journal"
        )
    return None


def _is_s3(address: str) -> bool:
    return address.startswith("s3://")
