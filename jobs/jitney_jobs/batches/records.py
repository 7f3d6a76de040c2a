"""Files and batches as records on a disk: all that the gateways of one folder share.

files/ID, files/ID.json     a file, and what is known of it
batches/ID.json             a batch; written once when it is made, then by ``work.py`` alone
work/ID/                    of a batch that has not ended: ``input.jsonl``; ``job.yaml``, until it
                            is moved into the queue; ``cancel``, once the batch is to be
                            cancelled; ``out/``, the job's output
queue/                      job files: ``jitney_jobs/worker.py``
keys/NAME.key               the key with which jobs ask for an owner of batches
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from jitney_gateway.keys import read_keys
from jitney_gateway.refusals import StatusError

from jitney_jobs.journal import Record
from jitney_jobs.whole_files import write_whole

_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}(?:-output|-errors)?")
OPEN = ("in_progress", "finalizing")
"""Statuses of a batch that has not ended."""
FinalStatus = Literal["completed", "failed", "expired", "cancelled"]


class FileRecord(msgspec.Struct, kw_only=True):
    """OpenAI's object of a file, and whose it is. Times are in seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    owner: str


class BatchRecord(msgspec.Struct, kw_only=True):
    """OpenAI's object of a batch, and whose it is."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: str = "in_progress"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = msgspec.field(
        default_factory=lambda: {"total": 0, "completed": 0, "failed": 0}
    )
    metadata: dict[str, str] | None = None
    owner: str

    def end(self, status: FinalStatus, errors: list[dict[str, Any]]) -> None:
        """The batch has ended now."""
        self.errors = {"object": "list", "data": errors} if errors else None
        self.status = status
        now = int(time.time())
        match status:
            case "completed":
                self.completed_at = now
            case "failed":
                self.failed_at = now
            case "expired":
                self.expired_at = now
            case "cancelled":
                self.cancelled_at = now


R = TypeVar("R", bound=FileRecord | BatchRecord)


class Folder:
    """The folder. Any thread and process may use it."""

    def __init__(self, root: Path) -> None:
        """Raises OSError if it cannot be made."""
        self.files = root / "files"
        self.batches = root / "batches"
        self.work = root / "work"
        self.queue = root / "queue"
        self.keys = root / "keys"
        for each in (self.files, self.batches, self.work, self.queue, self.keys):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = root / "lock"

    def save(self, record: FileRecord | BatchRecord) -> None:
        """Survives a loss of power."""
        path = self._folder_of(type(record)) / f"{record.id}.json"
        write_private(path, [msgspec.json.encode(record)])

    def load(self, kind: type[R], id_: str) -> R:
        """Raises StatusError if there is none."""
        absent = StatusError(404, f"{id_[:64]!r} does not exist")
        if not _ID.fullmatch(id_):
            raise absent
        try:
            data = (self._folder_of(kind) / f"{id_}.json").read_bytes()
        except FileNotFoundError:
            raise absent from None
        return msgspec.json.decode(data, type=kind)

    def all(self, kind: type[R]) -> Iterator[R]:
        """The newest first."""
        names = [path.stem for path in self._folder_of(kind).glob("*.json")]
        for name in sorted(names, reverse=True):
            with contextlib.suppress(StatusError):  # it may be deleted meanwhile
                yield self.load(kind, name)

    def _folder_of(self, kind: type) -> Path:
        return self.files if kind is FileRecord else self.batches

    def key_file(self, owner: str) -> Path:
        """The file of the key with which jobs ask for an owner."""
        return self.keys / f"{owner}.key"

    def key_of_jobs(self, owner: str) -> dict[str, str]:
        """Key -> owner: the key with which the jobs of batches come to the gateway. Made once for
        all gateways of the folder. Raises ConfigError and OSError."""
        path = self.key_file(owner)
        if not path.exists():
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            write_private(new, [f"{owner}:{secrets.token_hex(24)}\n".encode()])
            with contextlib.suppress(FileExistsError):  # another gateway was faster
                os.link(new, path)
            new.unlink()
        return read_keys(path).owners

    def with_progress(self, batch: BatchRecord) -> BatchRecord:
        """A copy with what only the batch's job tells: how far it is, and whether it is being
        cancelled. A batch that has ended is returned as it is."""
        if batch.status not in OPEN:
            return batch
        record = self.job_record(batch.id)
        counts = batch.request_counts | {"completed": record.written, "failed": record.failed}
        batch = msgspec.structs.replace(batch, request_counts=counts)
        cancelling_at = self.cancelling_at(batch.id)
        if cancelling_at is not None:
            batch.cancelling_at = cancelling_at
            batch.status = "cancelling"
        return batch

    def job_record(self, batch_id: str) -> Record:
        """The journal of a batch's job. It is empty if the job has not begun."""
        return Record.read(self.work / batch_id / "out" / "_job" / "journal.jsonl")

    def cancelling_at(self, batch_id: str) -> int | None:
        """When it was said that a batch is to be cancelled. None if that was not said."""
        try:
            return int((self.work / batch_id / "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None


def new_id(kind: str) -> str:
    """A new id. Ids of later records are greater."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(4)}"


def write_private(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file as a whole or not at all. Only this process' user can read it."""
    write_whole(path, pieces, mode=0o600)
