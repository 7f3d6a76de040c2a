"""``jitney serve``: runs a server until it is told to stop, prints where it is, and repairs it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime

from jitney.errors import JitneyError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitney_server.log import failed_models
from jitney_server.server import TritonServer, choose_ports
from jitney_server.stopping import interruptible
from jitney_server.supervision import Supervisor

_OUT = Console(highlight=False)
_ERR = Console(stderr=True, highlight=False)
_TURN_S = 0.5
# The kernel sends SIGTERM (15) to the gateway when this process ends, however it does.
_GATEWAY = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from jitney.cli import main; main()"

NOT_UNLOADED = 3
"""Exit status if the server had to be killed at the stop though no request was left."""


def serve_until_stopped(
    server: TritonServer,
    start_timeout_s: float,
    grace_s: int,
    openai_port: int | None = None,
    gateway_options: Sequence[str] = (),
) -> int:
    """Start ``server``, print where it is, keep it going until a signal comes, and stop it. Returns
    the exit status: 0 or NOT_UNLOADED. With ``openai_port`` a gateway runs
    beside it, with ``gateway_options``; 0 is a free one.

    Raises JitneyError if it does not start, or if the stop may have cut requests off.
    """
    what = ", ".join(server.models or ()) or f"all of {server.model_repository.name}"
    beside: subprocess.Popen[bytes] | None = None
    with interruptible() as asked_to_stop:
        try:
            with _ERR.status(f"Loading {what} …"):
                server.start(start_timeout_s)
            supervisor = Supervisor(server, _say)
            _print_welcome(server)
            if openai_port is not None:
                (openai_port,) = choose_ports(server.host, [openai_port])
                beside = _start_gateway(server, openai_port, gateway_options)
            while not asked_to_stop.wait(_TURN_S):
                supervisor.turn()
                if openai_port is not None and beside is not None and beside.poll() is not None:
                    _say(f"the gateway ended by itself, with status {beside.poll()}")
                    beside = _start_gateway(server, openai_port, gateway_options)
        except KeyboardInterrupt:
            pass
        except JitneyError:
            server.stop()
            raise
        finally:
            if beside is not None:
                beside.terminate()  # it takes nothing new; streams go on while the server drains
        status = _stop(server, grace_s)
        if beside is not None:
            beside.kill()
            beside.wait()
        return status


def _start_gateway(
    server: TritonServer, port: int, options: Sequence[str]
) -> "subprocess.Popen[bytes]":
    """Returns when it listens. Raises JitneyError if it ends at once; it has said why."""
    command = [sys.executable, "-c", _GATEWAY, "gateway", "--server", server.grpc_url]
    command += ["--host", server.host, f"--port={port}"]
    command += [f"--metrics-url={server.metrics_url}", *options]
    # A group of its own: Ctrl-C is ours to pass on.
    started = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert started.stdout is not None
    address = started.stdout.readline().decode().strip()
    if not address:
        raise JitneyError(f"the gateway ended at once, with status {started.wait()}")
    _OUT.print(address)
    return started


def _say(text: str) -> None:
    """With the time, because it may be read much later."""
    _ERR.print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {escape(text)}", soft_wrap=True)


def _stop(server: TritonServer, grace_s: int) -> int:
    _ERR.print(f"Stopping: running requests get up to {grace_s} s; Ctrl-C again to end them now.")
    try:
        server.stop()
    except KeyboardInterrupt:
        server.stop(0)
    if not server.unclean:
        _ERR.print("Stopped.")
        return 0
    said = f"{server.unclean}; its log is {server.log_file}"
    if server.lost:
        raise JitneyError(f"the stop was not clean: {said}")
    _say(f"Stopped; no request was left, but the server had to be killed: {said}")
    return NOT_UNLOADED


def _states(server: TritonServer) -> Iterator[tuple[str, str, str]]:
    """Name, state and reason of every model that was asked for or that was loaded for another.

    What the server did not even try to load (an ensemble without its parts, a configuration that
    cannot be read) has no state in its index, or is not there; its log has the reason.
    """
    states = {name: found for name, found in server.admin.model_states().items() if found[0]}
    folders = [folder.name for folder in server.model_repository.iterdir() if folder.is_dir()]
    expected = server.models or [name for name in folders if not name.startswith(".")]
    failures = failed_models(server.log_tail(5000))
    for name in sorted(states.keys() | set(expected)):
        state, reason = states.get(name, ("", ""))
        yield name, state, reason or failures.get(name, "the log says why")


def _print_welcome(server: TritonServer) -> None:
    """Models, addresses, and one line to try."""
    table = Table("model", "state", box=None, pad_edge=False, header_style="dim")
    speaking = []
    for name, state, reason in _states(server):
        if state == "READY":
            table.add_row(name, "[green]ready[/]")
            if any(tensor["name"] == "text_input" for tensor in server.admin.model_inputs(name)):
                speaking.append(name)
        elif state in ("LOADING", "UNLOADING"):
            table.add_row(name, state.lower())
        else:
            table.add_row(name, f"[red]failed[/]: {escape(reason)}")
    _OUT.print(table)
    _OUT.print(f"\nHTTP     http://{server.http_url}\ngRPC     {server.grpc_url}")
    _OUT.print(f"metrics  {server.metrics_url}\nlog      {server.log_file}", soft_wrap=True)
    if speaking:
        body = json.dumps({"text_input": "def add(a, b):", "stream": True, "max_tokens": 32})
        url = f"http://{server.http_url}/v2/models/{speaking[0]}/generate_stream"
        _OUT.print("\nTry it:", style="bold")
        _OUT.print(f"curl -N {url} -d '{body}'", soft_wrap=True, markup=False)
    _OUT.print("\nCtrl-C stops the server.", style="dim")
