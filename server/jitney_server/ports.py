"""The ports of a server."""

import contextlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

from jitney.errors import InstallationError


class ServerPorts(NamedTuple):
    """The ports on which a server listens. Before it starts, 0 stands for a free one."""

    http: int
    grpc: int
    metrics: int


def choose_ports(host: str, requested: Sequence[int]) -> list[int]:
    """Replace each 0 by a port that is free now, and check that the others are free.

    All stay bound until the last one is chosen, so they differ. Another process may still take one
    before the server binds it. Raises InstallationError for a port that is not free.
    """
    with contextlib.ExitStack() as stack:
        chosen = []
        for port in requested:
            probe = stack.enter_context(socket.socket())
            try:
                # As the server does: a port in TIME_WAIT is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            except OSError as error:
                raise InstallationError(
                    f"cannot listen on {host}:{port} ({error.strerror}); choose another port, "
                    f"or 0 for a free one"
                ) from None
            chosen.append(probe.getsockname()[1])
        return chosen
