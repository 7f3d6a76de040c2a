"""Requests that the service refuses, and what it keeps of them: nothing."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jitney.frontend import service

from tests.frontend.house import House, count_of, ended, error_of, sampling, wait_until


def test_accept_never_raises(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house()
    request = pb.Request(text_input="a")
    monkeypatch.setattr(request, "inputs", lambda: 1 / 0)
    house.service.accept(request)
    assert error_of(request) == "INTERNAL: the request could not be taken in"


def close_pools(house: House) -> None:
    """As :meth:`Service.close` does first."""
    for pool in (house.service._short, house.service._long, house.service._new_grammars):
        pool.shutdown()


REFUSED: dict[str, dict[str, Any]] = {
    "too large": {"text_input": "the bus " * 100_000},
    "too long": {"input_ids": list(range(5)) * 1000},
    "an unknown parameter": {"text_input": "a", "sampling_parameters": '{"temprature": 1}'},
    "a value out of range": {"text_input": "a", "sampling_parameters": '{"top_p": 2}'},
    "no JSON": {"text_input": "a", "sampling_parameters": "{"},
    "two prompts": {"text_input": "a", "messages": "[]"},
    "a wrong type": {"text_input": "a", "stream": 1},
    "an unknown input": {"text_input": "a", "text": "b"},
    "a stream with its prompt": {
        "text_input": "a", "stream": True, "exclude_input_in_output": False
    },
}  # fmt: skip


@pytest.mark.parametrize("what", [*REFUSED, "while it drains", "at a bug"])
def test_the_inputs_of_a_refused_request_are_let_go_at_once(
    pb: Any, make_house: Callable[..., House], what: str
) -> None:
    """They are in the server's shared memory. The garbage collector may come much later."""
    house = make_house()
    request = pb.Request(**REFUSED.get(what, {"text_input": "a"}))
    if what == "while it drains":
        house.service.drain(60)
    if what == "at a bug":
        request.request_id = None
        logging.disable()  # the test's own handler would keep the exception
    sender = request.sender
    kept = weakref.ref(request)
    gc.disable()
    try:
        house.service.accept(request)
        del request
        assert sender.final == 1
        assert sender.sent[0].error is not None
        assert kept() is None
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_a_refusal_waits_for_room_and_holds_no_inputs(
    pb: Any, make_house: Callable[..., House], shared_memory: Any
) -> None:
    house = make_house()
    request = pb.Request(text_input="a", sampling_parameters='{"top_p": 2}')
    sender = request.sender
    kept = weakref.ref(request)
    shared_memory.senders = [sender]
    shared_memory.set_room(False)
    gc.disable()
    try:
        house.service.accept(request)
        del request
        assert kept() is None
    finally:
        gc.enable()
    time.sleep(0.1)
    assert not sender.closed
    shared_memory.set_room(True)
    wait_until(lambda: sender.final)
    assert sender.sent[0].error.text.startswith("INVALID_ARGUMENT: top_p is 2")


@pytest.mark.parametrize("fault", ["the pools are closed", "the choice of a pool raises"])
def test_a_request_that_no_thread_can_encode_ends_once_and_is_not_kept(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    house = make_house()
    service = house.service
    if fault == "the pools are closed":
        close_pools(house)
    else:
        monkeypatch.setattr(service, "_encoder_for", lambda request: 1 / 0)
    request = pb.Request(text_input="a")
    service.accept(request)
    wait_until(lambda: ended(request))
    wait_until(lambda: service._responder.counts.encoding == 0)
    assert service._responder.ended_bytes == service._accepted_bytes
    service.close()
    assert request.sender.final == 1
    assert count_of("unavailable") + count_of("failed") == 1


@pytest.mark.parametrize("end", ["its client goes", "its deadline passes", "the server drains"])
def test_what_ends_before_it_is_encoded_lets_its_inputs_go_at_once(
    pb: Any, make_house: Callable[..., House], end: str
) -> None:
    """It waits for a thread, behind others that may take minutes."""
    house = make_house()
    may_go_on = threading.Event()
    for _ in range(2):
        house.service._short.submit(may_go_on.wait)
    deadline = {"deadline_ms": 20} if end == "its deadline passes" else {}
    ids = np.arange(100, dtype=np.int32)
    request = pb.Request(input_ids=ids, sampling_parameters=sampling(**deadline))
    sender = request.sender
    kept = weakref.ref(ids)
    gc.disable()
    try:
        house.service.accept(request)
        del request, ids
        assert kept() is not None
        if end == "its client goes":
            sender.cancelled = True
        if end == "the server drains":
            house.service.drain(0)
        wait_until(lambda: sender.final)
        wait_until(lambda: kept() is None)
    finally:
        gc.enable()
        may_go_on.set()


def test_a_large_grammar_counts_among_the_bytes_of_open_requests(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_OPEN_BYTES", service.REQUEST_BYTES + 5000)
    house = make_house()
    large = sampling(structured_outputs={"regex": "a" * 5000})
    request = pb.Request(text_input="a", sampling_parameters=large)
    house.service.accept(request)
    assert error_of(request).startswith("UNAVAILABLE: all open requests have 0 bytes")
