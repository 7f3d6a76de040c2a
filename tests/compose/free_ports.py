"""Ports that nothing listens on, for the servers that tests start."""

import socket


def free_port() -> int:
    """A port of the loopback address that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
