"""The demo's requests: who asks what, when, over which protocol, and what came back when."""

import http.client
import json
import queue
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import tritonclient.grpc as grpc

MODEL = "pylm"
TIMEOUT_S = 120.0

_IN_PROMPT = '''"""Read a configuration file and check it."""

import json
import os
import sys
from collections import namedtuple

Option = namedtuple("Option", "name kind default")

OPTIONS = [
    Option("host", str, "localhost"),
    Option("port", int, 8000),
    Option("timeout", float, 30.0),
    Option("verbose", bool, False),
]


class ConfigError(Exception):
    """An option is unknown or its value is of the wrong kind."""


'''

# (prompt, most tokens): short and long ones mixed, so that they end in another order than they
# came.
PROMPTS: list[tuple[str, int]] = [
    ("import os\nimport sys\nfrom collections import", 160),
    ("def add(a, b):", 24),
    (
        "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, x):",
        200,
    ),
    ("for key, value in", 40),
    (_IN_PROMPT + "def read_config(path):", 180),
    ("try:\n    import threading\nexcept ImportError:", 48),
    ('def parse_args(argv=None):\n    """Parse the command line."""', 140),
    ("with open(filename, encoding='utf-8') as file:", 72),
    (_IN_PROMPT + _IN_PROMPT + "def main():", 110),
    ("@property\n    def name(self):", 56),
    ('class Node(object):\n    """A node of the tree."""\n\n    def', 128),
    ("if __name__ == '__main__':", 32),
]


@dataclass
class DemoRequest:
    """One request. Times are monotonic seconds; ``tokens`` grows while it runs."""

    number: int
    via: Literal["gRPC", "HTTP"]
    prompt: str
    max_tokens: int
    sent: float | None = None
    ended: float | None = None
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many) of each response."""
    prompt_tokens: int = 0
    text: str = ""
    finish_reason: str = "None"
    """That of its last response."""
    error: str = ""

    @property
    def started(self) -> float | None:
        """When its first token came."""
        return self.tokens[0][0] if self.tokens else None

    @property
    def made(self) -> int:
        """Tokens so far."""
        return sum(count for _, count in self.tokens)

    def note(self, text: str, count: int, prompt_tokens: int) -> None:
        """Note one response."""
        self.tokens.append((time.monotonic(), count))
        self.text += text
        self.prompt_tokens = prompt_tokens

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampled, but the same at every run: its own seed decides, not the batch around it."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": 0.6,
            "top_p": 0.9,
            "seed": self.number,
        }


def make_requests() -> list[DemoRequest]:
    """All of them, alternating between the two protocols."""
    return [
        DemoRequest(number, "gRPC" if number % 2 else "HTTP", prompt, max_tokens)
        for number, (prompt, max_tokens) in enumerate(PROMPTS, start=1)
    ]


def send(request: DemoRequest, grpc_url: str, http_url: str) -> None:
    """Send the request and note what comes back, until it ends. An error is noted, not raised."""
    request.sent = time.monotonic()
    try:
        if request.via == "gRPC":
            send_grpc(request, grpc_url)
        else:
            send_http(request, http_url)
        if request.finish_reason == "None":
            request.error = "the answer broke off"
    except (
        OSError,
        http.client.HTTPException,
        grpc.InferenceServerException,
        queue.Empty,
    ) as error:
        request.error = f"{type(error).__name__}: {error}"
    request.ended = time.monotonic()


def send_grpc(request: DemoRequest, url: str) -> None:
    """Over a decoupled gRPC stream, as any tritonclient user does it."""
    inputs = []
    for name, kind, value in (
        ("text_input", "BYTES", request.prompt.encode()),
        ("stream", "BOOL", True),
        ("sampling_parameters", "BYTES", json.dumps(request.sampling).encode()),
        ("return_finish_reason", "BOOL", True),
        ("return_num_input_tokens", "BOOL", True),
        ("return_num_output_tokens", "BOOL", True),
    ):
        tensor = grpc.InferInput(name, [1], kind)
        tensor.set_data_from_numpy(np.array([value], dtype=object if kind == "BYTES" else bool))
        inputs.append(tensor)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(partial(_put, answers))
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        final = False
        while not final:
            result, error = answers.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                request.note(
                    result.as_numpy("text_output")[0].decode(),
                    int(result.as_numpy("num_output_tokens")[0]),
                    int(result.as_numpy("num_input_tokens")[0]),
                )
                request.finish_reason = result.as_numpy("finish_reason")[0].decode()
            final = response.parameters["triton_final_response"].bool_param


def _put(answers: "queue.Queue[tuple[Any, Any]]", result: Any, error: Any) -> None:
    answers.put((result, error))


def send_http(request: DemoRequest, url: str) -> None:
    """Over ``/generate_stream``: server-sent events, one JSON object each."""
    body = {
        "text_input": request.prompt,
        "stream": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        **request.sampling,
    }
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST",
            f"/v2/models/{MODEL}/generate_stream",
            json.dumps(body),
            {"Content-Type": "application/json", "Connection": "close"},
        )
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(response.read().decode(errors="replace"))
        for line in response:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise http.client.HTTPException(event["error"])
            request.note(
                event["text_output"], event["num_output_tokens"], event["num_input_tokens"]
            )
            request.finish_reason = event["finish_reason"]
    finally:
        connection.close()
