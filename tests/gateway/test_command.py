"""How the gateway listens."""

import socket

from jitney.gateway.command import listen


def test_connections_send_small_pieces_at_once() -> None:
    """Else the kernel holds each event of a stream back until its client confirms the one before,
    which takes 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
