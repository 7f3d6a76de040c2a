"""Latency tiers: what a step leaves to lower ones, and what drafts may take of it."""

import itertools
import random

import pytest
from jitney.batch import Batch
from jitney.core.policy.cost import StepCost, Weights
from jitney.core.policy.prices import NO_DRAFTS, Prices
from jitney.core.policy.tier_limits import TierLimits
from jitney.read_config import make_config

from tests.core.play import check_streams
from tests.core.timed import BULK, COST, FAST, OVERLAP, TARGET, Timed, first_come, mixed, seconds_of


@OVERLAP
def test_a_step_is_within_the_gap_target_of_the_fast_tier(overlap: bool) -> None:
    play = Timed(overlap=overlap)
    fast, crowd = mixed(play)
    play.drain()
    assert max(play.gaps(fast)[1:]) <= TARGET * 1.01
    assert first_come(overlap) > 2 * TARGET
    steps = [batch for batch in play.batches if fast in {row.key for row in batch.rows}]
    assert min(map(seconds_of, steps[1:15])) > TARGET * 0.8e-3, "what fits is used"
    assert sum(len(play.bulk_rows(each)) for each in steps) > 8 * len(steps)
    check_streams(play, fast, *crowd)


@OVERLAP
def test_held_back_are_the_last_by_rank_and_counted(overlap: bool) -> None:
    play = Timed(overlap=overlap, prefix_caching=False)
    crowd = [play.bulk([key], max_tokens=40) for key in range(30)]
    play.step(4)
    play.fast([1, 2, 3], max_tokens=30)
    play.step(3)
    for _ in range(20):
        report = play.step()
        rows = play.bulk_rows(play.batches[-1])
        assert rows == crowd[: len(rows)]
        assert 10 <= len(rows) <= 14
        assert report.stats.tiers[1].held_back == 30 - len(rows)
        assert report.stats.tiers[1].running == 30
    play.drain()
    check_streams(play, *crowd)


@OVERLAP
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5])
def test_lower_tiers_keep_their_share_of_a_target_that_cannot_be_met(
    share: float, overlap: bool
) -> None:
    play = Timed({"gap_ms": 10}, {"share": share}, overlap=overlap)
    for key in range(4):
        play.bulk([key], max_tokens=60)
        play.bulk([key] * 300, max_tokens=2)
    play.step(3)
    fast = play.fast([1, 2, 3], max_tokens=50)
    play.step(4)
    for _ in range(30):
        play.step()
        (batch,) = play.batches[-1:]
        beside = seconds_of(batch) - COST.steps - COST.tokens - COST.samples
        assert fast in {row.key for row in batch.rows}
        assert play.bulk_rows(batch)
        # Of a target of 10 ms; or one row, or a token of a prompt, where that is more.
        assert 0.4 * share * 10e-3 < beside < max(share * 10e-3, COST.tokens) + 2e-3
    play.drain()
    check_streams(play, *play.submits)


@OVERLAP
def test_the_first_by_rank_of_a_tier_advances_though_others_of_it_decode(overlap: bool) -> None:
    """By a token in each step, where the target cannot be met and the share is next to nothing."""
    play = Timed({"gap_ms": 10}, {"share": 0.01}, overlap=overlap)
    crowd = [play.bulk([key], max_tokens=30) for key in range(4)]
    fast = play.fast([1, 2, 3], max_tokens=50)
    play.step(4)
    first = play.bulk([5] * 40, max_tokens=2, priority=-9)
    play.step(42 + overlap)
    assert first in play.order
    play.drain()
    check_streams(play, first, fast, *crowd)


@OVERLAP
def test_a_block_of_a_prompt_that_takes_longer_than_the_target_is_cut(overlap: bool) -> None:
    play = Timed(overlap=overlap, block_size=64)
    fast = play.fast([1, 2, 3], max_tokens=60)
    play.step(3)
    bulk = play.bulk([4] * 300, max_tokens=2)
    play.drain()
    assert play.times[bulk][0] < play.times[fast][-1], "it was computed beside the fast one"
    assert max(play.gaps(fast)[1:]) <= TARGET * 1.01
    check_streams(play, fast, bulk)


@OVERLAP
def test_a_prompt_of_the_fast_tier_comes_before_chunks_of_bulk(overlap: bool) -> None:
    """Though these are running, and a step of the target has no room for both."""
    play = Timed(overlap=overlap, max_num_batched_tokens=64)
    for key in range(3):
        play.bulk([key] * 300, max_tokens=2)
    talks = play.fast([9], max_tokens=90)
    play.step(4)
    steps = len(play.batches)
    asks = play.fast([1] * 50, max_tokens=4)
    while asks not in play.order:
        play.step()
    assert len(play.batches) - steps <= 5
    assert max(play.gaps(talks)) <= TARGET * 1.01, "nor does it break the rhythm of its own tier"
    play.drain()
    check_streams(play, *play.submits)


