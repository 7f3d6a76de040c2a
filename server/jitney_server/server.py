"""The embedded ``tritonserver``: a child process with our backends and one model repository.

Owns the process, its run folder, its ports and its log. Used by ``jitney serve``, the demo, the
benchmarks and the tests::

    with TritonServer(Path("model_repository")) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

A stopped server may be started again; it then has new free ports.
"""

import atexit
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from jitney.addresses import before_port
from jitney.errors import LoadError

from jitney_server.admin import Admin
from jitney_server.command_line import common_options, embedded_environment
from jitney_server.group_guard import guard_group
from jitney_server.installation import backend_folder, find_installation, link_backends
from jitney_server.launch import launch, restrict
from jitney_server.leftovers import RunFolder, sweep
from jitney_server.log_file import LogFile
from jitney_server.plain_paths import plain_path
from jitney_server.ports import ServerPorts, choose_ports
from jitney_server.repository import check_repository, names_to_load, unservable
from jitney_server.start_failure import explain_failure, is_port_taken
from jitney_server.starting_stubs import StartingStubs
from jitney_server.stopping import StopOutcome, stop
from jitney_server.supervision import LOAD_S

EXIT_TIMEOUT_S = 10
"""Seconds that the server gives to requests in flight once it was told to stop."""
_PORT_ATTEMPTS = 3
_POLL_S = 0.05
"""Seconds between two questions whether a server that starts is ready."""


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
        check_repository(model_repository, models, keep_going=keep_going)
        self.model_repository = model_repository.resolve()
        self.host = host
        self.models = None if models is None else list(models)
        self.requested_ports = ServerPorts(http_port, grpc_port, metrics_port)
        """As given: 0 where a free one is to be picked."""
        self._log = LogFile(log_file)
        self._extra_args = list(extra_args)
        self._installation = find_installation()
        self._exit_timeout_s = exit_timeout_s
        self._keep_going = keep_going
        self._open_endpoints = open_endpoints
        self._key = secrets.token_hex(16)
        self.admin = Admin(host, self.requested_ports, self.admin_headers)
        """Calls the server. Each start makes a new one, because the ports change: so do not keep
        it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._runtime: RunFolder | None = None
        """None: there is no process."""
        self.exit_status: int | None = None
        """The exit status of the last process that has ended. A negative number is the signal that
        ended it."""
        self.last_stop = StopOutcome()
        """How the last :meth:`stop` went."""

    @property
    def http_url(self) -> str:
        """``host:port``, as tritonclient's HTTP client takes it."""
        return f"{before_port(self.admin.host)}:{self.admin.ports.http}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as tritonclient's gRPC client takes it."""
        return f"{before_port(self.admin.host)}:{self.admin.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """The complete address of the Prometheus metrics."""
        return f"http://{before_port(self.admin.host)}:{self.admin.ports.metrics}/metrics"

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

    @property
    def log_file(self) -> Path | None:
        """Where the server and its models print. None: no temporary log exists now."""
        return self._log.path

    def unservable(self) -> dict[str, str]:
        """Name -> the reason, for each model that is left out because of its name."""
        return unservable(self.model_repository, self.models)

    def is_alive(self) -> bool:
        """Whether the process runs, ready or not."""
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        """Whether ``/v2/health/ready`` answers 200."""
        return self.is_alive() and self.admin.is_ready()

    def log_tail(self, lines: int = 50) -> str:
        """The last lines of the log; empty before the first start."""
        return self._log.tail(lines)

    def log_of_last_start(self) -> str:
        """What was logged since the last start; empty before the first one."""
        return self._log.of_last_start()

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
        # The log of an earlier start that failed stays: the error has named it to the user.
        self._log.forget_temporary()
        try:
            self._start_on(self.requested_ports, timeout_s)
        except KeyboardInterrupt:
            self._log.remove_temporary()  # nobody asks why this start has failed
            raise

    def restart(self, timeout_s: float = LOAD_S) -> None:
        """Start again, on the same ports, with the same key and log. First what is left of the
        server's process group is killed: the server too, if it still runs. Raises as :meth:`start`.
        """
        self._clean_up()
        self._start_on(self.admin.ports, timeout_s, append_to_log=True)

    def _start_on(
        self, ports: ServerPorts, timeout_s: float, *, append_to_log: bool = False
    ) -> None:
        """Start the server on these ports. 0: a free one is chosen. If another process takes one of
        these before the server does, other ports are chosen, up to _PORT_ATTEMPTS times."""
        num_attempts = _PORT_ATTEMPTS if 0 in ports else 1
        for attempt in range(1, num_attempts + 1):
            try:
                self._start_once(ports, timeout_s, append_to_log=append_to_log)
                return
            except _PortTakenError:
                if not append_to_log:
                    # The log holds this attempt alone, and a _PortTakenError does not name it.
                    self._log.remove_temporary()
                if attempt == num_attempts:
                    raise

    def _start_once(self, ports: ServerPorts, timeout_s: float, *, append_to_log: bool) -> None:
        assert self._process is None, "started twice"
        try:
            self._launch(ports, append_to_log=append_to_log)
            self._wait_until_ready(timeout_s)
            assert self._runtime is not None
            self._runtime.note_ready()
        except BaseException:
            self._clean_up()
            raise

    def stop(self, grace_s: float | None = None) -> bool:
        """Stop the server as :func:`jitney_server.stopping.stop` does, and kill what is left of it.

        Requests in flight have ``grace_s`` seconds; default: the exit timeout. Returns whether the
        stop was clean: every request had ended and every model was unloaded. True too if the server
        was not running.
        """
        if self._process is None:
            self._clean_up()
            self.last_stop = StopOutcome()
            return True
        assert self._runtime is not None
        if grace_s is None:
            grace_s = float(self._exit_timeout_s)
        self.last_stop = stop(self.admin, self._process, grace_s, self._runtime.stop_note)
        self._clean_up()
        is_clean = self.last_stop.problem is None
        if is_clean:
            self._log.remove_temporary()
        return is_clean

    def _launch(self, requested: ServerPorts, *, append_to_log: bool) -> None:
        ports = ServerPorts(*choose_ports(self.host, requested._asdict()))
        self.admin = Admin(self.host, ports, self.admin_headers)
        runtime = RunFolder()
        self._runtime = runtime
        link_backends(runtime.path / "backends", self._installation, backend_folder())
        if self._log.path is None:
            self._log.name_temporary(runtime.path.with_suffix(".log"))
        if self._log.is_temporary:
            # Noted before the file is made, so that no kill leaves a log that nobody removes.
            assert self._log.path is not None
            runtime.note_log(self._log.path)
        secret_arguments = [] if self._open_endpoints else restrict(self._key)
        with self._log.open(append=append_to_log) as log:
            self._process = launch(
                self._command(runtime),
                secret_arguments,
                embedded_environment(self._installation.library_path, runtime),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal sends Ctrl-C to our group, not to this one
            )
        runtime.note_server(self._process.pid)
        guard_group(self._process.pid)
        atexit.register(self._clean_up)

    def _command(self, runtime: RunFolder) -> list[str]:
        """The command line, without the secret arguments."""
        repository = plain_path(self.model_repository, runtime.path / "models")
        command = [
            str(self._installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={runtime.path / 'backends'}",
            f"--cache-directory={self._installation.caches}",
        ]
        command += common_options(
            host=self.host,
            ports=self.admin.ports,
            exit_timeout_s=self._exit_timeout_s,
            run_folder=runtime,
        )
        if self._keep_going:
            command.append("--exit-on-error=false")
        for name in names_to_load(self.model_repository, self.models):
            command.append(f"--load-model={name}")
        return command + self._extra_args

    def _wait_until_ready(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        stubs = StartingStubs(self._process.pid, is_starting=True)
        while not self.is_ready():
            status = self._process.poll()
            if status is not None:
                raise self._start_error(status)
            # With `keep_going`, the server serves its other models.
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

    def _clean_up(self) -> None:
        """Kill what is left of the group, and remove what the start made, except the log. May be
        called again."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.exit_status = self._process.wait()
            atexit.unregister(self._clean_up)
            self._process = None
        if self._runtime is not None:
            self._runtime.remove()
            self._runtime = None


class _PortTakenError(LoadError):
    """Another process took a port between our choice and the server's bind."""
