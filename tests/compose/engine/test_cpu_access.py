"""Profile `cpu`, run by a real engine: what clients get through the proxy, who is kept out, and
what is too much.
"""

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.compose.engine.clients import tensor
from tests.compose.engine.deployment import Deployment, wait_for
from tests.compose.http2 import Http2, pile_up


@pytest.mark.parametrize("name", ["", "wrong"])
def test_without_a_known_key_nothing_is_served(deployment: Deployment, name: str) -> None:
    client = deployment.client("")
    if name:
        client = type(client)(client.port, client.certificate, "W" * 43)
    for path in ("/v2", "/v2/models/pylm", "/v2/models/pylm/infer", "/v2/models/pylm/generate"):
        status, headers, body = client.request("POST", path, b"{}")
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        assert "API key" in json.loads(body)["error"]
    with client.grpc() as connection, pytest.raises(InferenceServerException) as refused:
        connection.is_server_ready(headers=client.headers)
    assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
    with pytest.raises(InferenceServerException, match="API key"):
        client.grpc_stream(4)


def test_a_stream_over_http_leaves_token_by_token(deployment: Deployment) -> None:
    client = deployment.client()
    client.stream(8)
    asked = time.monotonic()
    events = client.stream(900)
    first, last = events[0][0] - asked, events[-1][0] - asked
    assert events[-1][1]["finish_reason"] == "length"
    assert len(events) > 30  # not one piece
    assert first < last / 2  # the first came while the others were being made
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(events)]
    assert max(gaps) < last / 2  # nor in two


def test_a_stream_over_grpc_leaves_token_by_token(deployment: Deployment) -> None:
    client = deployment.client()
    client.grpc_stream(8)
    asked = time.monotonic()
    came = client.grpc_stream(900)
    assert len(came) > 30
    assert came[0][0] - asked < (came[-1][0] - asked) / 2
    text = "".join(event["text_output"] for _, event in client.stream(900))
    assert "".join(piece for _, piece in came) == text


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/pylm/unload",
        "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/status",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/pylm/trace/setting",
        "/v2/models/pylm/infer/../../../repository/index",
        "/v2/models/..%2f..%2fv2%2frepository%2findex/infer",
        "/v2/systemsharedmemory/region/..%2f..%2fmodels/register",
        "/v2/repository/..%2fmodels/index",
        "/metrics",
        "/",
    ],
)
def test_what_no_client_needs_ends_at_the_proxy(deployment: Deployment, path: str) -> None:
    assert deployment.client().request("POST", path, b"{}")[0] == 404


def test_what_no_client_needs_ends_at_the_server_too(deployment: Deployment) -> None:
    for path in ("repository/index", "systemsharedmemory/status", "logging", "trace/setting"):
        status = deployment.run_in(
            "triton-cpu", "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}",
            *(["-d", "{}"] if path == "repository/index" else []),
            f"http://127.0.0.1:8000/v2/{path}",
        )  # fmt: skip
        assert status == "403", path
    client = deployment.client()
    with client.grpc() as connection:
        for call in (
            lambda: connection.get_model_repository_index(headers=client.headers),
            lambda: connection.unload_model("pylm", headers=client.headers),
            lambda: connection.get_system_shared_memory_status(headers=client.headers),
            lambda: connection.update_log_settings({}, headers=client.headers),
        ):
            with pytest.raises(InferenceServerException) as refused:
                call()
            assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


# --------------------------------------------------------------------------- limits


def test_a_large_body_is_refused(deployment: Deployment) -> None:
    client = deployment.client()
    large = b"x" * ((1 << 20) + 1)
    status, _, body = client.request("POST", "/v2/models/pylm/generate", large)
    assert (status, "1m" in json.loads(body)["error"]) == (413, True)
    text = tensor("text", "BYTES", large, (1, 1))
    with client.grpc() as connection, pytest.raises(InferenceServerException) as refused:
        connection.infer("embed", [text], headers=client.headers)
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_a_key_over_its_rate_is_refused_and_others_are_not(deployment: Deployment) -> None:
    limited, other = deployment.client("limited"), deployment.client()
    connection = limited.connect()
    statuses = []
    began = time.monotonic()
    for _ in range(1000):  # 300 at once and 200 a second are allowed
        connection.request("GET", "/v2", headers=limited.headers)
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    took = time.monotonic() - began
    refused = response.getheader("Retry-After") if response.status == 429 else "1"
    connection.close()
    assert set(statuses) == {200, 429}
    assert 300 <= statuses.count(200) <= 300 + 200 * took + 2
    assert refused == "1"
    assert other.request("GET", "/v2")[0] == 200


def test_a_key_can_be_taken_away_while_bodies_fill_the_proxy(deployment: Deployment) -> None:
    """They have a file system of their own."""
    client = deployment.client()
    gone = type(client)(client.port, client.certificate, "G" * 32)
    file = client.certificate.parent / "api_keys"
    before = file.read_text(encoding="utf-8")
    try:
        file.write_text(f"{before}gone:{gone.key}\n", encoding="utf-8")
        deployment.run_in("proxy", "reload-keys")
        wait_for(lambda: gone.request("GET", "/v2")[0] == 200, "the new key", 60)
        filled = "cat /dev/zero >/tmp/filler || test $(df --output=avail /tmp | tail -1) = 0"
        deployment.run_in("proxy", "sh", "-c", filled)
        file.write_text(before, encoding="utf-8")
        deployment.run_in("proxy", "reload-keys")
        wait_for(lambda: gone.request("GET", "/v2")[0] == 401, "the key to be gone", 60)
    finally:
        file.write_text(before, encoding="utf-8")
        deployment.run_in("proxy", "rm", "-f", "/tmp/filler")
        deployment.run_in("proxy", "reload-keys")


