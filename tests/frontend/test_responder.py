"""The responder's turns, one by one and without a thread unless a test starts it."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jitney.errors import JitneyError, UnavailableError
from jitney.frontend import protocol
from jitney.frontend import responder as module
from jitney.frontend.channel import Channel
from jitney.frontend.metrics import ModelMetrics
from jitney.frontend.protocol import ClientRequest, ResponseWriter
from jitney.frontend.replies import Arrival, Reply
from jitney.frontend.responder import Responder
from jitney.messages import (
    Event,
    Finished,
    FrontMessage,
    Logprob,
    ModelInfo,
    PromptLogprobs,
    StepReport,
    StepStats,
    Submit,
    Timing,
    Tokens,
)
from jitney.sampling_params import SamplingParams
from jitney.text.completion import Completion
from jitney.text.logprobs import LogprobsEncoder
from jitney.text.tokenizer import Tokenizer

INFO = ModelInfo(
    vocab_size=320, max_model_len=64, num_blocks=8, block_size=4, eos_ids=frozenset(),
    dtype="float32", device="cpu", attention="reference", num_parameters=1,
)  # fmt: skip
TIMING = Timing(
    queue_s=0.0, first_token_s=0.0, total_s=0.0, cached_prompt_tokens=0, computed_prompt_tokens=1,
    preemptions=0,
)  # fmt: skip


RETURNS = frozenset({"logprobs", "finish_reason", "num_output_tokens"})


class Desk:
    """A responder and the order of what it sends."""

    def __init__(
        self, pb: Any, tokenizer: Tokenizer, send_share: float = 1.0, max_pending: int = 1 << 16
    ) -> None:
        self.pb, self.tokenizer = pb, tokenizer
        self.told: list[FrontMessage] = []
        metrics = ModelMetrics({"model": "m"}, INFO)
        self.responder = Responder(self.told.append, metrics, max_pending, send_share)
        self.senders: dict[int, Any] = {}
        self.order: list[int] = []

    def add(self, key: int, *, streamed: bool = True, **params: Any) -> None:
        sampling = SamplingParams(seed=1, max_tokens=1000, **params)
        submit = Submit(key=key, prompt=[5], params=sampling, arrival=time.monotonic())
        request = ClientRequest("input_ids", np.array([5]), sampling, streamed, False, RETURNS, "")
        encoder = LogprobsEncoder(self.tokenizer)
        writer = ResponseWriter(request, "", 1, encoder)
        sender = self.senders[key] = self.pb.Sender()
        sender.on_send = lambda response: self.order.append(key)
        completion = Completion(submit, self.tokenizer, encoder)
        arrival = Arrival(key, Channel(sender), submit.arrival, None)
        self.responder.add(arrival)
        reply = Reply(arrival, streamed, completion, writer)
        self.responder.begin(reply, submit)

    def report(self, *events: Event) -> None:
        self.responder.put(StepReport(list(events), StepStats()))

    def turn_until(self, condition: Callable[[], Any]) -> None:
        """A turn waits for work, so there must be some until ``condition`` holds."""
        while not condition():
            self.responder.turn()


@pytest.fixture
def make_desk(pb: Any, tokenizer: Tokenizer) -> Callable[..., Desk]:
    return lambda **options: Desk(pb, tokenizer, **options)


def token(key: int, *, last: bool = False) -> list[Event]:
    made: list[Event] = [
        Tokens(key=key, index=0, ids=[65], finish_reason="length" if last else None)
    ]
    return [*made, Finished(key, TIMING)] if last else made


def test_first_responses_leave_in_the_order_of_their_tokens(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk()
    for key in range(5):
        desk.add(key)
    desk.report(*(event for key in range(5) for event in token(key)))
    desk.turn_until(lambda: len(desk.order) >= 5)
    assert desk.order == [0, 1, 2, 3, 4]


def test_many_tokens_at_once_are_no_pile(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(max_pending=4)
    desk.add(0)
    for count in (1, 2, 3):
        desk.report(Tokens(key=0, index=0, ids=[65] * 20))
        desk.turn_until(lambda count=count: len(desk.order) == count or len(desk.told) > 1)
    assert [type(each) for each in desk.told] == [Submit]
    assert all(each.error is None for each in desk.senders[0].sent)


def test_a_stream_that_ends_while_it_waits_is_sent_next(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(send_share=0.01)
    for key in range(60):
        desk.add(key)
    desk.report(*(event for key in range(60) for event in token(key)))
    desk.turn_until(lambda: len(desk.order) >= 60)
    waiting = [event for key in range(60) for event in token(key)]
    desk.report(*waiting, *token(59, last=True), *token(58, last=True))
    desk.turn_until(lambda: len(desk.order) >= 62)
    assert desk.order[60:62] == [59, 58]
    assert desk.senders[59].final == desk.senders[58].final == 1


def test_responses_leave_while_reports_keep_coming(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_READ_S", 0.0)
    desk = make_desk()
    for key in range(4):
        desk.add(key)
    for _ in range(40):
        desk.report(*(event for key in range(4) for event in token(key)))
    for _ in range(18):  # one call each: eight take the requests over
        desk.responder.turn()
    assert len(desk.order) >= 10
    assert desk.responder._backlog == 30
    assert set(desk.order) == {0, 1, 2, 3}


def test_a_full_backlog_holds_the_engine_back(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 streams and an engine that reports as fast as it may: each stream gets its share."""
    monkeypatch.setattr(module, "MAX_REPORTS", 4)
    monkeypatch.setattr(module, "MAX_HOLD_S", 60.0)
    desk = make_desk(send_share=0.2)
    for key in range(256):
        desk.add(key)
    backlogs: list[int] = []

    def engine() -> None:
        for step in range(100):
            desk.report(*(event for key in range(256) for event in token(key, last=step == 99)))
            backlogs.append(desk.responder._backlog)

    thread = threading.Thread(target=engine)
    thread.start()
    desk.turn_until(lambda: len(backlogs) == 100)
    assert max(backlogs) <= 4
    assert all(sender.sent for sender in desk.senders.values())
    desk.turn_until(lambda: all(sender.final == 1 for sender in desk.senders.values()))


