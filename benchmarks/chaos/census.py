"""Counts what a run has on the machine: processes, sockets, shared memory and folders.

All folders ``/tmp/python_env_…`` count, because their names do not tell which server made them. On
a machine with other servers, give the benchmark namespaces of its own (docs/benchmarks.md).
"""

import os
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.chaos.launcher import MARK

_LEFT_S = 30.0
"""What is still there after so many seconds stays."""
_PAUSE_S = 0.25
_RUN_FOLDER = "jitney-server-"
"""Beginning of the names of run folders, and of shared memory that belongs to them."""
_CACHE = "torchinductor_"
"""Beginning of the name of torch's cache, which all programs of a user share."""
_PROGRAMS = ("tritonserver", "triton_python_backend_stub", "jitney.engine.process", "gateway",
             "serve", "nginx")  # fmt: skip
"""What a command line is called by."""


class Census:
    """Counts what belongs to the processes with one mark, whose temporary folder is ``folder``."""

    def __init__(self, mark: str, folder: Path) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._folder = folder
        self._run_folders: set[str] = set()
        """The names of all that there have been."""

    def take(self, *, with_files: bool = True) -> Counter[str]:
        """Kind of thing -> how many there are. ``with_files``: shared memory and folders too."""
        found = self._count_processes()
        if not with_files:
            return found
        folders = [
            entry.name
            for entry in self._folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(_CACHE)
        ]
        self._run_folders.update(name for name in folders if name.startswith(_RUN_FOLDER))
        found["folder for temporary files"] = len(folders)
        found["/tmp/python_env_ folder"] = _count_environments()
        prefixes = tuple(f"{name}-" for name in self._run_folders)
        found["shared memory"] = sum(
            name.startswith(prefixes) for name in os.listdir("/dev/shm") if prefixes
        )
        return found

    def left(self, before: Counter[str], *, with_files: bool = True) -> list[str]:
        """What there is more than before, each with its kind; waits some time for it to go."""
        deadline = time.monotonic() + _LEFT_S
        more = self.take(with_files=with_files) - before
        while more and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            more = self.take(with_files=with_files) - before
        return sorted(more.elements())

    def _count_processes(self) -> Counter[str]:
        """Processes, those that have ended and wait for their parents, and dead sockets."""
        found: Counter[str] = Counter()
        ours = set()
        for process in psutil.process_iter():
            try:
                if self._mark not in _environment(process):
                    continue
                ours.add(process.pid)
                found[_name(process)] += 1
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_CLOSE_WAIT:
                        found[f"socket in CLOSE_WAIT of {_name(process)}"] += 1
            except (psutil.Error, OSError):
                continue  # it has just ended
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE and process.ppid() in ours:
                    found[f"zombie {process.name()}"] += 1
            except psutil.Error:
                continue
        return found


def _environment(process: psutil.Process) -> list[bytes]:
    """Empty for a process that has ended."""
    return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")


def _name(process: psutil.Process) -> str:
    """What it is, as its command line says."""
    words = [word.rpartition("/")[2] for word in process.cmdline()]
    named = (program for program in _PROGRAMS if program in words)
    return f"process {next(named, process.name())}"


def _count_environments() -> int:
    return sum(path.is_dir() for path in Path("/tmp").glob("python_env_*"))
