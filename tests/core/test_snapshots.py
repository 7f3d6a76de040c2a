"""Snapshots of slots: a prompt that was computed before, or begins like one, goes on from a copy of
a snapshot, and so does a preempted sequence. No sequence ever waits for a snapshot's slot."""

import msgspec
import pytest
from jitney.core.borders import Borders
from jitney.core.slots import Slots
from jitney.messages import Emitted, Finished

from tests.core.play import Play, check_streams
from tests.core.test_overlap_faults import Once

pytestmark = pytest.mark.usefixtures("quiet")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def with_snapshots(*, least: int = 1, every: int = 2, **options) -> Play:
    """Blocks of 4 tokens."""
    play = Play(**{"num_slots": 3, "num_snapshots": 4, "cache": "state", **options})
    play.scheduler._planner._borders = Borders(play.scheduler.live, least=least, every=every)
    return play


def served(play: Play, prompt: list[int], **params) -> Finished:
    """The end of a request that is served to its end."""
    key = play.submit(prompt, **{"max_tokens": 3, **params})
    play.drain()
    check_streams(play, key)
    end = play.ends[key]
    assert isinstance(end, Finished)
    return end


def cached(play: Play, prompt: list[int], **params) -> int:
    """How many of the prompt's tokens were not computed."""
    return served(play, prompt, **params).timing.cached_prompt_tokens


# ---------------------------------------------------------------------- slots of snapshots


def test_a_snapshot_is_evicted_for_a_sequence() -> None:
    slots = Slots(1, num_snapshots=1)
    for key in (b"a", b"b"):
        slot = slots.begin_snapshot()
        assert slot is not None
        slots.keep_snapshot(slot, key)
    assert not slots.is_short
    slots.snapshots.note_used(b"a")
    held = [slots.take()]
    assert b"a" in slots.snapshots
    assert b"b" not in slots.snapshots
    slots.check_integrity(held)


def test_a_snapshot_that_is_begun_takes_no_slot_of_a_sequence() -> None:
    slots = Slots(2, num_snapshots=1)
    begun = slots.begin_snapshot()
    assert slots.begin_snapshot() is None
    held = [slots.take(), slots.take()]
    assert slots.is_short
    assert begun is not None
    slots.check_integrity(held, [begun])
    slots.keep_snapshot(begun, b"a")
    assert not slots.is_short
    slots.check_integrity(held)


def test_a_snapshot_is_not_evicted_for_its_own_copy() -> None:
    slots = Slots(1, num_snapshots=1)
    slot = slots.begin_snapshot()
    slots.keep_snapshot(slot, b"a")
    assert slots.can_copy(slot)
    other = slots.take()
    assert not slots.can_copy(slot)
    slots.release(other)
    copy = slots.fork(slot)
    assert slots.is_short  # the copy is not made
    slots.check_integrity([copy])
    slots.complete_copies(slots.pending_copies())
    assert not slots.is_short
    slots.check_integrity([copy])


def test_a_second_snapshot_of_a_border_is_dropped() -> None:
    slots = Slots(2, num_snapshots=2)
    first = slots.begin_snapshot()
    second = slots.begin_snapshot()
    slots.keep_snapshot(first, b"a")
    slots.keep_snapshot(second, b"a")
    assert slots.snapshots.slots() == [first]
    slots.check_integrity([])


@pytest.mark.parametrize("begun", [[], [0, 1]])
def test_integrity_sees_a_snapshot_of_no_step(begun: list[int]) -> None:
    slots = Slots(2, num_snapshots=2)
    slots.begin_snapshot()
    with pytest.raises(AssertionError, match="begun"):
        slots.check_integrity([], begun)


# ---------------------------------------------------------------------- hits


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (12, 8), (13, 12), (14, 12)])
def test_the_same_prompt_begins_at_its_last_full_block(
    length: int, hit: int, overlap: bool
) -> None:
    play = with_snapshots(overlap=overlap)
    served(play, PROMPT[:length])
    computed = play.batches
    play.batches = []
    assert cached(play, PROMPT[:length]) == hit
    assert play.rows(0) == [(1, 0, hit, length)]
    assert len(play.batches) <= len(computed)


def test_a_longer_prompt_goes_on_from_a_shorter_one() -> None:
    play = with_snapshots()
    served(play, PROMPT[:9])
    assert cached(play, PROMPT) == 8
    assert cached(play, PROMPT) == 12


def test_hits_are_counted() -> None:
    play = with_snapshots()
    served(play, PROMPT)
    key = play.submit(PROMPT, max_tokens=2)
    stats = play.step().stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (14, 12)
    play.drain()
    timing = play.ends[key].timing
    assert (timing.cached_prompt_tokens, timing.computed_prompt_tokens) == (12, 2)


def test_a_prompt_ends_a_chunk_at_its_last_full_block_if_that_saves_enough() -> None:
    play = with_snapshots(least=3, every=9)
    play.submit(PROMPT[:11])
    play.submit(PROMPT)
    play.step(2)
    assert play.rows(0) == [(0, 0, 0, 11), (1, 0, 0, 12)]
    assert play.rows(1) == [(0, 0, 11, 12), (1, 0, 12, 14)]


def test_a_beginning_that_prompts_share_gets_a_snapshot() -> None:
    """The second prompt shows what is shared; the third begins there."""
    play = with_snapshots(every=9)
    served(play, PROMPT)
    for hit in (0, 8, 8):
        tail = [hit, 7, len(play.submits), 7, 7, 7]
        assert cached(play, PROMPT[:8] + tail) == hit


