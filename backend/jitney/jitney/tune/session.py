"""The server that a run starts for itself, and the model in it, loaded with setting after setting.

Owns the server's process. It first loads the model as it stands in the repository; each further
setting is unloaded and loaded again with a configuration in the request. A server that dies of a
setting is started again for the next one.
"""

import contextlib
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jitney.errors import InternalError, LoadError
from jitney.server import TritonServer
from jitney.server_log import failed_models, said_once, without_traceback
from jitney.sweep.target import Target
from jitney.tune.setting import Setting, label
from jitney.tune.subject import Subject, read_setting

_LIVE = ("READY", "LOADING", "UNLOADING")
_UNLOAD_S = 60.0


class Session:
    """``beside``: models that are loaded, too, because the tuned one calls them.

    Raises InvalidArgumentError for one that is not there, InstallationError without a server.
    """

    def __init__(self, subject: Subject, beside: Sequence[str], timeout_s: float) -> None:
        self._subject = subject
        self._timeout_s = timeout_s
        self._beside = list(beside)
        self._server = TritonServer(
            subject.repository, models=[subject.name, *beside], keep_going=True
        )

    def start(self) -> float:
        """Start the server with the model as the repository has it; returns the seconds it took.

        Raises LoadError if that setting does not load; the server then runs all the same, unless
        it is the server itself, or a model beside, that fails: InternalError.
        """
        began = time.monotonic()
        try:
            self._server.start(self._timeout_s)
            states = self._server.model_states()
        except LoadError as error:
            raise InternalError(str(error)) from None
        for name in self._beside:
            if states[name][0] != "READY":
                raise InternalError(f"model {name} beside it did not load: {states[name][1]}")
        state, reason = states[self._subject.name]
        if state != "READY":
            raise LoadError(self._reason(reason, 0))
        return time.monotonic() - began

    def stop(self) -> None:
        """End the server. Ctrl-C meanwhile ends it without waiting, and nothing else: what was
        measured is still reported."""
        try:
            self._server.stop()
        except KeyboardInterrupt:
            self._server.stop(0)

    @property
    def target(self) -> Target:
        """For a sweep."""
        server = self._server
        return Target.of(server.grpc_url, server.http_url, server.metrics_url)

    def load(self, values: Mapping[str, int]) -> float:
        """Load the model with a setting; returns the seconds it took. Raises LoadError."""
        if not self._server.is_alive():
            self._restart()
        began = time.monotonic()
        offset = self._log_size()
        try:
            self._unload()
            status, text = self._ask(
                "POST",
                f"/v2/repository/models/{self._subject.name}/load",
                {"parameters": {"config": self._subject.override(values)}},
            )
            if status != 200:
                raise LoadError(self._reason(_error(text), offset))
            if not self._subject.language and self.setting() != tuple(values.values()):
                there = label(dict(zip(values, self.setting(), strict=True)))
                raise LoadError(f"the server made {there} of it")
        except (OSError, http.client.HTTPException) as error:
            if self._server.is_alive():
                raise LoadError(f"the server did not answer: {error}") from None
            tail = self._server.log_tail(3).replace("\n", " / ")
            raise LoadError(f"the server ended; it said last: {tail}") from None
        return time.monotonic() - began

    def setting(self) -> Setting:
        """Of a model that is loaded, as the server has completed its configuration."""
        status, text = self._ask("GET", f"/v2/models/{self._subject.name}/config")
        if status != 200:
            raise LoadError(_error(text))
        return read_setting(json.loads(text))

    def _restart(self) -> None:
        self._server.stop(0)
        with contextlib.suppress(LoadError):  # the setting as it stands is not what is wanted now
            self.start()

    def _unload(self) -> None:
        name = self._subject.name
        deadline = time.monotonic() + _UNLOAD_S
        asked = False
        while (state := self._server.model_states()[name][0]) in _LIVE:
            if state == "READY" and not asked:
                self._ask("POST", f"/v2/repository/models/{name}/unload")
                asked = True
            if time.monotonic() > deadline:
                raise LoadError(f"the setting before it was not unloaded within {_UNLOAD_S:.0f} s")
            time.sleep(0.05)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._server.http_url, timeout=self._timeout_s)
        try:
            content = None if body is None else json.dumps(body)
            headers = {**self._server.admin_headers, "Connection": "close"}
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def _log_size(self) -> int:
        path = self._server.log_file
        return path.stat().st_size if path is not None and path.exists() else 0

    def _reason(self, said: str, offset: int) -> str:
        """Why it did not load: by the log, which often says more than the answer does."""
        path: Path | None = self._server.log_file
        if path is not None and path.exists():
            with path.open("rb") as log:
                log.seek(offset)
                text = log.read().decode("utf-8", "replace")
            found = failed_models(text).get(self._subject.name)
            if found:
                return found
        return said_once(without_traceback(said)) or "the server gave no reason"


def _error(text: str) -> str:
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text
