"""How these tests speak with the server and with the recorders.

:class:`Caller` sends requests over one gRPC connection without waiting for them; what comes back is
a future of a :class:`Reply`. :class:`Recorder` reads a recorder's log and opens its gates.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from jitney.server import TritonServer

from tests.server.client import metric, wait_until
from tests.server.features.models import log_folder

REPLY_S = 30.0
"""Seconds within which every request must be answered. Nothing here takes more than a few."""


@dataclass(frozen=True)
class Reply:
    """The outputs of one request and when they came, monotonic seconds."""

    outputs: dict[str, np.ndarray]
    model_version: str
    at: float

    def value(self, name: str) -> float:
        """The single element of an output."""
        return self.outputs[name].item()


@dataclass(frozen=True)
class Execution:
    """One call of a recorder's ``execute``: the values of its rows, in order."""

    values: list[int]
    version: int
    instance: str
    tag: str
    start: float
    end: float | None
    """Monotonic seconds; None while it runs."""


class Caller:
    """One client of a server."""

    def __init__(self, server: TritonServer) -> None:
        self.client = grpc_client.InferenceServerClient(server.grpc_url)
        self._metrics_url = server.metrics_url

    def send(self, model: str, value: float, gate: int = 0, **options: Any) -> "Future[Reply]":
        """Send a request to a recorder. ``options`` are the client's own: priority, timeout, …"""
        tensors = {"VALUE": ints(value), "GATE": ints(gate)}
        return self.send_tensors(model, tensors, **options)

    def send_rows(self, model: str, values: list[int]) -> "Future[Reply]":
        """Send one request with a row for each value to a recorder."""
        rows = np.array(values, np.int32)[:, None]
        return self.send_tensors(model, {"VALUE": rows, "GATE": np.zeros_like(rows)})

    def send_tensors(
        self, model: str, tensors: dict[str, np.ndarray], **options: Any
    ) -> "Future[Reply]":
        """Send a request. The future's exception is the client's, with the server's text."""
        future: Future[Reply] = Future()

        def answer(result: Any, error: Exception | None) -> None:
            if error is not None:
                future.set_exception(error)
                return
            response = result.get_response()
            outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
            future.set_result(Reply(outputs, response.model_version, time.monotonic()))

        self.client.async_infer(
            model, infer_inputs(grpc_client, tensors), answer, client_timeout=REPLY_S, **options
        )
        return future

    def send_in_order(self, model: str, values: list[int], **options: Any) -> "list[Future[Reply]]":
        """Send to a recorder that will keep all of them waiting: each is in the server's queue
        before the next one leaves."""
        return [self.queued(model, self.send, value, **options) for value in values]

    def queued(
        self, model: str, send: "Callable[..., Future[Reply]]", *arguments: Any, **options: Any
    ) -> "Future[Reply]":
        """``send(model, …)``, and wait until the request is in the server's queue."""
        before = self.pending(model)
        future = send(model, *arguments, **options)
        wait_until(lambda: self.pending(model) == before + 1)
        return future

    def pending(self, model: str) -> float:
        """Requests of the model that the server has and has not begun to execute."""
        return metric(self._metrics_url, "nv_inference_pending_request_count", model=model)

    def statistics(self, model: str) -> dict[str, Any]:
        """The server's statistics of a model, one version, in the names of the protocol."""
        found = self.client.get_inference_statistics(model, as_json=True)["model_stats"]
        assert len(found) == 1, found
        return found[0]

    def batches(self, model: str) -> Counter[int]:
        """Batch size -> executions of that size, since the model was loaded."""
        return Counter(
            {
                int(entry["batch_size"]): int(entry["compute_infer"]["count"])
                for entry in self.statistics(model).get("batch_stats", [])
            }
        )

    def count(self, model: str, name: str) -> int:
        """``inference_count`` or ``execution_count``. The protocol leaves a zero out."""
        return int(self.statistics(model).get(name, 0))

    def cache_hits(self, model: str) -> int:
        """Requests that the response cache has answered."""
        statistics = self.statistics(model)["inference_stats"]
        return int(statistics.get("cache_hit", {}).get("count", 0))


class Recorder:
    """What one recorder wrote down since this object was made, and the model's gates."""

    _gates = itertools.count(1)

    def __init__(self, server: TritonServer, model: str) -> None:
        self._folder = log_folder(server.model_repository, model)
        self._past = len(self._lines())
        self._handed_out: list[int] = []

    def gate(self) -> int:
        """A new gate's number; a request that names it keeps its execution running."""
        self._handed_out.append(next(self._gates))
        return self._handed_out[-1]

    def open(self, gate: int) -> None:
        """Let the executions that wait for this gate end."""
        (self._folder / f"gate-{gate}").touch()

    def open_all(self) -> None:
        """Whatever became of the test: no execution may go on waiting."""
        for gate in self._handed_out:
            self.open(gate)

    def executions(self) -> list[Execution]:
        """Every execution, in order of their starts."""
        events = [json.loads(line) for line in self._lines()[self._past :]]
        starts = [event for event in events if event["event"] == "start"]
        ends = [event for event in events if event["event"] == "end"]
        return [
            Execution(
                values=start["values"],
                version=start["version"],
                instance=start["instance"],
                tag=start["tag"],
                start=start["at"],
                end=next(
                    (
                        end["at"]
                        for end in ends
                        if end["values"] == start["values"]
                        and end["instance"] == start["instance"]
                        and end["at"] >= start["at"]
                    ),
                    None,
                ),
            )
            for start in starts
        ]

    def of(self, value: int) -> Execution | None:
        """The execution that had this value among its rows; None if none had."""
        found = [execution for execution in self.executions() if value in execution.values]
        assert len(found) <= 1, f"value {value} was executed {len(found)} times"
        return found[0] if found else None

    def order(self) -> list[int]:
        """All values in the order in which they were executed."""
        return [value for execution in self.executions() for value in execution.values]

    def has_ended(self, value: int) -> bool:
        """Whether this value's execution is over."""
        execution = self.of(value)
        return execution is not None and execution.end is not None

    def _lines(self) -> list[str]:
        path = self._folder / "log"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def wait_for(self, value: int) -> None:
        """Until the execution of this value has started."""
        wait_until(lambda: self.of(value) is not None, REPLY_S)


def settles(read: Callable[[], Any], expected: Any, timeout_s: float = 5.0) -> None:
    """Assert that ``read`` comes to give ``expected``. For the server's statistics, which it writes
    after it has answered."""
    deadline = time.monotonic() + timeout_s
    while (value := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert value == expected


def infer_inputs(module: Any, tensors: dict[str, np.ndarray]) -> list[Any]:
    """The arrays as ``InferInput`` of tritonclient's ``grpc`` or ``http``."""
    kinds = {"i": "INT32", "f": "FP32"}
    inputs = []
    for name, array in tensors.items():
        made = module.InferInput(name, list(array.shape), kinds[array.dtype.kind])
        made.set_data_from_numpy(array)
        inputs.append(made)
    return inputs


def ints(value: float) -> np.ndarray:
    """One row with one INT32 number, as the recorders take it."""
    return np.array([[value]], np.int32)


def floats(value: float) -> np.ndarray:
    """One row with one FP32 number, as the ONNX models here take it."""
    return np.array([[value]], np.float32)


def read_log(path: Path) -> str:
    """A server's log so far."""
    return path.read_text(encoding="utf-8", errors="replace")
