"""Spans without a collector: what is refused at the start, and what a dead one costs."""

import socket
import sys
import time

import pytest
from jitney.errors import ConfigError
from jitney.tracing import Tracing
from jitney_gateway.app import make_app
from jitney_gateway.keys import FixedKeys
from starlette.testclient import TestClient

from tests.real_server.client import wait_until
from tests.real_server.collector import Collector


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is '127\.0\.0\.1:4317', not http:"):
        Tracing("127.0.0.1:4317", "test")


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"\.\[otel\]"):
        Tracing("http://127.0.0.1:4317", "test")


def test_a_dead_collector_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """It takes connections and answers nothing; many more spans come than may wait."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracing = Tracing(f"http://127.0.0.1:{silent.getsockname()[1]}", "test")
        for _ in range(20_000):
            span = tracing.begin("one", {}, time.monotonic())
            span.end(time.monotonic(), {})
        tracing.close()
    assert "Queue full, dropping Span" in caplog.text


def test_what_is_refused_at_the_door_has_a_span_with_its_status() -> None:
    collector = Collector()
    tracing = Tracing(collector.endpoint, "test")
    client = TestClient(make_app(None, FixedKeys({"k" * 24: "alice"}), tracing=tracing))  # type: ignore[arg-type]
    known = {"authorization": "Bearer " + "k" * 24}
    assert client.get("/metrics").status_code == 200  # it gets no span
    assert client.post("/v1/chat/completions").status_code == 401
    assert client.post("/v1/completions", headers=known).status_code == 400
    assert client.get("/nothing", headers=known).status_code == 404
    assert client.get("/openapi.json", headers=known).status_code == 200
    tracing.close()
    wait_until(lambda: len(collector.spans) == 4)
    collector.close()
    told = [
        (span.name, span.attributes["http.response.status_code"], span.failed)
        for span in sorted(collector.spans, key=lambda span: span.began)
    ]
    assert told == [
        ("POST /v1/chat/completions", 401, True),
        ("POST /v1/completions", 400, True),
        ("GET", 404, True),
        ("GET /openapi.json", 200, False),
    ]
