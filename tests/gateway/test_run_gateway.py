"""How the gateway listens."""

import signal
import socket
from typing import Any

import pytest
import uvicorn
from jitney.cli import make_app
from jitney.errors import InstallationError
from jitney_gateway.mounting import open_service
from jitney_gateway.run_gateway import listen
from typer.testing import CliRunner


def test_connections_send_small_pieces_at_once() -> None:
    """Else the kernel holds each event of a stream back until its client confirms the one before,
    which takes 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("words", "seconds"), [([], 10), (["--grace", "31"], 31)])
def test_streams_get_the_grace_at_a_stop(
    monkeypatch: pytest.MonkeyPatch, words: list[str], seconds: int
) -> None:
    def run(server: Any, sockets: list[socket.socket]) -> None:
        given.append(server.config.timeout_graceful_shutdown)
        sockets[0].close()

    given: list[int] = []
    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    done = CliRunner().invoke(make_app(), ["gateway", "--port", "0", *words])
    assert (done.exit_code, given) == (0, [seconds])


def test_no_service_by_that_name_is_an_incomplete_installation() -> None:
    with pytest.raises(InstallationError, match="no installed package offers pictures"):
        open_service("pictures", None)
