"""What becomes of batches: checked, worked off as jobs, and gathered into files.

A thread of one of the folder's gateways, the one that holds its lock, looks at every open batch
time and again. Each of its steps may be cut off anywhere, and is then taken again. The jobs are
those of a worker process (``jitney batch worker``), which asks this gateway for each line; their
journals have which of them are done. It ends when no job waits, and with the gateway.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError, show
from jitney.gateway.backend import GENERATING
from jitney.gateway.batch_records import OPEN, BatchRecord, FileRecord, Folder, write_whole
from jitney.gateway.refusals import FieldError, StatusError, describe
from jitney.gateway.wire import WireRecord, decode
from jitney.offline.journal import Record
from jitney.offline.worker import cancel

_LOG = logging.getLogger(__name__)

MAX_LINES = 50_000
_POLL_S = 1.0
_BETWEEN_WORKERS_S = 5.0
_SHOWN = 20
"""Errors of a batch that has no line to run."""
_JOB = {"input_format": "openai", "workers": 0, "retries": 8, "max_errors": "100%"}
_JOB |= {"part_seconds": 2.0}
_OPTIONS = ("--until-empty", "--tries=8", "--backoff=5")
# The kernel sends SIGTERM (15) to the worker when the thread ends that started it, however it does.
_WORKER = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from jitney.cli import main; main()"
_PRIORITY = 10
"""Of lines that name none: a client that waits goes first."""
_ANSWERED = re.compile(r"(\d{3}) (\{.*\})", re.DOTALL)
"""The reason of a bad row that the gateway answered: offline/asking.py."""


class _Body(msgspec.Struct):
    model: str


class _Line(WireRecord):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: _Body


class _Named(msgspec.Struct):
    custom_id: str | None = None


@contextlib.asynccontextmanager
async def working(
    folder: Folder | None, url: str, check: Callable[[str, str], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """The thread works, for the gateway of this loop at ``url``."""
    if folder is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def check_there(endpoint: str, model: str) -> None:
        asyncio.run_coroutine_threadsafe(check(endpoint, model), loop).result()

    work = BatchWork(folder, url, check_there)
    work.start()
    yield
    await asyncio.to_thread(work.stop)


class BatchWork:
    """The thread. ``check`` raises JitneyError for an endpoint that a model does not serve."""

    def __init__(self, folder: Folder, url: str, check: Callable[[str, str], None]) -> None:
        self._folder, self._url, self._check = folder, url, check
        self._worker: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        """Monotonic seconds: of the next worker."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin, and go on until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when the worker has committed what is finished, and ended."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with self._folder.lock.open("w") as lock:
            locked = False
            while not self._stopping.wait(_POLL_S):
                with contextlib.suppress(BlockingIOError):  # else another gateway does it
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                ids = sorted(path.name for path in self._folder.work.iterdir())
                steps: list[Callable[[], None]] = [partial(self.advance, id_) for id_ in ids]
                for step in [*steps, self._tend] if locked else []:
                    try:
                        step()
                    except UnavailableError as error:
                        _LOG.warning("a batch waits: %s", error)
                    except Exception:
                        _LOG.exception("a batch waits")
            if self._worker is not None:
                self._worker.terminate()
                self._worker.wait()

    def _tend(self) -> None:
        """Have a worker run while a job waits, or lies where one was killed."""
        if self._worker is not None and self._worker.poll() is not None:
            self._worker = None
            self._not_before = time.monotonic() + _BETWEEN_WORKERS_S
        jobs = [*self._folder.queue.glob("*.yaml"), *self._folder.queue.glob("running/*.yaml")]
        if self._worker is None and jobs and time.monotonic() >= self._not_before:
            command = [sys.executable, "-c", _WORKER, "batch", "worker", str(self._folder.queue)]
            self._worker = subprocess.Popen(
                [*command, "--server", self._url, *_OPTIONS], stdout=subprocess.DEVNULL
            )

    # ------------------------------------------------------------------ one batch

    def advance(self, id_: str) -> None:
        """Take the next step, if it is time for it."""
        try:
            batch = self._folder.load(BatchRecord, id_)
        except StatusError:  # its maker was killed before it was one, or is about to save it
            return
        work, queue = self._folder.work / id_, self._folder.queue
        if batch.status not in OPEN:
            for path in queue.glob(f"*/{id_}.*"):
                path.unlink()
            shutil.rmtree(work)
            return
        if batch.status == "validating" and not self._validate(batch):
            return
        with contextlib.suppress(FileNotFoundError):
            (work / "job.yaml").rename(queue / f"{id_}.yaml")
        cancelled = (work / "cancel").exists()
        if cancelled or time.time() >= batch.expires_at:
            with contextlib.suppress(InvalidArgumentError):  # it has ended meanwhile
                cancel(queue, id_)
        state = self._ended(id_)
        if state is not None:
            names = {"done": "completed", "failed": "failed", "cancelled": "expired"}
            self._finish(batch, "cancelled" if cancelled else names[state])

    def _ended(self, id_: str) -> str | None:
        """Where the job's file lies, once nobody works at the job."""
        for state in ("done", "failed", "cancelled"):
            path = self._folder.queue / state / f"{id_}.yaml"
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return state
        return None

    def _validate(self, batch: BatchRecord) -> bool:
        """Split the lines into those of the job and those that are refused, and write the job.
        Whether there is one."""
        work, ids, total = self._folder.work / batch.id, set[str](), 0
        errors: list[dict[str, Any]] = []
        with (
            (work / "given.jsonl").open("rb") as given,
            (work / "input.jsonl").open("wb") as kept,
            (work / "refused.jsonl").open("wb") as refused,
        ):
            for number, line in enumerate(given, 1):
                line = line.strip()
                total += bool(line)
                try:
                    if line:
                        batch.model = _check_line(line, batch, ids)
                        kept.write(line + b"\n")
                except InvalidArgumentError as error:
                    said = describe(error)[1]["error"]
                    refused.write(_error_line(line, None, said))
                    said = {name: said[name] for name in ("code", "message", "param")}
                    errors.append({**said, "line": number})
        batch.request_counts = {"total": total, "completed": 0, "failed": len(errors)}
        try:
            if not 0 < total <= MAX_LINES:
                bound = f"has {total:,} lines, but must have 1 to {MAX_LINES:,}"
                raise FieldError("input_file_id", f"the input file {bound}")
            if batch.model is not None:
                self._check(batch.endpoint, batch.model)
        except UnavailableError:
            raise
        except JitneyError as error:
            errors, batch.model = [describe(error)[1]["error"]], None
        if batch.model is None:
            self._end(batch, "failed", errors[:_SHOWN])
            return False
        left = max(1, batch.expires_at - _now())
        job: dict[str, Any] = {"model": batch.model, "within": f"{left}s"}
        if batch.owner:
            job["api_key_file"] = str(self._folder.key_file(batch.owner))
        if batch.endpoint in GENERATING:
            job["sampling"] = {"priority": _PRIORITY}
        job |= {**_JOB, "input": str(work / "input.jsonl"), "output": str(work / "out")}
        write_whole(work / "job.yaml", [msgspec.json.encode(job)])  # JSON is YAML too
        batch.status, batch.in_progress_at = "in_progress", _now()
        self._folder.save(batch)
        return True

    def _finish(self, batch: BatchRecord, end: str) -> None:
        """Gather what the job has made: each request is in one of two files."""
        work = self._folder.work / batch.id
        if (work / "cancel").exists():
            batch.cancelling_at = int((work / "cancel").stat().st_mtime)
        batch.status, batch.finalizing_at = "finalizing", _now()
        self._folder.save(batch)
        out = work / "out"
        record = Record(out / "_job" / "journal.jsonl")
        names = [name for part in record.parts for name in part.files]
        bad = [out / name for name in names if name.startswith("_errors/")]
        good = [out / name for name in names if not name.startswith("_errors/")]

        def errors() -> Iterator[bytes]:
            yield from _lines([work / "refused.jsonl"])
            yield from map(_of_bad_row, _lines(bad))
            for row, line in enumerate(_lines([work / "input.jsonl"])):
                if not record.done.covers(0, row, row + 1):
                    said = f"the batch was {end} before this request was done"
                    yield _error_line(line, None, {"code": f"batch_{end}", "message": said})

        batch.output_file_id, completed = self._gather(batch, "output", _lines(good))
        batch.error_file_id, failed = self._gather(batch, "errors", errors())
        batch.request_counts |= {"completed": completed, "failed": failed}
        why = self._folder.queue / "failed" / f"{batch.id}.txt"
        self._end(batch, end, [{"message": why.read_text("utf-8")}] if end == "failed" else [])

    def _gather(
        self, batch: BatchRecord, what: str, lines: Iterator[bytes]
    ) -> tuple[str | None, int]:
        """A file of the lines, if there are any, and their number."""
        id_, number = f"file-{batch.id[-24:]}-{what}", 0

        def counted() -> Iterator[bytes]:
            nonlocal number
            for line in lines:
                number += 1
                yield line

        path = self._folder.files / id_
        write_whole(path, counted())
        if not number:
            path.unlink()
            return None, 0
        record = FileRecord(
            id=id_,
            bytes=path.stat().st_size,
            created_at=_now(),
            filename=f"{batch.id}_{what}.jsonl",
            purpose="batch_output",
            owner=batch.owner,
        )
        self._folder.save(record)
        return id_, number

    def _end(self, batch: BatchRecord, end: str, errors: list[dict[str, Any]]) -> None:
        if errors:
            batch.errors = {"object": "list", "data": errors}
        batch.status = end
        setattr(batch, f"{end}_at", _now())
        self._folder.save(batch)


