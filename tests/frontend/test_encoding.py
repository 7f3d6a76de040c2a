"""Requests whose prompt is being encoded: they delay nobody, and end as all others do."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jitney.frontend import service as module
from jitney.frontend.protocol import parse_request
from jitney.text.tokenizer import Tokenizer

from tests.frontend.house import LABELS, House, count_of, ended, error_of, sampling, wait_until

LONG = "the bus stops here " * 20


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Long prompts are not encoded until it is set."""
    opened = threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 100:
            assert opened.wait(30)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(module, "SHORT_PROMPT", 100)
    monkeypatch.setattr(Tokenizer, "encode", slow)
    yield opened
    opened.set()


def asked(pb: Any, text: str, **params: Any) -> Any:
    return pb.Request(
        text_input=text, return_timing=True, sampling_parameters=sampling(max_tokens=5, **params)
    )


def test_a_long_prompt_delays_no_short_one_and_its_time_counts_from_its_arrival(
    pb: Any, make_house: Callable[..., House], gate: threading.Event
) -> None:
    house = make_house()
    long = asked(pb, LONG)
    house.service.accept(long)
    short = [asked(pb, "the bus") for _ in range(10)]
    for request in short:
        house.service.accept(request)
    wait_until(lambda: ended(*short))
    waiting = ("jitney_waiting_requests", frozenset(LABELS.items()))
    wait_until(lambda: pb.MetricFamily.values[waiting] == 1)
    assert not long.sender.final
    time.sleep(0.2)
    gate.set()
    wait_until(lambda: ended(long))
    (response,) = long.sender.sent
    assert json.loads(response.tensors["timing"][0])["queue_s"] >= 0.2


def test_a_deadline_passes_and_a_client_goes_while_a_prompt_is_encoded(
    pb: Any, make_house: Callable[..., House], gate: threading.Event
) -> None:
    house = make_house()
    first, late, gone = asked(pb, LONG), asked(pb, LONG, deadline_ms=50), asked(pb, LONG)
    for request in (first, late, gone):
        house.service.accept(request)
    wait_until(lambda: ended(late))
    assert error_of(late).startswith("DEADLINE_EXCEEDED: the deadline, 0.050 s after arrival")
    gone.sender.cancelled = True
    wait_until(lambda: ended(gone))
    assert error_of(gone).startswith("CANCELLED: ")
    gate.set()
    wait_until(lambda: ended(first))
    assert first.sender.sent[0].error is None
    wait_until(lambda: house.service._responder.counts.encoding == 0)
    assert [each.sender.final for each in (first, late, gone)] == [1, 1, 1]
    wait_until(lambda: (count_of("deadline"), count_of("cancelled")) == (1, 1))
    wait_until(house.idle)


def test_the_engine_s_scheduler_refuses_what_finds_a_full_queue(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(max_queued=2, max_num_seqs=1, step_seconds=0.01)
    runs = pb.Request(text_input="a", sampling_parameters=sampling(max_tokens=1500))
    house.service.accept(runs)
    wait_until(lambda: house.engine.scheduler.stats().running == 1)
    wait = [asked(pb, "the bus") for _ in range(2)]
    for request in wait:
        house.service.accept(request)
    wait_until(lambda: house.engine.scheduler.stats().waiting == 2)
    refused = asked(pb, "the bus")
    house.service.accept(refused)
    wait_until(lambda: ended(refused))
    assert error_of(refused) == (
        "UNAVAILABLE: the queue is full: 2 requests wait, and at most 2 may (max_queued)"
    )
    assert not any(request.sender.final for request in [runs, *wait])
    wait_until(lambda: count_of("unavailable") == 1)


def test_the_bytes_of_open_prompts_are_bounded(
    pb: Any,
    make_house: Callable[..., House],
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before they are encoded; what has ended counts no more, however it ended."""
    size = parse_request(asked(pb, LONG)).num_bytes + module.REQUEST_BYTES
    monkeypatch.setattr(module, "MAX_OPEN_BYTES", 2 * size)
    house = make_house()
    first, second, refused = (asked(pb, LONG) for _ in range(3))
    for request in (first, second, refused):
        house.service.accept(request)
    assert error_of(refused) == (
        f"UNAVAILABLE: all open requests have {2 * size:,} bytes, and at most "
        f"{2 * size:,} may be open"
    )
    second.sender.cancelled = True
    wait_until(lambda: ended(second))
    gate.set()
    wait_until(lambda: ended(first))
    wait_until(lambda: house.service._responder.ended_bytes == 2 * size)
    third, fourth = asked(pb, LONG), asked(pb, LONG)
    for request in (third, fourth):
        house.service.accept(request)
    wait_until(lambda: ended(third, fourth))
    assert [each.sender.sent[0].error for each in (third, fourth)] == [None, None]


def test_what_is_refused_after_its_encoding_is_told_why(
    pb: Any, make_house: Callable[..., House], gate: threading.Event
) -> None:
    gate.set()
    house = make_house()
    request = asked(pb, "a" * 5000)
    house.service.accept(request)
    wait_until(lambda: ended(request))
    assert "the model's context holds 2000" in error_of(request)
    wait_until(lambda: count_of("refused") == 1)


@pytest.mark.parametrize("end", ["close", "drain"])
def test_closing_and_draining_while_prompts_are_encoded(
    pb: Any, make_house: Callable[..., House], gate: threading.Event, end: str
) -> None:
    house = make_house()
    requests = [asked(pb, LONG) for _ in range(3)]
    for request in requests:
        house.service.accept(request)
    if end == "close":
        house.service.close()
    else:
        house.service.drain(0.05)
    wait_until(lambda: ended(*requests))
    gate.set()
    for request in requests:
        assert error_of(request).startswith("UNAVAILABLE: ")
    time.sleep(0.05)  # what is encoded by now must find nobody
    assert [request.sender.final for request in requests] == [1, 1, 1]
