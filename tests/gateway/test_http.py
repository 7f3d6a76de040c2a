"""What the gateway does with headers, methods and paths, whatever the endpoint."""

import gzip
import json
import logging
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from fastapi import Request, Response
from jitney import __version__
from jitney.errors import UnavailableError
from jitney_gateway.app import make_app
from jitney_gateway.commands import read_aliases
from jitney_gateway.document import Endpoint
from jitney_gateway.http_answers import as_json
from jitney_gateway.keys import FixedKeys
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.model_steps import Step
from jitney_gateway.refusals import describe
from jitney_gateway.server_client import ServedModel
from jitney_gateway.server_request import ServerRequest
from jitney_gateway.wire import MAX_BODY_BYTES
from starlette.testclient import TestClient

from tests.gateway.asked import KNOWN
from tests.gateway.test_answers import step

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
PAGE = "https://page.example"


class Answering:
    """In place of a server: a model that says one word."""

    aliases = {"gpt": "m"}  # noqa: RUF012

    async def language_model(self, name: str) -> ModelDescription:
        return KNOWN

    async def find_model(self, name: str) -> ServedModel:
        return ServedModel("m", "", {}, KNOWN, 0.0)

    async def listed_models(self) -> list[str]:
        return ["m"]

    async def is_ready(self) -> bool:
        return True

    async def generate(self, asks: Sequence[ServerRequest], headers: Any) -> AsyncIterator[Step]:
        yield step("one", end="stop")


class Forms:
    """In place of a mounted service: it takes a form, and a request without a body."""

    def endpoints(self, server: Any, /) -> list[Endpoint]:
        return [self._endpoint("/v1/files"), self._endpoint("/v1/batches/{id}/cancel")]

    def _endpoint(self, path: str) -> Endpoint:
        return Endpoint(method="POST", path=path, answer=self.answer, text="", fields=("id",))

    async def answer(self, request: Request) -> Response:
        return as_json({"id": "a"})


