"""How requests end that do not go well, with a server that answers as it is told to."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import jitney_gateway.event_stream as event_stream
import pytest
from jitney.errors import UnavailableError
from jitney_gateway.app import make_app
from jitney_gateway.keys import FixedKeys
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.model_steps import Step
from jitney_gateway.server_request import ServerRequest
from starlette.testclient import TestClient

from tests.gateway.asked import KNOWN
from tests.gateway.test_answers import step

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
}


class Ending:
    """In place of a server: one step, and then ``error``."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def language_model(self, name: str) -> ModelDescription:
        return KNOWN

    async def generate(self, asks: Sequence[ServerRequest], headers: Any) -> AsyncIterator[Step]:
        yield step("one")
        raise self._error


class Slow:
    """In place of a server: it waits, says one thing, waits again and ends."""

    def __init__(self, wait_s: float, error: Exception | None = None) -> None:
        self._wait_s = wait_s
        self._error = error
        self.is_closed = False

    async def language_model(self, name: str) -> ModelDescription:
        return KNOWN

    async def generate(self, asks: Sequence[ServerRequest], headers: Any) -> AsyncIterator[Step]:
        try:
            await asyncio.sleep(self._wait_s)
            if self._error is not None:
                raise self._error
            yield step("one")
            # Steps without text: what they may become is held back.
            for _ in range(4):
                await asyncio.sleep(self._wait_s / 4)
                yield step("")
            yield step("two", end="stop")
        finally:
            self.is_closed = True


def times_of_messages(server: Slow, path: str, *, leaves: bool = False) -> list[tuple[float, Any]]:
    """What a gateway sends for a stream, and when, in seconds. ``leaves``: the client goes after
    the first message."""
    sent: list[tuple[float, Any]] = []
    body = json.dumps({"model": "m", **BODIES[path], "stream": True}).encode()
    bodies = [{"type": "http.request", "body": body}]
    gone = asyncio.Event()

    async def receive() -> Any:
        if bodies:
            return bodies.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append((time.monotonic() - began, message))
        if leaves:
            gone.set()

    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"spec_version": "2.3"},
    }  # fmt: skip
    began = time.monotonic()
    asyncio.run(make_app(server, FixedKeys({}))(scope, receive, send))  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_and_lives_without_tokens(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two signs of life are due in a quarter of the time: a busy machine may delay them.
    monkeypatch.setattr(event_stream, "HEADERS_S", 0.05)
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.1)
    sent = times_of_messages(Slow(wait_s=1.0), path)
    assert sent[0][1]["status"] == 200
    text = b"".join(message.get("body", b"") for _, message in sent).decode()
    events = [event for event in text.split("\n\n") if event]
    before = events.index(next(event for event in events if "one" in event))
    assert events[:before].count(": keep-alive") >= 2
    events = [event for event in events[:before] if event != ": keep-alive"] + events[before:]
    before = events.index(next(event for event in events if "one" in event))
    life = 'event: ping\ndata: {"type":"ping"}' if path == "/v1/messages" else ": keep-alive"
    after = events.index(next(event for event in events if "two" in event))
    assert events[before:after].count(life) >= 2
    # Without them, the stream is what it is without silences.
    monkeypatch.setattr(event_stream, "SILENCE_S", 60.0)
    plain = times_of_messages(Slow(wait_s=0.0), path)
    quick = b"".join(message.get("body", b"") for _, message in plain).decode()
    others = [event for event in quick.split("\n\n") if event]
    assert life not in others
    assert len(others) == len(events) - events.count(life)


def test_what_is_refused_before_the_headers_has_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    error = UnavailableError("it stopped")
    for headers_s, status in ((60.0, 503), (0.05, 200)):
        monkeypatch.setattr(event_stream, "HEADERS_S", headers_s)
        server = Slow(wait_s=1.0, error=error)
        sent = times_of_messages(server, "/v1/chat/completions")
        assert sent[0][1]["status"] == status
        assert server.is_closed
        assert b"it stopped" in b"".join(message.get("body", b"") for _, message in sent)


def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_stream, "HEADERS_S", 0.1)
    server = Slow(wait_s=20.0)
    sent = times_of_messages(server, "/v1/chat/completions", leaves=True)
    assert server.is_closed
    assert sent[-1][0] < 15


def test_a_client_that_leaves_with_the_headers_ends_its_request() -> None:
    async def play() -> bool:
        server = Slow(wait_s=20.0)
        steps = server.generate([], {})

        async def events() -> Any:
            try:
                async for _ in steps:
                    yield []
            finally:
                await steps.aclose()

        more = events()
        first: Any = asyncio.ensure_future(anext(more, None))
        await asyncio.sleep(0.05)

        async def never_begun() -> Any:
            yield b""

        async def gone(message: Any = None) -> Any:
            raise OSError("the client has gone")

        stream = event_stream.EventStream(never_begun(), first, more)
        with contextlib.suppress(Exception):
            await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, gone)
        return server.is_closed

    assert asyncio.run(play())


def ask(path: str, error: Exception, **more: Any) -> Any:
    client = TestClient(make_app(Ending(error), FixedKeys({})))  # type: ignore[arg-type]
    return client.post(path, json={"model": "m", **BODIES[path], **more})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("error", [UnavailableError("it stopped"), KeyError("a fault of ours")])
def test_an_error_in_mid_stream_is_told(path: str, error: Exception) -> None:
    answer = ask(path, error, stream=True)
    assert answer.status_code == 200
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if path.endswith("completions"):
        assert events.pop() == "[DONE]"
    told = [json.loads(event) for event in events]
    said = "it stopped" if isinstance(error, UnavailableError) else "could not be answered"
    kinds = [event.get("type", "error" if "error" in event else "chunk") for event in told]
    assert kinds[-1] == ("response.failed" if path == "/v1/responses" else "error")
    assert said in events[-1]
    whole = ask(path, error)
    assert whole.status_code == (503 if isinstance(error, UnavailableError) else 500)
    assert said in whole.json()["error"]["message"]


def test_a_client_that_leaves_in_its_body_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    asyncio.run(make_app(Ending(KeyError()), FixedKeys({}))(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 499
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", BODIES)
def test_what_a_stop_cuts_off_may_be_tried_again(path: str) -> None:
    """uvicorn cancels what is open when the time for the stop is over."""
    sent: list[Any] = []
    bodies = [{"type": "http.request", "body": json.dumps({"model": "m", **BODIES[path]}).encode()}]

    async def receive() -> Any:
        if not bodies:
            await asyncio.sleep(60.0)
        return bodies.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"spec_version": "2.3"},
    }  # fmt: skip

    async def play() -> None:
        app = make_app(Slow(60.0), FixedKeys({}))  # type: ignore[arg-type]
        task = asyncio.create_task(app(scope, receive, send))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    asyncio.run(play())
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert "the gateway stops" in json.loads(sent[1]["body"])["error"]["message"]


def test_refusals_of_paths_have_the_apis_form() -> None:
    client = TestClient(make_app(Ending(KeyError()), FixedKeys({})))  # type: ignore[arg-type]
    refused = client.get("/v1/messages")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["type"] == "error"
    assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
