"""What a stop of the embedded server needs beyond the server's own interface. ``server`` calls it.

This server (2.51) keeps a model loaded while any client holds a gRPC stream open that has ever
carried a request to it, however idle, and waits for idle HTTP connections until its exit timeout.
So a stop first sees when nothing is in flight any more (:func:`requests_in_flight`), and then hangs
up on those clients (:func:`hang_up`); the server then unloads and exits by itself.
"""

import ctypes
import logging
import os
import re
import socket
from collections.abc import Collection

import psutil

_LOG = logging.getLogger(__name__)

_PIDFD_GETFD = 438
"""The number of the system call, which Python does not offer; the same on every architecture that
we run on."""

_IN_FLIGHT = re.compile(
    r'^jitney_(?:running|waiting)_requests\{[^}]*\bmodel="([^"]*)"[^}]*\} (\S+)$', re.M
)


def requests_in_flight(metrics: str) -> dict[str, float]:
    """Model -> its requests, running and waiting, of all its instances, from the text of the
    metrics endpoint. A model that has no such metrics is not ours and is not there."""
    total: dict[str, float] = {}
    for model, value in _IN_FLIGHT.findall(metrics):
        total[model] = total.get(model, 0.0) + float(value)
    return total


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