def test_every_so_many_blocks_there_is_a_snapshot() -> None:
    """A chunk ends at the last border that it reaches. Later snapshots are further apart."""
    play = with_snapshots(least=1, every=2, num_blocks=200, max_num_batched_tokens=10)
    prompt = [token % 50 for token in range(90)]
    played = play.submit(prompt, max_tokens=1)
    play.drain()
    check_streams(play, played)
    ends = [batch.rows[0].end for batch in play.batches]
    assert ends == [8, 16, 24, 34, 44, 54, 64, 72, 82, 88, 90]
    made = [batch.rows[0].end for batch in play.batches if batch.snapshots]
    assert made == [8, 16, 24, 44, 72, 88]


def test_a_request_with_prompt_logprobs_computes_its_prompt() -> None:
    play = with_snapshots()
    served(play, PROMPT)
    play.batches = []
    assert cached(play, PROMPT, prompt_logprobs=1) == 0
    assert not any(batch.snapshots for batch in play.batches)  # there is one already


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"num_snapshots": 0}])
def test_without_snapshots_nothing_is_a_hit(options: dict) -> None:
    play = with_snapshots(**options)
    served(play, PROMPT)
    assert cached(play, PROMPT) == 0
    assert not any(batch.snapshots for batch in play.batches)


def test_a_salt_separates_snapshots() -> None:
    play = with_snapshots()
    served(play, PROMPT)
    assert cached(play, PROMPT, cache_salt="a") == 0
    assert cached(play, PROMPT, cache_salt="a") == 12


@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_is_not_changed_by_who_begins_with_it(overlap: bool) -> None:
    play = with_snapshots(overlap=overlap)
    served(play, PROMPT)
    keys = [play.submit([*PROMPT[:12], tail], max_tokens=5, n=2) for tail in range(4)]
    play.drain()
    check_streams(play, *keys)
    assert cached(play, PROMPT) == 12


# ---------------------------------------------------------------------- too little room


def test_the_least_recently_used_is_evicted() -> None:
    play = with_snapshots(num_slots=1, num_snapshots=1, every=99)
    first, second, third = [[key] * 6 for key in range(3)]
    served(play, first)
    served(play, second)  # for which the only other slot is used
    assert cached(play, first) == 0
    assert cached(play, third) == 0
    assert cached(play, third) == 4


def test_blocks_may_go_before_their_snapshot() -> None:
    play = with_snapshots(num_blocks=5)
    served(play, PROMPT)
    assert len(play.scheduler.live.slots.snapshots) == 1
    served(play, [7] * 14)
    assert cached(play, PROMPT) == 0


def test_snapshots_leave_all_slots_to_sequences() -> None:
    play = with_snapshots(num_slots=3, num_snapshots=1, every=1)
    keys = [play.submit([key] * 9, max_tokens=9) for key in range(8)]
    most = 0
    while play.engine.has_work:
        play.step()
        most = max(most, len(play.scheduler.live.running))
    check_streams(play, *keys)
    assert most == 3


# ---------------------------------------------------------------------- preemption, faults


def test_a_preempted_sequence_begins_at_its_last_snapshot() -> None:
    play = with_snapshots(num_blocks=9, max_num_batched_tokens=32, watermark=0.0)
    keys = [play.submit([key] * 9, max_tokens=16) for key in range(2)]
    play.drain()
    check_streams(play, *keys)
    preempted = [key for key in keys if play.ends[key].timing.preemptions]
    assert preempted
    rows = [row for batch in play.batches for row in batch.rows if row.key in preempted]
    again = [row for row, before in zip(rows[1:], rows, strict=False) if row.start < before.end]
    assert again
    assert all(row.start > 0 for row in again)


def test_a_resumed_request_begins_at_a_snapshot() -> None:
    """As after the end of an engine, in which others have run since."""
    play = with_snapshots()
    served(play, PROMPT)
    key = play.submit(PROMPT, max_tokens=9)
    (right,) = play.run_alone(key)
    message = msgspec.structs.replace(
        play.submits[key], key=99, emitted=[Emitted(ids=right[:4])], first_token=0.0
    )
    play.engine.send(message)
    play.drain()
    assert play.streams[99, 0] == right[4:]
    rows = [row for batch in play.batches for row in batch.rows if row.key == 99]
    assert rows[0].start == 12


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", range(1, 10))
def test_a_failed_step_keeps_no_snapshot(at: int, overlap: bool) -> None:
    play = with_snapshots(overlap=overlap, faults=Once(at), max_num_batched_tokens=8)
    keys = [play.submit(PROMPT[: 9 + key % 3], max_tokens=6, n=1 + key % 2) for key in range(5)]
    play.drain()
    check_streams(play, *keys)
    slots = play.scheduler.live.slots
    assert slots.num_free + len(slots.snapshots) == slots.total


def test_a_row_that_is_executed_again_begins_at_its_snapshot() -> None:
    play = with_snapshots()
    served(play, PROMPT)
    play.batches = []
    play.runner.faults = Once(1)
    assert cached(play, PROMPT) == 12
    assert play.rows(0) == play.rows(1) == [(1, 0, 12, 14)]


def test_a_request_that_fails_in_its_row_leaves_no_snapshot() -> None:
    play = with_snapshots()
    play.runner.bad_keys.add(0)
    play.submit(PROMPT)
    play.drain()
    assert cached(play, PROMPT) == 0


def test_a_cancelled_request_leaves_no_snapshot_that_it_began() -> None:
    play = with_snapshots()
    scheduler = play.scheduler
    scheduler.submit(play.submits[play.submit(PROMPT)])
    batch = scheduler.schedule(0.0)
    assert batch.snapshots
    scheduler.cancel(0)
    scheduler.check_integrity()
    scheduler.update(batch, play.runner.execute(batch), 0.0)
    scheduler.check_integrity()
    assert len(scheduler.live.slots.snapshots) == 0
