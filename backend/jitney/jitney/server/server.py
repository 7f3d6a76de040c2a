"""The embedded ``tritonserver``: a child process with our backends and one model repository.

Owns the process, its run-time folder of links, its ports and its log. Used by ``jitney serve``, the
demo, the benchmarks and the tests::

    with TritonServer(Path("model_repository")) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

Life cycle: ``start`` returns when every model is ready, or raises LoadError with the server's own
explanation. ``stop`` unloads the models, then ends the process and whatever is left of its group,
so that no stub is orphaned. A stopped server may be started again; it then has new free ports.
"""

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from jitney.errors import InvalidArgumentError, LoadError
from jitney.server.admin import Admin
from jitney.server.installation import backend_directories as own_backend_directories
from jitney.server.installation import find_installation, link_backends
from jitney.server.launch import launch, restrict
from jitney.server.log import explain_failure, read_tail, without_traceback
from jitney.server.ports import choose_ports, reachable
from jitney.server.stopping import hang_up, unload_all
from jitney.server.supervision import LOAD_S

EXIT_TIMEOUT_S = 10
"""Seconds that the server gives to requests in flight once it was told to stop."""

_PORT_ATTEMPTS = 3
# After the models are unloaded, seconds for the process to end by itself.
_LINGER_S = 2.0