def test_a_new_password_of_grafanas_takes_effect_when_it_restarts(deployment: Deployment) -> None:
    file = deployment.project / "deploy" / "secrets" / "grafana_password"
    file.write_text("another password", encoding="utf-8")
    deployment.compose("restart", "grafana", timeout_s=120)
    told = "/var/lib/grafana/password"
    wait_for(
        lambda: deployment.run_in("grafana", "cat", told, check=False) == "another password",
        "Grafana to be told the password",
        60,
        lambda: deployment.logs("grafana"),
    )


def test_a_client_without_a_key_ends_no_worker(deployment: Deployment) -> None:
    """16,000 connections, then 900 of 128 streams that take no answer."""
    client = deployment.client()
    workers = proxy_workers(deployment)
    connection = client.connect()

    def ask() -> int:
        """The status of one more request with a key on a connection that was there before."""
        connection.request("GET", "/v2", headers=client.headers)
        response = connection.getresponse()
        response.read()
        return response.status

    assert ask() == 200
    plain: list[socket.socket] = []
    for number in range(16_000):
        with contextlib.suppress(OSError):
            plain.append(socket.create_connection(("127.0.0.1", client.port), timeout=60))
        if number % 200 == 0:
            plain = [each for each in plain if is_open(each)]
            assert ask() == 200
    for each in plain:
        each.close()
    held: list[Http2] = []
    for _ in range(30):
        held += pile_up(client.port, 30, "/v2/models/pylm/generate", {})
        assert ask() == 200
    for stream in held:
        stream.close()
    connection.close()
    assert proxy_workers(deployment) == workers
    assert not deployment.inspect("proxy")["State"]["OOMKilled"]
    wait_for(lambda: client.request("GET", "/v2")[0] == 200, "places for new connections", 60)


def proxy_workers(deployment: Deployment) -> set[int]:
    """The processes of nginx that serve."""
    first = psutil.Process(deployment.inspect("proxy")["State"]["Pid"])
    found = first.children(recursive=True)
    return {each.pid for each in found if each.cmdline()[:1] == ["nginx: worker process"]}


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has not closed it; closes it here too if it has."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


@pytest.fixture
def narrow(deployment: Deployment) -> Iterator[Deployment]:
    """The proxy with room for two requests of a key at once, and for little in a gRPC stream."""
    settings = {**deployment.settings, "OPEN_PER_KEY": "2", "MAX_STREAM_BODY": "100k"}
    changed = Deployment(deployment.engine, deployment.project, settings)
    try:
        changed.compose("up", "--detach", "--no-build", "proxy")
        changed.wait_healthy("proxy")
        yield changed
    finally:
        deployment.compose("up", "--detach", "--no-build", "proxy")
        deployment.wait_healthy("proxy")


def test_a_key_has_so_many_requests_under_way_and_a_stream_so_much_to_say(
    narrow: Deployment,
) -> None:
    client = narrow.client()
    enough = threading.Event()
    ends: list[dict[str, Any]] = []

    def go_on() -> None:
        while not enough.is_set():
            ends.append(client.stream(900)[-1][1])

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(go_on) for _ in range(2)]
        try:
            wait_for(lambda: client.request("GET", "/v2")[0] == 429, "both places to be taken", 20)
            assert narrow.client("limited").request("GET", "/v2")[0] == 200
        finally:
            enough.set()
        for each in running:
            each.result()
    # A stream may find that a question from above has its place.
    assert {str(end.get("finish_reason", end.get("status"))) for end in ends} <= {"length", "429"}
    assert client.request("GET", "/v2")[0] == 200
    with pytest.raises(InferenceServerException) as refused:
        client.grpc_stream(1, prompt="x" * 120_000)
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    said = refused.value.message()  # of a body that came at once, or later
    assert "too large" in said or "larger than" in said


# --------------------------------------------------------------------------- what errors say


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/pylm/generate", b"not json"),
        ("/v2/models/pylm/generate", b'{"text_input": "x", "max_tokens": -2}'),
        ("/v2/models/pylm/generate", b'{"text_input": "x", "temperature": "hot"}'),
        ("/v2/models/pylm/generate", b'{"text_input": ["x"], "nonsense": {}}'),
        ("/v2/models/pylm/infer", b'{"inputs": []}'),
        ("/v2/models/embed/infer", b'{"inputs": [{"name": "text"}]}'),
        (
            "/v2/models/embed/infer",
            b'{"inputs":[{"name":"text","shape":[1,1],"datatype":"FP32","data":[1]}]}',
        ),
        ("/v2/models/digits/infer", b'{"inputs":[{"name":"?","shape":[1],"datatype":"FP32"}]}'),
        ("/v2/models/none/infer", b"{}"),
        ("/v2/models/../../etc/passwd", b""),
    ],
)
def test_an_error_shows_nothing_of_the_inside(
    deployment: Deployment, path: str, body: bytes
) -> None:
    status, headers, answer = deployment.client().request("POST", path, body)
    assert status >= 400
    text = answer.decode()
    assert "error" in json.loads(text)
    for part in (
        "Traceback",
        'File "',
        ".py",
        "/opt/",
        "/models",
        "site-packages",
        "0x",
        "triton:",
    ):
        assert part not in text, text
    assert headers.get("server", "nginx") == "nginx"  # without a version
