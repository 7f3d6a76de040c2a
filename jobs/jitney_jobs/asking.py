"""An executor whose rows are requests to a server, and the requests of OpenAI's API. Those of a
Triton server are in ``remote.py``."""

import hashlib
import http.client
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from jitney.access import Access
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError, from_code

from jitney_jobs.job import Job

TIMEOUT_S = 600.0
"""Without a response for so long, a request is given up."""
_FAULTS_OF_THE_LINE = (400, 409, 413, 422)
"""Statuses of a bad row: another try would get them again."""
_CODES = {500: "INTERNAL", 504: "DEADLINE_EXCEEDED"}
"""The errors that other statuses stand for. Every status that is not named, such as 401, 404 and
429, is UNAVAILABLE: it ends the job, if it stays after some tries."""


class OpenAiRequest(NamedTuple):
    path: str
    body: bytes


class ServerExecutor:
    """Keeps requests under way, each in a thread of its own."""

    def __init__(
        self,
        ask: Callable[[Any], Any | JitneyError],
        at_once: int,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        """``ask`` is called for each row, in a thread. At most ``at_once`` calls run at a time.
        ``abort`` makes these calls return early, if that can be done."""
        self._ask = ask
        self._abort = abort
        self.capacity = 2 * at_once
        self._threads = ThreadPoolExecutor(at_once)
        self._running: dict[Future[Any], int] = {}
        self.figures: dict[str, float] = {}

    def rank(self, prepared: Any, is_last: bool) -> int:
        return 0

    def submit(self, key: int, prepared: Any) -> None:
        self._running[self._threads.submit(self._ask, prepared)] = key

    def step(self) -> list[tuple[int, Any]]:
        """Wait until a request has ended, or for a moment."""
        ended = wait(self._running, 0.2, FIRST_COMPLETED).done
        return [(self._running.pop(future), future.result()) for future in ended]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)  # requests that have not begun
        self._abort()  # those under way
        self._threads.shutdown()  # waits until their threads have ended


def access_of(job: Job) -> Access:
    """How the job reaches its server: TLS, certificates and key. Raises InvalidArgumentError for
    files that cannot be read."""
    ca_file = None if job.ca_file is None else Path(job.ca_file)
    key_file = None if job.api_key_file is None else Path(job.api_key_file)
    tls = job.tls or str(job.server).startswith("https:")
    return Access.of(tls, ca_file, key_file)


def request_digest(custom_id: str) -> str:
    """What the ids of a line's answer are made of."""
    return hashlib.sha256(custom_id.encode()).hexdigest()[:24]


class OpenAiServer:
    """A server of OpenAI's API, such as ``jitney gateway``. Any thread may call it."""

    def __init__(self, job: Job) -> None:
        """Raises InvalidArgumentError for files that cannot be read."""
        self._host = urlsplit(str(job.server)).netloc
        self._access = access_of(job)
        self._connect: Callable[[], http.client.HTTPConnection]
        if self._access.context is None:
            self._connect = partial(http.client.HTTPConnection, self._host, timeout=TIMEOUT_S)
        else:
            self._connect = partial(
                http.client.HTTPSConnection,
                self._host,
                timeout=TIMEOUT_S,
                context=self._access.context,
            )
        self._headers = {"content-type": "application/json", **dict(self._access.headers)}
        self._open: set[http.client.HTTPConnection] = set()
        self._is_aborted = False

    def ask(self, request: OpenAiRequest) -> Any | JitneyError:
        """The object that the server answers, or an error whose text is the status and the body."""
        connection = self._connect()
        self._open.add(connection)
        try:
            connection.connect()
            # Asked after connecting: `abort` cannot close a connection that is not there yet.
            if self._is_aborted:
                return UnavailableError(f"the request to {self._host} was aborted")
            connection.request("POST", request.path, request.body, self._headers)
            response = connection.getresponse()
            data = response.read()
            if response.status == 200:
                return msgspec.json.decode(data)
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            why = self._access.hide(str(error))
            return UnavailableError(f"{self._host} does not answer: {why}")
        finally:
            self._open.discard(connection)
            connection.close()
        text = self._access.hide(f"{response.status} {data.decode(errors='replace')}")
        if response.status in _FAULTS_OF_THE_LINE:
            return InvalidArgumentError(text)
        return from_code(_CODES.get(response.status, "UNAVAILABLE"), text)

    def abort(self) -> None:
        """Close the connections, and send no request from now on. The server drops the requests of
        these connections."""
        self._is_aborted = True  # first, so that a connection that is missed below sees it
        for connection in list(self._open):
            sock = connection.sock
            if sock is not None:
                with suppress(OSError):  # its thread has just closed it
                    sock.shutdown(socket.SHUT_RDWR)
