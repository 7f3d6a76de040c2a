"""Rows as requests to a server, so many at a time: an executor, which is given the function that
asks for a row. That of a Triton server is in ``remote.py``, that of OpenAI's API is here."""

import http.client
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from jitney.access import Access
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError, from_code

from jitney_jobs.job import Job

TIMEOUT_S = 600.0
"""Without a response for so long, a request is given up."""
_OF_THE_LINE = (400, 409, 413, 422)
"""Statuses that are the line's fault: another try would get them again."""
_CODES = {500: "INTERNAL", 504: "DEADLINE_EXCEEDED"}
Line = tuple[str, bytes]
"""A path and a body."""


class InServer:
    """So many threads, each with a request of its own."""

    def __init__(
        self,
        ask: Callable[[Any], Any | JitneyError],
        at_once: int,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        """``abort`` ends what is under way early, if that can be done."""
        self._ask = ask
        self._abort = abort
        self.capacity = 2 * at_once
        self._threads = ThreadPoolExecutor(at_once)
        self._running: dict[Future[Any], int] = {}
        self.figures: dict[str, float] = {}

    def rank(self, prepared: Any, ending: bool) -> int:
        return 0

    def submit(self, key: int, prepared: Any) -> None:
        self._running[self._threads.submit(self._ask, prepared)] = key

    def step(self) -> list[tuple[int, Any]]:
        """Wait until a request has ended, or a moment."""
        ended = wait(self._running, 0.2, FIRST_COMPLETED).done
        return [(self._running.pop(future), future.result()) for future in ended]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._abort()
        self._threads.shutdown()


def access_of(job: Job) -> Access:
    """How the job reaches its server: TLS, certificates and key. Raises InvalidArgumentError for
    files that cannot be read."""
    ca_file, key = (Path(each) if each else None for each in (job.ca_file, job.api_key_file))
    return Access.of(job.tls or str(job.server).startswith("https:"), ca_file, key)


class OpenAiServer:
    """A server of OpenAI's API, such as ``jitney gateway``. For any thread."""

    def __init__(self, job: Job) -> None:
        """Raises InvalidArgumentError for files that cannot be read."""
        self._place = urlsplit(str(job.server)).netloc
        self._access = access_of(job)
        context = self._access.context
        plain = http.client.HTTPConnection
        kind = partial(http.client.HTTPSConnection, context=context) if context else plain
        self._connect = partial(kind, self._place, timeout=TIMEOUT_S)
        self._headers = {"content-type": "application/json", **dict(self._access.headers)}
        self._open: set[http.client.HTTPConnection] = set()

    def ask(self, line: Line) -> Any | JitneyError:
        """The object that the server answers, or an error whose text is the status and the body."""
        connection = self._connect()
        self._open.add(connection)
        try:
            connection.request("POST", *line, self._headers)
            response = connection.getresponse()
            data = response.read()
            if response.status == 200:
                return msgspec.json.decode(data)
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            why = self._access.hide(str(error))
            return UnavailableError(f"{self._place} does not answer: {why}")
        finally:
            self._open.discard(connection)
            connection.close()
        text = self._access.hide(f"{response.status} {data.decode(errors='replace')}")
        if response.status in _OF_THE_LINE:
            return InvalidArgumentError(text)
        return from_code(_CODES.get(response.status, "UNAVAILABLE"), text)

    def abort(self) -> None:
        """Close the connections. The server then drops their requests."""
        for sock in [connection.sock for connection in [*self._open]]:
            if sock is not None:
                with suppress(OSError):  # its thread has just closed it
                    sock.shutdown(socket.SHUT_RDWR)
