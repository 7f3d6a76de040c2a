"""The proxy itself: this machine's nginx with deploy/proxy's configuration, in front of a server of
the tests' own. What a client without a key, or one who means harm, can do to it and behind it.

`make test-compose` installs nginx and its modules, and runs them.
"""

import json
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.compose.engine.deployment import wait_for
from tests.compose.http2 import Http2, pile_up
from tests.compose.proxy import LARGE_BYTES, Proxy, Server, send, serve

pytestmark = pytest.mark.debian
SERVICE = "/inference.GRPCInferenceService/"


def call(
    proxy: Proxy, method: str, *metadata: tuple[str, str], key: bool = True, message: bytes = b"hi"
) -> grpc.StatusCode:
    """What a call over gRPC ends with."""
    headers = proxy.client().headers.items() if key else ()
    with proxy.channel() as channel:
        try:
            channel.unary_unary(SERVICE + method)(
                message, metadata=(*headers, *metadata), timeout=60
            )
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


# --------------------------------------------------------------------------- without a key


@pytest.mark.parametrize(
    "target",
    [
        "/v2/health/ready?a=b",
        "/v2/health/../health/ready",
        "/v2/models/x/../../health/ready",
        "/v2/repository/models/x/unload/../../../../health/live",
        "/%76%32/health/ready",
        "/v2/health/%72eady",
        "/v2%2Fhealth%2Flive",
        "/v2/repository/index%2f..%2f..%2fhealth%2flive",
        "//v2//health//live",
        "/./healthz",
        "/x/../healthz",
        "/v2/repository/index",
        "/%76%32/models/x/infer",
        "/v2/models/x/infer",
        "/health?a=b",
        "/v1/../health",
        "/v1/models",
        "/v1/files",
        "/%76%31/chat/completions",
        "/v1%2Fmodels",
        "/metrics",
        "/openapi.json",
    ],
)
def test_without_a_key_servers_get_three_targets_and_nothing_else(
    proxy: Proxy, server: Server, target: str
) -> None:
    """Nor any header or body of the client's."""
    send(proxy, target, b"{}", ("X-Sent", "1"), ("Inference-Header-Content-Length", "9"), key=False)
    for method, reached, headers, body in server.seen:
        assert method == "GET"
        assert reached in ("/v2/health/ready", "/v2/health/live", "/health")
        assert not {"x-sent", "inference-header-content-length", "content-length"} & set(headers)
        assert body == b""


def test_health_is_answered_however_often_it_is_asked(proxy: Proxy, server: Server) -> None:
    """A load balancer that got 429 would take a healthy server out of service."""
    connection = proxy.client("").connect()
    began = time.monotonic()
    paths = ("/healthz", "/v2/health/ready", "/health")
    for number in range(600):
        connection.request("GET", paths[number % 3])
        response = connection.getresponse()
        response.read()
        assert response.status == 200
    took = time.monotonic() - began
    connection.close()
    assert 1 <= len(server.seen) <= 3 * (took + 2)  # each path once a second


def test_connections_of_an_address_are_bounded(server: Server) -> None:
    """Those that are taken are kept busy with a key, or they would be closed in time."""
    with Proxy(server, CONNECTIONS_PER_ADDRESS="20") as proxy:
        key = ("authorization", proxy.client().headers["authorization"])
        held, refused = [], 0
        for _ in range(40):
            try:
                held.append(Http2(proxy.port, window=65535))
            except OSError:
                refused += 1
                continue
            held[-1].ask("/v2/models/x/generate_stream", key, body=b'{"max_tokens": 5000}')
        assert (len(held), refused) == (20, 20)
        held.pop().close()
        wait_for(lambda: connects(proxy), "the place that was given up", 60, proxy.output)
        for each in held:
            each.close()


def connects(proxy: Proxy) -> bool:
    """Whether one more connection is taken."""
    try:
        Http2(proxy.port).close()
    except OSError:
        return False
    return True


ASKED_WITHOUT_KEY = {
    "no key": ("/v2/models/pylm/generate", {}),
    "no path": ("/nothing", {}),
    "alive": ("/alive", {}),
    "health": ("/healthz", {}),
    "a gateway": ("/v1/chat/completions", {}),
    "a gateway's health": ("/health", {}),
    "a body to come": ("/healthz", {"content-length": "1000"}),
    "too large": ("/v2", {"content-length": "1000000000"}),
    "no request": ("/v2", {"content-length": "nonsense"}),
    "gRPC": (SERVICE + "ModelInfer", {"content-type": "application/grpc"}),
    "Grafana": ("/", {}),
    "Grafana's metrics": ("/metrics", {}),
}


