"""How requests end that do not go well, with a server that answers as it is told to."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from jitney.errors import UnavailableError
from jitney_gateway.app import make_app
from jitney_gateway.keys import FixedKeys
from jitney_gateway.server_client import Step
from jitney_gateway.server_request import ModelDescription, ServerRequest
from starlette.testclient import TestClient

from tests.gateway.test_answers import step
from tests.gateway.test_server_requests import KNOWN

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


def test_refusals_of_paths_have_the_apis_form() -> None:
    client = TestClient(make_app(Ending(KeyError()), FixedKeys({})))  # type: ignore[arg-type]
    refused = client.get("/v1/messages")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["type"] == "error"
    assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
