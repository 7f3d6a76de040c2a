"""``jitney serve``: runs a server until it is told to stop, and repairs it meanwhile."""

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from jitney.errors import JitneyError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitney_server.admin import ModelState
from jitney_server.launch import unshielded
from jitney_server.ports import check_different, choose_ports
from jitney_server.server import TritonServer
from jitney_server.start_failure import failed_models
from jitney_server.stopping import interruptible
from jitney_server.supervision import Supervisor

_OUT = Console(highlight=False, emoji=False)
_ERR = Console(stderr=True, highlight=False, emoji=False)
_PAUSE_S = 0.5
"""Between two looks at the server and the gateway."""
_GATEWAY_START_S = 60.0
"""Seconds after which a gateway must listen, and have checked its options."""
_GATEWAY_END_S = 2.0
"""Seconds that a gateway has to end once the server has answered every request."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause between the end of a gateway and its next start. After a run that was longer than
this, the pauses begin anew."""
_RUN_GATEWAY = """
import ctypes, signal
PR_SET_PDEATHSIG = 1  # the kernel sends SIGTERM when `jitney serve` ends, however it ends
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
from jitney.cli import main
main()
"""

NOT_UNLOADED = 3
"""Exit status if no request was left at the stop, but the server had to be killed."""


def serve_until_stopped(
    server: TritonServer,
    *,
    start_timeout_s: float,
    grace_s: int,
    openai_port: int | None = None,
    gateway_options: Sequence[str] = (),
) -> int:
    """Start ``server``, print its addresses, keep it going until a signal comes, and stop it.

    With ``openai_port`` a gateway with ``gateway_options`` runs beside it; 0 is a free port.
    Returns the exit status: 0 or NOT_UNLOADED. Raises JitneyError if the gateway's options or port
    cannot be used, before anything is loaded; if the server does not start; or if the stop may have
    cut requests off.
    """
    gateway: GatewayProcess | None = None
    if openai_port is not None:
        # Its streams end when the server's do.
        gateway = GatewayProcess(server, openai_port, [*gateway_options, f"--grace={grace_s}"])
    with interruptible() as asked_to_stop:
        try:
            _run(server, gateway, asked_to_stop, start_timeout_s)
            if gateway is not None:
                gateway.begin_to_stop()
            try:
                return _stop(server, grace_s)
            finally:
                if gateway is not None:
                    gateway.wait(_GATEWAY_END_S)
        finally:
            if gateway is not None:
                gateway.kill()


def _run(
    server: TritonServer,
    gateway: "GatewayProcess | None",
    asked_to_stop: threading.Event,
    start_timeout_s: float,
) -> None:
    """Start the server and the gateway, and keep them going. Returns at a signal. Raises
    JitneyError if the gateway cannot be started, or the server does not start; then nothing is left
    running."""
    what = ", ".join(server.models or ()) or f"all of {server.model_repository.name}"
    try:
        if gateway is not None:
            gateway.check()
        with _ERR.status(f"Loading {what} …"):
            server.start(start_timeout_s)
        supervisor = Supervisor(server, _say)
        _print_welcome(server)
        while True:
            if gateway is not None:
                gateway.turn()
            if asked_to_stop.wait(_PAUSE_S):
                return
            supervisor.turn()
    except KeyboardInterrupt:
        pass  # the signal: `interruptible` raises it wherever we are
    except JitneyError:
        server.stop()
        raise


