"""What a gateway does with a signal that comes at its start."""

import signal
import socket

import pytest
import uvicorn
from jitney.errors import ConfigError
from jitney_gateway.run_gateway import listen, run_gateway


def test_a_signal_before_it_serves_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn has no handlers yet, but the launcher may have ended already."""
    wants_to_exit = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        signal.raise_signal(signal.SIGTERM)
        wants_to_exit.append(server.should_exit)
        for each in sockets:
            each.close()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(uvicorn.Server, "run", run)
    try:
        run_gateway("127.0.0.1:1", "127.0.0.1", 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert wants_to_exit == [True]


def test_it_listens_on_an_address_of_ipv6() -> None:
    try:
        listener = listen("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listener:
        host, port = listener.getsockname()[:2]
        assert host == "::1"
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{port}: .*in use"):
            listen("::1", port)
