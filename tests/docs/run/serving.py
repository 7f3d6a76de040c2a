"""The server that pages talk to, at the addresses that they write: ports 8000, 8001 and 8002."""

import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

PORTS = (8000, 8001, 8002)
START_S = 600.0


class Server:
    """`jitney serve` over the model repository of the scratch copy, started when first asked for
    and then kept, until a page starts one of its own."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._folder = folder
        self._variables = variables
        self._log = folder.parent / "server.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make sure that it runs and every model is ready."""
        if self._process is not None and self._process.poll() is None:
            return
        check_ports_are_free()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [".venv/bin/jitney", "serve", "model_repository"],
                cwd=self._folder,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_ready(self._process, self._log)

    def stop(self) -> None:
        """As Ctrl-C does it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
        self._process = None


def check_ports_are_free() -> None:
    """Raise AssertionError if another server listens where the pages' is to."""
    for port in PORTS:
        with socket.socket() as probe:
            probe.settimeout(1)
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        assert not taken, f"port {port} is in use: the pages' commands need {PORTS}"


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server at the usual port has loaded every model and says so. Raises
    AssertionError with the end of what it printed."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        if "Ctrl-C" in log.read_text(encoding="utf-8", errors="replace") and _answers():
            return
        time.sleep(0.2)
    raise AssertionError(f"the server is not ready\n{log.read_text('utf-8', 'replace')[-4000:]}")


def _answers() -> bool:
    try:
        with urllib.request.urlopen("http://127.0.0.1:8000/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
