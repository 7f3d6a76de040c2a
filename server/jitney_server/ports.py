"""The ports of a server."""

import contextlib
import itertools
import socket
from collections.abc import Mapping
from typing import NamedTuple

from jitney.addresses import before_port, family_of
from jitney.errors import InstallationError


class ServerPorts(NamedTuple):
    """The ports on which a server listens. Before it starts, 0 stands for a free one."""

    http: int
    grpc: int
    metrics: int


def choose_ports(host: str, requested: Mapping[str, int]) -> list[int]:
    """Replace each 0 by a port that is free now, and check that the others are free and differ.
    ``requested``: what listens on a port -> the port.

    All stay bound until the last one is chosen, so the free ones differ too. Another process may
    still take one before the server binds it. Raises InstallationError for a port that is not free,
    or that is requested twice.
    """
    check_different(requested)
    with contextlib.ExitStack() as stack:
        chosen = []
        for port in requested.values():
            probe = stack.enter_context(socket.socket(family_of(host)))
            try:
                # As the server does: a port in TIME_WAIT is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            except OSError as error:
                raise InstallationError(
                    f"cannot listen on {before_port(host)}:{port} ({error.strerror}); choose "
                    f"another port, or 0 for a free one"
                ) from None
            chosen.append(probe.getsockname()[1])
        return chosen


def check_different(requested: Mapping[str, int]) -> None:
    """Raise InstallationError if two of the ports are the same and not 0. An attempt to bind them
    would not fail: with SO_REUSEADDR a port can be bound twice while nobody listens on it."""
    for (first, port), (second, other) in itertools.combinations(requested.items(), 2):
        if port == other and port != 0:
            raise InstallationError(
                f"port {port} is requested for both {first} and {second}; choose another port, or "
                f"0 for a free one"
            )
