"""What a stop of the embedded server needs beyond the server's own interface. ``server`` calls it.

This server (2.51) keeps a model loaded while any client holds a gRPC stream open that has ever
carried a request to it, however idle, and waits for idle HTTP connections until its exit timeout.
So a stop first sees when nothing is in flight any more (:func:`requests_in_flight`), and then hangs
up on those clients (:func:`hang_up`); the server then unloads (:func:`unload_all`) and exits by
itself.
"""

import contextlib
import ctypes
import logging
import os
import re
import socket
import time
from collections.abc import Collection

import psutil

from jitney.errors import InternalError
from jitney.server.admin import NO_ANSWER, Admin

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


def children(pid: int | None) -> list[psutil.Process]:
    """The processes of the models of the server ``pid``; none if that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [] if pid is None else psutil.Process(pid).children()
    return []


def requests_in_flight(metrics: str) -> dict[str, float]:
    """Model -> its requests, running and waiting, of all its instances, from the text of the
    metrics endpoint. A model that has no such metrics is not ours and is not there."""
    total: dict[str, float] = {}
    for model, value in _IN_FLIGHT.findall(metrics):
        total[model] = total.get(model, 0.0) + float(value)
    return total


def unload_all(admin: Admin, pid: int, grace_s: float) -> tuple[str, bool]:
    """Unload every model of the server ``pid``; requests in flight have ``grace_s`` seconds to end.
    Models of ours that say that they have no request may take longer. Returns which were left and
    why, empty if none was, and whether requests may have been lost with them."""
    began = quiet_since = time.monotonic()
    asked: dict[str, float] = {}
    said: dict[str, str] = {}  # why the server refused to unload a model
    requests: dict[str, float] = {}
    try:
        while True:
            states = {name: state for name, (state, _) in admin.model_states().items() if state}
            now = time.monotonic()
            for name, state in sorted(states.items()):
                if name not in asked or (state == "READY" and now > asked[name] + _ASK_AGAIN_S):
                    asked[name], said[name] = now, ""
                    try:
                        admin.unload(name)
                    except InternalError as error:
                        said[name] = f" ({error})"
            live = {name: state for name, state in sorted(states.items()) if state in _LIVE}
            if not live:
                return "", False
            try:
                shown = requests_in_flight(admin.metrics())
                # A model that was shown before and is not now has ended its last request: it takes
                # its metrics along. Other backends' models never have any.
                requests = {**dict.fromkeys(requests, 0.0), **shown}
            except NO_ANSWER:  # a server may be told to have no metrics
                requests = shown = {}
            quiet = all(requests.get(name) == 0 for name in live)
            stuck = any(live[name] == "UNLOADING" for name in live.keys() & shown.keys())
            longer = 0.0 if not quiet else _STUCK_S if stuck else _UNLOAD_S
            if now > began + grace_s + longer:
                left = []
                for name, state in live.items():
                    count = requests.get(name)
                    busy = "" if count is None else f" with {count:.0f} requests in flight"
                    left.append(f"{name} is {state}{busy}{said[name]}")
                return f"after {now - began:.1f} s {', '.join(left)}", not quiet
            if not quiet:
                quiet_since = now
            elif now - quiet_since > _QUIET_S:
                hang_up(pid, [admin.grpc_port])
            time.sleep(0.05)
    except NO_ANSWER as error:
        # The signals must do.
        return f"the server does not answer: {error}", True


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
