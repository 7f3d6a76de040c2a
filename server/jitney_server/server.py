"""The embedded ``tritonserver``: a child process with our backends and one model repository.

Owns the process, its run-time folder of links, its ports and its log. Used by ``jitney serve``, the
demo, the benchmarks and the tests::

    with TritonServer(Path("model_repository")) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

A stopped server may be started again; it then has new free ports.
"""

import atexit
import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from jitney.errors import InvalidArgumentError, LoadError

from jitney_server.admin import Admin
from jitney_server.installation import backend_folder, find_installation, link_backends
from jitney_server.launch import guard_group, launch, restrict
from jitney_server.leftovers import RunFolder, sweep
from jitney_server.plain_paths import plain_path, unservable_models
from jitney_server.ports import ServerPorts, choose_ports
from jitney_server.start_failure import explain_failure, is_port_taken
from jitney_server.stopping import StopOutcome, model_processes, stop
from jitney_server.supervision import LOAD_S

EXIT_TIMEOUT_S = 10
"""Seconds that the server gives to requests in flight once it was told to stop."""

LOAD_THREADS = 16
"""Models that load at a time. In each load the server waits for at least a second without using a
core: so more threads than cores pay."""
FORWARDED_HEADERS = "(?i)traceparent|tracestate|jitney-limits"
"""Headers that models get as parameters of the request: those of traces, and the limits of an API
key."""
_PORT_ATTEMPTS = 3
_POLL_S = 0.05
_STUBS_POLL_S = 1.0
"""Between two looks at the stubs of a server that starts."""
_ENDED_STUB_S = 10.0
"""A stub that has ended for so long is one whose end the server does not notice."""


