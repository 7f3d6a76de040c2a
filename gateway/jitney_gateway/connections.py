"""Bounds the connections of a gateway: their number, and the time that one may be idle.

A connection is idle while it has no request that is being answered: its client sends nothing, or
sends its headers slowly. It is slow while its client sends a body, or has much of an answer to
read. uvicorn has no bound for any of these. ``run_gateway.py`` makes the bounds.
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
"""Most connections that may be open, however many files the process may open."""


def most_connections() -> int:
    """Three quarters of the files that this process may open. The others are for what is no
    connection of a client."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, soft * 3 // 4)


class ConnectionBounds:
    """The bounds of one gateway, and its idle and slow connections. Only its event loop uses
    this."""

    def __init__(self, most: int, head_s: float = HEAD_S) -> None:
        """``most``: connections that may be open. ``head_s``: seconds that one may be idle."""
        self._most = most
        self._head_s = head_s
        self._idle: dict[BoundedProtocol, asyncio.TimerHandle] = {}
        """Idle connection -> its timer. The one that has been idle longest comes first."""
        self._slow: dict[BoundedProtocol, None] = {}
        """Slow connections, in the same order. They have no timer: ``request_body`` bounds the time
        of a body, and an answer may take any time to be read."""
        self._has_warned = False

    def apply_to(self, config: Config) -> None:
        """Make the server of ``config`` keep these bounds."""
        config.http = partial(BoundedProtocol, self)  # type: ignore[assignment]

    def admit(self, protocol: "BoundedProtocol") -> None:
        """Note a new connection.

        If there are too many, the one that has been idle longest is closed. If none is idle, the
        one that has been slow longest is closed; if none is slow, the new one.
        """
        if len(protocol.connections) > self._most:
            longest_slow = next(iter(self._slow), protocol)
            victim = next(iter(self._idle), longest_slow)
            self.forget(victim)
            victim.transport.abort()
            self._warn()
            if victim is protocol:
                return
        self.begin_idle(protocol)

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _LOG.warning(
            "%d connections are open, the most that a gateway keeps here (three quarters of its "
            "open files, ulimit -n). For each further one, the connection that has been idle or "
            "slow longest is closed. There is no further warning of this",
            self._most,
        )

    def begin_idle(self, protocol: "BoundedProtocol") -> None:
        """Note that a connection is idle. Its time begins, unless it was idle before."""
        self._slow.pop(protocol, None)
        if protocol not in self._idle:
            loop = asyncio.get_running_loop()
            self._idle[protocol] = loop.call_later(self._head_s, self._expire, protocol)

    def begin_slow(self, protocol: "BoundedProtocol") -> None:
        """Note that a connection is slow."""
        self._end_idle(protocol)
        self._slow.setdefault(protocol, None)

    def forget(self, protocol: "BoundedProtocol") -> None:
        """Note that a connection is neither idle nor slow, or is closed."""
        self._end_idle(protocol)
        self._slow.pop(protocol, None)

    def _end_idle(self, protocol: "BoundedProtocol") -> None:
        timer = self._idle.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, protocol: "BoundedProtocol") -> None:
        del self._idle[protocol]
        protocol.transport.abort()


class BoundedProtocol(H11Protocol):
    """uvicorn's connection, which tells :class:`ConnectionBounds` whether it is idle or
    slow."""

    def __init__(self, bounds: ConnectionBounds, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bounds = bounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._bounds.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._bounds.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        """Called by the task that answers."""
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        """Called by the transport: the client has much to read."""
        super().pause_writing()
        self._note_state()

    def resume_writing(self) -> None:
        """Called by the transport: the client has read most of it."""
        super().resume_writing()
        self._note_state()

    def _note_state(self) -> None:
        if self not in self.connections:
            return  # it is closed
        has_request = self.cycle is not None and not self.cycle.response_complete
        if self.flow.write_paused or (has_request and self.cycle.more_body):
            self._bounds.begin_slow(self)
        elif has_request:
            self._bounds.forget(self)
        elif not self.transport.is_closing():
            self._bounds.begin_idle(self)
