"""The commands of a folder of job files, which workers run one after another.

A job's state is where its file lies: in the folder itself it waits, and below it is ``running``,
``done``, ``failed`` or ``cancelled``. Who runs a job has a lock on its file, which ends with the
process: a file in ``running`` without one is of a worker that was killed.
"""

import contextlib
import fcntl
import math
import os
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from jitney.errors import InvalidArgumentError

from jitney_jobs.job_making import make_job, read_job
from jitney_jobs.outcome import ExitStatus, is_worth_another_try
from jitney_jobs.whole_files import write_whole

if TYPE_CHECKING:
    from jitney_jobs.executors import Models

_POLL_S = 1.0
_FILES = ("template", "labels", "tokenizer", "ca_file", "api_key_file")
"""Settings that may name a local file: they do if one of that name is there."""


class JobState(StrEnum):
    """Where a job's file lies below the worker's folder: in a folder of that name, or in the
    worker's folder itself."""

    WAITING = ""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_Folder = Annotated[Path, typer.Argument(help="The folder of job files.")]


def submit(folder: _Folder, file: Annotated[Path, typer.Argument(help="A job file.")]) -> None:
    """Put a job file into a worker's folder."""
    settings = read_job(file)  # says so if pyyaml is missing
    import yaml

    job = make_job(settings)
    for name in _FILES:
        path = settings.get(name)
        if path is not None and os.path.exists(str(path)):
            settings[name] = os.path.abspath(str(path))
    if job.model is not None:  # a path, or a name: the job knows which
        settings["model"] = job.model
    settings["input"] = [job.input, *job.more_inputs] if job.more_inputs else job.input
    settings.pop("more_inputs", None)
    settings["output"] = job.output
    if job.journal is not None:  # a folder, which may be made by the job
        settings["journal"] = job.journal
    waiting = folder / f"{file.stem}.yaml"
    if waiting.exists() or (folder / JobState.RUNNING / waiting.name).exists():
        raise InvalidArgumentError(f"a job {file.stem} waits or runs in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(waiting, [yaml.safe_dump(settings).encode()])


def cancel(folder: _Folder, name: Annotated[str, typer.Argument(help="The job's name.")]) -> None:
    """Cancel a job that waits or runs; what it has finished is committed."""
    # A job that runs may be put back to those that wait meanwhile.
    for state in (JobState.WAITING, JobState.RUNNING, JobState.WAITING):
        with contextlib.suppress(FileNotFoundError):
            return _move(folder / state / f"{name}.yaml", folder / JobState.CANCELLED)
    raise InvalidArgumentError(f"no job {name} waits or runs in {folder}")


def list_jobs(folder: _Folder) -> None:
    """Say where the jobs of a worker's folder stand."""
    for state in JobState:
        for path in _job_files(folder / state):
            why = _reason_file(path)
            error = f": {why.read_text(encoding='utf-8')}" if why.exists() else ""
            print(f"{state or 'waiting':9}  {path.stem}{error}")


def worker(
    folder: _Folder,
    until_empty: Annotated[bool, typer.Option(help="End when no job waits.")] = False,
    tries: Annotated[int, typer.Option(help="Tries of a job whose error may pass.", min=1)] = 3,
    backoff: Annotated[
        float,
        typer.Option(
            help="Seconds before a job's second try, then doubled. Other jobs run meanwhile."
        ),
    ] = 30.0,
    server: Annotated[str | None, typer.Option(help="Server of jobs that name none.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port for the metrics of jobs that name none.")
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address for the metrics of jobs that name none.")
    ] = "127.0.0.1",
    push_gateway: Annotated[
        str | None, typer.Option(help="Push gateway of jobs that name none.")
    ] = None,
) -> None:
    """Run the job files of a folder one after another. The exit status is 1 if any of them failed,
    else 3 if any has bad rows, or 4 if any was late."""
    from jitney_jobs.executors import Models

    sys.path.insert(0, os.getcwd())  # functions of the user's, which processes import too
    defaults = {
        "server": server,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
        "push_gateway": push_gateway,
    }
    # Closing cancels requests to a server: a process that is stopped does not wait for answers.
    with contextlib.closing(Models()) as models:
        queue = _Queue(folder, defaults, tries, backoff, models)
        status = queue.run(until_empty)
    raise typer.Exit(status)


@dataclass(frozen=True)
class _Claim:
    """A job in ``running`` that is this worker's."""

    path: Path
    lock: int
    """A descriptor of the locked file."""

    def is_held(self) -> bool:
        """Whether the job's file is still there. It is not if the job was cancelled."""
        return _lies_at(self.path, self.lock)

    def release(self) -> None:
        os.close(self.lock)


@dataclass
class _Attempt:
    """A job that this worker has claimed, and its next try."""

    claim: _Claim
    at: float = 0.0
    """When it is to begin, in monotonic seconds."""
    failures: int = 0
    """Tries that failed."""


class _Ended(NamedTuple):
    """What has become of a job that was tried."""

    state: JobState
    """Where its file belongs now."""
    status: ExitStatus
    note: str | None = None
    """What `list` says of it."""


_WORST_FIRST = (ExitStatus.JOB_ERROR, ExitStatus.BAD_ROWS, ExitStatus.LATE, ExitStatus.COMPLETE)
"""The exit status of a worker is the first of these that one of its jobs has."""


class _Queue:
    """The jobs of a worker's folder, run one after another."""

    def __init__(
        self,
        folder: Path,
        defaults: dict[str, Any],
        tries: int,
        backoff: float,
        models: "Models",
    ) -> None:
        """``defaults``: settings of jobs that do not have them. ``backoff``: seconds after the
        first try of a job that failed."""
        self._folder = folder
        self._defaults = defaults
        self._tries = tries
        self._backoff = backoff
        self._models = models
        self._retries: list[_Attempt] = []
        """Jobs whose last try failed. This worker keeps them until their next try."""
        self._statuses = {ExitStatus.COMPLETE}
        """Of the jobs that have ended."""

    def run(self, until_empty: bool) -> ExitStatus:
        """Returns the worst status of the jobs. Raises typer.Exit if a job was stopped by a
        signal."""
        while True:
            attempt = self._next_attempt()
            if attempt is not None:
                self._try(attempt)
            elif until_empty and not self._retries:
                return next(status for status in _WORST_FIRST if status in self._statuses)
            else:
                time.sleep(self._pause_s())

    def _next_attempt(self) -> _Attempt | None:
        """A job whose pause is over, or else one that waits in the folder."""
        now = time.monotonic()
        for attempt in self._retries:
            if attempt.at <= now or not attempt.claim.is_held():
                self._retries.remove(attempt)
                return attempt
        claim = _claim(self._folder)
        return None if claim is None else _Attempt(claim)

    def _pause_s(self) -> float:
        first_at = min((attempt.at for attempt in self._retries), default=math.inf)
        return max(0.0, min(_POLL_S, first_at - time.monotonic()))

    def _try(self, attempt: _Attempt) -> None:
        """Run a job, and move its file to where it belongs after that. A job whose error may pass
        is kept for its next try instead."""
        if not attempt.claim.is_held():  # it was cancelled while it waited
            attempt.claim.release()
            return
        ended = self._run_once(attempt)
        if ended is None:
            self._retries.append(attempt)
            return
        if self._put_away(attempt.claim, ended):
            self._statuses.add(ended.status)
        attempt.claim.release()
        if ended.state is JobState.WAITING:
            for other in self._retries:
                self._put_away(other.claim, ended)
            raise typer.Exit(ExitStatus.STOPPED)

    def _run_once(self, attempt: _Attempt) -> _Ended | None:
        """What has become of the job. None: it is to be tried again. If the job was cancelled
        meanwhile, the answer is not used (:meth:`_put_away`)."""
        from jitney_jobs.rows import reason

        claim = attempt.claim
        try:
            return self._run(claim)
        except Exception as error:
            # The job's error, or one of a user's function, which may be of any kind. It ends this
            # try and not the worker. The next try loads the model anew.
            self._models.close()
            print(f"{claim.path.stem}: {reason(error)}", file=sys.stderr)
            attempt.failures += 1
            may_try = attempt.failures < self._tries and is_worth_another_try(error)
            if may_try and claim.is_held():
                _reason_file(claim.path).write_text(reason(error), encoding="utf-8")
                attempt.at = time.monotonic() + self._backoff * 2 ** (attempt.failures - 1)
                return None
            return _Ended(JobState.FAILED, ExitStatus.JOB_ERROR, reason(error))

    def _run(self, claim: _Claim) -> _Ended:
        """Raises what :func:`~jitney_jobs.run.run_job` raises."""
        from jitney_jobs.job_record import read_record
        from jitney_jobs.run import run_job
        from jitney_jobs.status import exit_status, note_of

        began = time.time()
        job = make_job({**self._defaults, **read_job(claim.path)})
        if not run_job(job, self._models, claim.is_held):
            return _Ended(JobState.WAITING, ExitStatus.STOPPED)
        record = read_record(job.output, job.journal, job.its_shard)
        return _Ended(JobState.DONE, exit_status(record, job), note_of(record, began))

    def _put_away(self, claim: _Claim, ended: _Ended) -> bool:
        """Move the job's file to where it belongs. Returns False if it was cancelled instead."""
        if not claim.is_held():
            return False
        try:
            note = _reason_file(claim.path)
            if ended.note is not None:
                note.write_text(ended.note, encoding="utf-8")
            elif ended.state is JobState.DONE:  # an earlier try may have failed
                note.unlink(missing_ok=True)
            _move(claim.path, self._folder / ended.state)
        except FileNotFoundError:  # it was cancelled just now
            return False
        return True


def _claim(folder: Path) -> _Claim | None:
    """A job that is in nobody's hands: one whose worker was killed, or else the one that came
    first. None if there is no such job."""
    for path in [*_job_files(folder / JobState.RUNNING), *_job_files(folder)]:
        running = folder / JobState.RUNNING / path.name
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been moved before it was locked. And a job of its name may be running.
            if _lies_at(path, file.fileno()) and (path == running or not running.exists()):
                _move(path, running.parent)
                # A duplicate shares the lock, which therefore outlives `file`.
                return _Claim(running, os.dup(file.fileno()))
    return None


def _lies_at(path: Path, lock: int) -> bool:
    """Whether the locked file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _job_files(folder: Path) -> list[Path]:
    """By the time at which they came there."""
    found = []
    for path in folder.glob("[!.]*.yaml"):
        with contextlib.suppress(FileNotFoundError):  # it was moved just now
            found.append((path.stat().st_ctime_ns, path))
    return [path for _, path in sorted(found)]


def _reason_file(job_file: Path) -> Path:
    """Beside the job's file: why its last try failed, or what is bad in its output."""
    return job_file.with_suffix(".txt")


def _move(path: Path, folder: Path) -> None:
    """Move a job's file. Raises FileNotFoundError if it is not there."""
    folder.mkdir(exist_ok=True)
    # The reason goes first: a reader who finds the job there finds its reason too.
    with contextlib.suppress(FileNotFoundError):
        _reason_file(path).rename(folder / _reason_file(path).name)
    path.rename(folder / path.name)
