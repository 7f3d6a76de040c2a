"""TCP ports of this machine: which are free, and where a client reaches them."""

import contextlib
import socket
from collections.abc import Sequence

from jitney.errors import InstallationError


def port_problem(host: str, port: int) -> str | None:
    """Why ``host:port`` cannot be listened on, or None if it can, right now."""
    try:
        _bound(host, port).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def choose_ports(host: str, requested: Sequence[int]) -> list[int]:
    """Replace each 0 by a port that is free now, and check that the others are.

    All stay bound until the last is chosen, so that they differ. Between this and the server's own
    bind another process may still take one. Raises InstallationError for a port that is not free.
    """
    with contextlib.ExitStack() as stack:
        chosen = []
        for port in requested:
            try:
                probe = stack.enter_context(_bound(host, port))
            except OSError as error:
                raise InstallationError(
                    f"cannot listen on {host}:{port} ({error.strerror}); choose another port, "
                    f"or 0 for a free one"
                ) from None
            chosen.append(probe.getsockname()[1])
        return chosen


def reachable(host: str) -> str:
    """An address that a client on this machine can use for a server bound to ``host``."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound but not listening. REUSEADDR, as the server: a port in TIME_WAIT is free."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe
