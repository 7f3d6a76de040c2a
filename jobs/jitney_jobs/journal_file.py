"""A journal in a local file of lines, appended and synced. Locks exclude two runs; they end with
their process."""

import fcntl
import os
from pathlib import Path

from jitney.errors import UnavailableError

from jitney_jobs.job import Job
from jitney_jobs.journal_entries import Entry, encode
from jitney_jobs.journal_record import Record, read_file
from jitney_jobs.whole_files import sync


class JournalFile:
    """The journal's file, open for one run."""

    part_mark = ""
    """What the names of parts end with: nothing, since the locks leave one writer."""

    mark_of_run = ""

    def __init__(self, job: Job, folder: Path) -> None:
        """Take the locks and read what is there. Raises UnavailableError if another run has a lock
        of this output, wherever its journal is, or of this journal; InvalidArgumentError for a
        journal that is damaged."""
        self._path = folder / "journal.jsonl"
        owner = job.output if job.journal is None else job.journal
        self._descriptors: list[int] = []
        """Of the locks and of the journal. A lock ends when its descriptor is closed."""
        try:
            of_output = Path(job.output, "_job")
            is_local = "://" not in job.output
            if job.shard is not None:
                # Shards share the output. A run of the whole, or a merge, has it alone.
                self._lock(of_output, job.output, fcntl.LOCK_SH)
                self._lock(folder, f"shard {job.shard} of {owner}")
            else:
                self._lock(folder, owner)
                if is_local and of_output.resolve() != folder.resolve():
                    self._lock(of_output, job.output)
            self.record, self._size = read_file(self._path)
            self._file = self._open(self._path, os.O_APPEND)
            os.ftruncate(self._file, self._size)
            sync(folder)
        except BaseException:
            self.close()  # the next try, in the same process, can take the locks
            raise

    def may_remove(self, part: str) -> bool:
        """Always: the locks leave one writer."""
        return True

    def restart(self) -> None:
        """Begin anew: nothing of the job counts any more."""
        os.ftruncate(self._file, 0)
        self._size = 0
        self.record = Record(self._path.parent)

    def append(self, entry: Entry) -> None:
        """Write a line. Returns when it is on the disk. After an OSError nothing of it is there."""
        data = encode(entry)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        self.record.apply(entry)

    def settle(self) -> None:
        """Nothing: whether a line was appended is always known."""

    def close(self) -> None:
        """Give the locks back."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _open(self, path: Path, flags: int = 0) -> int:
        """A descriptor that :meth:`close` closes."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
        self._descriptors.append(descriptor)
        return descriptor

    def _lock(self, folder: Path, owner: str, kind: int = fcntl.LOCK_EX) -> None:
        self._descriptors.append(lock_folder(folder, owner, kind))


def lock_folder(folder: Path, owner: str, kind: int = fcntl.LOCK_EX) -> int:
    """Lock a folder, and return a descriptor: the lock ends when that is closed. ``owner``: what
    the lock is of, for the error. Raises UnavailableError if a run has a lock that excludes it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UnavailableError(f"another run writes to {owner}") from None
    return lock
