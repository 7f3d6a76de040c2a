"""Process 1 of the server containers: starts ``tritonserver``, watches it and drains it.

    python entrypoint.py --embedded            the server of the nvidia-pytriton package
    python entrypoint.py --native FOLDER       NVIDIA's own, e.g. in /opt/tritonserver

Owns the server's command line, its signals and the container's exit status. Everything that the
server and its models print goes to standard output, which the container engine rotates.

SIGTERM: the models get it first (ours refuse new requests, and end running ones with an error after
their option ``drain_s``), and the server gets it once they have nothing in flight. By itself the
server would cut streams, and would not end while a stream or a connection is open. The status is 0
if no request of ours was cut off; requests of other models over gRPC are not known here.

If the server ends, stays not ready, or loses a model's process, which it does not start again, this
process ends with status 1: the engine's restart policy then starts a new container.
"""

import argparse
import contextlib
import http.client
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from health import remember
from jitney.server.installation import backend_directories, find_installation, link_backends
from jitney.server.server import RESTRICTED
from jitney.server.stopping import hang_up, requests_in_flight

_POLL_S = 1.0
# How long the metrics must show no request: they are 0.25 s late, responses less.
_QUIET_S = 0.6
_STUB = "triton_python_backend_stub"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or a failure; returns the container's exit status."""
    options = parse(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    server = Server.start(options)
    try:
        failure = server.watch(stop)
        if failure:
            say(f"{failure}; a new container must take over")
        drained = server.drain()
    finally:
        server.kill()
    return 0 if drained and not failure else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what follows ``--`` goes to tritonserver as it is."""
    parser = argparse.ArgumentParser(description="Run tritonserver as process 1 of a container.")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--embedded", action="store_true", help="the server of nvidia-pytriton")
    kind.add_argument("--native", type=Path, metavar="FOLDER", help="where NVIDIA's server is")
    parser.add_argument("--models", type=Path, default=Path("/models"), help="model repository")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--drain-s", type=float, default=30.0, help="seconds that requests in flight get at a stop"
    )
    parser.add_argument(
        "--exit-timeout-s", type=int, default=10, help="then, seconds for the server to unload"
    )
    parser.add_argument(
        "--lost-model-s", type=float, default=10.0, help="seconds a model's process may be missing"
    )
    parser.add_argument(
        "--unready-s", type=float, default=120.0, help="seconds the server may be not ready"
    )
    parser.add_argument("server_args", nargs="*", metavar="-- ARGUMENT")
    return parser.parse_args(arguments)


@dataclass
class Server:
    """One ``tritonserver`` process, which leads its own process group."""

    options: argparse.Namespace
    process: subprocess.Popen[bytes]
    was_ready: bool = False
    stubs: Counter[str] = field(default_factory=Counter)
    """Model -> its processes, as they were when the server became ready."""

    @classmethod
    def start(cls, options: argparse.Namespace) -> "Server":
        """Start the server; it is not ready yet."""
        remember(options.models)
        runtime = Path(tempfile.mkdtemp(prefix="jitney-"))
        environment = dict(os.environ)
        if options.embedded:
            installation = find_installation()
            backends = runtime / "backends"
            link_backends(backends, installation, backend_directories())
            environment["LD_LIBRARY_PATH"] = installation.library_path
            binary, caches = installation.binary, installation.caches
        else:
            binary, backends = options.native / "bin" / "tritonserver", options.native / "backends"
            caches = options.native / "caches"
        process = subprocess.Popen(
            command(options, binary, backends, caches),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals to the container's terminal are ours to pass on
        )
        return cls(options, process)

    # ------------------------------------------------------------------ while it runs

    def watch(self, stop: threading.Event) -> str:
        """Until ``stop`` is set: an empty string; or until a failure, and which."""
        ready_at = whole_at = time.monotonic()
        while not stop.wait(_POLL_S):
            status = self.process.poll()
            if status is not None:
                return f"the server ended by itself with status {status}"
            now = time.monotonic()
            if self.is_ready():
                ready_at = now
                if not self.was_ready:
                    self.was_ready, whole_at = True, now
                    self.stubs = stubs_of(self.process.pid)
                    say(f"ready with {', '.join(sorted(self.stubs)) or 'no Python model'}")
            if not self.was_ready:
                continue
            missing = self.stubs - stubs_of(self.process.pid)
            if not missing:
                whole_at = now
            if now - whole_at > self.options.lost_model_s:
                return f"the process of model {', '.join(sorted(missing))} is gone"
            if now - ready_at > self.options.unready_s:
                return f"the server has not been ready for {self.options.unready_s:.0f} s"
        return ""

    def is_ready(self) -> bool:
        """Whether ``/v2/health/ready`` answers 200."""
        return self.answers("/v2/health/ready")

    def answers(self, path: str) -> bool:
        """Whether one of the server's own pages answers 200."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get(path, self.options.http_port)[0] == 200
        return False

    def get(self, path: str, port: int) -> tuple[int, str]:
        """Status and body of one of the server's own pages."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    # ------------------------------------------------------------------ how it ends

    def drain(self) -> bool:
        """End the server; whether every request that it had taken was answered in time."""
        if self.process.poll() is not None:
            return False
        # A server with `--exit-on-error=false` may serve and never be ready.
        if not self.was_ready and not self.answers("/v2/health/live"):
            say("stopping while models load: nothing was taken yet")
            return True  # `kill` follows; the server itself would first load them all
        say(f"stopping; requests in flight get up to {self.options.drain_s:.0f} s")
        for stub in children(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                stub.send_signal(signal.SIGTERM)  # to our model; the stub itself ignores it
        quiet = self.wait_until_quiet(time.monotonic() + self.options.drain_s)
        if quiet:
            # The server would wait for idle connections as for busy ones. Those of gRPC first: an
            # open stream keeps its model loaded.
            hang_up(self.process.pid, [self.options.grpc_port, self.options.metrics_port])
        self.process.send_signal(signal.SIGTERM)
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(self.options.exit_timeout_s + 2)
        say(
            f"the server ended with status {status}"
            if status is not None
            else "the server did not end in time and was killed"
        )
        if not quiet:
            say("not every request had ended")
        return quiet and status == 0

    def wait_until_quiet(self, deadline: float) -> bool:
        """Whether our models had nothing in flight before ``deadline``.

        The server itself waits for the requests of other models when it stops.
        """
        quiet_since = time.monotonic()
        while (now := time.monotonic()) < deadline and self.process.poll() is None:
            try:
                metrics = self.get("/metrics", self.options.metrics_port)[1]
            except (OSError, http.client.HTTPException):
                return False  # without an answer, its requests are unknown
            if any(requests_in_flight(metrics).values()):
                quiet_since = now
            elif now - quiet_since > _QUIET_S:
                return True
            time.sleep(0.1)
        return False

    def kill(self) -> None:
        """Kill what is left of the server and its models. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def command(options: argparse.Namespace, binary: Path, backends: Path, caches: Path) -> list[str]:
    """The server's command line: clients cannot load models, and the calls that reach the server's
    memory, models, traces or logs need a random key that is told to no client."""
    closed = f"{','.join(RESTRICTED)}:jitney-key={secrets.token_hex(16)}"
    return [
        str(binary),
        f"--model-repository={options.models}",
        f"--backend-directory={backends}",
        f"--cache-directory={caches}",
        "--model-control-mode=none",
        f"--http-address={options.host}",
        f"--http-port={options.http_port}",
        f"--grpc-address={options.host}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-address={options.host}",
        f"--metrics-port={options.metrics_port}",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        f"--http-restricted-api={closed}",
        f"--grpc-restricted-protocol={closed}",
        *options.server_args,
    ]


def children(pid: int) -> list[psutil.Process]:
    """The models' processes: the live children of the server that are stubs. One that is ending
    has no command line any more, though it may not be called a zombie yet."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE and _STUB in "".join(child.cmdline()[:1]):
                    found.append(child)
    return found


def stubs_of(pid: int) -> Counter[str]:
    """Model -> how many processes it has. A stub's first argument is a file of its version."""
    names: Counter[str] = Counter()
    for stub in children(pid):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            names[Path(stub.cmdline()[1]).parents[1].name] += 1
    return names


def say(text: str) -> None:
    """One line in the container's log."""
    print(f"[entrypoint] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
