"""The embedded server's HTTP endpoints as its owner uses them: readiness, models, metrics.

Plain requests over connections of their own, so that none stays open behind. Every call raises
OSError or http.client.HTTPException if the server does not answer within ``TIMEOUT_S``, and
InternalError if it answers with anything but what is asked for.
"""

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jitney.errors import InternalError
from jitney.server.ports import reachable

TIMEOUT_S = 10.0


class Admin:
    """``ports`` are those of HTTP, gRPC and metrics; ``headers`` open the restricted endpoints."""

    def __init__(self, host: str, ports: Sequence[int], headers: Mapping[str, str]) -> None:
        self.host = host
        self.http_port, self.grpc_port, self.metrics_port = ports
        self._headers = {**headers, "Connection": "close"}

    def is_ready(self, path: str = "/v2/health/ready") -> bool:
        """Whether ``path`` answers 200; False too while nothing listens yet."""
        try:
            return self._request("GET", path, self.http_port)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def model_states(self) -> dict[str, tuple[str, str]]:
        """Model name -> (state, reason); the state is empty if nobody ever asked for the model."""
        return {
            entry["name"]: (entry.get("state", ""), entry.get("reason", ""))
            for entry in json.loads(self._ask("POST", "/v2/repository/index"))
        }

    def model_inputs(self, name: str) -> list[dict[str, Any]]:
        """The input tensors of a ready model: name, datatype and shape of each."""
        inputs: list[dict[str, Any]] = json.loads(self._ask("GET", f"/v2/models/{name}"))["inputs"]
        return inputs

    def unload(self, name: str) -> None:
        """Ask for it; the server does it once the model's requests have ended."""
        self._ask("POST", f"/v2/repository/models/{name}/unload")

    def load(self, name: str, timeout_s: float) -> None:
        """Load a model, and what is made of it. InternalError has the model's reason if it cannot
        be; a model that is still loaded is not loaded anew."""
        self._ask("POST", f"/v2/repository/models/{name}/load", timeout_s=timeout_s)

    def is_answered(self, name: str) -> bool:
        """Whether a language model answers a request, which it refuses at once; the server answers
        for a model whose process does not. False if nobody does within ``TIMEOUT_S``."""
        try:
            path = f"/v2/models/{name}/generate"
            said = self._request("POST", path, self.http_port, '{"text_input": ""}')[1]
        except TimeoutError:
            return False
        return b"is not healthy" not in said

    def metrics(self) -> str:
        """The text of the metrics endpoint, which opens a moment after the server is ready."""
        return self._ask("GET", "/metrics", self.metrics_port)

    def _ask(
        self, method: str, path: str, port: int | None = None, timeout_s: float = TIMEOUT_S
    ) -> str:
        status, body = self._request(method, path, port or self.http_port, None, timeout_s)
        if status != 200:
            said = body.decode(errors="replace")[:200]
            raise InternalError(f"the server answered {method} {path} with HTTP {status}: {said}")
        return body.decode()

    def _request(
        self,
        method: str,
        path: str,
        port: int,
        body: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(reachable(self.host), port, timeout=timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
