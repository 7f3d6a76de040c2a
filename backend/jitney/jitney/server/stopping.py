"""What a stop of the embedded server needs beyond the server's own interface. ``server`` calls it.

This server (2.51) keeps a model loaded while any client holds a gRPC stream open that has ever
carried a request to it, however idle, and waits for idle HTTP connections until its exit timeout.
So a stop first sees when nothing is in flight any more (:func:`requests_in_flight`), and then hangs
up on those clients (:func:`hang_up`); the server then unloads (:func:`unload_all`) and exits by
itself.
"""

import ctypes
import http.client
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import psutil

from jitney.errors import InternalError
from jitney.server.admin import Admin

_LOG = logging.getLogger(__name__)

_PIDFD_GETFD = 438
"""The number of the system call, which Python does not offer; the same on every architecture that
we run on."""

_LIVE = ("READY", "LOADING", "UNLOADING")
# So long must the metrics show no request: they are a quarter of a second late, responses less.
_QUIET_S = 0.6
# A model that is still ready after so long is asked once more to unload.
_ASK_AGAIN_S = 2.0
# Longer than the grace, for models without any request: a process with torch in it takes two
# seconds of a core to end, and many of them end at once.
_UNLOAD_S = 30.0
# The same if one of them still shows its metrics, which it withdraws when it ends: this server has
# lost count of its requests, and will not end it (docs/troubleshooting.md).
_STUCK_S = 3.0

_IN_FLIGHT = re.compile(
    r'^jitney_(?:running|waiting)_requests{.*?\bmodel="([^"]*)".*} (\S+)$', re.M
)


def requests_in_flight(metrics: str) -> dict[str, float]:
    """Model -> its requests, running and waiting, of all its instances, from the text of the
    metrics endpoint. A model that has no such metrics is not ours and is not there."""
    total: dict[str, float] = {}
    for model, value in _IN_FLIGHT.findall(metrics):
        total[model] = total.get(model, 0.0) + float(value)
    return total


class Left(NamedTuple):
    """What a stop left behind."""

    text: str
    """Models and why they were left; empty if none was."""
    lost: bool
    """Whether requests may have been lost with them."""


def unload_all(admin: Admin, pid: int, grace_s: float) -> Left:
    """Unload every model of the server ``pid``; requests in flight have ``grace_s`` seconds to end.

    SIGTERM alone would not do: the server
    first waits for idle keep-alive connections, up to its whole exit timeout, and then has no time
    left to unload its models. And an open gRPC stream keeps a model from being unloaded: it is cut
    once no request is in flight. Models of ours that say that they have no request may take longer.
    """
    began = quiet_since = time.monotonic()
    deadline = began + grace_s
    asked: dict[str, float] = {}
    refusals: dict[str, str] = {}
    requests: dict[str, float] = {}
    try:
        while True:
            states = {name: state for name, (state, _) in admin.model_states().items() if state}
            now = time.monotonic()
            for name in sorted(states):
                again = states[name] == "READY" and now > asked.get(name, now) + _ASK_AGAIN_S
                if name not in asked or again:
                    asked[name] = now
                    refusals.pop(name, None)
                    try:
                        admin.unload(name)
                    except InternalError as error:
                        refusals[name] = str(error)
            live = {name: state for name, state in states.items() if state in _LIVE}
            if not live:
                return Left("", lost=False)
            shown = _look(admin)
            # A model that was shown before and is not now has ended its last request: it takes its
            # metrics along. Other backends' models never have any.
            requests = {} if shown is None else {**dict.fromkeys(requests, 0.0), **shown}
            quiet = all(requests.get(name) == 0 for name in live)
            stuck = any(live[name] == "UNLOADING" for name in live.keys() & (shown or {}).keys())
            if now > deadline + ((_STUCK_S if stuck else _UNLOAD_S) if quiet else 0):
                return Left(_explain(live, requests, refusals, now - began), lost=not quiet)
            if not quiet:
                quiet_since = now
            elif now - quiet_since > _QUIET_S:
                hang_up(pid, [admin.grpc_port])
            time.sleep(0.05)
    except (OSError, http.client.HTTPException, InternalError) as error:
        # The signals must do.
        return Left(f"the server does not answer: {error}", lost=True)


def _look(admin: Admin) -> dict[str, float] | None:
    """Model -> requests in flight, as the metrics show; None without metrics, which a server may be
    told not to have."""
    try:
        return requests_in_flight(admin.metrics())
    except (OSError, http.client.HTTPException, InternalError):
        return None


def _explain(
    live: dict[str, str], requests: Mapping[str, float], refusals: dict[str, str], after_s: float
) -> str:
    """One line about the models that are left: their states, requests and what the server said."""
    left = []
    for name, state in sorted(live.items()):
        said = f"{name} is {state}"
        if (in_flight := requests.get(name)) is not None:
            said += f" with {in_flight:.0f} requests in flight"
        if name in refusals:
            said += f" ({refusals[name]})"
        left.append(said)
    return f"after {after_s:.1f} s {', '.join(left)}"


def hang_up(pid: int, ports: Collection[int]) -> int:
    """Close the clients' connections to ``ports`` of the process ``pid``, one of our children.

    The sockets are borrowed from the process (Linux 5.6 or later) and shut down for reading, which
    it takes for the client's own going. Returns how many there were. Where that is not allowed
    (some containers), nothing is done but a line in the log.
    """
    ended = 0
    try:
        descriptor = os.pidfd_open(pid)
        try:
            connections = psutil.Process(pid).net_connections(kind="tcp")
            for each in connections:
                if each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports:
                    with _borrow(descriptor, each.fd) as connection:
                        connection.shutdown(socket.SHUT_RD)
                    ended += 1
        finally:
            os.close(descriptor)
    except (OSError, psutil.Error) as error:
        _LOG.info("open connections cannot be closed from outside: %s", error)
    return ended


def _borrow(pidfd: int, descriptor: int) -> socket.socket:
    """A socket of our own on another process's connection."""
    libc = ctypes.CDLL(None, use_errno=True)
    ours = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if ours < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return socket.socket(fileno=ours)