def test_no_engine_hangs_behind_a_send_that_hangs(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HOLD_S", 0.02)
    desk = make_desk()
    for _ in range(module.MAX_REPORTS):
        desk.report()
    began = time.monotonic()
    desk.report()
    assert 0.02 <= time.monotonic() - began < 5


def logprobs_of(size: int) -> list[list[Logprob]]:
    return [[Logprob(65 + i % 7, -1.0, 1), Logprob(80, -2.0, 2)] for i in range(size)]


def test_a_backlog_of_a_stream_leaves_in_parts(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_CANDIDATES", 60)
    desk = make_desk()
    desk.add(0, logprobs=1)
    ids = list(range(65, 91)) * 5
    desk.report(
        Tokens(
            key=0, index=0, ids=ids, logprobs=logprobs_of(130), cumulative_logprob=-130.0,
            finish_reason="length",
        ),
        Finished(0, TIMING),
    )  # fmt: skip
    sender = desk.senders[0]
    desk.turn_until(lambda: sender.final)
    counts = [response.tensors["num_output_tokens"].tolist() for response in sender.sent]
    assert counts == [[30]] * 4 + [[10]]
    reasons = [response.tensors["finish_reason"][0] for response in sender.sent]
    assert reasons == [b"None"] * 4 + [b"length"]
    text = b"".join(response.tensors["text_output"][0] for response in sender.sent)
    assert text.decode() == desk.tokenizer.decode(ids)
    parts = [json.loads(response.tensors["logprobs"][0]) for response in sender.sent]
    assert [len(part) for part in parts] == [30] * 4 + [10]


def test_logprobs_of_one_large_answer_are_encoded_as_they_come(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()
    desk.add(0, streamed=False, logprobs=1)
    for _ in range(10):
        desk.report(
            Tokens(key=0, index=0, ids=[65] * 20, logprobs=logprobs_of(20), cumulative_logprob=-9.0)
        )
    desk.turn_until(lambda: not desk.responder._backlog)
    assert not desk.senders[0].sent
    monkeypatch.setattr(LogprobsEncoder, "encode", None)  # nothing is left to encode
    desk.report(*token(0, last=True))
    desk.turn_until(lambda: desk.senders[0].final)
    (response,) = desk.senders[0].sent
    made = json.loads(response.tensors["logprobs"][0])
    text = desk.tokenizer.token_text(65)
    assert len(made) == 200
    assert made[0]["65"] == {"logprob": -1.0, "rank": 1, "decoded_token": text}
    assert response.tensors["num_output_tokens"].tolist() == [201]


def test_others_have_a_turn_while_a_prompts_logprobs_are_encoded(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_CANDIDATES", 60)
    monkeypatch.setattr(module, "MAX_READ_S", 60.0)  # all of the inbox first
    desk = make_desk()
    desk.add(0, prompt_logprobs=1)
    desk.add(1)
    positions: list[list[Logprob] | None] = [None, *logprobs_of(199)]
    desk.report(PromptLogprobs(0, positions), *token(0), *token(1))
    desk.turn_until(lambda: len(desk.order) == 2)
    assert desk.order == [1, 0]
    made = json.loads(desk.senders[0].sent[0].tensors["prompt_logprobs"][0])
    assert len(made) == 200
    assert made[0] is None
    desk.report(*token(0, last=True))
    desk.turn_until(lambda: desk.senders[0].final)
    assert "prompt_logprobs" not in desk.senders[0].sent[1].tensors


def test_an_exception_while_it_is_stopped_does_not_keep_the_others_waiting(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()
    desk.add(0)
    desk.add(1)
    desk.responder.stop()
    fail = Channel.fail

    def once(channel: Channel, error: JitneyError) -> None:
        monkeypatch.setattr(Channel, "fail", fail)
        raise ZeroDivisionError

    monkeypatch.setattr(Channel, "fail", once)
    with pytest.raises(ZeroDivisionError):
        desk.turn_until(lambda: False)
    assert desk.responder.turn() is None
    assert desk.senders[1].sent[0].error.text == "UNAVAILABLE: the model is being unloaded"


def test_a_request_that_the_engine_does_not_take_is_answered(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()

    def refuse(message: FrontMessage) -> None:
        if isinstance(message, Submit):
            raise UnavailableError("the model is being unloaded")

    monkeypatch.setattr(desk.responder, "_tell_engine", refuse)
    desk.add(0)
    desk.responder.turn()
    (response,) = desk.senders[0].sent
    assert response.error.text == "UNAVAILABLE: the model is being unloaded"


def test_an_answer_whose_send_raises_ends_its_request(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needed no engine, such as a description of the model, is guarded like all else."""
    desk = make_desk()
    sender = desk.pb.Sender()
    arrival = Arrival(0, Channel(sender), time.monotonic(), None, size=7)

    def fail(channel: Channel, tensors: Any, *, final: bool) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Channel, "send", fail)
    desk.responder.add(arrival)
    desk.responder.answer(arrival, [("text_output", protocol.string_array(["a"]))])
    desk.turn_until(lambda: sender.final)
    (response,) = sender.sent
    assert response.error.text == "INTERNAL: the request could not be answered"
    assert desk.responder.counts.encoding == 0
    assert desk.responder.ended_bytes == 7


# ------------------------------------------------------------------ room in the shared memory


def test_what_is_to_end_while_there_is_no_room_ends_once_there_is(
    make_desk: Callable[..., Desk], shared_memory: Any
) -> None:
    """Its last data, an error, an answer that needs no engine, and a refusal; a stream goes on."""
    desk = make_desk()
    for key in range(4):
        desk.add(key, streamed=key != 1)
    description = Arrival(4, Channel(desk.pb.Sender()), time.monotonic(), None)
    desk.senders[4] = description.channel._sender
    refused = Channel(desk.pb.Sender())
    desk.senders[5] = refused._sender
    desk.responder.add(description)
    shared_memory.senders = list(desk.senders.values())
    desk.turn_until(lambda: desk.responder.counts.submitted == 4)
    shared_memory.set_room(False)
    desk.report(*token(0, last=True), *token(1, last=True), *token(2))
    desk.responder.abort(3, UnavailableError("the queue is full"))
    desk.responder.answer(description, [("text_output", protocol.string_array(["a"]))])
    desk.responder.refuse(refused, UnavailableError("the server is shutting down"))
    for _ in range(20):
        desk.responder.turn()
    assert desk.order == []
    assert not any(sender.closed for sender in desk.senders.values())
    shared_memory.set_room(True)
    ended = [desk.senders[key] for key in (0, 1, 3, 4, 5)]
    desk.turn_until(lambda: all(sender.final for sender in ended) and desk.senders[2].sent)
    assert [sender.final for sender in ended] == [1] * 5
    errors = [sender.sent[-1].error for sender in ended]
    assert [error and error.text for error in errors] == [
        None, None, "UNAVAILABLE: the queue is full", None,
        "UNAVAILABLE: the server is shutting down",
    ]  # fmt: skip
    desk.report(*token(2, last=True))
    desk.turn_until(lambda: desk.senders[2].final)
    reasons = [response.tensors["finish_reason"][0] for response in desk.senders[2].sent]
    assert reasons == [b"None", b"length"]


def test_many_answers_that_fail_one_after_the_other_need_no_deep_stack(
    make_desk: Callable[..., Desk], shared_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()
    shared_memory.set_room(False)

    def fail(channel: Channel, tensors: Any, *, final: bool) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Channel, "send", fail)
    senders = [desk.pb.Sender() for _ in range(1000)]
    for key, sender in enumerate(senders):
        arrival = Arrival(key, Channel(sender), time.monotonic(), None)
        desk.responder.add(arrival)
        desk.responder.answer(arrival, [])
    desk.turn_until(lambda: desk.responder.counts.encoding == 1000)
    desk.turn_until(lambda: desk.responder._inbox.empty())
    shared_memory.set_room(True)
    desk.turn_until(lambda: desk.responder._final_responses.is_empty)
    assert all(sender.final == 1 for sender in senders)


def test_a_stop_without_room_takes_its_time_and_no_longer(
    make_desk: Callable[..., Desk], shared_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_SENDS_S", 0.1)
    desk = make_desk()
    desk.add(0)
    desk.add(1)
    desk.turn_until(lambda: desk.responder.counts.submitted == 2)
    shared_memory.set_room(False)
    desk.report(*token(0, last=True))
    desk.responder.stop()
    began = time.monotonic()
    while desk.responder.turn() is not None:
        pass
    assert 0.1 <= time.monotonic() - began < 5
    texts = [sender.sent[-1].error.text for sender in desk.senders.values()]
    assert texts == ["UNAVAILABLE: the model is being unloaded"] * 2
