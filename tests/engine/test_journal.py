"""Requests that go on in another engine get the tokens that they would have had."""

import random

import msgspec
import pytest
from jitney.engine.journal import Journal
from jitney.messages import (
    Cancel,
    Cancelled,
    Failed,
    Finish,
    Finished,
    StepReport,
    StepStats,
    Submit,
    Tokens,
)
from jitney.sampling_params import SamplingParams

from tests.engine.mortal import Mortal, submit_of
from tests.fake_grammar import FakeGrammar
from tests.fake_tokens import candidates
from tests.solo_stream import solo_stream


def random_request(key: int, rng: random.Random) -> Submit:
    """Anything that the fake runner can serve."""
    n = rng.choice((1, 1, 1, 2, 4))
    params = SamplingParams(
        n=n,
        max_tokens=rng.randint(1, 24),
        seed=key,
        logprobs=rng.choice((None, 0)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
        presence_penalty=rng.choice((0.0, 0.0, 1.0)),
        min_tokens=0,
        priority=rng.randint(-1, 1),
    )
    prompt = [rng.randrange(40) for _ in range(rng.randint(1, 40))]
    stop = frozenset(rng.sample(range(50), 2)) if rng.random() < 0.3 else frozenset()
    grammar = rng.choice(("", "", "0,2,5:9", "1,3:30:4"))
    return Submit(
        key=key, prompt=prompt, params=params, stop_ids=stop, arrival=0.0, grammar=grammar
    )


@pytest.mark.parametrize("eviction", ["preempt", "never"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_survive_random_deaths(eviction: str, caching: bool, seed: int) -> None:
    """Wherever engines die, and whatever report dies with them."""
    rng = random.Random(f"{eviction} {caching} {seed}")
    house = Mortal(
        num_blocks=rng.choice((48, 96)),
        eviction=eviction,
        prefix_caching=caching,
        max_num_seqs=rng.choice((4, 16)),
        max_num_batched_tokens=rng.choice((16, 64)),
    )
    submits = [random_request(key, rng) for key in range(20)]
    for submit in submits[:10]:
        house.send(submit)
    for submit in submits[10:]:
        for _ in range(rng.randint(0, 6)):
            house.step()
        if rng.random() < 0.7:
            house.step(lost=rng.random() < 0.7)
            assert house.crash() == []
        house.send(submit)
    house.drain()
    for submit in submits:
        end = house.ends[submit.key]
        if isinstance(end, Failed):  # it can never fit beside its own sequences
            assert (eviction, end.code) == ("never", "INVALID_ARGUMENT")
            assert (submit.key, 0) not in house.streams
            continue
        assert isinstance(house.ends[submit.key], Finished)
        for index in range(submit.params.n):
            wanted = solo_stream(submit, index)
            assert house.streams[submit.key, index] == wanted
            complete = submit.grammar and len(wanted) == FakeGrammar(submit.grammar).length
            ended = "stop" if complete or wanted[-1] in submit.stop_ids else "length"
            assert house.reasons[submit.key, index] == ended
            if submit.params.logprobs is not None:
                size = len(submit.prompt)
                total = sum(
                    candidates(token, size + at, 50)[0].logprob for at, token in enumerate(wanted)
                )
                assert house.logprobs[submit.key, index] == pytest.approx(total)
        if submit.params.prompt_logprobs is not None:
            assert len(house.prompt_logprobs[submit.key].logprobs) == len(submit.prompt)
    kv = house.engine.scheduler.kv
    assert kv.num_used == 0


def test_a_finish_that_died_with_the_engine_is_sent_again() -> None:
    house = Mortal()
    house.send(submit_of(0, n=2, max_tokens=100))
    house.step()
    house.send(Finish(0, 0))
    house.crash()
    house.step()
    assert house.reasons == {(0, 0): "stop"}
    house.send(Finish(0, 1))
    house.drain()
    assert isinstance(house.ends[0], Finished)


def test_a_cancel_that_died_with_the_engine_is_sent_again() -> None:
    house = Mortal()
    house.send(submit_of(0, max_tokens=100))
    house.step()
    house.send(Cancel(0))
    house.crash()
    house.drain()
    assert house.ends == {0: Cancelled(0)}


def test_a_deadline_goes_on_running() -> None:
    house = Mortal()
    house.send(submit_of(0, max_tokens=100, deadline=0.5))
    house.step()
    before = list(house.streams[0, 0])
    house.now = 1.0
    house.crash()
    house.drain()
    assert house.streams[0, 0] == before
    assert house.reasons[0, 0] == "deadline"
    timing = house.ends[0].timing  # type: ignore[union-attr]
    assert timing.first_token_s == pytest.approx(0.01)


def test_what_no_engine_has_ends_at_its_deadline() -> None:
    """While the engine is down, with what there is; a cancel is answered then, too."""
    house = Mortal()
    for key, deadline in ((0, 0.5), (1, 0.5), (2, None), (3, None)):
        house.send(submit_of(key, n=2 if key == 0 else 1, max_tokens=100, deadline=deadline))
        if key == 0:
            house.step()
    assert house.journal.note_death([]) == []
    assert house.journal.expire(0.4) == []
    house.journal.note_message(Cancel(2))
    for event in house.journal.expire(0.6):
        house.take(event)
    assert isinstance(house.ends[0], Finished)
    assert house.reasons == {(0, 0): "deadline", (0, 1): "deadline"}
    end = house.ends[1]
    assert isinstance(end, Failed)
    assert end.code == "DEADLINE_EXCEEDED"
    assert house.ends[2] == Cancelled(2)
    assert [message.key for message in house.journal.take_unsent()] == [3]


def test_deadlines_of_what_a_silent_engine_has() -> None:
    """What it reports of them later, if it goes on after all, is not handed on."""
    house = Mortal()
    house.send(submit_of(0, max_tokens=100, deadline=0.5))
    house.send(submit_of(1))
    house.step()
    assert house.journal.expire(1.0) == [], "it sees to it itself"
    for event in house.journal.expire(1.0, engine_is_silent=True):
        house.take(event)
    assert house.reasons == {(0, 0): "deadline"}
    assert isinstance(house.ends[0], Finished)
    house.now = 1.0
    house.drain()
    assert isinstance(house.ends[1], Finished)
    assert house.streams[1, 0] == solo_stream(submit_of(1))


def test_accepted_requests_pass_by_the_queue_s_limit() -> None:
    house = Mortal(max_queued=2, max_num_seqs=1)
    for key in range(3):
        house.send(submit_of(key))
        house.step()
    house.crash()
    house.drain()
    assert all(isinstance(end, Finished) for end in house.ends.values())
    assert len(house.ends) == 3


def test_the_prompt_is_counted_again_and_the_first_token_is_not() -> None:
    house = Mortal()
    house.send(submit_of(0, list(range(20)), max_tokens=6))
    house.step()
    house.step()
    house.crash()
    house.drain()
    timing = house.ends[0].timing  # type: ignore[union-attr]
    assert (timing.cached_prompt_tokens, timing.computed_prompt_tokens) == (0, 20)


def test_names_are_bounded() -> None:
    journal = Journal()
    assert journal.names(2) == ""
    for key, name in enumerate(("line\nbreak", "", "c")):
        journal.note_message(msgspec.structs.replace(submit_of(key), request_id=name))
    assert journal.names(3) == r"'line\nbreak', #1, 'c'"
    assert journal.names(2) == r"'line\nbreak', #1, …"


def test_counts_that_are_lost_with_an_engine_are_not_invented() -> None:
    journal = Journal()
    journal.note_message(msgspec.structs.replace(submit_of(0), deadline=5.0))
    journal.take_unsent()
    journal.note_report(StepReport([Tokens(key=0, index=0, ids=[7])], StepStats()), 1.0)
    *_, end = journal.expire(6.0, engine_is_silent=True)
    assert isinstance(end, Finished)
    assert end.timing.queue_s is None
    assert (end.timing.cached_prompt_tokens, end.timing.computed_prompt_tokens) == (0, 0)


def test_only_requests_that_an_engine_has_got_count_as_sent() -> None:
    journal = Journal()
    params = SamplingParams()
    journal.note_message(Submit(key=0, prompt=[1], params=params, arrival=0.0))
    journal.take_unsent()
    journal.note_death([])
    journal.note_message(Submit(key=1, prompt=[1], params=params, arrival=0.0))
    assert (len(journal), journal.num_sent()) == (2, 1)
