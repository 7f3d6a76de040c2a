"""Requests that go on in another engine get the tokens that they would have had."""

import random
from typing import Any

import msgspec
import pytest
from jitney.batch import Batch
from jitney.engine.engine import Engine
from jitney.engine.journal import Journal
from jitney.engine.wire import Making, RowOwner
from jitney.messages import (
    Cancel,
    Cancelled,
    Event,
    Failed,
    Finish,
    Finished,
    PromptLogprobs,
    StepReport,
    StepStats,
    Submit,
    Tokens,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner
from tests.fake_tokens import candidates
from tests.inline import make_at_once
from tests.solo_stream import solo_stream

BLOCK = 4


class Mortal:
    """An engine that is replaced whenever :meth:`crash` says so; what a client has got so far."""

    def __init__(self, num_blocks: int = 64, overlap: bool = False, **options: Any) -> None:
        self.num_blocks = num_blocks
        self.overlap = overlap
        self.config = make_config({"model": "fake", "block_size": BLOCK, **options})
        self.journal = Journal()
        self.now = 0.0
        self.spans: list[RowOwner] = []
        self.streams: dict[tuple[int, int], list[int]] = {}
        self.logprobs: dict[tuple[int, int], float | None] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.ends: dict[int, Finished | Cancelled | Failed] = {}
        self.engine = self.make()

    def make(self) -> Engine:
        runner = FakeRunner(num_blocks=self.num_blocks, block_size=BLOCK, overlap=self.overlap)
        engine = Engine(self.config, runner, lambda: self.now, self.note, FakeGrammar)
        return make_at_once(engine)

    def note(self, in_flight: list[Batch], new: Batch) -> None:
        self.spans = [
            RowOwner(row.key, row.index) for batch in (*in_flight, new) for row in batch.rows
        ]

    def send(self, message: Submit | Finish | Cancel) -> None:
        self.journal.note_message(message)
        self.send_due()

    def send_due(self) -> None:
        for message in self.journal.take_unsent():
            self.engine.send(message)

    def step(self, lost: bool = False) -> None:
        """A step; ``lost``: the engine dies before its report is sent."""
        self.now += 0.01
        report = self.engine.step()
        self.engine.scheduler.check_integrity()
        if lost or report is None:
            return
        for event in self.journal.note_report(report, self.now):
            self.take(event)
        self.send_due()

    def crash(self, from_elsewhere: bool = True) -> list[Failed]:
        failed = self.journal.note_death(self.spans, from_elsewhere=from_elsewhere)
        self.engine = self.make()
        self.send_due()
        return failed

    def take(self, event: Event) -> None:
        assert event.key not in self.ends, "an event after the end"
        match event:
            case Tokens():
                at = event.key, event.index
                assert at not in self.reasons, "a token after the sequence's end"
                self.streams.setdefault(at, []).extend(event.ids)
                self.logprobs[at] = event.cumulative_logprob
                if event.finish_reason is not None:
                    self.reasons[at] = event.finish_reason
            case PromptLogprobs():
                assert event.key not in self.prompt_logprobs, "prompt logprobs came twice"
                self.prompt_logprobs[event.key] = event
            case _:
                self.ends[event.key] = event

    def drain(self) -> None:
        for _ in range(20_000):
            if not len(self.journal):
                return
            self.step()
        raise AssertionError("requests stay open")


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


def submit_of(key: int, prompt: list[int] | None = None, **params: Any) -> Submit:
    deadline = params.pop("deadline", None)
    return Submit(
        key=key,
        prompt=prompt or [1, 2, 3],
        params=SamplingParams(seed=key, **{"max_tokens": 8, **params}),
        arrival=0.0,
        deadline=deadline,
    )


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


def deaths_until_failed(journal: Journal, *sequences: int, samples: dict[int, int]) -> int:
    """How many engines end, each with these sequences of request 0 at work, after so many samples
    of its sequences, before the request is failed."""
    for deaths in range(1, 20):
        assert len(journal.take_unsent()) == 1
        for index, count in samples.items():
            for _ in range(count):
                report = StepReport([Tokens(key=0, index=index, ids=[7])], StepStats())
                journal.note_report(report, 1.0)
        failed = journal.note_death([RowOwner(0, index) for index in sequences])
        if failed:
            assert [one.key for one in failed] == [0]
            return deaths
    raise AssertionError("it is never failed")


def test_a_fault_of_decoding_alone_is_found_too() -> None:
    """The first token of a resumed request comes from its prefill: it always gets one further."""
    journal = Journal()
    journal.note_message(submit_of(0, max_tokens=1000))
    assert deaths_until_failed(journal, 0, samples={0: 1}) == 4


def test_every_sequence_has_to_get_past_what_it_was_doing() -> None:
    """A fault of decoding, in a request of two sequences: each engine prefills both again."""
    journal = Journal()
    journal.note_message(submit_of(0, n=2, max_tokens=1000))
    assert deaths_until_failed(journal, 0, 1, samples={0: 1, 1: 1}) == 4


def test_a_sequence_proves_nothing_for_another() -> None:
    """The first one decodes while the second, at which engines die, is prefilled in chunks."""
    journal = Journal()
    journal.note_message(submit_of(0, n=2, max_tokens=1000))
    assert deaths_until_failed(journal, 0, 1, samples={0: 3}) == 4


def test_what_a_grammar_forces_proves_nothing() -> None:
    """A fault of decoding: each engine samples a token, and a few are forced after it."""
    journal = Journal()
    journal.note_message(submit_of(0, max_tokens=1000))
    failed: list[Failed] = []
    for _ in range(4):
        journal.take_unsent()
        journal.note_report(StepReport([Tokens(key=0, index=0, ids=[7] * 5)], StepStats()), 1.0)
        failed += journal.note_death([RowOwner(0, 0)])
    assert [one.key for one in failed] == [0]


def test_samples_of_two_engines_are_no_proof() -> None:
    """One died between two steps, so that nobody was at fault. The suspect is still tried alone."""
    journal = Journal()
    for key in (0, 1):
        journal.note_message(submit_of(key, max_tokens=1000))
    journal.take_unsent()
    for _ in range(2):
        assert journal.note_death([RowOwner(0, 0)]) == []
        journal.take_unsent()
    for _ in range(2):
        journal.note_report(StepReport([Tokens(key=0, index=0, ids=[7])], StepStats()), 1.0)
        assert journal.note_death([]) == []
        assert [message.key for message in journal.take_unsent()] == [0]
    for _ in range(2):
        assert journal.take_unsent() == []
        journal.note_report(StepReport([Tokens(key=0, index=0, ids=[7])], StepStats()), 1.0)
    assert [message.key for message in journal.take_unsent()] == [1]


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


# ---------------------------------------------------------------- the request that ends engines


def test_who_is_at_work_twice_is_tried_alone_and_failed() -> None:
    journal = Journal()
    for key in range(3):
        journal.note_message(submit_of(key))
    assert [m.key for m in journal.take_unsent()] == [0, 1, 2]
    rows = [RowOwner(0, 0), RowOwner(1, 0)]
    assert journal.note_death(rows) == []
    assert [m.key for m in journal.take_unsent()] == [0, 1, 2]
    assert journal.note_death(rows) == []
    assert [m.key for m in journal.take_unsent()] == [0], "the first suspect alone"
    journal.note_message(submit_of(3))
    assert journal.take_unsent() == [], "nobody joins it"
    assert journal.note_death([RowOwner(0, 0)]) == [], "once may be chance"
    assert [m.key for m in journal.take_unsent()] == [0]
    (failed,) = journal.note_death([RowOwner(0, 0)])
    assert (failed.key, failed.code) == (0, "INTERNAL")
    assert "ended the engine" in failed.message
    assert [m.key for m in journal.take_unsent()] == [1], "the next suspect"


def test_names_are_bounded() -> None:
    journal = Journal()
    assert journal.names(2) == ""
    for key, name in enumerate(("line\nbreak", "", "c")):
        journal.note_message(msgspec.structs.replace(submit_of(key), request_id=name))
    assert journal.names(3) == r"'line\nbreak', #1, 'c'"
    assert journal.names(2) == r"'line\nbreak', #1, …"


def test_a_suspect_that_emits_a_token_is_cleared() -> None:
    house = Mortal()
    for key in range(3):
        house.send(submit_of(key))
    house.step(lost=True)
    house.crash()
    house.step(lost=True)
    house.crash()
    assert set(house.engine._open) == set()
    house.step()
    assert set(house.streams) == {(0, 0)}, "it ran alone"
    house.drain()
    assert all(isinstance(end, Finished) for end in house.ends.values())
    assert len(house.ends) == 3


def test_kills_from_elsewhere_fail_a_request_at_the_tenth_alone() -> None:
    """The kernel kills a process like that if a request needs too much memory."""
    journal = Journal()
    for key in range(2):
        journal.note_message(submit_of(key))
    for _ in range(11):
        assert journal.take_unsent()
        assert journal.note_death([RowOwner(0, 0)], from_elsewhere=True) == []
    assert [message.key for message in journal.take_unsent()] == [0]
    (failed,) = journal.note_death([RowOwner(0, 0)], from_elsewhere=True)
    said = "this request ended the engine 12 times, 10 of them with nothing else at work"
    assert failed == Failed(0, "INTERNAL", said)


@pytest.mark.parametrize("crash_comes_first", [True, False])
def test_a_crash_among_the_kills_counts_as_one(crash_comes_first: bool) -> None:
    journal = Journal()
    journal.note_message(submit_of(0))
    rows = [RowOwner(0, 0)]
    for _ in range(2):
        assert journal.note_death(rows, from_elsewhere=True) == []
    # From here on it is tried alone.
    assert journal.note_death(rows, from_elsewhere=not crash_comes_first) == []
    failed = journal.note_death(rows, from_elsewhere=crash_comes_first)
    assert [one.key for one in failed] == [0]


def test_whoever_has_nothing_at_work_is_not_blamed() -> None:
    """An engine that ends between two steps, or with its fork server."""
    journal = Journal()
    journal.note_message(submit_of(0))
    for _ in range(30):
        journal.take_unsent()
        assert journal.note_death([]) == []
    assert len(journal) == 1


def test_beside_another_at_work_nobody_is_tried_alone() -> None:
    """Two suspects: the second one joins the first once that is proved innocent."""
    journal = Journal()
    both = [RowOwner(0, 0), RowOwner(1, 0)]
    for key in (0, 1):
        journal.note_message(submit_of(key, max_tokens=1000))
    for _ in range(2):
        assert journal.note_death(both) == []
    journal.take_unsent()
    for _ in range(2):
        journal.note_report(StepReport([Tokens(key=0, index=0, ids=[7])], StepStats()), 1.0)
    assert [message.key for message in journal.take_unsent()] == [1]
    assert journal.note_death(both) == []
    assert [message.key for message in journal.take_unsent()] == [1], "this time alone"
    assert journal.note_death([RowOwner(1, 0)]) == []
    assert [one.key for one in journal.note_death([RowOwner(1, 0)])] == [1]
    assert [message.key for message in journal.take_unsent()] == [0]


def test_who_has_something_made_is_at_work_too() -> None:
    """With it fail all that need the same, and nobody else."""
    journal = Journal()
    for key, grammar in enumerate(("bad", "good", "bad", "")):
        journal.note_message(msgspec.structs.replace(submit_of(key), grammar=grammar))
    making = Making(0, "grammar", [0])
    for _ in range(2):
        assert len(journal.take_unsent()) == 4
        assert journal.note_death([], [making]) == []
    for _ in range(2):
        assert [message.key for message in journal.take_unsent()] == [0]
        failed = journal.note_death([], [making])
    assert [one.key for one in failed] == [0, 2]
    assert "the grammar of this request ended the engine 4 times" in failed[1].message
    assert [message.key for message in journal.take_unsent()] == [1, 3]


def test_an_adapter_that_ends_engines_is_found_beside_running_requests() -> None:
    """What runs beside it is a suspect, too, until it has run alone."""
    journal = Journal()
    runs = submit_of(0, max_tokens=1000)
    names_it = submit_of(1, lora_name="deadly")
    for submit in (runs, names_it):
        journal.note_message(submit)
    making = [Making(0, "adapter", [1])]
    failed: list[Failed] = []
    for _ in range(20):
        sent = [message.key for message in journal.take_unsent()]
        if 0 in sent:
            for _ in range(2):
                journal.note_report(StepReport([Tokens(key=0, index=0, ids=[7])], StepStats()), 1.0)
            sent += [message.key for message in journal.take_unsent()]
        if 1 not in sent:
            break
        rows = [RowOwner(0, 0)] if 0 in sent else []
        failed += journal.note_death(rows, making)
        if failed:
            break
    assert [one.key for one in failed] == [1]


def test_a_sequence_that_has_ended_is_not_blamed() -> None:
    """With overlap, the step in flight may have a row of it."""
    journal = Journal()
    journal.note_message(submit_of(0, n=2, max_tokens=1000))
    journal.note_message(submit_of(1, max_tokens=1000))
    for _ in range(2):
        journal.take_unsent()
        ended = Tokens(key=0, index=0, ids=[7], finish_reason="stop")
        journal.note_report(StepReport([ended], StepStats()), 1.0)
        assert journal.note_death([RowOwner(0, 0), RowOwner(0, 1)]) == []
    assert [message.key for message in journal.take_unsent()] == [0]
    for _ in range(2):
        journal.note_report(StepReport([Tokens(key=0, index=1, ids=[7])], StepStats()), 1.0)
    assert [message.key for message in journal.take_unsent()] == [1]


def test_a_token_proves_that_the_resources_were_there() -> None:
    """Of whichever sequence."""
    journal = Journal()
    journal.note_message(submit_of(0, n=100, max_tokens=1000))
    journal.note_message(submit_of(1, max_tokens=1000))
    for _ in range(2):
        assert journal.note_death([], [Making(0, "grammar", [0])]) == []
    assert [message.key for message in journal.take_unsent()] == [0]
    journal.note_report(StepReport([Tokens(key=0, index=0, ids=[7])], StepStats()), 1.0)
    assert [message.key for message in journal.take_unsent()] == [1]


def test_of_two_kinds_at_fault_only_who_needs_both_fails_with_it() -> None:
    """Which of the two ends engines is not known."""
    journal = Journal()
    needs = [("bad", "law"), ("bad", None), ("", "law"), ("bad", "law")]
    for key, (grammar, adapter) in enumerate(needs):
        submit = submit_of(key, lora_name=adapter)
        journal.note_message(msgspec.structs.replace(submit, grammar=grammar))
    making = [Making(0, "grammar", [0]), Making(1, "adapter", [0])]
    for _ in range(3):
        assert journal.note_death([], making) == []
    failed = journal.note_death([], making)
    assert [each.key for each in failed] == [0, 3]
    assert failed[0].message.startswith("the adapter and the grammar of this request ended")


def test_others_fail_with_it_only_if_the_resource_was_at_fault_each_time() -> None:
    journal = Journal()
    for key in range(3):
        journal.note_message(msgspec.structs.replace(submit_of(key), grammar="shared"))
    making = [Making(0, "grammar", [0])]
    for _ in range(3):
        assert journal.note_death([RowOwner(0, 0)]) == []
    (failed,) = journal.note_death([], making)
    assert failed.key == 0
    assert "this request ended the engine 4 times" in failed.message


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_random_kills_fail_nobody(seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    house = Mortal(num_blocks=192, overlap=overlap, max_num_seqs=8, max_num_batched_tokens=16)
    submits = [submit_of(key, [key] * 20, n=1 + key % 2, max_tokens=200) for key in range(8)]
    for submit in submits:
        house.send(submit)
    for _ in range(100):
        for _ in range(rng.randint(0, 12)):
            house.step()
        house.step(lost=True)
        assert house.crash() == []
    house.drain()
    for submit in submits:
        for index in range(submit.params.n):
            assert house.streams[submit.key, index] == solo_stream(submit, index)


def test_an_ended_suspect_lets_the_others_in() -> None:
    house = Mortal()
    house.send(submit_of(0, max_tokens=50))
    house.send(submit_of(1))
    for _ in range(2):
        house.step(lost=True)
        house.crash()
    house.send(Cancel(0))
    house.drain()
    assert house.ends[0] == Cancelled(0)
    assert isinstance(house.ends[1], Finished)


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
