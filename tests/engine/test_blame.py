"""Which requests the journal blames for the ends of engines, tries alone, and fails."""

import random

import msgspec
import pytest
from jitney.engine.journal import Journal
from jitney.engine.wire import Making, RowOwner
from jitney.messages import (
    Cancel,
    Cancelled,
    Failed,
    Finished,
    StepReport,
    StepStats,
    Tokens,
)

from tests.engine.mortal import Mortal, submit_of
from tests.solo_stream import solo_stream


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


@pytest.mark.parametrize("from_elsewhere", [False, True])
def test_a_grammar_that_has_ended_engines_gets_no_other(from_elsewhere: bool) -> None:
    """A client may send it again and again. Kills from elsewhere say nothing about the next one."""
    journal = Journal()
    making = [Making(0, "grammar", [0])]
    journal.note_message(msgspec.structs.replace(submit_of(0), grammar="bad"))
    while len(journal):
        journal.take_unsent()
        journal.note_death([], making, from_elsewhere=from_elsewhere)
    for key, grammar in ((1, "bad"), (2, "good")):
        journal.note_message(msgspec.structs.replace(submit_of(key), grammar=grammar))
    sent = [message.key for message in journal.take_unsent()]
    failed = journal.expire(0.0)
    if from_elsewhere:
        assert (sent, failed) == ([1, 2], [])
        return
    assert sent == [2]
    (event,) = failed
    assert isinstance(event, Failed)
    assert (event.key, event.code) == (1, "INTERNAL")
    assert len(journal) == 1
    assert journal.take_unsent() == []


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
