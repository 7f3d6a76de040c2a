"""The commands of a folder of job files, which workers run one after another.

A job's state is where its file lies: in the folder itself it waits, and below it is ``running``,
``done``, ``failed`` or ``cancelled``. Who runs a job has a lock on its file, which ends with the
process: a file in ``running`` without one is of a worker that was killed.
"""

import contextlib
import fcntl
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from jitney.errors import InvalidArgumentError

from jitney_jobs.job import STOPPED, make_job, read_job

if TYPE_CHECKING:
    from jitney_jobs.executors import Models

_POLL_S = 1.0
_FILES = ("model", "template", "labels", "tokenizer", "journal", "ca_file", "api_key_file")
_Folder = Annotated[Path, typer.Argument(help="The folder of job files.")]


def submit(folder: _Folder, file: Annotated[Path, typer.Argument(help="A job file.")]) -> None:
    """Put a job file into a worker's folder."""
    import yaml

    settings = read_job(file)
    job = make_job(settings)
    local = [name for name in _FILES if os.path.exists(str(settings.get(name)))]
    settings |= {name: os.path.abspath(settings[name]) for name in local}
    settings |= {"input": job.input, "output": job.output}
    waiting = folder / f"{file.stem}.yaml"
    if waiting.exists() or (folder / "running" / waiting.name).exists():
        raise InvalidArgumentError(f"a job {file.stem} waits or runs in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    waiting.with_suffix(".new").write_text(yaml.safe_dump(settings), encoding="utf-8")
    waiting.with_suffix(".new").rename(waiting)


def cancel(folder: _Folder, name: Annotated[str, typer.Argument(help="The job's name.")]) -> None:
    """Cancel a job that waits or runs; what it has finished is committed."""
    for state in ("", "running", ""):  # it may be put back meanwhile
        with contextlib.suppress(FileNotFoundError):
            return _move(folder / state / f"{name}.yaml", folder / "cancelled")
    raise InvalidArgumentError(f"no job {name} waits or runs in {folder}")


def list_jobs(folder: _Folder) -> None:
    """Say where the jobs of a worker's folder stand."""
    for state in ("", "running", "done", "failed", "cancelled"):
        for path in _files(folder / state):
            why = path.with_suffix(".txt")
            error = f": {why.read_text(encoding='utf-8')}" if why.exists() else ""
            print(f"{state or 'waiting':9}  {path.stem}{error}")


def worker(
    folder: _Folder,
    until_empty: Annotated[bool, typer.Option(help="End when no job waits.")] = False,
    tries: Annotated[int, typer.Option(help="Tries of a job that fails.", min=1)] = 3,
    backoff: Annotated[float, typer.Option(help="Seconds after the first; then doubled.")] = 30.0,
    server: Annotated[str | None, typer.Option(help="Of jobs that name none.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Likewise.")] = None,
    metrics_host: Annotated[str, typer.Option(help="Likewise.")] = "127.0.0.1",
    push_gateway: Annotated[str | None, typer.Option(help="Likewise.")] = None,
) -> None:
    """Run the job files of a folder one after another. The status is 1 if any of them failed."""
    from jitney_jobs.executors import Models

    sys.path.insert(0, os.getcwd())  # functions of the user's, which processes import too
    telling = {"metrics_port": metrics_port, "metrics_host": metrics_host}
    telling |= {"push_gateway": push_gateway, "server": server}
    with contextlib.closing(Models()) as models:  # so that it waits for no server when stopped
        failed = _work(folder, until_empty, tries, backoff, telling, models)
    raise typer.Exit(int(failed > 0))


def _work(
    folder: Path,
    until_empty: bool,
    tries: int,
    backoff: float,
    telling: dict[str, Any],
    models: "Models",
) -> int:
    """Returns how many jobs failed."""
    from jitney_jobs.dataset import reason
    from jitney_jobs.run import run_job

    failed = 0
    while (claimed := _claim(folder)) or not until_empty:
        if claimed is None:
            time.sleep(_POLL_S)
            continue
        path, lock = claimed
        held = partial(_lies_at, path, lock)
        state = "failed"  # where the job's file goes; empty if it is stopped: it waits again
        for number in range(tries):
            if not held():
                break
            time.sleep(backoff * 2 ** (number - 1) if number else 0.0)
            try:
                job = make_job({**telling, **read_job(path)})
                state = "done" if run_job(job, models, held) else ""
                break
            except Exception as error:  # the job's or a user's function's; the next may do well
                models.close()
                print(f"{path.stem}: {reason(error)}", file=sys.stderr)
                if held():
                    path.with_suffix(".txt").write_text(reason(error), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):  # cancelled in the end
            if held():
                _move(path, folder / state)
                failed += state == "failed"
        os.close(lock)
        if not state:
            raise typer.Exit(STOPPED)
    return failed


def _claim(folder: Path) -> tuple[Path, int] | None:
    """A job and its lock: one whose worker was killed, or else the one that came first."""
    for path in [*_files(folder / "running"), *_files(folder)]:
        running = folder / "running" / path.name
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been moved before it was locked. And a job of its name may be running.
            if _lies_at(path, file.fileno()) and (path == running or not running.exists()):
                _move(path, running.parent)
                return running, os.dup(file.fileno())
    return None


def _lies_at(path: Path, lock: int) -> bool:
    """Whether the locked file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _files(folder: Path) -> list[Path]:
    """Of jobs, by the time at which they came."""
    found = []
    for path in folder.glob("[!.]*.yaml"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_ctime_ns, path))
    return [path for _, path in sorted(found)]


def _move(path: Path, folder: Path) -> None:
    """A job, with why its last try failed."""
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # before the job: who sees it there reads it
        path.with_suffix(".txt").rename(folder / f"{path.stem}.txt")
    path.rename(folder / path.name)