@OVERLAP
def test_a_prompt_of_the_fast_tier_leaves_bulk_its_share_of_the_step(overlap: bool) -> None:
    play = Timed(overlap=overlap, bulk={"share": 0.3})
    decodes = play.fast([1, 2, 3], max_tokens=40)
    play.step(3)
    bulk = play.bulk([4] * 200, max_tokens=2)
    prompt = play.fast([5] * 200, max_tokens=2)
    play.drain()
    both = [
        each for each in play.batches if {decodes, bulk, prompt} <= {row.key for row in each.rows}
    ]
    assert len(both) > 5
    steps = [seconds_of(each) for each in both[1:]]  # in the first one both are admitted
    assert max(steps) <= TARGET * 1.01e-3
    check_streams(play, decodes, bulk, prompt)


@OVERLAP
def test_bulk_steps_are_a_third_of_the_target_for_a_first_token(overlap: bool) -> None:
    play = Timed({"ttft_ms": 120}, overlap=overlap)
    for key in range(8):
        play.bulk([key] * 500, max_tokens=3)
    play.step(3)
    for _ in range(20):
        play.step()
        assert seconds_of(play.batches[-1]) <= 0.0401
        asked = play.now
    key = play.fast([1] * 20, max_tokens=2)
    play.drain()
    assert play.times[key][0] - asked < 0.120
    check_streams(play, *play.submits)


@OVERLAP
@pytest.mark.parametrize("target", [{"gap_ms": 60}, {"ttft_ms": 180}])
def test_the_target_of_a_lower_tier_does_not_lift_that_of_the_first(
    target: dict[str, float], overlap: bool
) -> None:
    """Though its own is the smaller one, it takes no longer steps."""
    tiers = [{"name": "fast", **target}, {"name": "chat", "ttft_ms": 150}]
    play = Timed(tiers=tiers, overlap=overlap)
    fast = play.fast([1, 2, 3], max_tokens=30)
    if "ttft_ms" in target:
        play.drain()
    play.step(2)
    begin = len(play.batches)
    chats = [play.submit([key] * 300, tier="chat", max_tokens=20) for key in range(4)]
    play.drain()
    assert max(1e3 * seconds_of(batch) for batch in play.batches[begin:]) <= 60 * 1.01
    check_streams(play, fast, *chats)


@OVERLAP
def test_who_has_a_gap_target_decodes_though_a_first_token_above_allows_less(overlap: bool) -> None:
    """Only its prompts, and the tiers below it, are limited by that."""
    tiers = [{"name": "fast", "ttft_ms": 60}, {"name": "chat", "gap_ms": 200}, BULK]
    play = Timed(tiers=tiers, overlap=overlap)
    bulk = [play.bulk([key], max_tokens=200) for key in range(4)]
    play.step(4)
    chats = [play.submit([key], tier="chat", max_tokens=60) for key in range(16)]
    while len(play.order) < len(bulk) + len(chats):
        play.step()
    begin = len(play.batches)
    long = play.submit([1] * 200, tier="chat", max_tokens=2)
    for _ in range(20):
        report = play.step()
        keys = {row.key for row in play.batches[-1].rows}
        assert keys.issuperset(chats)
        assert 0 < report.stats.tiers[2].held_back < 4
        assert len(keys.intersection(bulk)) == 4 - report.stats.tiers[2].held_back
    parts = [row for batch in play.batches[begin:] for row in batch.rows if row.key == long]
    assert max(len(row.token_ids) for row in parts) <= 8, "its prompt is cut"
    play.drain()
    check_streams(play, *bulk, *chats, long)


def test_a_prompt_waits_for_a_full_step_though_its_tokens_take_no_time() -> None:
    """A chunk takes some time however many tokens it has, and the step has less left."""
    play = Timed()
    crowd = [play.bulk([key], max_tokens=40) for key in range(24)]
    fast = play.fast([1, 2, 3], max_tokens=40)
    while fast not in play.order:
        play.step()
    prompt = play.bulk([5] * 100, max_tokens=2)
    play.scheduler.policies.cost.weights = Weights(step=10e-3, any_chunk=2e-3, sample=1e-3)
    report = play.step()
    rows = play.bulk_rows(play.batches[-1])
    assert 9 <= len(rows) <= 11
    assert rows == crowd[: len(rows)]
    assert report.stats.tiers[1].held_back == 24 - len(rows) + 1
    play.drain()
    check_streams(play, prompt, fast, *crowd)


