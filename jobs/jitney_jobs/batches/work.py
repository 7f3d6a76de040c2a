"""Runs batches as jobs of worker processes, and gathers the jobs' parts into files.

The gateway that holds the folder's lock has a thread that looks at every open batch each second,
and takes its next step. A step that was cut off anywhere is taken again. Worker processes (``jitney
batch worker``) run the jobs, and ask this gateway for each line; the jobs' journals tell which
lines are done. The workers end when no job waits, and with the gateway.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from jitney.errors import InvalidArgumentError
from jitney_gateway.refusals import StatusError
from jitney_gateway.server_client import GENERATING

from jitney_jobs.batches.records import (
    OPEN,
    BatchRecord,
    FileRecord,
    FinalStatus,
    Folder,
    write_private,
)
from jitney_jobs.journal import Record
from jitney_jobs.openai_form import request_digest
from jitney_jobs.worker import JobState, cancel

_LOG = logging.getLogger(__name__)

_POLL_S = 1.0
_BETWEEN_WORKERS_S = 5.0
_MOST_WORKERS = 4
"""Batches that run at a time: one whose model is away, and is asked again and again, holds up no
other."""
_ABANDONED_S = 3600.0
_JOB = {
    "input_format": "openai",
    "workers": 0,
    "retries": 8,
    "patience": "5m",
    "max_errors": "100%",
    "part_seconds": 2.0,
}
"""Settings of a batch's job."""
_BACKGROUND = {"service_tier": "flex"}
"""Lines that name no service tier get this one, so that interactive clients go first. The gateway
turns it into a tier or priority for each line when the job sends it, by the model and by the limits
of the batch's owner at that time."""
_OPTIONS = ("--until-empty", "--tries=8", "--backoff=5")
# The kernel sends SIGTERM (15) to the worker when the thread ends that started it, however it does.
_WORKER = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from jitney.cli import main; main()"
_FINAL_STATUSES: dict[JobState, FinalStatus] = {
    JobState.DONE: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "expired",
}
"""State of a job that has ended -> status of its batch. `BatchWork.advance` asks first whether the
client cancelled the batch. If not, the job was cancelled because the batch has expired."""


def start_batch(folder: Folder, batch: BatchRecord, lines: Path) -> None:
    """Have :class:`BatchWork` run a batch, whose lines are good. The batch exists once its record
    is saved, which is the last step. It keeps its lines if their file is deleted later. Raises
    FileNotFoundError if the file has just been deleted."""
    work = folder.work / batch.id
    job: dict[str, Any] = {
        **_JOB,
        "model": batch.model,
        "input": str(work / "input.jsonl"),
        "output": str(work / "out"),
    }
    if batch.owner:
        job["api_key_file"] = str(folder.key_file(batch.owner))
    if batch.endpoint in GENERATING:
        job["sampling"] = _BACKGROUND
    work.mkdir()
    (work / "input.jsonl").hardlink_to(lines)
    write_private(work / "job.yaml", [msgspec.json.encode(job)])  # JSON is YAML too
    folder.save(batch)


@contextlib.asynccontextmanager
async def working(folder: Folder | None, url: str) -> AsyncIterator[None]:
    """Within ``async with`` batches are run. Each line is asked of the gateway at ``url``."""
    if folder is None:
        yield
        return
    work = BatchWork(folder, url)
    work.start()
    try:
        yield
    finally:  # even if the gateway is stopped by force, which cancels what runs
        await asyncio.to_thread(work.stop)


