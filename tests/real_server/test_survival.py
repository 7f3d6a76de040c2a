"""What the backend survives, beside another client's stream that must not notice.

The fixture ``bystander`` is in every test: it runs a stream beside it, compares its text with the
text it has alone, and waits until no KV block is in use.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import (
    Reply,
    Stream,
    generate,
    generate_stream_events,
    metric,
    settled,
    stream,
    wait_until,
)
from tests.real_server.conftest import BUSY_CONTEXT, CONTEXT, NARROW_BLOCKS, used_blocks

pytestmark = pytest.mark.usefixtures("bystander")

Ask = Callable[..., Reply]


def refused(reply: Reply, *said: str) -> None:
    """One error and nothing else; it begins with the code and says each of ``said``."""
    assert reply.responses == []
    assert reply.finals == 1
    assert reply.error.startswith("INVALID_ARGUMENT: ")
    for text in said:
        assert text in reply.error, reply.error


def greedy(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampling_parameters": {"temperature": "nan"}}, "temperature"),
    ({"sampling_parameters": {"n": 1_000_000}}, "from 1 to 128"),
    ({"sampling_parameters": {"stop_token_ids": [1] * 100_000}}, "at most 8,192"),
    ({"sampling_parameters": "[" * 1000 + "]" * 1000}, "nested deeper"),
    ({"parameters": {"temprature": 1}}, "did you mean 'temperature'"),
    ({"input_ids": [5, 2**31 - 1]}, f"input_ids is {2**31 - 1}"),
    ({"text_input": b"half \xe6\x9d"}, "text_input is not UTF-8"),
    ({"text_input": b"x" * (64 << 20)}, "text_input has 67,108,864 bytes"),
    ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages"),
]


def test_requests_that_are_refused(ask: Ask) -> None:
    for tensors, said in REFUSED:
        refused(ask(**tensors), said)


def test_the_same_request_id_twice(server: TritonServer) -> None:
    def one(seed: int) -> Reply:
        return stream(
            server.grpc_url,
            "tiny",
            text_input="the bus",
            request_id="same",
            sampling_parameters={"max_tokens": 100, "seed": seed, "ignore_eos": True},
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, (1, 2))
    assert first.text != second.text
    assert [one(1).text, one(2).text] == [first.text, second.text]


def test_more_than_an_empty_cache_holds(ask: Ask) -> None:
    reply = ask("narrow", input_ids=[5] * 10, sampling_parameters={"max_tokens": 500})
    refused(reply, "10", "500", f"the cache has {NARROW_BLOCKS}")


def test_outputs_that_together_exceed_the_cache(server: TritonServer) -> None:
    """Any two of them do, but they must run at the same time: up to five times they are sent."""

    def one(seed: int) -> Reply:
        return stream(
            server.grpc_url,
            "narrow",
            text_input="Zürich 東京 " * (1 + seed),
            sampling_parameters={"max_tokens": 250, "seed": seed, "ignore_eos": True},
            return_output_ids=True,
        )

    def preemptions() -> float:
        return metric(server.metrics_url, "jitney_preemptions_total", model="narrow")

    alone = [one(seed) for seed in range(4)]
    before = settled(preemptions)
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(one, range(4)))
        assert [reply.errors for reply in together] == [[]] * 4
        assert [reply.all("output_ids") for reply in together] == [
            reply.all("output_ids") for reply in alone
        ]
        if settled(preemptions) > before:
            return
    raise AssertionError("none was preempted")


# ------------------------------------------------------------------ clients that go away


def cancelled(server: TritonServer) -> float:
    """How many requests of ``busy`` ended as cancelled: whoever goes away late, or unnoticed, is
    not among them."""
    url = server.metrics_url
    return metric(url, "jitney_requests_total", model="busy", outcome="cancelled")


def outcomes(server: TritonServer) -> float:
    """How many requests of ``busy`` have ended, one way or the other."""
    return metric(server.metrics_url, "jitney_requests_total", model="busy")


def test_an_http_client_disconnects(server: TritonServer) -> None:
    before = settled(lambda: cancelled(server))
    events = generate_stream_events(
        server.http_url, "busy", input_ids=[5, 6, 7], stream=True, **greedy(BUSY_CONTEXT - 3)
    )
    next(events)
    wait_until(lambda: used_blocks(server, "busy") > 0)
    events.close()
    wait_until(lambda: used_blocks(server, "busy") == 0)
    wait_until(lambda: cancelled(server) == before + 1)


def test_cancelled_while_queued(server: TritonServer) -> None:
    before = settled(lambda: cancelled(server))
    with occupied(server):
        tensors = {"text_input": "a", "stream": True, "sampling_parameters": greedy(5)}
        queued = Stream(server.grpc_url, "busy", tensors)
        wait_until(lambda: waiting(server) == 1)
        queued.cancel()
        wait_until(lambda: waiting(server) == 0)
        wait_until(lambda: cancelled(server) == before + 1)


# A gRPC stream that is cancelled at the very moment in which the server takes its final response
# makes this server (2.51) crash, or keep the model loaded for good, once in some hundred times;
# what the backend does has no part in it (docs/troubleshooting.md). So cancels that aim at the last
# step come over HTTP here, and those over gRPC aim at requests that have long to go.


def test_cancelled_during_a_prefill(server: TritonServer) -> None:
    url = server.metrics_url
    size = CONTEXT // 2

    def figures() -> tuple[float, float, float]:
        """Requests encoded, ended in any way and ended as cancelled."""
        prompts = metric(url, "jitney_prompt_tokens_total", model="busy")
        return prompts / size, outcomes(server), cancelled(server)

    before = settled(figures)
    rng = np.random.default_rng(0)
    for delay in (0.005, 0.01, 0.02, 0.04, 0.08):
        prompt = rng.integers(3, 300, size).astype(np.int32)
        tensors = {"input_ids": prompt, "stream": True, "sampling_parameters": greedy(size)}
        one = Stream(server.grpc_url, "busy", tensors)
        time.sleep(delay)
        one.cancel()
    after = settled(figures, lambda now: now[2] > before[2])
    accepted, ended, gone = (now - then for now, then in zip(after, before, strict=True))
    assert gone > 0
    # One that was cancelled before it reached the server was never a request, and one that was
    # cancelled before it was encoded has no prompt tokens.
    assert accepted <= ended <= 5
    assert used_blocks(server, "busy") == 0


def test_cancelled_around_the_last_step(server: TritonServer) -> None:
    before = settled(lambda: outcomes(server))
    dice = random.Random(7)
    for _ in range(30):
        events = generate_stream_events(
            server.http_url, "busy", input_ids=[5, 6, 7], stream=True, **greedy(3)
        )
        while next(events, None) is not None and dice.random() < 0.7:
            pass
        events.close()
    assert settled(lambda: outcomes(server), lambda now: now >= before + 30) == before + 30


# ------------------------------------------------------------------ shared memory


@contextmanager
def memory_full(server: TritonServer, model: str) -> Iterator[None]:
    """Inside, the shared memory of the model's processes cannot grow."""
    stubs = [
        each for each in psutil.Process(server.pid).children() if f"{model}_0_0" in each.cmdline()
    ]
    assert stubs, [each.cmdline() for each in psutil.Process(server.pid).children()]
    for stub in stubs:
        stub.rlimit(psutil.RLIMIT_FSIZE, (4096, psutil.RLIM_INFINITY))
    try:
        yield
    finally:
        for stub in stubs:
            stub.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


