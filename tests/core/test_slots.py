"""Models whose sequences hold slots beside blocks: every sequence has one of its own, begins in an
empty one, and none is ever ahead of its tokens."""

import itertools

import pytest
from jitney.batch import Batch
from jitney.core.slots import Slots
from jitney.errors import InternalError
from jitney.messages import Emitted, Failed, Finish, Submit
from jitney.sampling_params import SamplingParams

from tests.core.play import Play, check_streams
from tests.core.test_overlap_faults import Once
from tests.fake_tokens import VOCAB_SIZE, candidates

pytestmark = pytest.mark.usefixtures("quiet")

KINDS = ["state", "opaque"]


def with_slots(**options) -> Play:
    return Play(**{"num_slots": 4, "cache": "opaque", **options})


# ---------------------------------------------------------------------- the slots alone


def test_slots_run_out() -> None:
    slots = Slots(2)
    assert [slots.take(), slots.take()] == [0, 1]
    assert slots.is_short
    slots.release(0)
    assert not slots.is_short
    slots.check_integrity([1])


def test_without_slots_none_is_short() -> None:
    slots = Slots(0)
    assert not slots.is_used
    assert not slots.is_short
    assert slots.take() is None
    assert slots.fork(None) is None
    slots.release(None)
    slots.check_integrity([])


def test_the_source_of_a_copy_is_held_until_it_is_made() -> None:
    slots = Slots(3)
    leader = slots.take()
    fork = slots.fork(leader)
    slots.release(leader)
    slots.check_integrity([fork])
    assert slots.num_free == 1
    slots.complete_copies(slots.pending_copies())
    assert slots.num_free == 2
    slots.check_integrity([fork])


def test_a_released_copy_is_cancelled() -> None:
    slots = Slots(3)
    leader = slots.take()
    slots.release(slots.fork(leader))
    assert slots.pending_copies() == []
    slots.check_integrity([leader])


@pytest.mark.parametrize("held", [[], [0], [0, 0], [0, 1, 2]])
def test_integrity_sees_a_slot_that_is_lost_or_held_twice(held: list[int]) -> None:
    slots = Slots(3)
    slots.take()
    slots.take()
    with pytest.raises(AssertionError):
        slots.check_integrity(held)


def test_a_slot_is_not_released_twice() -> None:
    slots = Slots(2)
    slot = slots.take()
    slots.release(slot)
    with pytest.raises(AssertionError, match="nobody held"):
        slots.release(slot)


def test_a_released_slot_is_named_once_unless_it_is_held_again() -> None:
    slots = Slots(3)
    assert sorted(slots.take_released()) == [0, 1, 2]  # an earlier scheduler may have left any
    first = slots.take()
    second = slots.take()
    slots.release(first)
    slots.release(second)
    assert slots.take() == second
    slots.check_integrity([second])
    assert slots.take_released() == [first]
    assert slots.take_released() == []


# ---------------------------------------------------------------------- in steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_no_more_run_than_there_are_slots(kind: str, overlap: bool) -> None:
    play = with_slots(num_slots=3, cache=kind, overlap=overlap)
    keys = [play.submit([key] * 5, max_tokens=4 + key) for key in range(8)]
    play.drain()
    for batch in play.batches:
        held = [row.slot for row in batch.rows]
        assert len(set(held)) == len(held) <= 3
    check_streams(play, *keys)


def test_a_prompt_that_was_computed_before_is_computed_again() -> None:
    play = with_slots(cache="state")
    play.submit([1] * 9, max_tokens=2)
    play.drain()
    again = play.submit([1] * 9, max_tokens=2)
    assert play.step().stats.prefix_query_tokens == 0
    play.drain()
    assert play.ends[again].timing.cached_prompt_tokens == 0
    check_streams(play, again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [7, 8])
def test_forks_copy_the_slot_of_their_leader(kind: str, length: int) -> None:
    play = with_slots(cache=kind, num_slots=5)
    key = play.submit([3] * length, n=3, max_tokens=6)
    play.step(2)
    assert len(play.batches[1].slot_copies) == 2
    shared = {row.block_table[0] for row in play.batches[1].rows}
    assert len(shared) == (1 if kind == "state" else 3)
    play.drain()
    check_streams(play, key)


def test_a_fork_whose_slot_is_not_free_yet_waits() -> None:
    """The first request's leader has ended, and its slot is the source of a copy."""
    play = with_slots(
        num_slots=4, choose=lambda row, index: 9 if (row.key, index) == (0, 0) else 1 + row.end
    )
    first = play.submit([1, 2], n=2, max_tokens=4, stop_token_ids=[], stop_ids=frozenset({9}))
    second = play.submit([3, 4], n=4, max_tokens=4)
    play.drain()
    assert play.got(first) == [[9], [3, 4, 5, 6]]
    assert play.got(second) == [[3, 4, 5, 6]] * 4
    assert play.ends[second].timing.preemptions > 0


def test_preemption_gives_the_slot_back() -> None:
    play = with_slots(num_blocks=6, num_slots=4)
    keys = [play.submit([key] * 6, max_tokens=12) for key in range(3)]
    play.drain()
    assert sum(play.ends[key].timing.preemptions for key in keys) > 0
    check_streams(play, *keys)
    assert play.scheduler.live.slots.num_free == 4


def test_a_slot_in_flight_is_not_handed_out() -> None:
    play = with_slots(num_slots=1, overlap=True)
    play.submit([1, 2], max_tokens=9)
    play.step(2)
    assert play.scheduler.live.in_flight
    play.scheduler.cancel(0)
    assert play.scheduler.live.slots.num_free == 0
    after = play.submit([3, 4], max_tokens=3)
    play.drain()
    check_streams(play, after)


