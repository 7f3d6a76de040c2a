"""``jitney serve``: runs a server until it is told to stop, and repairs it meanwhile."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from jitney.errors import JitneyError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitney_server.admin import ModelState
from jitney_server.log import failed_models
from jitney_server.ports import choose_ports
from jitney_server.server import TritonServer
from jitney_server.stopping import interruptible
from jitney_server.supervision import Supervisor

_OUT = Console(highlight=False)
_ERR = Console(stderr=True, highlight=False)
_PAUSE_S = 0.5
"""Between two looks at the server and the gateway."""
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
    Returns the exit status: 0 or NOT_UNLOADED. Raises JitneyError if the server does not start, or
    if the stop may have cut requests off.
    """
    what = ", ".join(server.models or ()) or f"all of {server.model_repository.name}"
    gateway: GatewayProcess | None = None
    with interruptible() as asked_to_stop:
        try:
            with _ERR.status(f"Loading {what} …"):
                server.start(start_timeout_s)
            supervisor = Supervisor(server, _say)
            _print_welcome(server)
            if openai_port is not None:
                gateway = GatewayProcess(server, openai_port, gateway_options)
            while not asked_to_stop.wait(_PAUSE_S):
                supervisor.turn()
                if gateway is not None:
                    gateway.restart_if_ended()
        except KeyboardInterrupt:
            pass  # the signal
        except JitneyError:
            server.stop()
            raise
        finally:
            if gateway is not None:
                gateway.begin_to_stop()
        status = _stop(server, grace_s)
        if gateway is not None:
            gateway.kill()
        return status


class GatewayProcess:
    """A gateway beside the server, as a process."""

    def __init__(self, server: TritonServer, port: int, options: Sequence[str]) -> None:
        """Starts it; 0 is a free port. Raises JitneyError if it ends at once."""
        (self._port,) = choose_ports(server.host, [port])
        self._server = server
        self._options = options
        self._process = self._start()

    def restart_if_ended(self) -> None:
        """Start the gateway again, on the same port, if it has ended. Raises JitneyError if it ends
        at once."""
        status = self._process.poll()
        if status is not None:
            _say(f"the gateway ended by itself, with status {status}")
            self._process = self._start()

    def begin_to_stop(self) -> None:
        """Let it take no new requests. Its streams go on while the server still answers them."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        """Returns when it listens. If it ends at once, it has printed why itself."""
        server = self._server
        command = [
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
        # A group of its own: the terminal sends Ctrl-C to ours, and we decide what ends when.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        if not address:
            raise JitneyError(f"the gateway ended at once, with status {process.wait()}")
        _OUT.print(address)
        return process


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
    if server.unclean is None:
        _ERR.print("Stopped.")
        return 0
    problem = f"{server.unclean}; its log is {server.log_file}"
    if server.cut_requests:
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

    Some models the server does not even try to load: an ensemble without its parts, or one whose
    configuration cannot be read. Its index has no state for them, or has them not at all; but its
    log has the reason.
    """
    states = {}
    for name, found in server.admin.model_states().items():
        if found.state:
            states[name] = found
    expected = server.models
    if not expected:
        folders = [entry.name for entry in server.model_repository.iterdir() if entry.is_dir()]
        expected = [name for name in folders if not name.startswith(".")]
    failures = failed_models(server.log_tail(5000))
    for name in sorted({*states, *expected}):
        found = states.get(name, ModelState(state="", reason=""))
        reason = found.reason or failures.get(name, "the log says why")
        yield ListedModel(name, found.state, reason)


def _print_welcome(server: TritonServer) -> None:
    """Print the models, the addresses, and one line to try."""
    table = Table("model", "state", box=None, pad_edge=False, header_style="dim")
    language_models = []
    for model in _listed_models(server):
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
        _OUT.print(f"curl -N {url} -d '{body}'", soft_wrap=True, markup=False)
    _OUT.print("\nCtrl-C stops the server.", style="dim")
