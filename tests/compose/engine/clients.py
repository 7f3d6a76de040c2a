"""The clients of a deployment: HTTPS and gRPC through the proxy, with a key or without."""

import contextlib
import http.client
import json
import queue
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

PROMPT = "def add(first, second):\n    return first + second\n\n\ndef subtract(first, second):\n"
TIMEOUT_S = 60
_DTYPES: dict[str, type] = {"BYTES": object, "BOOL": bool, "FP32": np.float32}


@dataclass(frozen=True)
class Client:
    """One user of the proxy. Without a key it says nothing of one."""

    port: int
    certificate: Path
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What a request carries, over HTTP or, lower case as gRPC wants it, over gRPC."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def connect(self) -> http.client.HTTPSConnection:
        """A connection that checks the certificate."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        return http.client.HTTPSConnection(
            "localhost", self.port, context=context, timeout=TIMEOUT_S
        )

    def request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body."""
        connection = self.connect()
        try:
            connection.request(method, path, body=body, headers=self.headers)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, response.read()
        finally:
            connection.close()

    def stream(
        self, max_tokens: int, model: str = "pylm", prompt: str = PROMPT
    ) -> list[tuple[float, dict[str, Any]]]:
        """One generate_stream: (when it came, the event) of each, in order."""
        body = {
            "text_input": prompt,
            "stream": True,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_finish_reason": True,
        }
        connection = self.connect()
        events = []
        try:
            path = f"/v2/models/{model}/generate_stream"
            connection.request("POST", path, json.dumps(body), headers=self.headers)
            response = connection.getresponse()
            while line := response.readline():
                if response.status != 200:
                    events.append((time.monotonic(), {"status": response.status}))
                    break
                if line.startswith(b"data: "):
                    events.append((time.monotonic(), json.loads(line[6:])))
        finally:
            connection.close()
        return events

    def complete(self, max_tokens: int) -> str:
        """The text of one stream of the gateway's. Raises AssertionError if it is cut off."""
        body = {"model": "pylm", "prompt": PROMPT, "max_tokens": max_tokens, "stream": True}
        asked = json.dumps({**body, "temperature": 0, "ignore_eos": True}).encode()
        status, _, answer = self.request("POST", "/v1/completions", asked)
        assert status == 200, answer
        *events, last = answer.decode().removeprefix("data: ").strip().split("\n\ndata: ")
        assert last == "[DONE]", answer
        choices = [json.loads(event)["choices"][0] for event in events]
        assert choices[-1]["finish_reason"] == "length", answer
        return "".join(choice["text"] for choice in choices)

    def embed(self, text: str) -> list[float]:
        """A sentence embedding over HTTP. Raises AssertionError with the answer otherwise."""
        tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
        body = json.dumps({"inputs": [tensor]}).encode()
        status, _, answer = self.request("POST", "/v2/models/embed/infer", body)
        assert status == 200, answer
        outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
        embedding: list[float] = outputs["sentence_embedding"]
        return embedding

    def grpc(self) -> grpc_client.InferenceServerClient:
        """Triton's own client; calls need ``headers=client.headers``."""
        return grpc_client.InferenceServerClient(
            f"localhost:{self.port}", ssl=True, root_certificates=str(self.certificate)
        )

    def grpc_stream(self, max_tokens: int, prompt: str = PROMPT) -> list[tuple[float, str]]:
        """One stream over gRPC: (when it came, text) of each response. Raises what it raises."""
        answers: queue.Queue[Any] = queue.Queue()
        came = []
        with self.grpc() as client:
            client.start_stream(
                lambda result, error: answers.put((result, error)), headers=self.headers
            )
            with contextlib.suppress(InferenceServerException):  # refused: the reason comes below
                client.async_stream_infer(
                    "pylm", _inputs(max_tokens, prompt), enable_empty_final_response=True
                )
            while True:
                result, error = answers.get(timeout=TIMEOUT_S)
                if error is not None:
                    raise error
                response = result.get_response()
                if response.outputs:
                    text = result.as_numpy("text_output")[0].decode()
                    came.append((time.monotonic(), text))
                if response.parameters["triton_final_response"].bool_param:
                    return came


def _inputs(max_tokens: int, prompt: str) -> list[grpc_client.InferInput]:
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return [
        tensor("text_input", "BYTES", prompt.encode()),
        tensor("stream", "BOOL", True),
        tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
    ]


def tensor(name: str, kind: str, value: object, shape: tuple[int, ...] = (1,)) -> Any:
    """An input tensor of one element."""
    made = grpc_client.InferInput(name, list(shape), kind)
    made.set_data_from_numpy(np.array(value, dtype=_DTYPES[kind]).reshape(shape))
    return made
