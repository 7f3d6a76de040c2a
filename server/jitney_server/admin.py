"""The embedded server's HTTP endpoints as its owner uses them: readiness, models, metrics.

Each call has a connection of its own, which is closed after it: an idle connection would hold up
the server's stop. A call that fails raises one of these::

    CallError
    ├── NoAnswerError     no answer in time, or no connection
    └── RefusedCallError  the server answered with an error
"""

import contextlib
import http.client
import json
import string
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from jitney.errors import InternalError

from jitney_server.ports import ServerPorts
from jitney_server.start_failure import without_frames_and_repetitions

TIMEOUT_S = 10.0

_SENT_AS_THEY_ARE = "".join(set(string.punctuation) - set("/?"))
_REACHED_AT = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that stands for every address of this machine -> one of these."""


class CallError(InternalError):
    """A call to the server failed."""


class NoAnswerError(CallError):
    """The server gave no answer."""


class RefusedCallError(CallError):
    """The server answered with an error; the text has it."""


class ModelState(NamedTuple):
    """The state of a model, as the server's repository index has it."""

    state: str
    """``READY``, ``LOADING``, ``UNLOADING`` or ``UNAVAILABLE``. Empty if nobody has asked for the
    model yet."""
    reason: str
    """Why it is unavailable."""


class Admin:
    """Calls to the server that listens on ``host`` and ``ports``. ``headers`` open its restricted
    endpoints."""

    def __init__(self, host: str, ports: ServerPorts, headers: Mapping[str, str]) -> None:
        self.host = _REACHED_AT.get(host, host)
        """Where a client on this machine reaches a server that is bound to ``host``."""
        self.ports = ports
        self._headers = {**headers, "Connection": "close"}

    def is_ready(self, path: str = "/v2/health/ready") -> bool:
        """Whether ``path`` answers 200; False too while nothing listens yet."""
        try:
            self._call("GET", path)
        except CallError:
            return False
        return True

    def model_states(self) -> dict[str, ModelState]:
        """Model name -> its state."""
        states = {}
        for entry in json.loads(self._call("POST", "/v2/repository/index")):
            reason = without_frames_and_repetitions(entry.get("reason", ""))
            states[entry["name"]] = ModelState(entry.get("state", ""), reason)
        return states

    def model_inputs(self, name: str) -> Any:
        """The input tensors of a ready model: a list of name, datatype and shape of each."""
        return json.loads(self._call("GET", f"/v2/models/{_quoted(name)}"))["inputs"]

    def unload(self, name: str) -> None:
        """Ask the server to unload a model. It does so once the model's requests have ended."""
        self._call("POST", f"/v2/repository/models/{_quoted(name)}/unload")

    def load(self, name: str, timeout_s: float) -> None:
        """Load a model and, if it is an ensemble, its parts. Does nothing for a model that is
        loaded. Raises RefusedCallError with the model's reason if it cannot be loaded."""
        path = f"/v2/repository/models/{_quoted(name)}/load"
        self._call("POST", path, timeout_s=timeout_s)

    def infer(self, name: str, inputs: list[dict[str, Any]]) -> Any:
        """The list of a model's output tensors for these inputs, all in the form of JSON."""
        body = json.dumps({"inputs": inputs})
        answer = self._call("POST", f"/v2/models/{_quoted(name)}/infer", body)
        return json.loads(answer)["outputs"]

    def is_answering(self, name: str) -> bool:
        """Whether the process of a language model answers a request within ``TIMEOUT_S``.

        The request is one that the model refuses at once. If the process is dead, the server itself
        answers, with a text that says so.
        """
        try:
            self._call("POST", f"/v2/models/{_quoted(name)}/generate", '{"text_input": ""}')
        except NoAnswerError:
            return False
        except RefusedCallError as error:
            return "is not healthy" not in str(error)
        return True

    def metrics(self) -> str:
        """The text of the metrics endpoint, which opens a moment after the server is ready."""
        return self._call("GET", "/metrics", port=self.ports.metrics)

    def _call(
        self,
        method: str,
        path: str,
        body: str | None = None,
        *,
        port: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        """The text of a response; ``port`` is that of HTTP by default."""
        port = port or self.ports.http
        connection = http.client.HTTPConnection(self.host, port, timeout=timeout_s)
        try:
            with contextlib.closing(connection):
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"the server did not answer {method} {path}: {error!r}") from None
        if response.status != 200:
            answer = f"HTTP {response.status}: {text[:400]}"
            raise RefusedCallError(f"the server answered {method} {path} with {answer}")
        return text


def _quoted(name: str) -> str:
    """A model's name as a part of a path.

    This server (2.51) does not decode paths, and knows a model by its name as it is. So only what
    cannot be sent, or would end the name, is quoted: a model without a stub may have any name, with
    spaces and letters like ü. The server does not know such a model by its quoted name, but it says
    so: the call ends as a RefusedCallError.
    """
    return quote(name, safe=_SENT_AS_THEY_ARE)