def test_a_response_that_finds_no_memory_ends_its_request_with_an_error(
    server: TritonServer,
) -> None:
    """What it does not need any more, the memory keeps: so this is one test."""

    def failures() -> float:
        return metric(server.metrics_url, "jitney_send_failures_total", model="busy")

    def one(streamed: bool) -> Reply:
        return stream(
            server.grpc_url, "busy", input_ids=[5] * 2000, stream=streamed, return_logprobs=True,
            sampling_parameters=greedy(200, logprobs=20, prompt_logprobs=20),
        )  # fmt: skip

    before = failures()
    for streamed in (True, False):
        with memory_full(server, "busy"):
            reply = one(streamed)
        assert reply.error.startswith("INTERNAL: a response could not be sent")
        assert reply.finals == 1
    wait_until(lambda: failures() == before + 2)
    for streamed in (True, False):
        whole = one(streamed)
        assert whole.errors == []
        assert whole.finals == 1
        assert sum(len(json.loads(each)) for each in whole.all("logprobs")) == 200


def test_a_large_answer_over_http(server: TritonServer) -> None:
    """Its data goes before the final flag: still one response."""
    status, body = generate(
        server.http_url, "tiny", text_input="a", return_logprobs=True, **greedy(300, logprobs=5)
    )
    assert status == 200
    assert len(json.loads(body["logprobs"])) == 300