class TritonServer:
    """One ``tritonserver`` process over ``model_repository``.

    - ``http_port``, ``grpc_port``, ``metrics_port``: 0 picks a free one.
    - ``models``: the models of the repository to load, perhaps an empty list; None: all of them.
    - ``log_file`` gets everything that the server and the models print. None: a temporary file,
      which a clean stop removes.
    - ``extra_args`` go to the server as they are, behind ours.
    - ``exit_timeout_s``: seconds that requests in flight get at a stop.
    - ``keep_going``: serve what loads. Without it one model that fails stops the start.
    - ``open_endpoints``: leave the endpoints of ``launch.RESTRICTED`` open to every client.

    Raises InvalidArgumentError for a repository that is not a folder or a model that is not in it,
    and InstallationError if a part of the server is missing.
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
        _check_repository(model_repository, models or (), keep_going=keep_going)
        self.model_repository = model_repository.resolve()
        self.host = host
        self.models = None if models is None else list(models)
        self.requested_ports = ServerPorts(http_port, grpc_port, metrics_port)
        """As given: 0 where a free one is to be picked."""
        self.log_file = log_file
        self._has_temporary_log = log_file is None
        self._log_start = 0
        """Where the log of the last start begins in the file: a restart keeps what was there."""
        self._extra_args = list(extra_args)
        self._installation = find_installation()
        self._exit_timeout_s = exit_timeout_s
        self._keep_going = keep_going
        self._open_endpoints = open_endpoints
        self._key = secrets.token_hex(16)
        self.admin = Admin(host, self.requested_ports, self.admin_headers)
        """Each start makes another one, for its ports. So do not keep it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._runtime: RunFolder | None = None
        """Holds links to our backends, while there is a process."""
        self.exit_status: int | None = None
        """That of the last process that has ended. A negative one is the signal that ended it."""
        self.last_stop = StopOutcome()

    @property
    def http_url(self) -> str:
        """``host:port``, as tritonclient's HTTP client takes it."""
        return f"{self.admin.host}:{self.admin.ports.http}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as tritonclient's gRPC client takes it."""
        return f"{self.admin.host}:{self.admin.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """The complete address of the Prometheus metrics."""
        return f"http://{self.admin.host}:{self.admin.ports.metrics}/metrics"

    @property
    def admin_headers(self) -> dict[str, str]:
        """The HTTP header that opens the restricted endpoints. For gRPC its name has the prefix
        ``triton-grpc-protocol-``."""
        return {} if self._open_endpoints else {"jitney-key": self._key}

    @property
    def pid(self) -> int | None:
        """The id of the server's process, which leads a process group of its own. None before a
        start."""
        return None if self._process is None else self._process.pid

    def unservable(self) -> dict[str, str]:
        """Name -> why, of the models that are left out because their names cannot be served."""
        names = _model_names(self.model_repository) if self.models is None else self.models
        return unservable_models(self.model_repository / name for name in names)

    def is_alive(self) -> bool:
        """Whether the process runs, ready or not."""
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

    def log_of_last_start(self) -> str:
        """What was logged since the last start; empty before the first one."""
        if self.log_file is None or not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ start and stop

    def start(self, timeout_s: float = 300.0) -> None:
        """Start the server and wait until every model is ready.

        Raises LoadError with the reason of each model that failed, or if the server is not ready in
        ``timeout_s``. Then nothing is left running, and the log is kept.

        What dead servers of this user have left on this machine is removed first.
        """
        sweep()
        self._start(self.requested_ports, timeout_s, append_to_log=False)

    def _start(self, ports: ServerPorts, timeout_s: float, *, append_to_log: bool) -> None:
        assert self._process is None, "started twice"
        attempts_left = _PORT_ATTEMPTS if 0 in ports else 1
        while True:
            attempts_left -= 1
            try:
                self._launch(ports, append_to_log=append_to_log)
                self._wait_until_ready(timeout_s)
                assert self._runtime is not None
                self._runtime.note_ready()
                return
            except _PortTakenError:
                is_last = attempts_left == 0
                self._clean_up(keep_log=is_last)
                if is_last:
                    raise
                # Another process took one of our free ports: the next attempt chooses others.
            except Exception:
                self._clean_up(keep_log=True)  # the error names it
                raise
            except BaseException:  # Ctrl-C
                self._clean_up(keep_log=append_to_log)
                raise

    def stop(self, grace_s: float | None = None) -> bool:
        """Stop the server as :func:`jitney_server.stopping.stop` does, and kill what is left of it.

        Requests in flight have ``grace_s`` seconds; default: the exit timeout. Returns whether the
        stop was clean: every request had ended and every model was unloaded. True too if the server
        was not running.
        """
        outcome = StopOutcome()
        was_running = self._process is not None
        if self._process is not None:
            if grace_s is None:
                grace_s = float(self._exit_timeout_s)
            outcome = stop(self.admin, self._process, grace_s)
        self.last_stop = outcome
        is_clean = outcome.problem is None
        # After a start that failed nothing runs, and the error has named the log.
        self._clean_up(keep_log=not (is_clean and was_running))
        return is_clean

    def restart(self, timeout_s: float = LOAD_S) -> None:
        """Start again after the process has ended, on the same ports, with the same key and log.
        What is left of it is killed first. Raises as :meth:`start`."""
        self._clean_up(keep_log=True)
        self._start(self.admin.ports, timeout_s, append_to_log=True)

    def _launch(self, requested: ServerPorts, *, append_to_log: bool) -> None:
        ports = ServerPorts(*choose_ports(self.host, requested._asdict()))
        self.admin = Admin(self.host, ports, self.admin_headers)
        runtime = RunFolder()
        self._runtime = runtime
        link_backends(runtime.path / "backends", self._installation, backend_folder())
        if self._has_temporary_log and not append_to_log:
            self.log_file = None
        log_file = self._prepare_log_file()
        secret_arguments = [] if self._open_endpoints else restrict(self._key)
        with log_file.open("ab" if append_to_log else "wb") as log:
            self._log_start = log.tell()
            self._process = launch(
                self._command(runtime),
                secret_arguments,
                self._environment(runtime),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal sends Ctrl-C to our group, not to this one
            )
        runtime.note_server(self._process.pid)
        guard_group(self._process.pid)
        atexit.register(self._clean_up, keep_log=True)

    def _prepare_log_file(self) -> Path:
        """The log of this start, whose folder exists."""
        if self.log_file is None:
            handle, name = tempfile.mkstemp(prefix="jitney-server-", suffix=".log")
            os.close(handle)
            self.log_file = Path(name)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        return self.log_file

    def _command(self, runtime: RunFolder) -> list[str]:
        """The command line, without the secret arguments."""
        repository = plain_path(self.model_repository, runtime.path / "models")
        command = [
            str(self._installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={runtime.path / 'backends'}",
            f"--cache-directory={self._installation.caches}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--model-load-thread-count={LOAD_THREADS}",
            f"--grpc-header-forward-pattern={FORWARDED_HEADERS}",
            f"--http-header-forward-pattern={FORWARDED_HEADERS}",
            # A name of our own for the stubs' shared memory: after a kill it can be removed.
            f"--backend-config=python,shm-region-prefix-name={runtime.name}-",
        ]
        for kind, port in self.admin.ports._asdict().items():
            command += [f"--{kind}-address={self.host}", f"--{kind}-port={port}"]
        # Once it has started, a server is ready although one of its models is loaded again: the
        # others serve. That model's own readiness says so.
        command.append("--strict-readiness=false")
        if self._keep_going:
            command.append("--exit-on-error=false")
        # Explicit control lets `stop` unload the models. Clients would need the key for it.
        command.append("--model-control-mode=explicit")
        command += [f"--load-model={name}" for name in self._names_to_load()]
        return command + self._extra_args

    def _names_to_load(self) -> list[str]:
        """The models that the server is told to load; ``*`` stands for all of the repository."""
        unservable = self.unservable()
        if self.models is None and not unservable:
            return ["*"]
        names = _model_names(self.model_repository) if self.models is None else self.models
        return [name for name in names if name not in unservable]

    def _environment(self, runtime: RunFolder) -> dict[str, str]:
        """The server's environment. Its stubs find our virtual environment by it.

        The Python in a stub looks for ``python3`` on PATH and uses the virtual environment to which
        that belongs. So the folder of our own Python comes first.
        """
        environment = dict(os.environ)
        environment.pop("PYTHONHOME", None)  # it would hide the virtual environment
        library_path = self._installation.library_path
        if environment.get("LD_LIBRARY_PATH"):
            library_path += f":{environment['LD_LIBRARY_PATH']}"
        environment["LD_LIBRARY_PATH"] = library_path
        folder = Path(sys.executable).parent
        python3 = folder / "python3"
        is_ours = python3.exists() and python3.samefile(sys.executable)
        if not is_ours:
            # The folder's `python3` is missing or of another version: a link stands in for it.
            folder = runtime.path / "bin"
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
        stubs = _StartingStubs(self._process.pid)
        while not self.is_ready():
            status = self._process.poll()
            if status is not None:
                raise self._start_error(status)
            if not self._keep_going and stubs.one_has_ended(time.monotonic()):
                raise LoadError(
                    f"the process of a model has ended while the server started, which the server "
                    f"has not noticed; the log is {self.log_file}:\n{self.log_tail(10)}"
                )
            if time.monotonic() > deadline:
                raise LoadError(
                    f"the server was not ready within {timeout_s:.0f} s; the log is "
                    f"{self.log_file}:\n{self.log_tail(10)}"
                )
            time.sleep(_POLL_S)

    def _start_error(self, status: int) -> LoadError:
        """Why the server exited with ``status`` instead of becoming ready."""
        text = self.log_of_last_start()
        if is_port_taken(text):
            ports = "/".join(map(str, self.admin.ports))
            return _PortTakenError(
                f"one of the ports {ports} on {self.host} is in use by another server"
            )
        return LoadError(f"{explain_failure(text, status)}\nThe whole log is {self.log_file}")

    def _clean_up(self, *, keep_log: bool) -> None:
        """Kill what is left of the group and remove what the start made. Idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.exit_status = self._process.wait()
            atexit.unregister(self._clean_up)
            self._process = None
        if self._runtime is not None:
            self._runtime.remove()
            self._runtime = None
        if self._has_temporary_log and not keep_log and self.log_file is not None:
            self.log_file.unlink(missing_ok=True)
            self.log_file = None