class TritonServer:
    """One ``tritonserver`` process over ``model_repository``.

    Ports: a number, or None or 0 for a free one. ``models`` is an explicit subset of the
    repository, which may be empty; None loads all of it. ``log_file`` gets everything the server
    and the models print; None is a temporary file that a clean stop removes. ``keep_going`` serves
    what loads even if a model fails; otherwise one failure stops the start. ``open_endpoints``
    leaves the endpoints of ``launch.RESTRICTED`` open to every client. ``extra_args`` go to the
    server as they are, behind ours.

    Raises InvalidArgumentError for a repository that is not a folder or a model that is not in it;
    InstallationError if a part of the server is missing.
    """

    def __init__(
        self,
        model_repository: Path,
        *,
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        host: str = "127.0.0.1",
        models: Sequence[str] | None = None,
        log_file: Path | None = None,
        extra_args: Sequence[str] = (),
        backend_directories: Sequence[Path] | None = None,
        exit_timeout_s: int = EXIT_TIMEOUT_S,
        keep_going: bool = False,
        open_endpoints: bool = False,
    ) -> None:
        self.model_repository = _checked_repository(Path(model_repository), models)
        self.host = host
        self.models = None if models is None else list(models)
        self._requested_ports = (http_port or 0, grpc_port or 0, metrics_port or 0)
        self._ports = [0, 0, 0]
        self._requested_log = log_file
        self._own_log = log_file is None
        self._log_mode = "wb"
        self._extra_args = list(extra_args)
        self._backends = list(backend_directories or own_backend_directories())
        self._installation = find_installation()
        self._exit_timeout_s = exit_timeout_s
        self._keep_going = keep_going
        self._open_endpoints = open_endpoints
        self._key = secrets.token_hex(16)
        self.admin = Admin(host, self._ports, self.admin_headers)
        self._process: subprocess.Popen[bytes] | None = None
        self._runtime: Path | None = None
        self.log_file: Path | None = None
        self.exit_status: int | None = None
        """Of the last process once it has ended; negative: the signal that ended it."""
        self.unclean = ""
        """Why the last stop was not clean; empty if it was."""
        self.lost = False
        """Whether the last stop may have cut requests off."""

    @property
    def http_url(self) -> str:
        """``host:port``, as tritonclient's HTTP client takes it."""
        return f"{reachable(self.host)}:{self._ports[0]}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as tritonclient's gRPC client takes it."""
        return f"{reachable(self.host)}:{self._ports[1]}"

    @property
    def metrics_url(self) -> str:
        """The complete address of the Prometheus metrics."""
        return f"http://{reachable(self.host)}:{self._ports[2]}/metrics"

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
        return "" if self.log_file is None else read_tail(self.log_file, lines)

    def model_states(self) -> dict[str, tuple[str, str]]:
        """Model name -> (state, reason), as the server's repository index has it: ``READY``, or
        ``UNAVAILABLE`` and why. Models that were never asked for have an empty state."""
        return {
            name: (state, without_traceback(reason))
            for name, (state, reason) in self.admin.model_states().items()
        }

    def model_inputs(self, name: str) -> list[dict[str, Any]]:
        """The input tensors of a ready model: name, datatype and shape of each."""
        return self.admin.model_inputs(name)

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 300.0) -> None:
        """Start the server and wait until it is ready.

        Raises LoadError with the reason of each model that failed, or if it is not ready in
        ``timeout_s``; then nothing is left running, and the log is kept.
        """
        assert self._process is None, "started twice"
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                self._launch()
                self._wait_until_ready(timeout_s)
                return
            except _PortTaken as error:
                last = 0 not in self._requested_ports or attempt == _PORT_ATTEMPTS
                self._end(keep_log=last)
                if last:
                    raise LoadError(str(error)) from None
            except BaseException:
                self._end(keep_log=True)
                raise

    def stop(self, grace_s: float | None = None) -> bool:
        """Stop the server. Returns whether that was clean: every request in flight had ended and
        every model was unloaded. True too if the server was not running.

        The models are told and unloaded first, which refuses new requests and gives those in flight
        up to ``grace_s`` seconds (default: the exit timeout; after its option ``drain_s`` a model
        of ours ends them with an error); then connections are closed, and the process gets
        SIGTERM; what is left of its group soon after is killed.
        """
        self.unclean, self.lost = "", False
        if self._process is None:
            return True
        self._signal_models()
        grace_s = float(self._exit_timeout_s) if grace_s is None else grace_s
        ended = f"the server had ended before, with status {self._process.poll()}"
        self.unclean, self.lost = ended, True
        if self.is_alive():
            self.unclean, self.lost = unload_all(self.admin, self._process.pid, grace_s)
            hang_up(self._process.pid, self._ports)  # the server would wait for idle ones
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LINGER_S)
        self._end(keep_log=bool(self.unclean))
        return not self.unclean

    def _signal_models(self) -> None:
        """SIGTERM to the models' processes. The server's stub itself ignores it."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for stub in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    stub.send_signal(signal.SIGTERM)

    def restart(self, timeout_s: float = LOAD_S) -> None:
        """Start again after the process ended, on the same ports, with the same key and log. What
        is left of it is killed first. Raises as :meth:`start`."""
        self._end(keep_log=True)
        http_port, grpc_port, metrics_port = self._ports
        self._requested_ports = (http_port, grpc_port, metrics_port)
        self._requested_log, self._log_mode = self.log_file, "ab"
        self.start(timeout_s)

    def _launch(self) -> None:
        self._ports = choose_ports(self.host, self._requested_ports)
        self.admin = Admin(self.host, self._ports, self.admin_headers)
        self._runtime = runtime = Path(tempfile.mkdtemp(prefix="jitney-server-"))
        link_backends(runtime / "backends", self._installation, self._backends)
        if self._requested_log is None:
            handle, name = tempfile.mkstemp(prefix="jitney-server-", suffix=".log")
            os.close(handle)
            self.log_file = Path(name)
        else:
            self._requested_log.parent.mkdir(parents=True, exist_ok=True)
            self.log_file = self._requested_log
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
        http_port, grpc_port, metrics_port = self._ports
        command = [
            str(self._installation.binary),
            f"--model-repository={self.model_repository}",
            f"--backend-directory={runtime / 'backends'}",
            f"--cache-directory={self._installation.caches}",
            f"--http-address={self.host}",
            f"--http-port={http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={metrics_port}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            # A name of our own for the stubs' shared memory, so that it can be swept after a kill.
            f"--backend-config=python,shm-region-prefix-name={runtime.name}-",
        ]
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
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if not self.is_alive():
                self._raise_failure()
            if time.monotonic() > deadline:
                raise LoadError(
                    f"the server was not ready within {timeout_s:.0f} s; the log is "
                    f"{self.log_file}:\n{self.log_tail(10)}"
                )
            time.sleep(0.05)

    def _raise_failure(self) -> None:
        assert self._process is not None
        assert self.log_file is not None
        text = read_tail(self.log_file, 5000)
        if "already in use" in text:
            ports = "/".join(str(port) for port in self._ports)
            raise _PortTaken(f"one of the ports {ports} on {self.host} is in use by another server")
        raise LoadError(
            f"{explain_failure(text, self._process.poll())}\nThe whole log is {self.log_file}"
        )

    def _end(self, *, keep_log: bool) -> None:
        """Kill what is left of the group and remove what the start made. Idempotent."""
        if self._process is not None:
            self._kill_group()
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

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class _PortTaken(Exception):
    """Another process took a port between our choice and the server's bind."""


def _checked_repository(path: Path, models: Sequence[str] | None) -> Path:
    if not path.is_dir():
        raise InvalidArgumentError(f"the model repository {path} is not a folder")
    present = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    for name in models or ():
        if name not in present:
            raise InvalidArgumentError(
                f"model {name!r} is not in {path}, which holds {', '.join(present) or 'nothing'}"
            )
    return path.resolve()