def test_the_seconds_of_a_step_with_chunks_are_taken_once_for_all_tiers() -> None:
    tiers = [FAST, {"name": "mid", "aging_s": 5.0}, BULK]
    play = Timed(tiers=tiers, max_num_batched_tokens=64)
    play.fast([1, 2, 3], max_tokens=50)
    play.step(2)
    play.submit([4] * 300, tier="mid", max_tokens=2)
    play.bulk([5] * 300, max_tokens=2)
    play.step()
    limits = play.scheduler.policies.limits
    assert isinstance(limits, TierLimits)
    play.scheduler.policies.cost.weights = Weights(step=1.0, any_chunk=100.0)
    running = play.scheduler.live.running
    assert [sequence.num_to_prefill > 0 for sequence in running] == [False, True, True]
    limits.begin(running)
    assert limits._taken == 101.0
    play.fast([6] * 300, max_tokens=2)
    play.step()
    play.scheduler.policies.cost.weights = Weights(step=1.0, any_chunk=100.0)
    assert len(running) == 4
    limits.begin(running)
    assert limits._taken + limits._prompt_seconds_due == 101.0


@OVERLAP
def test_no_step_is_empty_though_a_target_is_below_the_time_of_any(overlap: bool) -> None:
    """A prompt has its block of the step before a decode that would have to make way for it."""
    play = Timed({"ttft_ms": 6}, num_blocks=24, watermark=0.0, overlap=overlap)
    decodes = play.bulk([1, 2, 3], max_tokens=60)
    play.step(3)
    prompt = play.bulk([5] * 80, max_tokens=2, priority=-5)
    play.drain()
    check_streams(play, decodes, prompt)


@OVERLAP
def test_lower_tiers_have_no_drafts_while_they_are_limited(overlap: bool) -> None:
    play = Timed(overlap=overlap, speculation={"max_drafts": 4})
    play.draft(1.0)
    crowd = [play.bulk([key], max_tokens=60) for key in range(6)]
    play.step(6)
    assert any(row.drafts for batch in play.batches for row in batch.rows)
    fast = play.fast([1, 2], max_tokens=40)
    play.step(3 + overlap)
    drafts = {"fast": 0, "bulk": 0}
    while fast not in play.ends:
        play.step()
        if fast not in play.ends:
            for row in play.batches[-1].rows:
                drafts[play.tier_of(row.key)] += row.drafts
    assert drafts["fast"] > drafts["bulk"] == 0
    play.drain()
    check_streams(play, fast, *crowd)


@OVERLAP
def test_drafts_of_the_fast_tier_stop_at_its_target(overlap: bool) -> None:
    """And what they take is not given to others as well."""
    play = Timed(overlap=overlap, speculation={"max_drafts": 8})
    play.draft(1.0)
    crowd = [play.bulk([key], max_tokens=60) for key in range(12)]
    play.step(3)
    fast = [play.fast([1, key], max_tokens=60) for key in range(4)]
    play.step(4)
    begin = len(play.batches)
    while not any(key in play.ends for key in fast):
        play.step()
    steps = play.batches[begin:-1]
    assert max(map(seconds_of, steps)) <= TARGET * 1.01e-3
    assert any(row.drafts for batch in steps for row in batch.rows)
    assert all(play.bulk_rows(batch) for batch in steps)
    play.drain()
    check_streams(play, *fast, *crowd)


@OVERLAP
def test_what_a_draft_model_reads_stops_at_the_target(overlap: bool) -> None:
    """Prompts that take twice the target to read are read in parts, and then drafts come of it."""
    model = {"drafter": "draft_model", "model": "m", "max_drafts": 4}
    play = Timed(overlap=overlap, speculation=model, num_blocks=1024)
    play.draft(1.0)
    crowd = [play.bulk([key], max_tokens=60) for key in range(12)]
    fast = play.fast([1] * 400, max_tokens=80)
    while fast not in play.order:
        play.step()
    begin = len(play.taken) + overlap
    while fast not in play.ends:
        play.step()
    assert max(play.taken[begin:-1]) <= TARGET * 1.01e-3
    rows = [row for batch in play.batches for row in batch.rows if row.key == fast]
    assert sum(0 < row.most_read < 200 for row in rows) > 4, "in parts"
    assert sum(row.drafts for row in rows) > 40
    play.drain()
    check_streams(play, fast, *crowd)


