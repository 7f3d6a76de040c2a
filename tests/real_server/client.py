"""The real clients, as the tests use them: one call, one :class:`Reply`.

gRPC goes through ``tritonclient.grpc`` (sync) and ``tritonclient.grpc.aio``; HTTP through the
``/generate`` and ``/generate_stream`` endpoints, because ``tritonclient.http`` cannot stream.
"""

import http.client
import json
import queue
import re
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as aio_client

TIMEOUT_S = 60.0
T = TypeVar("T")


@dataclass
class Reply:
    """What came back for one request, in order."""

    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finals: int = 0
    """Responses, errors among them, that carried the final flag."""

    @property
    def text(self) -> str:
        """Of the first sequence."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """Of each sequence, all responses together."""
        n = len(self.responses[0]["text_output"])
        return [
            b"".join(response["text_output"][i] for response in self.responses).decode()
            for i in range(n)
        ]

    @property
    def error(self) -> str:
        """The only error; there is no response beside it."""
        assert len(self.errors) == 1, self.errors
        return self.errors[0]

    def last(self, name: str) -> Any:
        """An output of the last response, as a list."""
        return self.responses[-1][name].tolist()

    def all(self, name: str) -> list[Any]:
        """An output of every response, as one list."""
        return [value for response in self.responses for value in response[name].tolist()]


def make_inputs(module: Any, tensors: dict[str, Any]) -> list[Any]:
    """``InferInput`` objects of the contract's types; an array goes as it is."""
    inputs = []
    for name, value in tensors.items():
        if isinstance(value, np.ndarray):
            array = value
        elif isinstance(value, bool):
            array = np.array([value])
        elif isinstance(value, (str, bytes)):
            array = np.array([value.encode() if isinstance(value, str) else value], dtype=object)
        elif isinstance(value, dict):
            array = np.array([json.dumps(value).encode()], dtype=object)
        else:
            array = np.array(value, dtype=np.int32)
        kind = {"b": "BOOL", "O": "BYTES", "i": "INT32", "f": "FP32"}[array.dtype.kind]
        if array.dtype == np.int64:
            kind = "INT64"
        made = module.InferInput(name, list(array.shape), kind)
        made.set_data_from_numpy(array)
        inputs.append(made)
    return inputs


class Stream:
    """One gRPC stream with one request, read as it comes."""

    def __init__(
        self,
        url: str,
        model: str,
        tensors: dict[str, Any],
        *,
        parameters: dict[str, Any] | None = None,
        request_id: str = "",
        outputs: list[str] | None = None,
    ) -> None:
        self._client = grpc_client.InferenceServerClient(url)
        self._events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._events.put((result, error)))
        self._client.async_stream_infer(
            model,
            make_inputs(grpc_client, tensors),
            request_id=request_id,
            parameters=parameters,
            outputs=[grpc_client.InferRequestedOutput(name) for name in outputs or []] or None,
            enable_empty_final_response=True,
        )
        self.reply = Reply()

    def step(self, timeout: float = TIMEOUT_S) -> bool:
        """Wait for one response. False: it was the final one."""
        result, error = self._events.get(timeout=timeout)
        if error is not None:
            self.reply.errors.append(error.message())
            self.reply.finals += 1  # the server ends the request with its error
            return False
        response = result.get_response()
        arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
        if arrays:
            self.reply.responses.append(arrays)
        final = response.parameters["triton_final_response"].bool_param
        self.reply.finals += final
        return not final

    def read(self, timeout: float = TIMEOUT_S) -> Reply:
        """Read to the end and close."""
        while self.step(timeout):
            pass
        self.close()
        return self.reply

    def close(self) -> None:
        """End the stream in good order."""
        self._client.stop_stream()
        self._client.close()

    def cancel(self) -> None:
        """Go away in the middle of it."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def stream(url: str, model: str, **tensors: Any) -> Reply:
    """A gRPC request, read to its end. ``stream`` is true unless given."""
    parameters = tensors.pop("parameters", None)
    outputs = tensors.pop("outputs", None)
    request_id = tensors.pop("request_id", "")
    tensors.setdefault("stream", True)
    one = Stream(url, model, tensors, parameters=parameters, outputs=outputs, request_id=request_id)
    return one.read()


async def stream_asyncio(url: str, model: str, **tensors: Any) -> Reply:
    """The same through the asyncio client."""
    tensors.setdefault("stream", True)
    reply = Reply()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": model,
            "inputs": make_inputs(aio_client, tensors),
            "enable_empty_final_response": True,
        }

    async with aio_client.InferenceServerClient(url) as client:
        async for result, error in client.stream_infer(requests()):
            # Read to the stream's end: who leaves at the final response cancels what the server
            # is about to end (docs/troubleshooting.md).
            if error is not None:
                reply.errors.append(error.message())
                reply.finals += 1
                continue
            response = result.get_response()
            arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
            if arrays:
                reply.responses.append(arrays)
            reply.finals += response.parameters["triton_final_response"].bool_param
    return reply


def _post(url: str, model: str, endpoint: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    host, port = url.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    connection.request("POST", f"/v2/models/{model}/{endpoint}", json.dumps(body))
    return connection.getresponse()


def generate(url: str, model: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON of ``/generate``."""
    response = _post(url, model, "generate", body)
    return response.status, json.loads(response.read())