class GatewayProcess:
    """A gateway beside the server, as a process that is started again whenever it has ended.

    Each start doubles the pause before the next one, unless the gateway ran for longer than
    _LONGEST_PAUSE_S. Nothing that happens to it stops the server.
    """

    def __init__(self, server: TritonServer, port: int, options: Sequence[str]) -> None:
        """Does not start it. ``port``: 0 is a free one."""
        self._server = server
        self._port = port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._listens = False
        """Whether the process has said so."""
        self._has_listened = False
        """Whether any of its processes has."""
        self._is_given_up = False
        """The process was killed, because it did not listen in time."""
        self._pause_s = 0.0
        """Seconds to wait, when the process ends the next time, before it is started again."""
        self._start_at: float | None = 0.0
        """When it must be started. None: it was started."""

    def check(self) -> None:
        """Raise JitneyError if a gateway could not be started now: its port is taken, or one of its
        options is wrong. The server need not run."""
        check_different({**self._server.requested_ports._asdict(), "gateway": self._port})
        try:
            checked = subprocess.run(
                [*self._command(), "--check"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_GATEWAY_START_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JitneyError(
                f"the gateway does not check its options within {_GATEWAY_START_S:.0f} s"
            ) from None
        if checked.returncode != 0:
            said = checked.stderr.strip().removeprefix("error: ")
            reason = said or f"it ended with status {checked.returncode}"
            raise JitneyError(f"the gateway cannot be started: {reason}")

    def turn(self) -> None:
        """Start it if it does not run and the pause is over. Kill it if it does not listen within
        _GATEWAY_START_S. Print its address once it listens. Never waits: the server must be watched
        meanwhile."""
        if self._process is not None and self._process.poll() is None:
            self._look_whether_it_listens(self._process)
            return
        now = time.monotonic()
        if self._start_at is None:
            assert self._process is not None
            self._wait_before_start(f"the gateway ended by itself, with status {self._end()}", now)
        if self._start_at is not None and now >= self._start_at:
            self._start(now)

    def begin_to_stop(self) -> None:
        """Let it take no new requests. Its streams go on while the server still answers them."""
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended: clients may read the last of their answers still. Another signal
        ends the wait."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def _start(self, now: float) -> None:
        self._started_at = now
        self._start_at = None
        self._listens = False
        self._is_given_up = False
        try:
            # Its port stays the same from the first start on.
            (self._port,) = choose_ports(self._server.host, {"gateway": self._port})
            # A group of its own: the terminal sends Ctrl-C to ours, and we decide what ends when.
            self._process = subprocess.Popen(
                self._command(), stdout=subprocess.PIPE, start_new_session=True
            )
        except (OSError, JitneyError) as error:
            self._process = None
            self._wait_before_start(f"the gateway could not be started: {error}", now)

    def _look_whether_it_listens(self, process: "subprocess.Popen[bytes]") -> None:
        if self._listens or self._is_given_up:
            return
        # The gateway prints one line, its address, when it listens (`run_gateway`).
        assert process.stdout is not None
        if select.select([process.stdout], [], [], 0)[0]:
            address = process.stdout.readline().decode().strip()
            self._listens = address != ""
            if self._listens and not self._has_listened:
                self._has_listened = True
                _OUT.print(address)
        elif time.monotonic() - self._started_at > _GATEWAY_START_S:
            _say(f"the gateway does not listen after {_GATEWAY_START_S:.0f} s")
            self._is_given_up = True
            process.kill()

    def _wait_before_start(self, why: str, now: float) -> None:
        _say(why)
        if now - self._started_at > _LONGEST_PAUSE_S:
            self._pause_s = 0.0
        self._start_at = now + self._pause_s
        self._pause_s = min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)

    def _end(self) -> int:
        """Wait for its end. Returns its exit status."""
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait()

    def _command(self) -> list[str]:
        server = self._server
        return [
            sys.executable,
            "-c",
            _RUN_GATEWAY,
            "gateway",
            f"--server={server.grpc_url}",
            f"--host={server.host}",
            f"--port={self._port}",
            f"--metrics-url={server.metrics_url}",
            *self._options,
        ]


def _say(text: str) -> None:
    """Print a line with the time, because it may be read much later."""
    _ERR.print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {escape(text)}", soft_wrap=True)


def _stop(server: TritonServer, grace_s: int) -> int:
    """Stop the server. Returns the exit status, or raises JitneyError."""
    _ERR.print(f"Stopping: running requests get up to {grace_s} s; Ctrl-C again to end them now.")
    try:
        server.stop()
    except KeyboardInterrupt:
        server.stop(0)
    outcome = server.last_stop
    if outcome.problem is None:
        if outcome.stuck is not None:
            _say(f"every request was answered; the server was killed, because {outcome.stuck}")
        _ERR.print("Stopped.")
        return 0
    problem = f"{outcome.problem}; its log is {server.log_file}"
    if outcome.cut_requests:
        raise JitneyError(f"the stop was not clean: {problem}")
    _say(f"Stopped; no request was left, but the server had to be killed: {problem}")
    return NOT_UNLOADED


class ListedModel(NamedTuple):
    """A model in the welcome's table."""

    name: str
    state: str
    """As in :class:`~jitney_server.admin.ModelState`."""
    reason: str
    """Why it is not ready, if it is not."""


def _listed_models(server: TritonServer) -> Iterator[ListedModel]:
    """Every model that was asked for, or that was loaded for another one.

    The server does not even try to load some models: an ensemble without its parts, or one whose
    configuration cannot be read. Its index has no state for them or does not list them, but its log
    has the reason.
    """
    states = {}
    for name, found in server.admin.model_states().items():
        if found.state:
            states[name] = found
    expected = server.models
    if not expected:
        folders = [entry.name for entry in server.model_repository.iterdir() if entry.is_dir()]
        expected = [name for name in folders if not name.startswith(".")]
    failures = failed_models(server.log_of_last_start()) | server.unservable()
    for name in sorted({*states, *expected}):
        found = states.get(name, ModelState(state="", reason=""))
        reason = found.reason or failures.get(name, "the log says why")
        yield ListedModel(name, found.state, reason)


def _print_welcome(server: TritonServer) -> None:
    """Print the models, the addresses, and one line to try. Warn if there are no models."""
    listed = list(_listed_models(server))
    if not listed:
        _say(f"warning: {server.model_repository} holds no models, so nothing is served")
    table = Table("model", "state", box=None, pad_edge=False, header_style="dim")
    language_models = []
    for model in listed:
        if model.state == "READY":
            table.add_row(model.name, "[green]ready[/]")
            inputs = server.admin.model_inputs(model.name)
            if any(tensor["name"] == "text_input" for tensor in inputs):
                language_models.append(model.name)
        elif model.state in ("LOADING", "UNLOADING"):
            table.add_row(model.name, model.state.lower())
        else:
            table.add_row(model.name, f"[red]failed[/]: {escape(model.reason)}")
    _OUT.print(table)
    _OUT.print(f"\nHTTP     http://{server.http_url}")
    _OUT.print(f"gRPC     {server.grpc_url}")
    _OUT.print(f"metrics  {server.metrics_url}", soft_wrap=True)
    _OUT.print(f"log      {server.log_file}", soft_wrap=True)
    if language_models:
        body = json.dumps({"text_input": "def add(a, b):", "stream": True, "max_tokens": 32})
        url = f"http://{server.http_url}/v2/models/{language_models[0]}/generate_stream"
        _OUT.print("\nTry it:", style="bold")
        sent = f"-H 'Content-Type: application/json' -d '{body}'"
        _OUT.print(f"curl -N {url} {sent}", soft_wrap=True, markup=False)
    _OUT.print(f"\nNot for strangers: {unshielded()}.", style="dim", soft_wrap=True)
    _OUT.print("Ctrl-C stops the server.", style="dim")
