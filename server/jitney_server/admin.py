"""The embedded server's HTTP endpoints as its owner uses them: readiness, models, metrics.

Plain requests over connections of their own, so that none stays open behind. A call raises one of
``NO_ANSWER``: InternalError if the server answers with anything but what is asked for, the others
if it does not answer within ``TIMEOUT_S``.
"""

import contextlib
import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jitney.errors import InternalError

from jitney_server.log import readable

TIMEOUT_S = 10.0
NO_ANSWER = (OSError, http.client.HTTPException, InternalError)


class Admin:
    """``ports`` are those of HTTP, gRPC and metrics; ``headers`` open the restricted endpoints."""

    def __init__(self, host: str, ports: Sequence[int], headers: Mapping[str, str]) -> None:
        self.host = "127.0.0.1" if host in ("0.0.0.0", "") else host
        """Where a client on this machine reaches a server that is bound to ``host``."""
        self.ports = self.http_port, self.grpc_port, self.metrics_port = tuple(ports)
        self._headers = {**headers, "Connection": "close"}

    def is_ready(self, path: str = "/v2/health/ready") -> bool:
        """Whether ``path`` answers 200; False too while nothing listens yet."""
        try:
            self._ask("GET", path)
        except NO_ANSWER:
            return False
        return True

    def model_states(self) -> dict[str, tuple[str, str]]:
        """Model name -> (state, reason), as the repository index has it: ``READY``, or
        ``UNAVAILABLE`` and why. The state is empty if nobody ever asked for the model."""
        return {
            entry["name"]: (entry.get("state", ""), readable(entry.get("reason", "")))
            for entry in json.loads(self._ask("POST", "/v2/repository/index"))
        }

    def model_inputs(self, name: str) -> Any:
        """The input tensors of a ready model: a list of name, datatype and shape of each."""
        return json.loads(self._ask("GET", f"/v2/models/{name}"))["inputs"]

    def unload(self, name: str) -> None:
        """Ask for it; the server does it once the model's requests have ended."""
        self._ask("POST", f"/v2/repository/models/{name}/unload")

    def load(self, name: str, timeout_s: float) -> None:
        """Load a model, and what is made of it. InternalError has the model's reason if it cannot
        be; a model that is still loaded is not loaded anew."""
        self._ask("POST", f"/v2/repository/models/{name}/load", timeout_s=timeout_s)

    def infer(self, name: str, inputs: list[dict[str, Any]]) -> Any:
        """The list of a model's output tensors for these inputs, all as JSON has them."""
        body = json.dumps({"inputs": inputs})
        return json.loads(self._ask("POST", f"/v2/models/{name}/infer", body))["outputs"]

    def is_answered(self, name: str) -> bool:
        """Whether a language model answers a request, which it refuses at once; the server answers
        for a model whose process does not. False if nobody does within ``TIMEOUT_S``."""
        try:
            self._ask("POST", f"/v2/models/{name}/generate", '{"text_input": ""}')
        except TimeoutError:
            return False
        except InternalError as error:
            return "is not healthy" not in str(error)
        return True

    def metrics(self) -> str:
        """The text of the metrics endpoint, which opens a moment after the server is ready."""
        return self._ask("GET", "/metrics", port=self.metrics_port)

    def _ask(
        self,
        method: str,
        path: str,
        body: str | None = None,
        *,
        port: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        port = port or self.http_port
        connection = http.client.HTTPConnection(self.host, port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            said = response.read().decode(errors="replace")
        if response.status != 200:
            answer = f"HTTP {response.status}: {said[:400]}"
            raise InternalError(f"the server answered {method} {path} with {answer}")
        return said