@pytest.mark.parametrize("kind", ASKED_WITHOUT_KEY)
def test_streams_without_a_key_do_not_pile_up(proxy: Proxy, kind: str) -> None:
    """Connections of 128 streams each, all of which keep their answers waiting. So many may
    wait in all; the others are cut off."""
    path, more = ASKED_WITHOUT_KEY[kind]
    port = proxy.grafana_port if kind.startswith("Grafana") else proxy.port
    held = pile_up(port, 3, path, more)
    wait_for(lambda: sum(each.waiting() for each in held) <= 64, "the others to be cut off", 60)
    assert proxy.client().request("GET", "/v2")[0] == 200
    for each in held:
        each.close()


def test_what_streams_without_a_key_hold_is_small(server: Server) -> None:
    with Proxy(server) as proxy, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: proxy.client().request("GET", "/v2")[0] == 200, "the first answer", 60)
        running = pool.submit(proxy.client().stream, 40)
        before = proxy.memory()
        held = pile_up(proxy.port, 16, "/v2/models/pylm/generate", {})
        grown = proxy.memory() - before
        assert len(running.result()) == 41
        assert grown < 12 << 20
        for each in held:
            each.close()


# --------------------------------------------------------------------------- with a key


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("sent", "reached"),
    [
        ([FORM], "application/json"),
        ([f"\t{FORM.upper()};charset=utf-8"], "application/json"),
        ([f"{FORM}nonsense"], "application/json"),
        (["multipart/form-data; boundary=x"], "application/json"),
        (["application/json", FORM], "application/json"),
        ([FORM, "application/octet-stream"], "application/json"),
        (["application/json; charset=utf-8"], "application/json; charset=utf-8"),
        (["application/octet-stream"], "application/octet-stream"),
        ([], None),
    ],
)
def test_a_form_does_not_reach_the_server_as_one(
    proxy: Proxy, server: Server, sent: list[str], reached: str | None
) -> None:
    """The server takes forms apart on the stack of a thread: one of 4.2 MB ended it."""
    headers = [("Content-Type", value) for value in sent]
    for path in ("/v2/models/x/generate", "/v2/models/x/infer", "/v2/models/x/versions/1/infer"):
        assert send(proxy, path, b"{}", *headers)[0] == 200
    assert [request[2].get("content-type") for request in server.asked()] == [reached] * 3
    assert [request[3] for request in server.asked()] == [b"{}"] * 3


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity, gzip"])
def test_a_compressed_request_is_refused_over_http(
    proxy: Proxy, server: Server, encoding: str
) -> None:
    """Half a megabyte may be half a gigabyte to the server."""
    status, body = send(proxy, "/v2/models/x/infer", b"...", ("Content-Encoding", encoding))
    assert (status, "compressed" in json.loads(body)["error"]) == (415, True)
    twice = [("Content-Encoding", "identity"), ("Content-Encoding", "gzip")]
    assert send(proxy, "/v2/models/x/infer", b"...", *twice)[0] == 415
    assert server.asked() == []
    assert send(proxy, "/v2/models/x/infer", b"{}", ("Content-Encoding", "identity"))[0] == 200


def test_a_compressed_request_is_refused_over_grpc(proxy: Proxy, server: Server) -> None:
    headers = tuple(proxy.client().headers.items())
    with proxy.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(SERVICE + "ModelInfer")(
            b"x" * 100_000, metadata=headers, compression=grpc.Compression.Gzip, timeout=60
        )
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "compressed" in refused.value.details()
    with proxy.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        list(
            channel.stream_stream(SERVICE + "ModelStreamInfer")(
                iter([b"x" * 100_000]), metadata=headers, compression=grpc.Compression.Gzip
            )
        )
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert server.called == []
    assert call(proxy, "ModelInfer") == grpc.StatusCode.OK


@pytest.mark.parametrize("length", ["99999999999", "-1", "abc", "", "1e5", "+3", "0x10"])
def test_a_length_that_the_server_cannot_read_is_refused(
    proxy: Proxy, server: Server, length: str
) -> None:
    """Servers up to 26.07 end at one of these."""
    sent = ("Inference-Header-Content-Length", length)
    assert send(proxy, "/v2/models/x/infer", b"{}", sent)[0] == 400
    assert send(proxy, "/v2/models/x/infer", b"{}", (sent[0], "2"), sent)[0] == 400
    assert server.asked() == []
    assert send(proxy, "/v2/models/x/infer", b"{}....", (sent[0], "2"))[0] == 200


DEEP = b"[" * 1_000_000


