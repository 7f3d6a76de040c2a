"""The service with the real engine over an arithmetic runner: accepting, sending, ending."""

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from jitney.errors import JitneyError
from jitney.frontend import responder
from jitney.frontend.replies import Arrival
from jitney.frontend.responder import Responder

from tests.frontend.house import (
    LABELS,
    House,
    count_of,
    ended,
    error_of,
    ids_of,
    sampling,
    text_of,
    wait_until,
)


def test_a_stream_delivers_every_token_in_order_and_ends_once(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house()
    requests = [
        pb.Request(
            text_input="the bus" + " stops" * i, stream=True, return_output_ids=True,
            sampling_parameters=sampling(max_tokens=30 + i),
        )
        for i in range(5)
    ]  # fmt: skip
    for request in requests:
        house.service.accept(request)
    wait_until(lambda: ended(*requests))
    for i, request in enumerate(requests):
        ids = house.solo("the bus" + " stops" * i, seed=1, max_tokens=30 + i)
        assert ids_of(request) == ids
        assert text_of(request) == house.tokenizer.decode(ids)
        assert request.sender.final == 1
    wait_until(house.idle)


def test_it_is_ready_while_there_is_an_engine(pb: Any, make_house: Callable[..., House]) -> None:
    house = make_house()
    assert house.service.is_ready
    house.handle.health.up = False
    assert not house.service.is_ready
    house.handle.health.up = True
    house.service.close()
    assert not house.service.is_ready


def test_without_streaming_there_is_one_response(pb: Any, make_house: Callable[..., House]) -> None:
    house = make_house()
    request = pb.Request(
        text_input="the bus", return_timing=True, sampling_parameters=sampling(max_tokens=9)
    )
    house.service.accept(request)
    wait_until(lambda: ended(request))
    (response,) = request.sender.sent
    text = house.tokenizer.decode(house.solo("the bus", seed=1, max_tokens=9))
    assert response.tensors["text_output"][0].decode() == "the bus" + text
    assert json.loads(response.tensors["timing"][0])["computed_prompt_tokens"] > 0


def test_the_servers_own_priority_is_ignored_with_one_line_of_the_log(
    pb: Any, make_house: Callable[..., House], caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house()
    plain = pb.Request(json.dumps({"max_tokens": 2}), text_input="the bus")
    prioritized = [
        pb.Request(json.dumps({"priority": 3, "max_tokens": 2}), text_input="the bus")
        for _ in range(2)
    ]
    for request in (plain, *prioritized):
        house.service.accept(request)
    wait_until(lambda: ended(plain, *prioritized))
    said = [record.getMessage() for record in caplog.records if "changes nothing" in record.msg]
    assert len(said) == 1
    assert "priority" in said[0]


def test_only_an_answer_that_is_not_streamed_is_bounded(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(max_answer_entries=60)
    asked = sampling(max_tokens=11, n=2, logprobs=2)
    whole, streamed = (
        pb.Request(text_input="the bus", stream=stream, sampling_parameters=asked)
        for stream in (False, True)
    )
    for request in (whole, streamed):
        house.service.accept(request)
    wait_until(lambda: ended(whole, streamed))
    assert "is 66, but an answer that is not streamed may have at most 60" in error_of(whole)
    assert all(response.error is None for response in streamed.sender.sent)


def test_a_cumulative_logprob_alone_brings_no_logprobs(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house()
    made = {}
    for logprobs in (None, 0):
        request = pb.Request(
            text_input="a", return_logprobs=True, return_cumulative_logprob=True,
            sampling_parameters=sampling(max_tokens=3, logprobs=logprobs),
        )  # fmt: skip
        house.service.accept(request)
        wait_until(lambda request=request: ended(request))
        (response,) = request.sender.sent
        assert response.tensors["cumulative_logprob"][0] < 0
        made[logprobs] = json.loads(response.tensors["logprobs"][0])
    assert made[None] is None
    assert len(made[0]) == 3


def test_streams_take_turns(pb: Any, make_house: Callable[..., House]) -> None:
    house = make_house(step_seconds=0.001, send_share=1.0)
    accepted = threading.Event()
    order: list[int] = []
    requests = []
    for i in range(4):
        request = pb.Request(
            text_input="the bus", stream=True, sampling_parameters=sampling(max_tokens=450)
        )

        def slow(response: Any, i: int = i) -> None:
            now = house.runner.batches
            if now < 400:  # none has its last token yet
                order.append(i)
                accepted.wait(60)
                wait_until(lambda: house.runner.batches > now + 2)  # a new token for each

        request.sender.on_send = slow
        requests.append(request)
        house.service.accept(request)
    accepted.set()
    wait_until(lambda: ended(*requests))
    turns = order[8:]  # all four are under way
    assert len(turns) >= 8
    # Where the machine is busy, a turn of the worker may send four responses before it reads the
    # next report. That report then lines the streams up anew, so the last one may come first next.
    for start in range(len(turns) - 6):
        assert len(set(turns[start : start + 7])) == 4, order


def test_sending_keeps_to_its_share_and_tokens_gather(
    pb: Any, make_house: Callable[..., House]
) -> None:
    responses = {}
    for share in (1.0, 0.1):
        house = make_house(step_seconds=0.002, send_share=share)
        requests = [
            pb.Request(
                text_input="the bus" + " stops" * i, stream=True, return_output_ids=True,
                sampling_parameters=sampling(max_tokens=100),
            )
            for i in range(4)
        ]  # fmt: skip
        for request in requests:
            request.sender.on_send = lambda response: time.sleep(0.0004)
            house.service.accept(request)
        wait_until(lambda requests=requests: ended(*requests))
        for i, request in enumerate(requests):
            expected = house.solo("the bus" + " stops" * i, seed=1, max_tokens=100)
            assert ids_of(request) == expected
            assert len(request.sender.sent[0].tensors["output_ids"]) < 50  # the first did not wait
        responses[share] = sum(len(request.sender.sent) for request in requests)
    assert responses[0.1] < 0.7 * responses[1.0], responses


def test_a_stream_that_piles_up_beyond_the_bound_is_cancelled_alone(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(max_pending_tokens=20)
    stuck = pb.Request(
        text_input="the bus", stream=True, sampling_parameters=sampling(max_tokens=500)
    )
    whole = pb.Request(text_input="the", sampling_parameters=sampling(max_tokens=300))
    sending, released = threading.Event(), threading.Event()
    stuck.sender.on_send = lambda response: (sending.set(), released.wait(60))
    # The bound is not reached before the first response is on its way.
    house.runner.faults = lambda batch, written: house.runner.batches >= 10 and sending.wait(60)
    house.service.accept(stuck)
    wait_until(lambda: house.runner.batches >= 60)
    house.service.accept(whole)
    released.set()
    wait_until(lambda: ended(stuck, whole))
    assert error_of(stuck).startswith("CANCELLED: ")
    assert "max_pending_tokens" in error_of(stuck)
    assert whole.sender.sent[0].error is None  # what waits for its one response is no pile
    wait_until(house.idle)


def test_a_cancelled_request_frees_its_blocks_and_gets_one_last_response(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(step_seconds=0.002)
    request = pb.Request(
        text_input="the bus", stream=True, sampling_parameters=sampling(max_tokens=1500)
    )
    house.service.accept(request)
    wait_until(lambda: request.sender.sent)
    first = ("jitney_time_to_first_token_seconds_count", frozenset(LABELS.items()))
    wait_until(lambda: pb.MetricFamily.values[first] == 1)  # long before the request ends
    request.sender.cancelled = True
    wait_until(lambda: ended(request))
    assert error_of(request).startswith("CANCELLED: ")
    wait_until(house.idle)
    wait_until(lambda: count_of("cancelled") == 1)


def test_a_send_that_fails_because_the_client_has_gone_is_a_cancellation(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(step_seconds=0.002)
    request = pb.Request(
        text_input="the bus", stream=True, sampling_parameters=sampling(max_tokens=1500)
    )
    house.service.accept(request)
    wait_until(lambda: request.sender.sent)
    request.sender.cancelled, request.sender.memory = True, 0
    wait_until(house.idle)
    wait_until(lambda: count_of("cancelled") == 1)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_send_that_fails_though_the_client_is_there_is_answered_by_an_error(
    pb: Any, make_house: Callable[..., House], streamed: bool
) -> None:
    house = make_house(step_seconds=0.001)
    request = pb.Request(
        text_input="the bus", stream=streamed, return_logprobs=True,
        sampling_parameters=sampling(max_tokens=500, logprobs=1),
    )  # fmt: skip
    request.sender.memory = 1 << 30 if streamed else 4500
    house.service.accept(request)
    wait_until(lambda: request.sender.sent or request.sender.final)
    request.sender.memory = 0 if streamed else 4500
    wait_until(lambda: ended(request))
    assert error_of(request) == "INTERNAL: a response could not be sent"
    wait_until(house.idle)
    wait_until(lambda: count_of("failed") == 1)
    failures = ("jitney_send_failures_total", frozenset(LABELS.items()))
    wait_until(lambda: pb.MetricFamily.values[failures] == 1)


def test_a_bug_in_one_text_fails_that_request_alone(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(step_seconds=0.002)
    good = pb.Request(text_input="the", stream=True, sampling_parameters=sampling(max_tokens=500))
    house.service.accept(good)
    wait_until(lambda: good.sender.sent)

    class Broken:
        def feed(self, token_id: int) -> str:
            raise ValueError("a secret path")

    monkeypatch.setattr(house.tokenizer.__class__, "decoder", lambda *_: Broken())
    bad = pb.Request(text_input="the", sampling_parameters=sampling(max_tokens=50))
    house.service.accept(bad)
    wait_until(lambda: ended(bad))
    monkeypatch.undo()
    wait_until(lambda: ended(good))
    assert error_of(bad) == "INTERNAL: the request could not be answered"
    assert all(response.error is None for response in good.sender.sent)
    wait_until(house.idle)


def test_when_the_engine_dies_everybody_is_told(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(step_seconds=0.005)
    running = pb.Request(text_input="a", stream=True, sampling_parameters=sampling(max_tokens=1500))
    house.service.accept(running)
    wait_until(lambda: running.sender.sent)

    def die(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(house.engine, "_step_or_recover", die)
    wait_until(lambda: ended(running))
    assert error_of(running).split(":")[0] in ("INTERNAL", "UNAVAILABLE")
    house.service._workers["engine"].join(60)
    late = pb.Request(text_input="a")
    house.service.accept(late)
    assert error_of(late).startswith("UNAVAILABLE: the engine has stopped")


def test_close_ends_what_runs_refuses_what_comes_and_leaves_no_thread(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(step_seconds=0.002)
    running = pb.Request(text_input="a", stream=True, sampling_parameters=sampling(max_tokens=1500))
    house.service.accept(running)
    wait_until(lambda: running.sender.sent)
    house.service.close()
    assert error_of(running).startswith("UNAVAILABLE: the model is being unloaded")
    late = pb.Request(text_input="a")
    house.service.accept(late)
    assert error_of(late).startswith("UNAVAILABLE: ")
    assert not any(worker.is_alive for worker in house.service._workers.values())


def test_close_sends_what_has_ended_and_says_unavailable_to_the_rest(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responder, "MAX_REPORTS", 10_000)
    house = make_house(step_seconds=0.002, max_num_seqs=32)
    ended_first, endless = (
        [
            pb.Request(text_input="a", sampling_parameters=sampling(max_tokens=max_tokens))
            for _ in range(number)
        ]
        for number, max_tokens in ((18, 200), (2, 1900))
    )
    plug = pb.Request(text_input="a", stream=True, sampling_parameters=sampling(max_tokens=1900))
    armed, gate = threading.Event(), threading.Event()
    plug.sender.on_send = lambda response: armed.is_set() and gate.wait(60)
    for request in [*ended_first, *endless, plug]:
        house.service.accept(request)
    wait_until(lambda: house.engine.scheduler.stats().running == 21)
    armed.set()  # from the next response on it is sent while the others end
    wait_until(lambda: house.engine.scheduler.stats().running == 3)
    assert not any(request.sender.final for request in ended_first)
    closing = threading.Thread(target=house.service.close)
    closing.start()
    wait_until(lambda: not house.service._workers["engine"].is_alive)
    gate.set()
    closing.join(10)
    for request in ended_first:
        (response,) = request.sender.sent
        assert response.error is None
    for request in endless:
        assert error_of(request) == "UNAVAILABLE: the model is being unloaded"


def test_draining_lets_short_requests_end_and_then_ends_the_rest(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(step_seconds=0.005)
    short = pb.Request(text_input="a", sampling_parameters=sampling(max_tokens=10))
    long = pb.Request(text_input="a", stream=True, sampling_parameters=sampling(max_tokens=1500))
    for request in (short, long):
        house.service.accept(request)
    house.service.drain(1.0)
    house.service.drain(math.inf)  # a launcher keeps the time, and tells when it is over
    wait_until(lambda: ended(short))
    time.sleep(1.5)
    assert not ended(long)
    house.service.drain(0.1)
    late = pb.Request(text_input="a")
    house.service.accept(late)
    assert error_of(late).startswith("UNAVAILABLE: the server is shutting down")
    wait_until(lambda: ended(short, long))
    assert short.sender.sent[0].error is None
    assert error_of(long).startswith("UNAVAILABLE: the server is shutting down")
    wait_until(house.idle)


def test_a_service_that_is_opened_again_serves_unless_it_refuses_for_another_reason(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house(step_seconds=0.005)
    house.service.drain(1.0)
    assert not house.service.is_ready
    house.service.reopen()
    assert house.service.is_ready
    again = pb.Request(text_input="a", sampling_parameters=sampling(max_tokens=300))
    house.service.accept(again)
    wait_until(lambda: ended(again))
    assert again.sender.sent[0].error is None, "the drain does not end it after a second"
    house.service.close()
    house.service.reopen()
    late = pb.Request(text_input="a")
    house.service.accept(late)
    assert error_of(late).startswith("UNAVAILABLE: the model is being unloaded")


def test_a_drain_hides_no_other_reason_for_a_refusal(
    pb: Any, make_house: Callable[..., House]
) -> None:
    house = make_house()
    house.service.close()
    house.service.drain(math.inf)
    house.service.reopen()
    late = pb.Request(text_input="a")
    house.service.accept(late)
    assert error_of(late).startswith("UNAVAILABLE: the model is being unloaded")


def test_a_request_that_comes_as_everything_is_ended_ends_too(
    pb: Any, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not refused, and it is not open yet when all open requests are ended."""
    house = make_house(step_seconds=0.005)
    taker = house.service._responder
    add = taker.add
    all_ended = threading.Event()

    def abort_all(error: JitneyError) -> None:
        Responder.abort_all(taker, error)
        all_ended.set()

    def add_late(arrival: Arrival) -> None:
        house.service.drain(0)
        assert all_ended.wait(60)
        add(arrival)

    monkeypatch.setattr(taker, "abort_all", abort_all)
    monkeypatch.setattr(taker, "add", add_late)
    late = pb.Request(text_input="a", stream=True, sampling_parameters=sampling(max_tokens=1500))
    house.service.accept(late)
    wait_until(lambda: ended(late))
    assert error_of(late).startswith("UNAVAILABLE: the server is shutting down")
    assert late.sender.final == 1
    wait_until(house.idle)
