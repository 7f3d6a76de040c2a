"""Ports are chosen free and different, and one that is taken or requested twice is named."""

import socket

import pytest
from jitney.errors import InstallationError
from jitney_server.ports import choose_ports


def test_free_ports_differ() -> None:
    ports = choose_ports("127.0.0.1", {f"number {index}": 0 for index in range(20)})
    assert len(set(ports)) == 20
    assert min(ports) > 0


def test_a_wanted_port_is_kept_and_a_taken_one_refused() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(InstallationError, match=f"127.0.0.1:{taken} .*in use"):
            choose_ports("127.0.0.1", {"http": 0, "grpc": taken})
    assert choose_ports("127.0.0.1", {"http": 0, "grpc": taken})[1] == taken


def test_a_port_that_is_requested_twice_is_refused() -> None:
    (port,) = choose_ports("127.0.0.1", {"any": 0})
    with pytest.raises(InstallationError, match=f"port {port} is .* for both http and metrics"):
        choose_ports("127.0.0.1", {"http": port, "grpc": 0, "metrics": port})


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(InstallationError, match=r"192\.0\.2\.1"):
        choose_ports("192.0.2.1", {"http": 0})