def _check_line(line: bytes, batch: BatchRecord, ids: set[str]) -> str:
    """The model, which is that of the first line. Raises FieldError."""
    given = decode(line, _Line)
    for field, value, wanted in (
        ("url", given.url, batch.endpoint),
        ("body.model", given.body.model, batch.model or given.body.model),
    ):
        if value != wanted:
            raise FieldError(field, f"{field} is {show(value)}, but this batch is for {wanted!r}")
    if given.custom_id in ids:
        raise FieldError("custom_id", "custom_id is that of an earlier line")
    ids.add(given.custom_id)
    return given.body.model


def _of_bad_row(line: bytes) -> bytes:
    """The line of an error file, from that of a job's."""
    bad = msgspec.json.decode(line)
    answered = _ANSWERED.fullmatch(bad["error"])
    given = msgspec.json.encode(bad["input"])
    if answered is None:
        return _error_line(given, None, {"code": "request_failed", "message": bad["error"]})
    body = msgspec.json.decode(answered[2])
    return _error_line(given, {"status_code": int(answered[1]), "body": body}, None)


def _error_line(
    given: bytes, response: dict[str, Any] | None, error: Mapping[str, Any] | None
) -> bytes:
    """For a line as it was given."""
    try:
        custom_id = msgspec.json.decode(given, type=_Named).custom_id
    except msgspec.DecodeError:
        custom_id = None
    digest = hashlib.sha256(given).hexdigest()[:24]
    if response is not None:
        response = {**response, "request_id": digest}
    if error is not None:
        error = {name: error[name] for name in ("code", "message")}
    made = {"id": f"batch_req_{digest}", "custom_id": custom_id}
    return msgspec.json.encode({**made, "response": response, "error": error}) + b"\n"


def _lines(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from file


def _now() -> int:
    return int(time.time())
