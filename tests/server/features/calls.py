"""How these tests speak with the server and with the recorders.

:class:`Caller` sends requests over one gRPC connection without waiting for them; what comes back is
a future of a :class:`Reply`. :class:`Log` reads a recorder's log and opens its gates.
"""

import itertools
import json
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from jitney.server.server import TritonServer

from tests.server.client import make_inputs, metric, wait_until
from tests.server.features.repository import log_folder

REPLY_S = 60.0
"""Seconds within which every request must be answered. Nothing here takes more than a few."""


@dataclass(frozen=True)
class Reply:
    """The outputs of one request."""

    outputs: dict[str, np.ndarray]

    def value(self, name: str = "VALUE_OUT") -> float:
        """The single element of an output."""
        return self.outputs[name].item()


class Log:
    """What one recorder wrote down since this object was made, and the model's gates."""

    _gates = itertools.count(1)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._past = len(self._lines())
        self._handed_out: list[int] = []

    def gate(self) -> int:
        """A new gate's number; a request that names it keeps its execution running."""
        self._handed_out.append(next(self._gates))
        return self._handed_out[-1]

    def open_all(self) -> None:
        """Let the executions that wait for a gate end."""
        for gate in self._handed_out:
            (self._folder / f"gate-{gate}").touch()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Every ``start`` or ``end`` of an execution, in order."""
        events = [json.loads(line) for line in self._lines()[self._past :]]
        return [event for event in events if event["event"] == kind]

    def order(self, kind: str = "start") -> list[int]:
        """All values in the order in which their executions started, or ended."""
        return [value for event in self.events(kind) for value in event["values"]]

    def wait_for(self, value: int, kind: str = "start") -> None:
        """Until the execution of this value has started, or ended."""
        wait_until(lambda: value in self.order(kind), REPLY_S)

    def _lines(self) -> list[str]:
        path = self._folder / "log"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


class Caller:
    """One client of a server, as a context manager: in the end every gate is opened."""

    def __init__(self, server: TritonServer) -> None:
        self.client = grpc_client.InferenceServerClient(server.grpc_url)
        self.repository = server.model_repository
        self._metrics_url = server.metrics_url
        self._logs: list[Log] = []

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs:
            log.open_all()
        self.client.close()

    def log(self, model: str) -> Log:
        """The log of a recorder from now on."""
        self._logs.append(Log(log_folder(self.repository, model)))
        return self._logs[-1]

    def send(self, model: str, value: int, gate: int = 0, **options: Any) -> "Future[Reply]":
        """Send a request to a recorder. ``options`` are the client's own: priority, …

        The future's exception is the client's, with the server's text."""
        future: Future[Reply] = Future()

        def answer(result: Any, error: Exception | None) -> None:
            if error is not None:
                future.set_exception(error)
                return
            names = [output.name for output in result.get_response().outputs]
            future.set_result(Reply({name: result.as_numpy(name) for name in names}))

        tensors = {"VALUE": [[value]], "GATE": [[gate]]}
        inputs = make_inputs(grpc_client, tensors)
        self.client.async_infer(model, inputs, answer, client_timeout=REPLY_S, **options)
        return future

    def send_in_order(self, model: str, values: list[int], **options: Any) -> "list[Future[Reply]]":
        """Send to a recorder that will keep all of them waiting: each is in the server's queue
        before the next one leaves."""
        futures = []
        for value in values:
            before = self.pending(model)
            futures.append(self.send(model, value, **options))
            wait_until(lambda before=before: self.pending(model) == before + 1)
        return futures

    def pending(self, model: str) -> float:
        """Requests of the model that the server has and has not begun to execute."""
        return metric(self._metrics_url, "nv_inference_pending_request_count", model=model)

    def block(self, model: str) -> Log:
        """Keep a model of one instance busy with the request of value 1, until its gates open."""
        log = self.log(model)
        self.send(model, 1, log.gate())
        log.wait_for(1)
        return log
