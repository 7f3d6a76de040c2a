"""``jitney serve`` as a process, and the processes below it. Used by benchmarks.soak, too."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
from jitney_server.ports import choose_ports

from benchmarks.chaos.clients import Doors
from benchmarks.chaos.workload import MODEL

JITNEY = Path(sys.executable).parent / "jitney"
HOST = "127.0.0.1"
MARK = "JITNEY_CHAOS"
"""A variable that all processes of one :class:`Launcher` inherit."""
GRACE_S = 10
READY_S = 600.0
_POLL_S = 0.1


class Launcher:
    """``jitney serve`` over a repository, with a gateway, always on the same ports. ``folder`` is
    its place for temporary files."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.log = folder / "launcher.log"
        names = ("http", "grpc", "metrics", "openai")
        ports = choose_ports(HOST, dict.fromkeys(names, 0))
        self.ports = dict(zip(names, ports, strict=True))
        options = [f"--{name}-port={port}" for name, port in self.ports.items()]
        self._command = [JITNEY, "serve", repository, f"--grace={GRACE_S}", *options]
        self._environment = {**os.environ, "TMPDIR": str(folder), MARK: self.mark}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def doors(self) -> Doors:
        """Where the server and its gateway listen."""
        http = f"http://{HOST}:{self.ports['http']}"
        gateway = f"http://{HOST}:{self.ports['openai']}"
        return Doors(f"{HOST}:{self.ports['grpc']}", http, gateway)

    @property
    def metrics_url(self) -> str:
        """The address of the server's metrics."""
        return f"http://{HOST}:{self.ports['metrics']}/metrics"

    def start(self) -> None:
        """Start it and wait until model and gateway are ready. Raises RuntimeError otherwise."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Raises RuntimeError if model and gateway are not ready in time."""
        urls = (f"{self.doors.http}/v2/models/{MODEL}/ready", f"{self.doors.gateway}/health")
        deadline = time.monotonic() + READY_S
        while not all(map(_is_fine, urls)):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"jitney serve is not ready:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def stop(self) -> tuple[int, float]:
        """Stop it as an operator does. Returns its exit status and how many seconds that took."""
        assert self._process is not None
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(60 + GRACE_S)
        self._process = None
        return status, time.monotonic() - began

    def kill(self) -> None:
        """Kill the launcher itself. What it leaves is its own affair."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def end(self) -> None:
        """End everything, if it still runs: the benchmark is over."""
        if self._process is None:
            return
        processes = psutil.Process(self._process.pid).children(recursive=True)
        self.kill()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def log_tail(self) -> str:
        """The end of all that it has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    # --------------------------------------------------------------------- processes

    def process(self, name: str) -> psutil.Process:
        """The process of that name, one of PROCESSES. Raises LookupError if there is none."""
        assert self._process is not None
        found: psutil.Process | None = psutil.Process(self._process.pid)
        for is_next in PROCESSES[name]:
            found = _child(found, is_next) if found is not None else None
        if found is None:
            raise LookupError(f"there is no {name} now")
        return found


def _is_fine(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _child(parent: psutil.Process, is_wanted: Callable[[list[str]], bool]) -> psutil.Process | None:
    """The first child of that command line."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in parent.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_wanted(child.cmdline()):
                    return child
    return None


def _is_gateway(words: list[str]) -> bool:
    return "gateway" in words


def _is_server(words: list[str]) -> bool:
    return bool(words) and words[0].endswith("/tritonserver")


def _is_stub(words: list[str]) -> bool:
    return bool(words) and words[0].endswith("/triton_python_backend_stub")


def _is_engine(words: list[str]) -> bool:
    """An engine is forked, so it has the command line of its fork server."""
    return "jitney.engine.process" in words


_SERVER = (_is_server,)
_STUB = (*_SERVER, _is_stub)
_FORK_SERVER = (*_STUB, _is_engine)
PROCESSES: dict[str, tuple[Callable[[list[str]], bool], ...]] = {
    "launcher": (),
    "gateway": (_is_gateway,),
    "server": _SERVER,
    "stub": _STUB,
    "fork server": _FORK_SERVER,
    "engine": (*_FORK_SERVER, _is_engine),
}
"""Name of a process -> the way down to it from the launcher, by command lines."""
