"""Ports are chosen free and different, and a taken one is named."""

import socket

import pytest
from jitney.errors import InstallationError
from jitney_server.ports import choose_ports


def test_free_ports_differ() -> None:
    ports = choose_ports("127.0.0.1", [0] * 20)
    assert len(set(ports)) == 20
    assert min(ports) > 0


def test_a_wanted_port_is_kept_and_a_taken_one_refused() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(InstallationError, match=f"127.0.0.1:{taken} .*in use"):
            choose_ports("127.0.0.1", [0, taken])
    assert choose_ports("127.0.0.1", [0, taken])[1] == taken


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(InstallationError, match=r"192\.0\.2\.1"):
        choose_ports("192.0.2.1", [0])
