"""A journal beside an output on S3: one object a commit, ``_job/journal/0``, ``1`` and so on.

Each is put on condition that there is none of that name. So of two runs that commit at the same
time one collides, and ends:

- a run begins with a claim, an object of its own. A run that wrote before cannot commit after it;
- parts have a mark in their names: the number of the claim, and a random word. So no run writes
  over a part of another one, and it removes none but those of runs before it;
- a run that was killed leaves its claim. The next one looks whether that process is still there; if
  it was on another machine, whether ``_job/alive``, which a run writes anew every few seconds,
  still changes. That is a courtesy to the run that is there: a wrong answer costs it its end, but
  no row.
"""

import contextlib
import os
import posixpath
import re
import secrets
import socket
import sys
import threading
import time
from pathlib import Path

from jitney.errors import InvalidArgumentError, UnavailableError

from jitney_jobs.job import Job
from jitney_jobs.journal_entries import Claim, Elsewhere, Entry, FileRows, Released, encode
from jitney_jobs.journal_record import Record, RecordReader
from jitney_jobs.object_storage import NO_CONDITIONS, NoConditionsError, Objects
from jitney_jobs.shards import Shard

FOLDER = "_job/journal"
_MARK = re.compile(r"part-(?:\d+-of-\d+-)?(?:\d+-)+(\d+)-[0-9a-f]+\.")
"""In the name of a part's file: its shard and its numbers, that of the claim, and a random word."""
_OF_SHARD = re.compile(r"part-\d+-of-\d+-")
_BEAT_S = 5.0
_WATCH_S = 16.0
"""For so long ``_job/alive`` of a run that lives may stay as it is."""
_POLL_S = 1.0
_REPAIR = (
    "put back a copy of the object; or delete it and all with greater numbers: what they noted is "
    "then done again, once"
)


class TakenOverError(UnavailableError):
    """Another run has committed where this one would have."""


class JournalObjects:
    """The journal's objects, open for one run, which has claimed the job."""

    def __init__(self, job: Job, retries_bad: bool = False) -> None:
        """Read what is there, and claim the job unless it is complete or sealed. It is not complete
        if this run ``retries_bad`` rows or files, and there are some. Raises UnavailableError if
        another run writes, InvalidArgumentError for a journal that is damaged, and OSError."""
        self._objects = Objects(job.output, job.retries)
        self._folder = folder_of(job.its_shard)
        """Of the objects, below the output."""
        self._owner = self._objects.address
        """What the journal is called in errors."""
        if job.shard is not None:
            self._owner = f"shard {job.shard} of {self._owner}"
        self._is_whole = job.shard is None
        self._token = secrets.token_hex(8)
        self._claim_number = sys.maxsize
        """The number of this run's claim. A run that has none finds a job that is complete."""
        self.record, self._next = read_objects(self._objects, job.its_shard)
        self._waiting: list[FileRows] = []
        """Noted with the next commit: they are worth no object of their own."""
        self._unsure: list[Entry] = []
        """What a request has put, or has not: its answer was lost."""
        self._is_taken_over = False
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None
        if self.record.elsewhere is not None:
            raise InvalidArgumentError(
                f"the journal of {self._objects.address} is {self.record.elsewhere.place}: name "
                "that folder as journal"
            )
        if self.record.is_sealed:
            return
        is_complete = self.record.end is not None and self.record.written > 0
        if not is_complete or (retries_bad and self.record.has_bad):
            self._claim()

    @property
    def part_mark(self) -> str:
        """What the name of the next part ends with. Each call gives another one: what a part was
        that could not be committed is not known for certain."""
        return f"{self.mark_of_run}-{secrets.token_hex(4)}"

    @property
    def mark_of_run(self) -> str:
        """The number of the claim."""
        return f"-{self._claim_number}"

    def may_remove(self, part: str) -> bool:
        """Whether a file of a part that no commit names is of a run that can commit no more. So are
        those of shards once the job goes on as a whole: then the shards are sealed. Their claims
        have numbers of their own."""
        if self._is_whole and _OF_SHARD.search(part):
            return True
        mark = _MARK.search(part)
        return mark is None or int(mark[1]) <= self._claim_number

    def restart(self) -> None:
        """Begin anew. The line that begins a job says so itself, so that nothing is deleted."""

    def append(self, entry: Entry) -> None:
        """Returns when the object is there. After an OSError it may be there or not; what is
        appended next finds out. Raises UnavailableError if another run has taken over."""
        self.settle()
        if isinstance(entry, FileRows):
            self._waiting.append(entry)
            self.record.apply(entry)
            return
        self._unsure = [*self._waiting, entry]
        self.settle()

    def settle(self) -> None:
        """Have what may be there be there. Raises as :meth:`append`."""
        if self._is_taken_over:
            raise self._taken_over()
        if not self._unsure:
            return
        if not self._is_ours(b"".join(map(encode, self._unsure))):
            self._is_taken_over = True
            raise self._taken_over()
        entry = self._unsure[-1]
        self._unsure = []
        self._waiting = []
        self.record.apply(entry)

    def close(self) -> None:
        """Say that this run has ended. If that fails, the next one has to find out."""
        self._closed.set()
        if self._beating is None:
            return
        self._beating.join()
        if not self._is_taken_over:
            with contextlib.suppress(OSError, UnavailableError):
                self.append(Released(self._token))

    def _is_ours(self, data: bytes) -> bool:
        """Put the next object. Returns whether it has ``data`` now: there may be one already, of
        another run, or of a request of our own whose answer was lost."""
        name = f"{self._folder}/{self._next}"
        is_ours = self._objects.create(name, data) or self._objects.read(name) == data
        if is_ours:
            self._next += 1
        return is_ours

    def _taken_over(self) -> TakenOverError:
        return TakenOverError(
            f"another run has taken over {self._owner}: it has committed "
            f"{self._folder}/{self._next}, which this run could not"
        )

    def _claim(self) -> None:
        before = self.record.claim
        if before is not None and self._lives(before):
            process = f"process {before.pid} on {before.host}"
            raise UnavailableError(f"another run writes to {self._owner}: {process}")
        claim = Claim(
            token=self._token,
            machine=_machine(),
            pid=os.getpid(),
            process_began=_process_began(os.getpid()),
            host=socket.gethostname(),
            at=time.time(),
        )
        data = encode(claim)
        is_first = self._next == 0
        if not self._is_ours(data):
            raise UnavailableError(f"another run has just begun to write to {self._owner}")
        if is_first and self._objects.create(f"{self._folder}/0", data):
            self._objects.delete(f"{self._folder}/0")
            raise InvalidArgumentError(f"{self._objects.address} {NO_CONDITIONS}")
        self._claim_number = self._next - 1
        self.record.apply(claim)
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def _lives(self, claim: Claim) -> bool:
        """Whether the run of a claim goes on."""
        if claim.machine == _machine() and claim.pid != os.getpid():
            return _process_began(claim.pid) == claim.process_began
        # It may also be of this process: of a job that failed to say its end, or of a thread.
        return self._changes(claim)

    def _changes(self, claim: Claim) -> bool:
        """Watch ``_job/alive`` for as long as a run may take to write it anew."""
        print(
            f"the last run, on {claim.host}, has not said its end: this one waits {_WATCH_S:.0f} s "
            "to see whether it goes on",
            file=sys.stderr,
        )
        first = self._alive()
        until = time.monotonic() + _WATCH_S
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            if self._alive() != first:
                return True
        return False

    @property
    def _alive_name(self) -> str:
        return f"{posixpath.dirname(self._folder)}/alive"

    def _alive(self) -> bytes:
        try:
            return self._objects.read(self._alive_name)
        except FileNotFoundError:
            return b""

    def _beat(self) -> None:
        number = 0
        while True:
            # A beat that is missed is made up for by the next one.
            with contextlib.suppress(OSError):
                self._objects.put(self._alive_name, f"{self._token} {number}\n".encode())
            number += 1
            if self._closed.wait(_BEAT_S):
                return


