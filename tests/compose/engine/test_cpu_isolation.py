"""Profile `cpu`, run by a real engine: how each container is shut in, and who reaches whom.

Nothing of this needs the kernel's packet filter: the inner network has no address on the machine,
so that neither the machine nor another network has a way there.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.compose.engine.deployment import SERVICES, Deployment

# What listens on the inner network: service, address, and what only it answers. That a connection
# opens says little: a machine's own gateway may take one for every address there is.
INNER = [
    ("triton-cpu", "http://{}:8000/v2", "model_repository(unload_dependents)"),
    ("triton-cpu", "http://{}:8001/inference.GRPCInferenceService/ServerLive", "application/grpc"),
    ("triton-cpu", "http://{}:8002/metrics", "nv_inference_count"),
    ("gateway", "http://{}:9000/metrics", "jitney_gateway_requests"),
    ("prometheus", "http://{}:9090/api/v1/status/buildinfo", "goVersion"),
    ("prober", "http://{}:9115/", "Blackbox"),
    ("disks", "http://{}:9100/metrics", "node_filesystem"),
    ("grafana", "http://{}:3000/jitney.json", "panels"),
    ("proxy", "https://{}:8443/alive", "alive"),
    ("proxy", "https://{}:3000/jitney.json", "panels"),
]
BY_NAME = [(service, url.format("triton" if service == "triton-cpu" else service), sign)
           for service, url, sign in INNER]  # fmt: skip
ids = [f"{service}-{url.split(':')[2].split('/')[0]}" for service, url, _ in INNER]


# --------------------------------------------------------------------------- who reaches whom


def reaches(deployment: Deployment, service: str, url: str, sign: str) -> bool:
    """Whether a container gets the answer that has ``sign`` in it."""
    return _curl(deployment, ["exec", deployment.container(service), "curl"], url, sign)


def stranger_reaches(deployment: Deployment, network: str, url: str, sign: str) -> bool:
    """Whether a container that is no service, on one of the engine's networks, does; on the network
    ``host`` it stands for a program of the machine."""
    run = ["run", "--rm", f"--network={network}", "--entrypoint=curl", "jitney/prometheus:local"]
    return _curl(deployment, run, url, sign)


def _curl(deployment: Deployment, how: list[str], url: str, sign: str) -> bool:
    http2 = ["--http2-prior-knowledge", "-X", "POST"] if "GRPC" in url else []
    said = deployment.engine.docker(
        *how, "-s", "-i", "-k", "--max-time", "5", *http2, url, check=False
    ).stdout
    return sign in said


def test_only_two_ports_are_published_on_the_loopback_address(deployment: Deployment) -> None:
    """What the engine itself listens on, for all of its containers."""
    process = deployment.engine.process
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    ports = (deployment.settings["HTTPS_PORT"], deployment.settings["GRAFANA_PORT"])
    # Its own, for the containers' programs, have other numbers at each start.
    published = {(ip, port) for ip, port in listening if str(port) in ports}
    assert published == {("127.0.0.1", int(port)) for port in ports}
    for service in SERVICES:
        settings = deployment.inspect(service)["NetworkSettings"]
        given = {port for port, addresses in settings["Ports"].items() if addresses}
        assert given == ({"8443/tcp", "3000/tcp"} if service == "proxy" else set())
        networks = {"inner", "edge"} if service == "proxy" else {"inner"}
        assert set(settings["Networks"]) == {deployment.network(each) for each in networks}


@pytest.mark.parametrize(("service", "url", "sign"), INNER, ids=ids)
def test_the_machine_reaches_nothing_on_the_inner_network(
    deployment: Deployment, service: str, url: str, sign: str
) -> None:
    url = url.format(deployment.address(service, "inner"))
    assert reaches(deployment, "prober", url, sign)  # there is something to be reached
    assert not stranger_reaches(deployment, "host", url, sign)


@pytest.mark.parametrize(("service", "url", "sign"), INNER, ids=ids)
def test_a_container_beside_the_proxy_reaches_nothing_on_the_inner_network(
    deployment: Deployment, service: str, url: str, sign: str
) -> None:
    address = deployment.address(service, "inner")
    assert not stranger_reaches(deployment, deployment.network("edge"), url.format(address), sign)


@pytest.mark.parametrize(("service", "url", "sign"), BY_NAME, ids=ids)
def test_only_the_proxy_is_found_beside_the_proxy(
    deployment: Deployment, service: str, url: str, sign: str
) -> None:
    """So the refusals above are not the stranger's own failure."""
    found = stranger_reaches(deployment, deployment.network("edge"), url, sign)
    assert found is (service == "proxy")


def test_a_container_of_another_network_reaches_nothing(deployment: Deployment) -> None:
    network = "jitney-strangers"
    deployment.engine.docker("network", "create", network)
    try:
        for service, url, sign in INNER:
            address = deployment.address(service, "inner")
            assert not stranger_reaches(deployment, network, url.format(address), sign)
    finally:
        deployment.engine.docker("network", "rm", network)


@pytest.mark.parametrize(("service", "url", "sign"), BY_NAME[:4], ids=ids[:4])
def test_the_proxy_reaches_the_servers(
    deployment: Deployment, service: str, url: str, sign: str
) -> None:
    assert reaches(deployment, "proxy", url, sign)


LISTENER = "this is the machine itself"


@contextmanager
def listener() -> Iterator[int]:
    """The port of something that listens on every address of the machine."""
    with socket.create_server(("0.0.0.0", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.recv(4096)
                connection.sendall(f"HTTP/1.0 200 OK\r\n\r\n{LISTENER}".encode())
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_the_inner_network_leads_nowhere(deployment: Deployment) -> None:
    """Not even to what listens on the machine, which every way to the world goes through."""
    machine = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    with listener() as port:
        urls = [f"http://{address}:{port}/" for address in machine]
        assert any(reaches(deployment, "proxy", url, LISTENER) for url in urls)
        for service in SERVICES:
            if service != "proxy":
                found = [url for url in urls if reaches(deployment, service, url, LISTENER)]
                assert found == [], service


# --------------------------------------------------------------------------- rights


def test_every_container_runs_without_rights(deployment: Deployment) -> None:
    for service in SERVICES:
        status = deployment.run_in(service, "cat", "/proc/self/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        user = "472" if service == "grafana" else "10001"  # Grafana's image has its own
        assert fields["Uid"].split() == [user] * 4
        assert int(fields["CapEff"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        for folder in ("/", "/etc", "/opt", "/usr/bin"):
            tried = deployment.run_in(
                service, "sh", "-c", f"touch {folder}/x; echo $?", check=False
            )
            assert tried.strip() != "0", (service, folder)