class _StartingStubs:
    """The stubs of a server that starts. It waits without an end for a stub that ended early."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._looked_at = -math.inf
        self._ended_at: dict[int, float] = {}
        """Process id of a stub that has ended -> when that was seen first."""

    def one_has_ended(self, now: float) -> bool:
        """Whether one is a zombie for _ENDED_STUB_S: the server has not asked for its status."""
        if now - self._looked_at < _STUBS_POLL_S:
            return False
        self._looked_at = now
        ended_at = {}
        for process in model_processes(self._server_pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    ended_at[process.pid] = self._ended_at.get(process.pid, now)
        self._ended_at = ended_at
        return any(now - since >= _ENDED_STUB_S for since in ended_at.values())


class _PortTakenError(LoadError):
    """Another process took a port between our choice and the server's bind."""


def _check_repository(folder: Path, models: Sequence[str], *, keep_going: bool) -> None:
    """Raise InvalidArgumentError if the repository is not a folder, or one of the models is not in
    it, or cannot be served under its name and ``keep_going`` is not set."""
    if not folder.is_dir():
        raise InvalidArgumentError(f"the model repository {folder} is not a folder")
    present = _model_names(folder)
    for name in models:
        if name not in present:
            listed = ", ".join(present) or "nothing"
            raise InvalidArgumentError(f"model {name!r} is not in {folder}, which holds {listed}")
    unservable = unservable_models(folder / name for name in models or present)
    if not keep_going:
        for reason in unservable.values():
            raise InvalidArgumentError(reason)


def _model_names(repository: Path) -> list[str]:
    """Of the folders of the repository that are not hidden."""
    names = sorted(entry.name for entry in repository.iterdir() if entry.is_dir())
    return [name for name in names if not name.startswith(".")]
