"""Closes the connections that clients have to a server, from outside of its process.

The server (2.51) itself keeps some of them for ever. ``stopping`` and ``supervision`` call this.
"""

import contextlib
import ctypes
import errno
import logging
import os
import socket
from collections.abc import Collection, Iterator
from typing import NamedTuple

import psutil

_LOG = logging.getLogger(__name__)

_PIDFD_GETFD = 438
"""The number of the system call, which Python does not offer. It is the same on every architecture
that we run on."""
_CLOSED_ERRORS = (errno.EBADF, errno.ENOTSOCK, errno.ENOTCONN)
"""What the system says of a connection that has been closed since it was listed."""


class HangUp(NamedTuple):
    """What :func:`hang_up` did."""

    closed: int
    """Connections that it closed."""
    was_allowed: bool
    """False: this system does not let a process take the sockets of another one."""


def hang_up(pid: int, ports: Collection[int]) -> HangUp:
    """Close the clients' connections to ``ports`` of the process ``pid``, one of our children.

    Both sides are shut down:

    - The process reads the end of the connection, as if the client had closed it. Connections that
      the client has really closed (CLOSE_WAIT) end too.
    - The client reads the end after what was sent to it. To shut down the first side would not be
      enough: while a request has had no response, this server (2.51) does not read its connection,
      so it would not notice the end, and would never close the connection.

    What the process writes later does not reach the client. So an answer that is cut off here never
    looks complete.

    Some systems (some containers) do not let a process take the sockets of another one. There this
    only writes a line to the log. Needs Linux 5.6 or later.
    """
    closed = 0
    try:
        with _opened_pidfd(pid) as pidfd:
            for connection in psutil.Process(pid).net_connections(kind="tcp"):
                is_open = connection.status in (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)
                if not is_open or connection.laddr.port not in ports:
                    continue
                if _close(pidfd, connection.fd):
                    closed += 1
    except (OSError, psutil.Error) as error:
        _LOG.info("open connections cannot be closed from outside: %s", error)
        return HangUp(closed, was_allowed=False)
    return HangUp(closed, was_allowed=True)


def _close(pidfd: int, descriptor: int) -> bool:
    """Close another process's connection. False: it has been closed meanwhile. Raises OSError if
    the system does not allow it."""
    try:
        with _copied_socket(pidfd, descriptor) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno in _CLOSED_ERRORS:
            return False
        raise
    return True


@contextlib.contextmanager
def _opened_pidfd(pid: int) -> Iterator[int]:
    """A descriptor of the process itself."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _copied_socket(pidfd: int, descriptor: int) -> socket.socket:
    """A socket of our own for a connection of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    ours = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if ours < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return socket.socket(fileno=ours)