def client_of(keys: dict[str, str] | None = None, **options: Any) -> TestClient:
    server: Any = Answering()
    services: Any = [Forms()]
    return TestClient(make_app(server, FixedKeys(keys or {}), services=services, **options))


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_ignored_stands_in_a_header_and_once_in_the_log(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of()
    body = CHAT | {"store": True, "foo": 1, "stream": stream}
    with caplog.at_level(logging.INFO):
        answers = [client.post(PATH, json=body) for _ in range(3)]
        plain = client.post(PATH, json=CHAT)
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["jitney-ignored"] == "store, foo"
    lines = [each.getMessage() for each in caplog.records if "ignored" in each.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith(f"to {PATH}: these fields were ignored: store, foo")
    assert "jitney-ignored" not in plain.headers


def test_a_strict_gateway_refuses_it() -> None:
    answer = client_of(strict=True).post(PATH, json=CHAT | {"foo": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "foo is unknown or not supported"
    assert answer.json()["error"]["param"] == "foo"


# ------------------------------------------------------------------------------- browsers


def test_without_the_option_no_page_is_told_anything() -> None:
    client = client_of()
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    assert client.options(PATH, headers=asked).status_code == 405
    answer = client.post(PATH, content=json.dumps(CHAT), headers={"origin": PAGE})
    assert answer.status_code == 200, "as curl sends it"
    assert not any("access-control" in name for name in answer.headers)


def test_a_page_may_ask_for_headers_alone() -> None:
    client = client_of({"a-key": "alice"}, allowed_origins=[PAGE])
    asked = {
        "origin": PAGE,
        "access-control-request-method": "HEAD",
        "access-control-request-headers": "authorization",
    }
    assert client.options("/v1/models", headers=asked).status_code == 200


def test_the_list_of_models_may_be_asked_for_with_a_slash() -> None:
    client = client_of()
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_pages_of_allowed_origins_may_ask(allowed: str) -> None:
    client = client_of({"a-key": "alice"}, allowed_origins=[allowed])
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    told = client.options(PATH, headers=asked)
    assert told.status_code == 200, "a browser asks without a key"
    assert told.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "authorization" in told.headers["access-control-allow-headers"]
    refused = client.post(PATH, json=CHAT, headers={"origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] in (PAGE, "*"), "the page reads why"
    answer = client.post(PATH, json=CHAT, headers={"origin": PAGE, "authorization": "Bearer a-key"})
    assert answer.status_code == 200
    assert "jitney-ignored" in answer.headers["access-control-expose-headers"]


def test_other_pages_may_not() -> None:
    client = client_of(allowed_origins=[PAGE])
    other = {"origin": "https://other.example"}
    asked = client.options(PATH, headers=other | {"access-control-request-method": "POST"})
    assert asked.status_code == 400
    form = client.post("/v1/files", files={"file": b""}, headers=other)
    assert form.status_code == 403
    assert client.post("/v1/batches/a/cancel", headers=other).status_code == 403
    assert client.post("/v1/batches/a/cancel").status_code == 200, "no page has sent it"
    assert client.post("/v1/files", files={"file": b""}, headers={"origin": PAGE}).is_success


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
def test_pages_must_send_json(content_type: str, status: int) -> None:
    """A browser would send the other types without asking first."""
    client = client_of(allowed_origins=[PAGE])
    headers = {"content-type": content_type} if content_type else {}
    answer = client.post(PATH, content=json.dumps(CHAT), headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert "must be application/json" in answer.json()["error"]["message"]


# ------------------------------------------------------------------------------- bodies


def posted(data: bytes, encoding: str) -> Any:
    return client_of().post(PATH, content=data, headers={**JSON, "content-encoding": encoding})


def test_a_compressed_body_is_read() -> None:
    data = json.dumps(CHAT).encode()
    assert posted(gzip.compress(data), "gzip").status_code == 200
    assert posted(gzip.compress(data[:9]) + gzip.compress(data[9:]), "GZIP").status_code == 200
    assert posted(data, "identity").status_code == 200


def test_a_body_that_is_no_gzip_is_refused() -> None:
    data = gzip.compress(json.dumps(CHAT).encode())
    for wrong in (b"{}", data[:-4], data + b"x"):
        answer = posted(wrong, "gzip")
        assert answer.status_code == 400
        assert "the body is no gzip" in answer.json()["error"]["message"]
    answer = posted(data, "br")
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == (
        "the header Content-Encoding is 'br', but only gzip is taken"
    )


def test_a_bomb_is_too_large() -> None:
    bomb = gzip.compress(bytes(8 * MAX_BODY_BYTES), 1)
    assert posted(bomb, "gzip").status_code == 413


@pytest.mark.parametrize("content", [b"", b" "])
def test_many_members_are_too_large_too(content: bytes) -> None:
    """Each takes time, though it has no data."""
    data = gzip.compress(json.dumps(CHAT).encode()) + gzip.compress(content) * 99
    assert posted(data, "gzip").status_code == 200
    assert posted(data + gzip.compress(content), "gzip").status_code == 413


def test_empty_blocks_are_too_large_too() -> None:
    whole = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    empty = whole.flush(zlib.Z_FULL_FLUSH)
    data = whole.compress(b"") + empty + (b"\0\0\0\xff\xff" * (MAX_BODY_BYTES // 5))
    assert posted(data, "gzip").status_code == 413


def test_a_form_must_come_as_it_is() -> None:
    answer = client_of().post("/v1/files", content=b"", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


# ------------------------------------------------------------------------------- paths


def test_the_document_needs_the_key() -> None:
    client = client_of({"a-key": "alice"})
    assert client.get("/openapi.json").status_code == 401
    known = {"authorization": "Bearer a-key"}
    document = client.get("/openapi.json", headers=known).json()
    assert PATH in document["paths"]
    assert "head" not in document["paths"]["/health"]
    assert client.get("/version").status_code == 401
    assert client.get("/version", headers=known).json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/ping", "/metrics"])
def test_operators_need_no_key(path: str) -> None:
    client = client_of({"a-key": "alice"})
    assert client.get(path).status_code == 200
    assert client.head(path).status_code == 200


def test_a_head_has_the_headers_alone() -> None:
    client = client_of()
    for path in ("/v1/models", "/openapi.json", "/v1/models/m"):
        whole = client.get(path)
        head = client.head(path)
        assert head.status_code == 200
        assert head.content == b""
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert client.head(PATH).status_code == 405


def test_models_have_a_time_and_aliases() -> None:
    began = int(time.time())
    client = client_of()
    listed = client.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["m", "gpt"]
    assert began <= listed[0]["created"] <= time.time()
    assert client.get("/v1/models/gpt").json()["id"] == "gpt"


def test_aliases_are_pairs() -> None:
    assert read_aliases(["gpt-4o=m", "a=b=c"]) == {"gpt-4o": "m", "a": "b=c"}
    for wrong in ("m", "=m", "a="):
        with pytest.raises(Exception, match="must be NAME=MODEL"):
            read_aliases([wrong])


def test_a_full_queue_is_no_fault_of_the_servers() -> None:
    status, body = describe(UnavailableError("the queue is full"))
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    status, body = describe(UnavailableError("no server"))
    assert (status, body["error"]["type"]) == (503, "server_error")
