"""``jitney serve``: runs a server until it is told to stop, and prints where it can be reached."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitney.errors import JitneyError
from jitney.server.log import failed_models, read_tail, said_once
from jitney.server.server import TritonServer
from jitney.server.signals import interruptible

_OUT = Console(highlight=False)
_ERR = Console(stderr=True, highlight=False)


def serve_until_stopped(server: TritonServer, start_timeout_s: float, grace_s: int) -> None:
    """Start ``server``, print where it is, and wait for a signal or its end; then stop it.

    Raises JitneyError if it does not start, ends by itself or does not stop cleanly.
    """
    what = ", ".join(server.models or ()) or f"all of {server.model_repository.name}"
    with interruptible() as asked_to_stop:
        try:
            with _ERR.status(f"Loading {what} …"):
                server.start(start_timeout_s)
            _print_welcome(server)
            while server.is_alive() and not asked_to_stop.wait(0.5):
                pass
        except KeyboardInterrupt:
            pass
        if not asked_to_stop.is_set():
            tail = server.log_tail(15)
            server.stop()
            raise JitneyError(f"the server ended by itself; its last lines are:\n{tail}")
        _stop(server, grace_s)


def _stop(server: TritonServer, grace_s: int) -> None:
    _ERR.print(f"Stopping: running requests get up to {grace_s} s; Ctrl-C again to end them now.")
    try:
        clean = server.stop()
    except KeyboardInterrupt:
        clean = server.stop(0)
    if not clean:
        log = f"; its log is {server.log_file}" if server.log_file else ""
        raise JitneyError(f"the stop was not clean: {server.unclean}{log}")
    _ERR.print("Stopped.")


def _states(server: TritonServer) -> dict[str, tuple[str, str]]:
    """Model -> (state, reason) of every model that was asked for or that was loaded for another.

    What the server did not even try to load (an ensemble without its parts, a configuration that
    cannot be read) has no state in its index, or is not there; its log has the reason.
    """
    states = {name: found for name, found in server.model_states().items() if found[0]}
    expected = server.models or [
        folder.name
        for folder in server.model_repository.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    ]
    failures = failed_models(read_tail(server.log_file, 5000)) if server.log_file else {}
    made = {}
    for name in sorted(states.keys() | set(expected)):
        state, reason = states.get(name, ("", ""))
        made[name] = (state, said_once(reason) or failures.get(name, "the log says why"))
    return made


def _print_welcome(server: TritonServer) -> None:
    """Models, addresses, and one line to try."""
    table = Table("model", "state", box=None, pad_edge=False, header_style="dim")
    speaking = []
    for name, (state, reason) in _states(server).items():
        if state == "READY":
            table.add_row(name, "[green]ready[/]")
            if any(tensor["name"] == "text_input" for tensor in server.model_inputs(name)):
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
