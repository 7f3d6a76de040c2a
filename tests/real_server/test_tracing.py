"""Spans of the gateway and the engine, at a collector: of one trace, and in their right places."""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import Stream, metric, stream, wait_until
from tests.real_server.collector import Collector, Span
from tests.real_server.test_engine_dies import engine_of
from tests.real_server.test_openai import USER, post

PARENT = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def address(server: TritonServer, collector: Collector) -> Iterator[str]:
    command = [
        str(Path(sys.executable).parent / "jitney"), "gateway", "--server", server.grpc_url,
        "--port", "0", "--otlp-endpoint", collector.endpoint,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1].removeprefix("http://").removesuffix("/v1")
    process.terminate()
    assert process.wait(30) == 0


def headers(trace: str, sampled: bool = True) -> dict[str, str]:
    return {"Traceparent": f"00-{trace}-{PARENT}-0{int(sampled)}", "Tracestate": "a=b"}


def spans(collector: Collector, trace: str, count: int) -> dict[str, Span]:
    wait_until(lambda: len(collector.trace(trace)) >= count)
    found = collector.trace(trace)
    assert len(found) == count
    return {span.name: span for span in found}


@pytest.mark.parametrize("streamed", [False, True])
def test_one_trace_has_gateway_and_engine(
    address: str, collector: Collector, streamed: bool
) -> None:
    trace = secrets.token_hex(16)
    body = {"model": "narrow", "messages": USER, "max_tokens": 7, "ignore_eos": True}
    if streamed:
        body |= {"stream": True, "n": 2}
    ask = {**headers(trace), "x-request-id": "ride-1"}
    url = f"http://{address}/v1/chat/completions"
    with urlopen(Request(url, json.dumps(body).encode(), ask)) as answer:
        assert answer.read()
    made = spans(collector, trace, 5)
    gateway, engine = made["POST /v1/chat/completions"], made["generate narrow"]
    assert gateway.parent == PARENT
    assert gateway.service == "jitney-gateway"
    assert gateway.attributes["http.response.status_code"] == 200
    assert engine.parent == gateway.id
    assert engine.service == "jitney"
    for span in (gateway, engine):
        assert span.attributes["gen_ai.request.model"] == "narrow"
        assert span.attributes["jitney.request_id"] == "ride-1"
    tokens = 14 if streamed else 7
    assert engine.attributes["gen_ai.usage.output_tokens"] == tokens
    assert engine.attributes["gen_ai.response.finish_reasons"] == ["length"] * (tokens // 7)
    parts = [made[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent for part in parts} == {engine.id}
    times = [gateway.began, engine.began, *(part.ended for part in parts)]
    assert times == sorted(times)
    assert engine.ended == parts[-1].ended <= gateway.ended
    assert [part.began for part in parts] == [engine.began, parts[0].ended, parts[1].ended]
    cached, computed = (
        parts[1].attributes[f"jitney.{one}_tokens"] for one in ("cached", "computed")
    )
    assert cached + computed == engine.attributes["gen_ai.usage.input_tokens"]
    assert parts[2].attributes["jitney.tokens"] == tokens


def test_refusals_and_what_is_not_sampled(address: str, collector: Collector) -> None:
    silent, refused, other = (secrets.token_hex(16) for _ in range(3))
    body = {"model": "narrow", "messages": USER, "max_tokens": 1}
    assert post(address, "/v1/chat/completions", body, **headers(silent, sampled=False))[0] == 200
    late = {**body, "deadline_ms": 0.001}
    assert post(address, "/v1/chat/completions", late, **headers(refused))[0] == 504
    made = spans(collector, refused, 2)
    assert made["POST /v1/chat/completions"].failed
    assert made["generate narrow"].failed
    assert post(address, "/nowhere", body, **headers(other))[0] == 404
    (span,) = spans(collector, other, 1).values()
    assert span.failed
    assert not collector.trace(silent)


def test_an_engine_restart_is_an_event(server: TritonServer, collector: Collector) -> None:
    """And a preemption; both are the model's own traces: no client gave them one."""
    before = len(collector.spans)
    tensors: dict[str, Any] = {"text_input": "the bus", "stream": True}
    tensors["sampling_parameters"] = {"max_tokens": 300, "ignore_eos": True}
    engine = engine_of(server, "narrow")
    assert engine is not None
    engine.suspend()  # the request is there when it dies, however quick it is
    one = Stream(server.grpc_url, "narrow", tensors, request_id="long")
    wait_until(lambda: metric(server.metrics_url, "jitney_running_requests", model="narrow") == 1)
    engine.kill()
    while one.step():
        pass
    assert not one.reply.errors

    def events(name: str) -> list[tuple[Span, int]]:
        engines = [one for one in collector.spans[before:] if one.name == "generate narrow"]
        return [(span, at) for span in engines for event, at, _ in span.events if event == name]

    wait_until(lambda: events("engine restart"))
    ((span, at),) = events("engine restart")
    assert span.attributes["jitney.request_id"] == "long"
    assert span.began < at < span.ended
    assert not span.parent

    def ask(seed: int) -> None:
        params = {"max_tokens": 250, "seed": seed, "ignore_eos": True}
        reply = stream(
            server.grpc_url, "narrow", text_input="the bus " * 9, sampling_parameters=params
        )
        assert not reply.errors

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    wait_until(lambda: events("preemption"))
    assert all(span.began < at < span.ended for span, at in events("preemption"))