def test_a_step_that_is_planned_again_counts_once_what_it_holds_back() -> None:
    """With overlap a step that asks a draft model is planned again after the step in flight."""
    model = {"drafter": "draft_model", "model": "m", "max_drafts": 4}
    play = Timed(overlap=True, speculation=model, num_blocks=1024)
    play.draft(1.0)
    # Only after a step that asks nothing is one in flight when the next is planned.
    prices = itertools.cycle([NO_DRAFTS, Prices(0.0), Prices(0.0), Prices(0.0)])
    play.scheduler.policies.drafts._prices = lambda some: next(prices)  # type: ignore
    for key in range(24):
        play.bulk([key], max_tokens=200)
    play.step(3)
    fast = play.fast([1] * 20, max_tokens=60)
    while fast not in play.order:
        play.step()
    reverted: list[Batch] = []
    revert = play.scheduler.revert
    play.scheduler.revert = lambda batch: (reverted.append(batch), revert(batch))  # type: ignore
    held_back = 0
    while fast not in play.ends:
        reverted.clear()
        report = play.step()
        if reverted:
            held_back = report.stats.tiers[1].held_back
            assert held_back == 24 - len(play.bulk_rows(play.batches[-1]))
    assert held_back > 0


def test_who_may_not_ask_loses_no_step_by_waiting_for_it() -> None:
    """With overlap a sequence that is to ask waits for its token: not where it is refused then."""
    model = {"drafter": "draft_model", "model": "m", "max_drafts": 4}
    play = Timed(overlap=True, speculation=model, num_blocks=1024, fast={"gap_ms": 12.5})
    play.draft(1.0)
    bulk = play.bulk([2], max_tokens=200)
    fast = play.fast([1] * 50, max_tokens=100)
    while fast not in play.order:
        play.step()
    begin = len(play.batches)
    while fast not in play.ends:
        play.step()
    assert not any(row.propose for batch in play.batches[begin:] for row in batch.rows)
    assert len(play.batches) - begin < 115, "some 99 tokens"
    play.drain()
    check_streams(play, fast, bulk)


def test_a_draft_model_is_not_asked_for_what_would_never_end() -> None:
    """Where the target leaves it a token or two a step, as many as the sequence grows by."""
    model = {"drafter": "draft_model", "model": "m", "max_drafts": 4}
    for gap_ms in (14.0, 15.0):
        play = Timed(block_size=1, speculation=model, num_blocks=1024, fast={"gap_ms": gap_ms})
        play.draft(1.0)
        key = play.fast([1] * 200, max_tokens=300)
        play.bulk([2], max_tokens=400)
        play.drain()
        check_streams(play, key)
        rows = [row for batch in play.batches for row in batch.rows if row.key == key]
        assert sum(row.most_read for row in rows) < 1500
        assert all(row.most_read >= 16 for row in rows if row.propose and row.start < 240)


def test_the_aim_shrinks_until_one_gap_in_a_hundred_exceeds_the_target() -> None:
    """Where steps take longer than planned by chance, by 15 % in the mean, half again at most."""
    tiers = make_config({"model": "m", "tiers": [FAST, BULK]}).tiers
    limits = TierLimits(tiers, StepCost(), 4)
    chance, now, exceeded = random.Random(3), 0.0, 0
    for step in range(20_000):
        taken = 22e-3 * limits.aim * (1.0 + 0.3 * chance.random())
        now += taken
        exceeded += step >= 2000 and taken > 22e-3
        limits.note_step(22e-3, now)
    assert 0.003 < exceeded / 18_000 < 0.02
    assert 0.72 < limits.aim < 0.85
    aim = limits.aim
    limits.note_step(None, now + 60.0)
    limits.note_step(22e-3, now + 90.0)
    assert limits.aim == aim, "neither is a gap"


@OVERLAP
def test_a_step_with_a_chunk_that_is_never_cut_does_not_change_the_aim(overlap: bool) -> None:
    """Such as the prompt of a tier above that of the target. No estimate was wrong."""
    tiers = [{"name": "fast", "ttft_ms": 600}, {"name": "chat", "gap_ms": 40}, BULK]
    play = Timed(tiers=tiers, overlap=overlap)
    chat = play.submit([1, 2, 3], tier="chat", max_tokens=60)
    bulk = [play.bulk([key], max_tokens=200) for key in range(4)]
    while len(play.order) < 5:
        play.step()
    play.step(4)
    limits = play.scheduler.policies.limits
    aim = limits.aim
    begin = len(play.taken)
    fast = play.fast([5] * 300, max_tokens=2)
    while fast not in play.order:
        play.step()
    assert max(play.taken[begin:]) > 2 * 40e-3
    assert limits.aim >= aim
    play.drain()
    check_streams(play, chat, fast, *bulk)


@pytest.mark.parametrize("size", range(1, 13))
def test_who_is_admitted_ahead_leaves_a_block_to_every_decode(size: int) -> None:
    for steps in range(2, 12):
        play = Timed(overlap=True, num_blocks=8, watermark=0.0, fast={"ttft_ms": 300})
        keys = [play.bulk([key] * 5, max_tokens=10) for key in range(2)]
        play.step(steps)
        keys.append(play.fast([9] * size, max_tokens=3))
        play.drain()
        check_streams(play, *keys)
