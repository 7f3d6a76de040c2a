"""Hundreds of clients that go away, one after the other, on a server of their own: it lives, and in
the end the model unloads, which it cannot while one request is still held.

What is left out, because this server (2.51) does not survive it whatever a backend does: a gRPC
stream that is cancelled at the moment in which the server takes its final response
(docs/troubleshooting.md). Such moments come over HTTP here.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import Stream, generate_stream_events, metric, settled, wait_until
from tests.real_server.conftest import CONTEXT, MODELS, write_model

STORM_S = 15.0
LONG = {"max_tokens": CONTEXT - 16, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stormy(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("stormy")
    options = {"model": str(checkpoint), "dtype": "float32", "threads": 1, **MODELS["busy"]}
    write_model(repository, "busy", options)
    with TritonServer(repository, exit_timeout_s=60) as started:
        yield started
        assert started.stop(), f"{started.last_stop.problem}\n{started.log_tail(40)}"


def open_long(server: TritonServer) -> Stream:
    tensors = {"input_ids": [5, 6, 7], "stream": True, "sampling_parameters": LONG}
    return Stream(server.grpc_url, "busy", tensors)


def grpc_in_mid_stream(server: TritonServer, dice: random.Random) -> int:
    one = open_long(server)
    for _ in range(dice.randint(1, 3)):
        one.step()
    time.sleep(dice.random() * 0.02)
    one.cancel()
    return 1


def grpc_in_the_queue(server: TritonServer, dice: random.Random) -> int:
    running = open_long(server)
    running.step()
    queued = open_long(server)
    time.sleep(dice.random() * 0.02)
    queued.cancel()
    running.cancel()
    return 2


def http_anywhere(server: TritonServer, dice: random.Random) -> int:
    events = generate_stream_events(
        server.http_url,
        "busy",
        input_ids=[5, 6, 7],
        stream=True,
        **{**LONG, "max_tokens": dice.choice([3, 50, 2000])},
    )
    for _ in range(dice.choice([1, 1, 2, 5])):
        next(events, None)
    events.close()
    return 1


@pytest.mark.parametrize("leave", [grpc_in_mid_stream, grpc_in_the_queue, http_anywhere])
def test_a_storm_of_clients_that_leave(
    stormy: TritonServer, leave: Callable[[TritonServer, random.Random], int]
) -> None:
    dice = random.Random(11)
    url = stormy.metrics_url
    before = settled(lambda: metric(url, "jitney_requests_total", model="busy"))
    began, left = time.monotonic(), 0
    while time.monotonic() - began < STORM_S:
        left += leave(stormy, dice)
        assert stormy.is_alive(), f"after {left} clients: {stormy.log_tail(20)}"
    assert left > 20
    wait_until(lambda: metric(url, "jitney_kv_used_blocks", model="busy") == 0)
    wait_until(lambda: metric(url, "jitney_running_requests", model="busy") == 0)
    # A queued one that left before it reached the server was never a request.
    ended = settled(lambda: metric(url, "jitney_requests_total", model="busy")) - before
    assert left / 2 <= ended <= left
