"""What the proxy does for the gateways behind it: keys, files, events, refusals of OpenAI's form.

`make test-compose` installs nginx and its modules, and runs them.
"""

import contextlib
import json

import pytest

from tests.compose.proxy import Proxy, Server, names, send, serve

pytestmark = pytest.mark.debian


def test_a_gateway_gets_the_key_that_was_found_to_be_known(proxy: Proxy, server: Server) -> None:
    """As OpenAI's clients send it and as Anthropic's do; a server gets neither."""
    key = proxy.client().key
    bearer, own = ("Authorization", f"Bearer {key}"), ("X-Api-Key", key)
    wrong = ("Authorization", "Bearer " + "w" * 43)
    for sent in ([bearer], [own], [bearer, ("X-Api-Key", "w" * 43)]):
        assert send(proxy, "/v1/models", b"{}", *sent, key=False)[0] == 200
        assert send(proxy, "/v2/models/x/infer", b"{}", *sent, key=False)[0] == 200
    for sent in ([wrong], [wrong, own], [("X-Api-Key", "")], [("X-Api-Key", key.swapcase())]):
        assert send(proxy, "/v1/models", b"{}", *sent, key=False)[0] == 401
    got = {(target, headers.get("authorization")) for _, target, headers, _ in server.asked()}
    assert got == {("/v1/models", f"Bearer {key}"), ("/v2/models/x/infer", None)}
    assert not any("x-api-key" in headers for _, _, headers, _ in server.asked())
    assert len(server.asked()) == 6
    assert '"key":"first"' in proxy.output()
    assert key not in proxy.output()


DOORS = ("/score", "/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/version", "/ping")


@pytest.mark.parametrize("path", DOORS)
def test_a_gateway_is_asked_without_v1_too(proxy: Proxy, server: Server, path: str) -> None:
    assert send(proxy, path, b"{}")[0] == 200
    (request,) = server.asked()
    assert request[1] == path
    assert request[2]["authorization"] == f"Bearer {proxy.client().key}"
    status, answer = send(proxy, path, b"{}", key=False)
    assert status == 401
    assert json.loads(answer)["error"]["code"] == "refused_by_proxy"
    for other in (f"{path}/x", f"{path}x", f"/x/..{path}", path.replace("/", "//", 1) + "/"):
        assert send(proxy, other, b"{}")[0] == 404
    assert len(server.asked()) == 1


def test_an_event_of_a_gateway_leaves_before_the_next_one_is_made(
    proxy: Proxy, server: Server
) -> None:
    client = proxy.client()
    connection = client.connect()
    try:
        connection.request("POST", "/v1/chat/completions", b"{}", client.headers)
        response = connection.getresponse()
        assert [response.readline() for _ in range(4)] == [b"data: event\n", b"\n"] * 2
        server.enough.set()
        assert response.read() == b"data: [DONE]\n\n"
    finally:
        server.enough.clear()
        connection.close()


def test_a_file_passes_through_as_it_comes(proxy: Proxy, server: Server) -> None:
    """It is larger than other bodies may be, and may be nested as it likes."""
    client = proxy.client()
    connection = client.connect()
    half = b"[" * (6 << 20)
    connection.putrequest("POST", "/v1/files")
    for name, value in client.headers.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(2 * len(half)))
    connection.endheaders(half)
    assert server.begun.wait(60)
    connection.send(half)
    assert connection.getresponse().status == 200
    connection.close()
    assert [len(body) for _, _, _, body in server.asked()] == [2 * len(half)]
    assert send(proxy, "/v1/files", b"...", ("Content-Encoding", "gzip"))[0] == 415
    connection = client.connect()
    connection.request("POST", "/v1/files", b"", {**client.headers, "Content-Length": "300000000"})
    refused = connection.getresponse()
    assert refused.status == 413
    assert "201m" in json.loads(refused.read())["error"]["message"]
    connection.close()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"[" * 1_000_000, 400),
        ("/v1/batches/x/cancel", b"[" * 65, 400),
        ("/v1/completions", b" " * ((8 << 20) + 1), 413),
        ("/v1/models/..%2f..%2fmetrics", b"{}", 404),
        ("/v1/files/%2e%2e/models", b"{}", 404),
        ("/v1/files/../../metrics", b"{}", 404),
    ],
)
def test_what_a_gateway_is_not_to_get_ends_at_the_proxy(
    proxy: Proxy, server: Server, path: str, body: bytes, status: int
) -> None:
    got, answer = send(proxy, path, body)
    assert got == status
    assert server.asked() == []
    assert json.loads(answer)["error"]


def test_a_refusal_in_the_place_of_a_gateway_is_openais_object(server: Server) -> None:
    with Proxy(server, REQUESTS_PER_SECOND="1", BURST="1") as proxy:
        for key, status, kind in (
            (False, 401, "invalid_request_error"),
            (True, 429, "rate_limit_error"),
        ):
            answers = [send(proxy, "/v1/models", b"{}", key=key) for _ in range(4)]
            got, body = answers[-1]
            assert got == status
            error = json.loads(body)["error"]
            assert (error["type"], error["param"]) == (kind, None)
            assert "key" in error["message"]


def test_two_gateways_share_the_requests_and_one_may_end() -> None:
    """What reached one that gave no answer is not sent to the other one too."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serve())
        beside = stack.enter_context(contextlib.ExitStack())
        second = beside.enter_context(serve("127.0.0.2", first.http_port))
        port = stack.enter_context(names(["127.0.0.1", "127.0.0.2"]))
        settings = {"GATEWAY_HOST": "gateway", "REQUESTS_PER_SECOND": "1000", "BURST": "1000"}
        proxy = stack.enter_context(Proxy(first, names=port, **settings))
        assert {send(proxy, "/v1/completions", b"{}")[0] for _ in range(64)} == {200}
        assert len(first.seen) > 0 < len(second.seen)
        assert len(first.seen) + len(second.seen) == 64
        for server in (first, second):
            server.seen.clear()
        assert {send(proxy, "/v1/drop", b"{}")[0] for _ in range(16)} == {503}
        assert len(first.seen) + len(second.seen) == 16
        beside.close()
        first.seen.clear()
        assert {send(proxy, "/v1/completions", b"{}")[0] for _ in range(64)} == {200}
        assert proxy.client("").request("GET", "/health")[0] == 200
        assert len(first.seen) == 65