# ------------------------------------------------------------------ long prompts


def test_a_prompt_of_megabytes_delays_nobody(server: TritonServer) -> None:
    """The others are admitted while it is encoded, which ends in a refusal; it is not at the door,
    because the model's ``max_prompt_bytes`` allows it."""
    long: list[Reply] = []
    prompt = b"the bus stops here " * 160_000
    thread = threading.Thread(
        target=lambda: long.append(
            stream(server.grpc_url, "tiny", text_input=prompt, sampling_parameters=greedy(5))
        )
    )
    began = time.monotonic()
    thread.start()
    waits: list[float] = []
    while thread.is_alive():
        reply = stream(
            server.grpc_url, "tiny", text_input="the bus", stream=False, return_timing=True,
            sampling_parameters=greedy(1),
        )  # fmt: skip
        waits.append(json.loads(reply.last("timing")[0])["queue_s"])
    took = time.monotonic() - began
    refused(long[0], "the model's context holds")
    # With one thread for all, the first would wait for the whole of it, and there would be no more.
    assert len(waits) > 3
    assert np.median(waits) < max(1.0, took / 4)


# ------------------------------------------------------------------ queue and deadlines


def waiting(server: TritonServer) -> float:
    return metric(server.metrics_url, "jitney_waiting_requests", model="busy")


@contextmanager
def occupied(server: TritonServer) -> Iterator[None]:
    """Inside, the only seat of ``busy`` is taken."""
    sampling = greedy(BUSY_CONTEXT - 3)
    tensors = {"input_ids": [5, 6, 7], "stream": True, "sampling_parameters": sampling}
    occupant = Stream(server.grpc_url, "busy", tensors)
    occupant.step()
    wait_until(lambda: used_blocks(server, "busy") > 0)
    try:
        yield
    finally:
        occupant.cancel()


def test_a_deadline_passes_while_running(ask: Ask) -> None:
    reply = ask(
        input_ids=[5, 6, 7],
        sampling_parameters=greedy(CONTEXT - 3, deadline_ms=1500),
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    assert reply.last("finish_reason") == [b"deadline"]
    assert 0 < sum(reply.all("num_output_tokens")) < CONTEXT - 3
    assert reply.text


def test_a_deadline_passes_in_the_queue(server: TritonServer) -> None:
    with occupied(server):
        reply = stream(
            server.grpc_url,
            "busy",
            text_input="a",
            sampling_parameters=greedy(5, deadline_ms=100),
        )
    assert reply.responses == []
    assert reply.error.startswith("DEADLINE_EXCEEDED: ")
    assert "queue" in reply.error


# ------------------------------------------------------------------ slow readers


def test_who_does_not_read_does_not_hold_up_the_others(server: TritonServer) -> None:
    """The other stream ends while the first client has not read past its first event; what it reads
    afterwards is whole."""
    sampling, prompt = greedy(600), [5, 6, 7]
    events = generate_stream_events(
        server.http_url, "tiny", input_ids=prompt, stream=True, **sampling
    )
    first = next(events)
    other = stream(
        server.grpc_url, "tiny", text_input="naïve café", sampling_parameters=greedy(900)
    )
    assert other.errors == []
    rest = list(events)
    assert [event for event in rest if "error" in event] == []
    alone = stream(server.grpc_url, "tiny", input_ids=prompt, sampling_parameters=sampling)
    assert "".join(event["text_output"] for event in [first, *rest]) == alone.text