class BatchWork:
    """A thread that advances the batches of a folder."""

    def __init__(self, folder: Folder, url: str) -> None:
        self._folder = folder
        self._url = url
        self._workers: list[subprocess.Popen[bytes]] = []
        self._not_before = 0.0
        """The time, in monotonic seconds, before which no worker is started."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin, and go on until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when the workers have committed what is finished, and ended."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with self._folder.lock.open("w") as lock:
            while not self._stopping.wait(_POLL_S):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._look()
                except BlockingIOError:
                    pass  # the thread of another gateway does it
                except Exception:  # it may pass, such as too many open files: look again later
                    _LOG.exception("batches wait")
            for worker in self._workers:
                worker.terminate()
            for worker in self._workers:
                worker.wait()

    def _look(self) -> None:
        """Advance every batch. One that cannot go on holds up no other."""
        steps: list[Callable[[], None]] = [
            partial(self.advance, path.name) for path in sorted(self._folder.work.glob("*"))
        ]
        for step in [*steps, self._start_workers]:
            try:
                step()
            except Exception:
                _LOG.exception("a batch waits")

    def _start_workers(self) -> None:
        """Start a worker if there are fewer than jobs in the queue. A job in ``running`` counts
        too: its worker may have been killed, and another one must go on."""
        live = [worker for worker in self._workers if worker.poll() is None]
        if len(live) < len(self._workers):
            # One has ended, perhaps as soon as it was started. So the next one is not started at
            # once: else a worker that cannot run would be started at every look.
            self._not_before = time.monotonic() + _BETWEEN_WORKERS_S
        self._workers = live
        waiting = list(self._folder.queue.glob("*.yaml"))
        running = list(self._folder.queue.glob("running/*.yaml"))
        wanted = min(len(waiting) + len(running), _MOST_WORKERS)
        if len(self._workers) < wanted and time.monotonic() >= self._not_before:
            command = [sys.executable, "-c", _WORKER, "batch", "worker", str(self._folder.queue)]
            command += ["--server", self._url, *_OPTIONS]
            self._workers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def advance(self, id_: str) -> None:
        """Take the next step of a batch, if it is time for it."""
        work = self._folder.work / id_
        queue = self._folder.queue
        try:
            batch = self._folder.load(BatchRecord, id_)
        except StatusError:
            # Its maker has not saved it yet, or was killed before.
            if time.time() - work.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(work)
            return
        if batch.status not in OPEN:
            # It was gathered: what is left of its job goes.
            for path in queue.glob(f"*/{id_}.*"):
                path.unlink()
            shutil.rmtree(work)
            return
        # It is new: into the queue.
        with contextlib.suppress(FileNotFoundError):
            (work / "job.yaml").rename(queue / f"{id_}.yaml")
        cancelled = (work / "cancel").exists()
        if cancelled or time.time() >= batch.expires_at:
            with contextlib.suppress(InvalidArgumentError):  # it has ended meanwhile
                cancel(queue, id_)
        status = self._status_of_ended_job(id_)
        if status is not None:
            self._finish(batch, "cancelled" if cancelled else status)

    def _status_of_ended_job(self, id_: str) -> FinalStatus | None:
        """None if the job has not ended, or a worker still holds the lock of its file."""
        for state, status in _FINAL_STATUSES.items():
            path = self._folder.queue / state / f"{id_}.yaml"
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return status
        return None

    def _finish(self, batch: BatchRecord, status: FinalStatus) -> None:
        """Gather what the job has made: each request is in one of two files."""
        work = self._folder.work / batch.id
        batch.status = "finalizing"
        batch.finalizing_at = int(time.time())
        self._folder.save(batch)

        record = self._folder.job_record(batch.id)
        out = work / "out"
        good: list[Path] = []
        bad: list[Path] = []
        for part in record.parts:
            for name in part.files:
                path = out / name
                if path.parent == out:
                    good.append(path)
                else:  # bad rows are in a folder of their own
                    bad.append(path)
        batch.output_file_id = self._gather(batch, "output", _lines(good))
        errors = _error_lines(work / "input.jsonl", _lines(bad), record, status)
        batch.error_file_id = self._gather(batch, "errors", errors)
        failed = batch.request_counts["total"] - record.written
        batch.request_counts |= {"completed": record.written, "failed": failed}
        batch.cancelling_at = self._folder.cancelling_at(batch.id)

        reasons = []
        if status == "failed":
            why = self._folder.queue / JobState.FAILED / f"{batch.id}.txt"
            reasons.append({"message": why.read_text("utf-8")})
        batch.end(status, reasons)
        self._folder.save(batch)

    def _gather(self, batch: BatchRecord, what: str, lines: Iterator[bytes]) -> str | None:
        """A file of the lines, if there are any."""
        id_ = f"file-{batch.id[-24:]}-{what}"
        path = self._folder.files / id_
        write_private(path, lines)
        if not path.stat().st_size:
            path.unlink()
            return None
        record = FileRecord(
            id=id_,
            bytes=path.stat().st_size,
            created_at=int(time.time()),
            filename=f"{batch.id}_{what}.jsonl",
            purpose="batch_output",
            owner=batch.owner,
        )
        self._folder.save(record)
        return id_


def _error_lines(
    given: Path, bad: Iterator[bytes], record: Record, status: FinalStatus
) -> Iterator[bytes]:
    """A line for each request that is in no part, or among the ``bad`` rows of one, in the order of
    the requests."""
    failures: dict[int, _BadLine] = {}
    for line in bad:
        bad_line = msgspec.json.decode(line, type=_BadLine)
        failures[bad_line.row] = bad_line
    for row, line in enumerate(filter(bytes.strip, _lines([given]))):
        failure = failures.get(row)
        if failure is not None and failure.custom_id is not None:
            yield failure.as_service_has_it()
        elif failure is not None:  # the line could not be read, or its answer not be written
            message = failure.error
            if isinstance(message, dict):
                message = message["message"]
            yield _error_line(line, "request_failed", str(message))
        elif not record.done.covers(0, row, row + 1):
            message = f"the batch was {status} before this request was done"
            yield _error_line(line, f"batch_{status}", message)


class _BadLine(msgspec.Struct):
    """What is read of a line in a job's error file: its row, and the service's own line."""

    row: int
    id: str | None = None
    custom_id: str | None = None
    response: Any = None
    error: Any = None

    def as_service_has_it(self) -> bytes:
        line = msgspec.to_builtins(self)
        del line["row"]
        return msgspec.json.encode(line) + b"\n"


class _CustomId(msgspec.Struct):
    custom_id: str


def _error_line(given: bytes, code: str, message: str) -> bytes:
    """For a request that has no answer."""
    custom_id: str | None = None
    digest = hashlib.sha256(given).hexdigest()[:24]
    # The stack may be deeper here than when the line was checked. Then a nesting that was just
    # within the limit is over it.
    with contextlib.suppress(RecursionError):
        custom_id = msgspec.json.decode(given, type=_CustomId).custom_id
        digest = request_digest(custom_id)
    line = {
        "id": f"batch_req_{digest}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return msgspec.json.encode(line) + b"\n"


def _lines(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from file
