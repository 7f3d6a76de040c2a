"""The embedded ``tritonserver``: a child process with our backends and one model repository.

Owns the process, its run-time folder of links, its ports and its log. Used by ``jitney serve``, the
demo, the benchmarks and the tests::

    with TritonServer(Path("model_repository")) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

A stopped server may be started again; it then has new free ports.
"""

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jitney.errors import InstallationError, InvalidArgumentError, LoadError

from jitney_server.admin import Admin
from jitney_server.installation import backend_folder, find_installation, link_backends
from jitney_server.launch import launch, restrict
from jitney_server.log import explain_failure
from jitney_server.stopping import stop
from jitney_server.supervision import LOAD_S

EXIT_TIMEOUT_S = 10
"""Seconds that the server gives to requests in flight once it was told to stop."""

LOAD_THREADS = 16
"""Models that load at a time. Each loses a second at least in which the server only waits."""
FORWARDED_HEADERS = "(?i)traceparent|tracestate|jitney-limits"
"""Headers that models get as parameters of the request, so that spans are of one trace."""
_PORT_ATTEMPTS = 3


class TritonServer:
    """One ``tritonserver`` process over ``model_repository``.

    Port 0 is a free one. ``models`` is an explicit subset of the repository, which may be empty;
    None loads all of it. ``log_file`` gets everything the server and the models print; None is a
    temporary file that a clean stop removes. ``keep_going`` serves what loads even if a model
    fails; otherwise one failure stops the start. ``open_endpoints`` leaves the endpoints of
    ``launch.RESTRICTED`` open to every client. ``extra_args`` go to the server as they are, behind
    ours.

    Raises InvalidArgumentError for a repository that is not a folder or a model that is not in it;
    InstallationError if a part of the server is missing.
    """

    def __init__(
        self,
        model_repository: Path,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        host: str = "127.0.0.1",
        models: Sequence[str] | None = None,
        log_file: Path | None = None,
        extra_args: Sequence[str] = (),
        exit_timeout_s: int = EXIT_TIMEOUT_S,
        keep_going: bool = False,
        open_endpoints: bool = False,
    ) -> None:
        if not model_repository.is_dir():
            raise InvalidArgumentError(f"the model repository {model_repository} is not a folder")
        present = sorted(entry.name for entry in model_repository.iterdir() if entry.is_dir())
        for name in models or ():
            if name not in present:
                held = ", ".join(present) or "nothing"
                raise InvalidArgumentError(
                    f"model {name!r} is not in {model_repository}, which holds {held}"
                )
        self.model_repository = model_repository.resolve()
        self.host = host
        self.models = None if models is None else list(models)
        self._requested_ports: tuple[int, ...] = (http_port, grpc_port, metrics_port)
        self.log_file = log_file
        self._own_log = log_file is None
        self._log_mode = "wb"
        self._extra_args = list(extra_args)
        self._installation = find_installation()
        self._exit_timeout_s = exit_timeout_s
        self._keep_going = keep_going
        self._open_endpoints = open_endpoints
        self._key = secrets.token_hex(16)
        self.admin = Admin(host, self._requested_ports, self.admin_headers)
        self._process: subprocess.Popen[bytes] | None = None
        self._runtime: Path | None = None
        self.exit_status: int | None = None
        """Of the last process once it has ended; negative: the signal that ended it."""
        self.unclean = ""
        """Why the last stop was not clean; empty if it was."""
        self.lost = False
        """Whether the last stop may have cut requests off."""

    @property
    def http_url(self) -> str:
        """``host:port``, as tritonclient's HTTP client takes it."""
        return f"{self.admin.host}:{self.admin.http_port}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as tritonclient's gRPC client takes it."""
        return f"{self.admin.host}:{self.admin.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The complete address of the Prometheus metrics."""
        return f"http://{self.admin.host}:{self.admin.metrics_port}/metrics"

    @property
    def admin_headers(self) -> dict[str, str]:
        """HTTP header that opens the restricted endpoints; for gRPC the name takes the prefix
        ``triton-grpc-protocol-``."""
        return {} if self._open_endpoints else {"jitney-key": self._key}

    @property
    def pid(self) -> int | None:
        """Of the server process, which leads its own process group. None before a start."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs; says nothing about readiness."""
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        """Whether ``/v2/health/ready`` answers 200."""
        return self.is_alive() and self.admin.is_ready()

    def log_tail(self, lines: int = 50) -> str:
        """The last lines of the log; empty before the first start."""
        if self.log_file is None or not self.log_file.exists():
            return ""
        text = self.log_file.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 300.0) -> None:
        """Start the server and wait until every model is ready. Raises LoadError with the reason of
        each that failed, or if it is not ready in ``timeout_s``; then nothing is left running, and
        the log is kept."""
        assert self._process is None, "started twice"
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            try:
                self._launch()
                self._wait_until_ready(timeout_s)
                return
            except BaseException as error:
                taken = isinstance(error, _PortTakenError) and 0 in self._requested_ports
                self._end(keep_log=not (taken and attempts_left))
                if not (taken and attempts_left):
                    raise

    def stop(self, grace_s: float | None = None) -> bool:
        """Stop the server as :func:`jitney_server.stopping.stop` does, and kill what is left of it.
        Requests in flight have ``grace_s`` seconds; default: the exit timeout. Returns whether that
        was clean: every request had ended and every model was unloaded. True too if the server was
        not running.
        """
        self.unclean = ""
        self.lost = False
        if self._process is not None:
            grace_s = float(self._exit_timeout_s) if grace_s is None else grace_s
            self.unclean, self.lost = stop(self.admin, self._process, grace_s)
        self._end(keep_log=bool(self.unclean))
        return not self.unclean

    def restart(self, timeout_s: float = LOAD_S) -> None:
        """Start again after the process ended, on the same ports, with the same key and log. What
        is left of it is killed first. Raises as :meth:`start`."""
        self._end(keep_log=True)
        self._requested_ports = self.admin.ports
        self._log_mode = "ab"
        self.start(timeout_s)

    def _launch(self) -> None:
        ports = choose_ports(self.host, self._requested_ports)
        self.admin = Admin(self.host, ports, self.admin_headers)
        self._runtime = runtime = Path(tempfile.mkdtemp(prefix="jitney-server-"))
        link_backends(runtime / "backends", self._installation, backend_folder())
        if self.log_file is None or (self._own_log and self._log_mode == "wb"):
            handle, name = tempfile.mkstemp(prefix="jitney-server-", suffix=".log")
            os.close(handle)
            self.log_file = Path(name)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open(self._log_mode) as log:
            self._process = launch(
                self._command(runtime),
                [] if self._open_endpoints else restrict(self._key),
                self._environment(runtime),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: Ctrl-C is ours to pass on
            )
        atexit.register(self._end, keep_log=True)

    def _command(self, runtime: Path) -> list[str]:
        command = [
            str(self._installation.binary),
            f"--model-repository={self.model_repository}",
            f"--backend-directory={runtime / 'backends'}",
            f"--cache-directory={self._installation.caches}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--model-load-thread-count={LOAD_THREADS}",
            f"--grpc-header-forward-pattern={FORWARDED_HEADERS}",
            f"--http-header-forward-pattern={FORWARDED_HEADERS}",
            # A name of our own for the stubs' shared memory, so that it can be swept after a kill.
            f"--backend-config=python,shm-region-prefix-name={runtime.name}-",
        ]
        for kind, port in zip(("http", "grpc", "metrics"), self.admin.ports, strict=True):
            command += [f"--{kind}-address={self.host}", f"--{kind}-port={port}"]
        if self._keep_going:
            command += ["--exit-on-error=false", "--strict-readiness=false"]
        # Explicit control lets `stop` unload the models; clients need the key for it.
        command.append("--model-control-mode=explicit")
        models = ["*"] if self.models is None else self.models
        command += [f"--load-model={name}" for name in models]
        return command + self._extra_args

    def _environment(self, runtime: Path) -> dict[str, str]:
        """The stub embeds Python, which finds itself as ``python3`` on PATH and from there the
        virtual environment: so this Python's folder comes first."""
        environment = dict(os.environ)
        environment.pop("PYTHONHOME", None)  # it would hide the virtual environment
        library_path = [self._installation.library_path, environment.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = ":".join(path for path in library_path if path)
        folder = Path(sys.executable).parent
        python3 = folder / "python3"
        if not (python3.exists() and python3.samefile(sys.executable)):
            folder = runtime / "bin"  # `python3` is another version: stand in for it
            folder.mkdir()
            (folder / "python3").symlink_to(sys.executable)
        environment["PATH"] = f"{folder}:{environment.get('PATH', os.defpath)}"
        # A thread of the engine that waits for another sleeps after some 50 µs instead of spinning
        # for milliseconds: the server, its clients and the engine share the cores.
        environment.setdefault("GOMP_SPINCOUNT", "1000")
        return environment

    def _wait_until_ready(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if (status := self._process.poll()) is not None:
                text = self.log_tail(5000)
                if "already in use" in text:
                    ports = "/".join(map(str, self.admin.ports))
                    raise _PortTakenError(
                        f"one of the ports {ports} on {self.host} is in use by another server"
                    )
                why = explain_failure(text, status)
                raise LoadError(f"{why}\nThe whole log is {self.log_file}")
            if time.monotonic() > deadline:
                raise LoadError(
                    f"the server was not ready within {timeout_s:.0f} s; the log is "
                    f"{self.log_file}:\n{self.log_tail(10)}"
                )
            time.sleep(0.05)

    def _end(self, *, keep_log: bool) -> None:
        """Kill what is left of the group and remove what the start made. Idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.exit_status = self._process.wait()
            atexit.unregister(self._end)
            self._process = None
        if self._runtime is not None:
            for region in Path("/dev/shm").glob(f"{self._runtime.name}-*"):
                region.unlink(missing_ok=True)
            shutil.rmtree(self._runtime, ignore_errors=True)
            self._runtime = None
        if self._own_log and not keep_log and self.log_file is not None:
            self.log_file.unlink(missing_ok=True)
            self.log_file = None


class _PortTakenError(LoadError):
    """Another process took a port between our choice and the server's bind."""


def choose_ports(host: str, requested: Sequence[int]) -> list[int]:
    """Replace each 0 by a port that is free now, and check that the others are.

    All stay bound until the last is chosen, so that they differ. Between this and the server's own
    bind another process may still take one. Raises InstallationError for a port that is not free.
    """
    with contextlib.ExitStack() as stack:
        chosen = []
        for port in requested:
            probe = stack.enter_context(socket.socket())
            try:
                # As the server does: a port in TIME_WAIT is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            except OSError as error:
                raise InstallationError(
                    f"cannot listen on {host}:{port} ({error.strerror}); choose another port, "
                    f"or 0 for a free one"
                ) from None
            chosen.append(probe.getsockname()[1])
        return chosen