@pytest.mark.parametrize(
    ("path", "body", "header", "passes"),
    [
        ("infer", DEEP, None, False),
        ("generate", DEEP, None, False),
        ("generate", b"[" * 65, None, False),
        ("generate_stream", b'{"a":' * 65, None, False),
        ("generate", b'{"text_input": "a \\" b", "x": ' + DEEP, None, False),
        ("generate", b'{"text_input": "' + b"x" * 100_000 + b'", "x": ' + DEEP, None, False),
        ("infer", b"{}" + DEEP, "1000000", False),
        ("generate", DEEP, "1", False),  # there the header means nothing
        ("infer", b"{}" + DEEP, "2", True),  # what follows is a tensor
        ("infer", DEEP, "0", True),
        ("generate", b'{"text_input": "' + DEEP + b'"}', None, True),
        ("generate", b'{"text_input": "\\"' + DEEP + b'"}', None, True),
        ("generate", b"[" * 60 + b"]" * 60, None, True),
        ("generate", b"{}" * 1000, None, True),
    ],
)
def test_json_that_is_nested_too_deeply_is_refused(
    proxy: Proxy, server: Server, path: str, body: bytes, header: str | None, passes: bool
) -> None:
    """A megabyte of brackets ends the server, whose parser calls itself."""
    sent = [("Inference-Header-Content-Length", header)] if header else []
    status, answer = send(proxy, f"/v2/models/x/{path}", body, *sent)
    assert status == (200 if passes else 400), answer
    assert [len(got) for _, _, _, got in server.asked()] == ([len(body)] if passes else [])
    if not passes:
        assert "nested" in json.loads(answer)["error"]


def test_a_body_without_a_length_over_http2_is_checked_too(proxy: Proxy, server: Server) -> None:
    connection = Http2(proxy.port, window=65535)
    key = ("authorization", proxy.client().headers["authorization"])
    for path in ("generate", "infer"):
        connection.ask(f"/v2/models/x/{path}", key, body=b"[" * 10_000)
    wait_for(lambda: connection.waiting() == 0, "both answers", 60)
    connection.close()
    assert server.asked() == []


SLOW_KEYS = "first:" + "a" * 24 + "\nother:" + "b" * 24 + "\n"
MANY = 40


