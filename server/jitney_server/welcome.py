"""What ``jitney serve`` prints once the server is ready: its models, its addresses, and one line to
try. Called by ``serving``.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitney_server.admin import ModelState, RefusedCallError
from jitney_server.repository import model_names
from jitney_server.server import TritonServer
from jitney_server.stacks import risk_of_large_requests
from jitney_server.start_failure import failed_models


class ListedModel(NamedTuple):
    """A model in the table."""

    name: str
    state: str
    """As in :class:`~jitney_server.admin.ModelState`."""
    reason: str
    """Why it is not ready, if it is not."""


def print_welcome(server: TritonServer, out: Console) -> list[ListedModel]:
    """Print what a user needs to know of a server that is ready. Returns the models."""
    models = list(_listed_models(server))
    out.print(_table_of(models))
    out.print(f"\nHTTP     http://{server.http_url}")
    out.print(f"gRPC     {server.grpc_url}")
    out.print(f"metrics  {server.metrics_url}", soft_wrap=True)
    out.print(f"log      {server.log_file}", soft_wrap=True)
    language_model = _first_language_model(server, models)
    if language_model is not None:
        body = json.dumps({"text_input": "def add(a, b):", "stream": True, "max_tokens": 32})
        url = f"http://{server.http_url}/v2/models/{language_model}/generate_stream"
        sent = f"-H 'Content-Type: application/json' -d '{body}'"
        out.print("\nTry it:", style="bold")
        out.print(f"curl -N {url} {sent}", soft_wrap=True, markup=False)
    out.print(f"\nNot for strangers: {risk_of_large_requests()}.", style="dim", soft_wrap=True)
    out.print("Ctrl-C stops the server.", style="dim")
    return models


def _listed_models(server: TritonServer) -> Iterator[ListedModel]:
    """Every model that was asked for, and those that the server has loaded because one of them
    needs them.

    There are models that the server does not even try to load: an ensemble without its parts, or a
    model whose configuration cannot be read. The server's index does not list those, or has no
    state for them, but its log has the reason.
    """
    states = {}
    for name, state in server.admin.model_states().items():
        if state.state:
            states[name] = state
    expected = server.models
    if expected is None:
        expected = model_names(server.model_repository)
    failures = failed_models(server.log_of_last_start()) | server.unservable()
    for name in sorted({*states, *expected}):
        found = states.get(name, ModelState(state="", reason=""))
        reason = found.reason or failures.get(name, "the log says why")
        yield ListedModel(name, found.state, reason)


def _table_of(models: list[ListedModel]) -> Table:
    table = Table("model", "state", box=None, pad_edge=False, header_style="dim")
    for model in models:
        if model.state == "READY":
            table.add_row(model.name, "[green]ready[/]")
        elif model.state in ("LOADING", "UNLOADING"):
            table.add_row(model.name, model.state.lower())
        else:
            table.add_row(model.name, f"[red]failed[/]: {escape(model.reason)}")
    return table


def _first_language_model(server: TritonServer, models: list[ListedModel]) -> str | None:
    for model in models:
        if model.state != "READY":
            continue
        try:
            inputs = server.admin.model_inputs(model.name)
        except RefusedCallError:
            continue  # its name is not one that the server knows in a path (`Admin`)
        if any(tensor["name"] == "text_input" for tensor in inputs):
            return model.name
    return None
