"""The engine's process is killed under a real server: streams go on with exactly their tokens."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import Reply, metric, stream, wait_until
from tests.real_server.conftest import used_blocks

MODEL = "narrow"
PROMPT = "the passengers board while"
PATIENCE_S = 300.0
"""A restart of an engine on a busy machine takes seconds, and this waits for ten."""


def engine_of(server: TritonServer, model: str) -> psutil.Process | None:
    """The engine of a model's only instance: what its fork server has forked."""
    assert server.pid is not None
    for stub in psutil.Process(server.pid).children():
        if any(f"/{model}/1/model.py" in word for word in stub.cmdline()):
            for fork_server in stub.children():
                for engine in fork_server.children():
                    return engine
    return None


def kill_engine(server: TritonServer, model: str) -> None:
    """Wait until it is up and has made a few steps, kill it, and wait until that is noticed."""
    before = restarts(server)
    wait_until(lambda: metric(server.metrics_url, "jitney_engine_up", model=model) == 1, PATIENCE_S)
    time.sleep(0.4)
    engine = engine_of(server, model)
    assert engine is not None
    engine.kill()
    wait_until(lambda: restarts(server) > before, PATIENCE_S)


def restarts(server: TritonServer) -> float:
    return metric(server.metrics_url, "jitney_engine_restarts_total", model=MODEL, cause="killed")


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 150},
    {"temperature": 1, "seed": 5, "max_tokens": 150},
    {"temperature": 1, "seed": 6, "n": 2, "max_tokens": 100},
    {"temperature": 1, "seed": 7, "presence_penalty": 1.0, "max_tokens": 150},
    {"temperature": 0, "logprobs": 2, "max_tokens": 150},
]


@pytest.fixture(scope="module")
def alone(server: TritonServer) -> list[Reply]:
    """The replies of ``REQUESTS`` with nobody beside them and no death."""
    return [ask(server, params) for params in REQUESTS]


def ask(server: TritonServer, params: dict[str, Any], request_id: str = "") -> Reply:
    return stream(
        server.grpc_url,
        MODEL,
        request_id=request_id,
        text_input=PROMPT,
        sampling_parameters={"ignore_eos": True, **params},
        return_finish_reason=True,
    )


def test_ten_deaths_in_a_row(server: TritonServer, alone: list[Reply]) -> None:
    """Under load: no stream ends, and each has the text that it has alone. The log says who went
    on."""
    before = restarts(server)
    with ThreadPoolExecutor(10) as pool:
        futures = [
            pool.submit(ask, server, params, f"ride {i}") for i, params in enumerate(REQUESTS * 2)
        ]
        for _ in range(10):
            kill_engine(server, MODEL)
        replies = [future.result(300) for future in futures]
    for reply, wanted in zip(replies, alone * 2, strict=True):
        assert not reply.errors
        assert reply.texts == wanted.texts
        assert reply.last("finish_reason") == wanted.last("finish_reason")
        assert reply.finals == 1
    wait_until(lambda: restarts(server) - before >= 10, PATIENCE_S)
    assert server.log_file is not None
    said = r"ended \(killed\) and is up again after [\d.]+ s; \d+ requests go on: .*'ride \d'"
    assert re.search(said, server.log_file.read_text(encoding="utf-8"))
    wait_until(lambda: used_blocks(server, MODEL) == 0, PATIENCE_S)
    wait_until(lambda: metric(server.metrics_url, "jitney_engine_up", model=MODEL) == 1, PATIENCE_S)