def upload(proxy: Proxy, key: str, length: int | None, sent: bytes = b"") -> socket.socket:
    """A request that was sent but for the rest of its body. ``length`` None: in chunks."""
    trust = ssl.create_default_context(cafile=proxy.secrets / "tls_certificate")
    plain = socket.create_connection(("localhost", proxy.port), timeout=60)
    connection = trust.wrap_socket(plain, server_hostname="localhost")
    head = (
        "POST /v2/models/x/generate HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {key}\r\n"
        + ("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
        + "\r\n\r\n"
    )
    if length is None:
        sent = b"%x\r\n%b\r\n" % (len(sent), sent)
    connection.sendall(head.encode() + sent)
    return connection


def status_of(connection: socket.socket, seconds: float = 60) -> int | None:
    """Of an answer. None: there is none within so many seconds. 0: it was cut off."""
    connection.settimeout(seconds)
    try:
        head = connection.recv(4096)
    except TimeoutError:
        return None
    return int(head.split(b" ", 2)[1]) if head else 0


def test_one_key_does_not_take_the_place_of_all_bodies(server: Server) -> None:
    """40 slow uploads of the largest size fill /tmp. Another key's are taken, and what is given up
    is free again."""
    with Proxy(server) as proxy:
        (proxy.secrets / "api_keys").write_text(SLOW_KEYS, encoding="utf-8")
        assert proxy.reload().returncode == 0
        wait_for(lambda: proxy.client("b" * 24).request("GET", "/v2")[0] == 200, "the keys", 60)
        held = [upload(proxy, "a" * 24, 8 << 20, b"[") for _ in range(MANY)]
        statuses = [status_of(each, 1) for each in held]
        assert statuses.count(None) == 10
        assert statuses.count(429) == MANY - 10
        body = json.dumps({"x": "y" * 1_000_000}).encode()
        connection = upload(proxy, "b" * 24, len(body), body)
        assert status_of(connection) == 200
        assert status_of(upload(proxy, "a" * 24, 20_000)) == 429
        assert status_of(upload(proxy, "a" * 24, 2, b"{}")) == 200
        for each in held:
            each.close()
        wait_for(
            lambda: status_of(upload(proxy, "a" * 24, len(body), body)) == 200,
            "what was given up",
            60,
            proxy.output,
        )


def test_bodies_of_unknown_length_count_as_they_come(server: Server) -> None:
    """Small ones of one key do not count as the largest that there may be, and large ones do not
    fill /tmp."""
    large = b"[" + b" " * (6 << 20)
    with Proxy(server) as proxy:
        (proxy.secrets / "api_keys").write_text(SLOW_KEYS, encoding="utf-8")
        assert proxy.reload().returncode == 0
        wait_for(lambda: proxy.client("b" * 24).request("GET", "/v2")[0] == 200, "the keys", 60)
        small = [upload(proxy, "a" * 24, None, b"[") for _ in range(MANY)]
        assert [status_of(each, 0.1) for each in small] == [None] * MANY
        for each in small:
            each.settimeout(60)
            each.sendall(b"1\r\n]\r\n0\r\n\r\n")
        assert [status_of(each) for each in small] == [200] * MANY
        held = [upload(proxy, "a" * 24, None, large) for _ in range(20)]
        answers: dict[socket.socket, int] = {}

        def the_others_fit() -> bool:
            for each in held:
                if each in answers:
                    continue
                status = status_of(each, 0.1)
                if status is not None:
                    answers[each] = status
            return len(held) - len(answers) <= 13  # of 6 MiB, in the key's 80

        wait_for(the_others_fit, "a refusal of those that do not fit", 60, proxy.output)
        assert set(answers.values()) == {429}
        # Two that are looked at together may both be refused, where one would have been enough.
        assert len(answers) < len(held)
        body = json.dumps({"x": "y" * 1_000_000}).encode()
        assert status_of(upload(proxy, "b" * 24, len(body), body)) == 200
        for each in held:
            each.close()
        wait_for(
            lambda: status_of(upload(proxy, "a" * 24, 8 << 20), 1) is None,
            "what was given up",
            60,
            proxy.output,
        )


def test_a_body_must_come_in_time(server: Server) -> None:
    """However steadily its pieces come."""
    with Proxy(server, BODY_SECONDS="2") as proxy:
        key = proxy.client().headers["authorization"].removeprefix("Bearer ")
        wait_for(lambda: proxy.client().request("GET", "/v2")[0] == 200, "the first answer", 60)
        connection = upload(proxy, key, 100)
        status = None
        for _ in range(40):
            connection.sendall(b"x")
            status = status_of(connection, 0.2)
            if status is not None:
                break
        assert status == 0
        wait_for(lambda: proxy.log("/v2/models/x/generate"), "the line of the log", 60)
        (line,) = proxy.log("/v2/models/x/generate")
        assert line["status"] == 408
        assert 2 <= line["seconds"] < 20


def test_what_is_refused_over_grpc_is_logged_with_its_status(proxy: Proxy) -> None:
    path = "ServerMetadata"
    assert call(proxy, path, key=False) == grpc.StatusCode.UNAUTHENTICATED
    assert call(proxy, path) == grpc.StatusCode.OK
    wait_for(lambda: len(proxy.log(SERVICE + path)) == 2, "two lines of the log", 60)
    assert {(line["status"], line["grpc_status"]) for line in proxy.log(SERVICE + path)} == {
        (200, "16"),
        (200, "0"),
    }


def test_grafanas_own_metrics_are_closed(proxy: Proxy, server: Server) -> None:
    client = proxy.client("")
    grafana = type(client)(proxy.grafana_port, client.certificate)
    for path in ("/metrics", "/metrics/", "/%6detrics", "/x/../metrics", "/metrics?a=b"):
        assert grafana.request("GET", path)[0] == 404
    assert server.asked() == []
    assert grafana.request("GET", "/api/health")[0] == 200


@pytest.mark.parametrize(
    ("path", "with_key"), [("/public/large.js", False), ("/v2/models/x", True), ("/v1/x", True)]
)
def test_an_answer_that_nobody_reads_fills_no_disk(
    proxy: Proxy, server: Server, path: str, with_key: bool
) -> None:
    """A visitor of Grafana has not even signed in."""
    client = proxy.client() if with_key else proxy.client("")
    if not with_key:
        client = type(client)(proxy.grafana_port, client.certificate)
    server.large_path = path
    connection = client.connect()
    try:
        connection.request("GET", path, headers=client.headers)
        response = connection.getresponse()
        assert response.read(1) == b"\0"
        time.sleep(2)
        assert proxy.temporary_bytes() < 1 << 20
        assert len(response.read()) == LARGE_BYTES - 1
    finally:
        server.large_path = ""
        connection.close()


# --------------------------------------------------------------------------- changes and stops


def test_streams_survive_a_change_of_keys_and_the_old_key_does_not() -> None:
    """At a stop the same streams would get one second."""
    with (
        serve() as server,
        Proxy(server, DRAIN_SECONDS="1") as proxy,
        ThreadPoolExecutor(2) as pool,
    ):
        try:
            client = proxy.client()
            over_http = pool.submit(client.stream, 100_000)
            over_grpc = pool.submit(exchange, proxy, server)
            wait_for(lambda: any("_stream" in each for each in server.targets()), "it", 60)
            wait_for(lambda: server.called, "the stream over gRPC", 60)
            (proxy.secrets / "api_keys").write_text("first:" + "n" * 32, encoding="utf-8")
            done = proxy.reload()
            assert done.returncode == 0, done.stderr
            wait_for(lambda: client.request("GET", "/v2")[0] == 401, "the key to be refused", 60)
            assert proxy.client().request("GET", "/v2")[0] == 200
            time.sleep(3)
        finally:
            server.enough.set()
        assert over_http.result()[-1][1] == {"text_output": "end"}
        assert over_grpc.result() > 0


def exchange(proxy: Proxy, server: Server) -> int:
    """How many messages come back of one stream over gRPC that ends well."""

    def spoken() -> Iterator[bytes]:
        while not server.enough.wait(0.1):
            yield b"again"

    headers = tuple(proxy.client().headers.items())
    with proxy.channel() as channel:
        stream = channel.stream_stream(SERVICE + "ModelStreamInfer")
        return len(list(stream(spoken(), metadata=headers)))


def test_a_server_gets_the_limits_of_the_key_and_none_of_the_clients(server: Server) -> None:
    bound, free = "b" * 32, "f" * 32
    with Proxy(server) as proxy:
        text = f"Bound:{bound} tiers=slow,bulk min_priority=0\nbound:{free}\n"
        (proxy.secrets / "api_keys").write_text(text, encoding="utf-8")
        assert proxy.reload().returncode == 0

        def ask(key: str, body: bytes, path: str = "/v2/models/x/generate") -> int:
            sent = (("authorization", f"Bearer {key}"), ("jitney-limits", "min_priority=-9"))
            assert call(proxy, "ModelInfer", *sent, key=False) == grpc.StatusCode.OK
            return send(proxy, path, body, *sent, key=False)[0]

        known = ("Authorization", f"Bearer {free}")
        wait_for(lambda: send(proxy, "/v2", b"", known, key=False)[0] == 200, "the new keys", 60)
        limits = "tiers=slow,bulk min_priority=0"
        large = {"text_input": "x" * 1_000_000}
        for given in ({}, {"text_input": "a"}, large):
            for path in ("generate", "%67enerate_stream"):
                given |= {"max_tokens": 1} if path != "generate" else {}
                data = b"\n " + json.dumps(given).encode()
                assert ask(bound, data, f"/v2/models/x/{path}") == 200
                _, _, headers, received = server.asked()[-1]
                assert json.loads(received) == {"jitney-limits": limits, **given}
                assert "jitney-limits" not in headers
                assert server.called[-1][1]["jitney-limits"] == limits
        assert ask(bound, b"[]") == ask(bound, b"") == 400
        assert ask(free, b"[]") == 200
        _, _, headers, received = server.asked()[-1]
        assert received == b"[]"
        assert "jitney-limits" not in headers | server.called[-1][1]


def test_a_bad_certificate_is_named_and_the_old_one_stays(server: Server) -> None:
    with Proxy(server) as proxy:
        trusted = (proxy.secrets / "tls_certificate").read_bytes()
        (proxy.secrets / "tls_certificate").write_text("nonsense", encoding="utf-8")
        done = proxy.reload()
        (proxy.secrets / "tls_certificate").write_bytes(trusted)
        assert done.returncode != 0
        assert "tls_certificate" in done.stderr or "secrets" in done.stderr
        assert proxy.client().request("GET", "/v2")[0] == 200


@pytest.mark.parametrize(("messages", "seconds"), [(30, 60), (1000, 2)])
def test_a_stop_lets_streams_end_in_their_time(server: Server, messages: int, seconds: int) -> None:
    with Proxy(server, DRAIN_SECONDS=str(seconds)) as proxy, ThreadPoolExecutor(1) as pool:
        server.seen.clear()
        stream = pool.submit(proxy.client().stream, messages)
        wait_for(lambda: "/v2/models/pylm/generate_stream" in server.targets(), "the stream", 60)
        began = time.monotonic()
        proxy.process.send_signal(signal.SIGQUIT)
        assert proxy.process.wait(60) == 0
        assert time.monotonic() - began < 60
        assert not proxy.workers()
        came = stream.result() if messages < 1000 or not stream.exception() else []
        is_whole = bool(came) and came[-1][1] == {"text_output": "end"}
        assert is_whole == (messages < 1000)
