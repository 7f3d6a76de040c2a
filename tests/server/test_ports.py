"""Ports are chosen free and different, and one that is taken or requested twice is named."""

import socket

import pytest
from jitney.errors import InstallationError
from jitney_server.admin import Admin
from jitney_server.command_line import common_options
from jitney_server.leftovers import RunFolder
from jitney_server.ports import ServerPorts, choose_ports


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


def test_ports_of_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as holder:
        try:
            holder.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(InstallationError, match=rf"\[::1\]:{taken} .*in use"):
            choose_ports("::1", {"http": 0, "grpc": taken})
    assert choose_ports("::1", {"http": 0, "grpc": taken})[1] == taken


def test_the_server_is_told_addresses_as_its_libraries_write_them() -> None:
    folder = RunFolder()
    try:
        options = common_options(
            host="::", ports=ServerPorts(1, 2, 3), exit_timeout_s=1, run_folder=folder
        )
    finally:
        folder.remove()
    assert "--http-address=ipv6:::" in options
    assert "--grpc-address=[::]" in options
    assert "--metrics-address=ipv6:::" in options
    assert Admin("::", ServerPorts(1, 2, 3), {}).host == "::1"