def generate_stream(url: str, model: str, **body: Any) -> list[dict[str, Any]]:
    """The events of ``/generate_stream``; an error is an event ``{"error": …}``."""
    return list(generate_stream_events(url, model, **body))


def generate_stream_events(url: str, model: str, **body: Any) -> Iterator[dict[str, Any]]:
    """The same, as they come; closing the generator disconnects."""
    response = _post(url, model, "generate_stream", body)
    try:
        while line := response.readline():
            if line.strip():  # an error of the server itself comes without the prefix
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        response.close()


def _open_soon(url: str) -> Any:
    """The metrics endpoint opens a moment after the server is ready."""
    ends = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return urllib.request.urlopen(url, timeout=TIMEOUT_S)
        except urllib.error.URLError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)


def metrics(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of the metrics endpoint: (name, labels) -> value."""
    text = _open_soon(url).read().decode()
    samples = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        pairs = frozenset(re.findall(r'(\w+)="([^"]*)"', labels))
        samples[(name, pairs)] = float(value)
    return samples


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of the samples of ``name`` that carry ``labels``; KeyError if there is none."""
    found = [
        value
        for (sample, pairs), value in metrics(url).items()
        if sample == name and labels.items() <= dict(pairs).items()
    ]
    if not found:
        raise KeyError(f"{name} {labels}")
    return sum(found)


def wait_until(condition: Callable[[], object], timeout: float = TIMEOUT_S) -> None:
    """Until ``condition`` holds; AssertionError if it does not in time."""
    ends = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends, "it did not come to pass in time"
        time.sleep(0.01)


def settled(
    read: Callable[[], T], reached: Callable[[T], object] = lambda _: True, quiet_s: float = 1.0
) -> T:
    """What ``read`` returns once it is ``reached`` and has not changed for ``quiet_s`` seconds; or,
    when the time is over, what it returns then: the caller asserts.

    For all that is counted after the answer: the server's statistics come a moment later, metrics
    up to a quarter of a second, and not all at once.
    """
    ends = time.monotonic() + TIMEOUT_S
    value, since = read(), time.monotonic()
    while time.monotonic() < ends and not (reached(value) and time.monotonic() - since >= quiet_s):
        time.sleep(0.02)
        if (now := read()) != value:
            value, since = now, time.monotonic()
    return value


def counts(client: grpc_client.InferenceServerClient, model: str, least: int = 0) -> np.ndarray:
    """Inferences and executions of a model so far, by the server's statistics: settled, once there
    are ``least`` inferences."""

    def read() -> tuple[int, int]:
        statistics = client.get_inference_statistics(model).model_stats[0]
        return statistics.inference_count, statistics.execution_count

    return np.array(settled(read, lambda now: now[0] >= least))