def folder_of(shard: Shard | None) -> str:
    """Of the journal of an output, or of one of its shards."""
    return FOLDER if shard is None else f"_job/{shard.folder}/journal"


def read_objects(objects: Objects, shard: Shard | None = None) -> tuple[Record, int]:
    """What a journal on object storage says, and the number of its next object. Raises
    InvalidArgumentError if an object is damaged or missing, and OSError."""
    folder = folder_of(shard)
    where = objects.address_of(folder)
    record = Record(None, where)
    reader = RecordReader(record, _REPAIR)
    numbers = sorted(int(name) for name in objects.names(folder) if name.isdecimal())
    for expected, number in enumerate(numbers):
        if number != expected:
            raise InvalidArgumentError(
                f"{where} is damaged: object {expected} is missing, but {number} is there; put it "
                f"back, or delete those from {number} on: what they noted is then done again, once"
            )
    names = [f"{folder}/{number}" for number in numbers]
    for number, data in enumerate(objects.read_each(names)):
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                bad = f"object {number} of {where} is damaged: its last line is torn; {_REPAIR}"
                raise InvalidArgumentError(bad)
            reader.add(line, f"object {number} of {where}")
    reader.finish()
    return record, len(numbers)


def note_elsewhere(job: Job, id: str, folder: Path) -> None:
    """Note beside the output that its journal is a local one, known by ``id``. Raises
    InvalidArgumentError if it has another journal, and OSError."""
    objects = Objects(job.output, job.retries)
    entry = Elsewhere(id, f"in {folder} on {socket.gethostname()}")
    name = f"{FOLDER}/0"
    try:
        if objects.create(name, encode(entry)):
            return
    except NoConditionsError:
        return  # then nobody has a journal there
    record, _ = read_objects(objects)
    there = record.elsewhere
    if there is None:
        raise InvalidArgumentError(f"{objects.address} has its journal in {FOLDER}: name no other")
    # A run that was killed before its first line left its place, and no id.
    if there.id != id and there.place != entry.place:
        raise InvalidArgumentError(
            f"{objects.address} has another journal, {there.place}: name that one; if it is lost, "
            f"choose another output, or delete this one with {FOLDER}"
        )


def _machine() -> str:
    """The system that a process number belongs to: this boot, and this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _process_began(pid: int) -> str:
    """In ticks since boot. Empty if there is no such process, or if it is dead already."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in brackets, may have blanks. Behind it stand the state and, 20th, the time.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