def test_drafts_are_never_computed() -> None:
    # Every token that the model chooses follows itself, so n-grams would foretell all of them.
    play = with_slots(speculation={"max_drafts": 4}, choose=lambda row, index: 7)
    play.submit([7] * 9, max_tokens=30)
    play.drain()
    assert not any(row.drafts for batch in play.batches for row in batch.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_all_forks_are_reserved_blocks_of_their_own(kind: str) -> None:
    play = with_slots(cache=kind, eviction="never", num_blocks=9, block_size=4)
    refused = play.submit([1] * 10, n=3, max_tokens=4)
    fits = play.submit([1] * 8, n=3, max_tokens=4)
    play.drain()
    assert isinstance(play.ends[refused], Failed)
    check_streams(play, fits)


def test_prompt_logprobs() -> None:
    play = with_slots(max_num_batched_tokens=4)
    key = play.submit([5, 6, 7, 8, 9, 10], max_tokens=3, prompt_logprobs=1)
    play.drain()
    prompt = play.submits[key].prompt
    expected = [None] + [candidates(prompt[at], at, VOCAB_SIZE) for at in range(1, len(prompt))]
    assert play.prompt_logprobs[key].logprobs == expected


# ---------------------------------------------------------------------- steps that fail


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunking", ["any", "whole"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_leaves_no_slot_ahead(
    at: int, kind: str, chunking: str, overlap: bool
) -> None:
    play = with_slots(
        cache=kind,
        chunking=chunking,
        overlap=overlap,
        faults=Once(at),
        num_slots=8,
        max_num_batched_tokens=8,
    )
    keys = [play.submit([key, 1, 2, 4, 5], max_tokens=6, n=1 + key % 2) for key in range(4)]
    play.drain()
    check_streams(play, *keys)
    assert play.scheduler.kv.num_used == 0
    assert play.scheduler.live.slots.num_free == 8


def test_a_request_that_breaks_its_steps_fails_alone_even_late() -> None:
    def fault(batch: Batch, written: bool) -> None:
        if written and any(row.key == 2 and row.end > 7 for row in batch.rows):
            raise RuntimeError("at a late position")

    play = with_slots(faults=fault, num_slots=8, max_num_batched_tokens=8)
    keys = [play.submit([key, 1, 2, 4, 5], max_tokens=6) for key in range(5)]
    play.drain()
    broken = keys.pop(2)
    check_streams(play, *keys)
    assert play.ends[broken].code == InternalError.code
    assert play.got(broken)[0] == play.run_alone(broken)[0][:3]


# ---------------------------------------------------------------------- prompts that are not cut


def test_a_whole_prompt_has_a_step_of_its_own_beyond_the_budget() -> None:
    play = with_slots(chunking="whole", max_num_batched_tokens=4)
    keys = [play.submit([key] * 9, max_tokens=6) for key in range(3)]
    play.step(5)
    prompts = [rows for rows in map(play.rows, range(5)) if rows[0][2] == 0]
    assert prompts == [[(key, 0, 0, 9)] for key in keys]
    play.drain()
    check_streams(play, *keys)


def test_prompts_and_decodes_take_turns() -> None:
    play = with_slots(chunking="whole", num_slots=8)
    for key in range(4):
        play.submit([key] * 3, max_tokens=30)
    play.step(8)
    kinds = ["prompt" if play.rows(step)[0][2] == 0 else "decode" for step in range(8)]
    assert kinds == ["prompt", "decode"] * 3 + ["prompt", "decode"]


def test_a_recomputation_goes_on_by_single_tokens() -> None:
    play = with_slots(chunking="whole", num_blocks=6)
    keys = [play.submit([key] * 6, max_tokens=12) for key in range(3)]
    play.drain()
    assert sum(play.ends[key].timing.preemptions for key in keys) > 0
    for batch in play.batches:
        for row in batch.rows:
            assert len(row.token_ids) == (6 if row.start == 0 else 1)
    check_streams(play, *keys)


def test_forced_tokens_are_computed_one_by_one() -> None:
    play = with_slots(chunking="whole")
    key = play.submit([1, 2, 3], max_tokens=12, grammar="2,3:9:2")
    play.drain()
    rows = itertools.chain.from_iterable(batch.rows for batch in play.batches)
    assert all(len(row.token_ids) == 1 for row in rows if row.start)
    check_streams(play, key)


@pytest.mark.parametrize("chunking", ["any", "whole"])
def test_a_stop_that_the_front_found_frees_the_slot(chunking: str) -> None:
    play = with_slots(chunking=chunking, num_slots=1)
    key = play.submit([1, 2], max_tokens=99)
    play.step(4)
    play.engine.send(Finish(key, 0))
    after = play.submit([3], max_tokens=2)
    play.drain()
    check_streams(play, after)


def test_a_recomputation_by_single_tokens_holds_no_decode_back() -> None:
    """It takes one token of a step, and not the share that is kept for chunks."""
    play = with_slots(chunking="whole", num_slots=16, max_num_batched_tokens=16, num_blocks=200)
    play.engine.send(
        Submit(
            key=99,
            prompt=[1, 2],
            params=SamplingParams(seed=0, max_tokens=40, ignore_eos=True),
            arrival=0.0,
            emitted=[Emitted(ids=[3] * 30)],
            first_token=0.0,
        )
    )
    for key in range(15):
        play.submit([key], max_tokens=30)
    play.engine.step()
    while len(play.scheduler.live.running) < 16:
        play.engine.step()
    (resumed,) = play.scheduler.live.requests[99].sequences
    play.engine.step()
    assert resumed.num_planned < resumed.decodes_from
    for _ in range(3):
        batch = play.scheduler.schedule(0.0)
        assert len(batch.rows) == 16
        play.scheduler.update(batch, play.runner.execute(batch), 0.0)
