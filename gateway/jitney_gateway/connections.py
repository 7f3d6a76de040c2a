"""How many connections a gateway keeps open, and for how long one may wait without a request.

Owns the count of open connections and the timers of those that have no request at work: a client
may have opened one and send nothing, or send its headers slowly. uvicorn bounds neither. Used by
:mod:`jitney_gateway.run_gateway`.
"""

import asyncio
import logging
import resource
from functools import partial
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

_LOG = logging.getLogger(__name__)

HEAD_S = 15.0
"""Seconds that a client may take to open a connection and send its request's headers."""
_MOST_CONNECTIONS = 16_384
"""Where the process may have any number of open files."""


def most_connections() -> int:
    """Three quarters of the files that this process may open: the rest is for its own."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, soft * 3 // 4)


class ConnectionBounds:
    """Of one gateway. Used by its event loop alone."""

    def __init__(self, most: int, head_s: float = HEAD_S) -> None:
        """At most ``most`` connections are open, and each waits ``head_s`` seconds for headers."""
        self._most = most
        self._head_s = head_s
        # Connections without a request at work, the one that waits longest first -> its timer.
        self._waiting: dict[BoundedProtocol, asyncio.TimerHandle] = {}
        self._has_said_so = False

    def bound(self, config: Config) -> None:
        """Let the server of ``config`` keep these bounds."""
        config.http = partial(BoundedProtocol, self)  # type: ignore[assignment]

    def admit(self, protocol: "BoundedProtocol") -> None:
        """Note a new connection. If there are too many, the one that has waited longest without a
        request is closed; the new one, if every other has a request."""
        if len(protocol.connections) > self._most:
            victim = next(iter(self._waiting), protocol)
            self.stop_waiting(victim)
            victim.transport.abort()
            if not self._has_said_so:
                self._has_said_so = True
                _LOG.warning(
                    "%d connections are open, the most that a gateway keeps here (three quarters "
                    "of its open files, ulimit -n): those that wait longest without a request are "
                    "closed. This is said once",
                    self._most,
                )
            if victim is protocol:
                return
        self.wait(protocol)

    def wait(self, protocol: "BoundedProtocol") -> None:
        """Note that a connection has no request at work. Its time begins, unless it has begun."""
        if protocol not in self._waiting:
            loop = asyncio.get_running_loop()
            self._waiting[protocol] = loop.call_later(self._head_s, self._expire, protocol)

    def stop_waiting(self, protocol: "BoundedProtocol") -> None:
        """Note that a connection has a request, or is closed."""
        timer = self._waiting.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, protocol: "BoundedProtocol") -> None:
        del self._waiting[protocol]
        protocol.transport.abort()


class BoundedProtocol(H11Protocol):
    """uvicorn's connection, which tells :class:`ConnectionBounds` when it has a request."""

    def __init__(self, bounds: ConnectionBounds, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bounds = bounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._bounds.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._bounds.stop_waiting(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        super().data_received(data)
        self._note_request()

    def on_response_complete(self) -> None:
        """Called by the task that answers."""
        super().on_response_complete()
        self._note_request()

    def _note_request(self) -> None:
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request:
            self._bounds.stop_waiting(self)
        elif not self.transport.is_closing():
            self._bounds.wait(self)
