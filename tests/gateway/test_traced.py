"""Spans without a collector: what is refused at the start, and what a dead one costs."""

import socket
import sys
import time

import pytest
from jitney.errors import ConfigError
from jitney.tracing import Tracing


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is '127\.0\.0\.1:4317', not http:"):
        Tracing("127.0.0.1:4317", "test")


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"triton-jitney\[otel\]"):
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
