"""Latency tiers: what a step leaves to lower ones, who makes way for whom, and that none starves.

The clock is the steps' own: each takes what a linear cost says, which the scheduler has to learn.
"""

import itertools
import random
from itertools import pairwise
from typing import Any

import pytest
from jitney.batch import Batch, StepOutput
from jitney.core.policy.cost import StepCost, StepShape, Weights
from jitney.core.policy.plain import NoCosts
from jitney.core.policy.speculation import NO_DRAFTS, Prices
from jitney.core.policy.tier_limits import TierLimits
from jitney.messages import Cancel, Failed
from jitney.read_config import make_config

from tests.core.play import Play, check_streams

COST = StepShape(
    steps=10e-3, any_chunk=1e-3, tokens=0.4e-3, samples=0.4e-3, context=1e-6,
    drafting_rows=0.5e-3, draft_tokens=0.8e-3,
    asking_rows=0.5e-3, model_passes=0.5e-3, tokens_read=0.1e-3,
)  # fmt: skip
TARGET = 22  # ms: a step of one sequence takes 11
FAST = {"name": "fast", "gap_ms": TARGET}
BULK = {"name": "bulk", "share": 0.1, "aging_s": 5.0}
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def seconds_of(batch: Batch, output: StepOutput | None = None) -> float:
    shape = StepShape.of(batch, () if output is None else output.rows)
    return sum(a * b for a, b in zip(COST, shape, strict=True))


class Timed(Play):
    """A step takes time, which is known to the scheduler."""

    def __init__(self, fast: dict | None = None, bulk: dict | None = None, **options: Any) -> None:
        tiers = [FAST | (fast or {}), BULK | (bulk or {})]
        options = {"tiers": tiers, "num_blocks": 512, "block_size": 4, **options}
        super().__init__(**options)
        self.times: dict[int, list[float]] = {}
        self.taken: list[float] = []
        wait_for = self.runner.wait_for
        self.runner.wait_for = lambda step: self._after(step.batch, wait_for(step))
        if self.scheduler.config.tiers:
            self.teach(COST)

    def teach(self, cost: StepShape) -> None:
        chance = random.Random(1)
        for _ in range(400):
            rows, chunk = chance.randrange(1, 40), chance.choice([0, 0, 30, 200])
            context = chance.randrange(10_000)
            shape = StepShape(1.0, float(chunk > 0), rows + chunk, rows, context)
            self._learn(cost, shape)
            drafted, asked = chance.randrange(8), chance.randrange(8)
            drafts, passes = drafted * chance.randrange(8), (asked > 0) * chance.randrange(8)
            read = asked * chance.randrange(20)
            shape = shape._replace(
                drafting_rows=drafted,
                draft_tokens=drafts,
                asking_rows=asked,
                model_passes=passes,
                tokens_read=read,
            )
            self._learn(cost, shape)

    def _learn(self, cost: StepShape, shape: StepShape) -> None:
        self.scheduler.policies.cost.add(
            shape, sum(a * b for a, b in zip(cost, shape, strict=True))
        )

    def _after(self, batch: Batch, output: StepOutput) -> StepOutput:
        self.taken.append(seconds_of(batch, output))
        self.now += self.taken[-1]
        return output

    def _take(self, event: Any) -> None:
        super()._take(event)
        self.times.setdefault(event.key, []).append(self.now)

    def fast(self, prompt: list[int], **params: Any) -> int:
        return self.submit(prompt, tier="fast", **params)

    def bulk(self, prompt: list[int], **params: Any) -> int:
        return self.submit(prompt, tier="bulk", **params)

    def gaps(self, key: int) -> list[float]:
        return [1e3 * (b - a) for a, b in pairwise(self.times[key][:-1])]

    def tier_of(self, key: int) -> str:
        return self.submits[key].params.tier or "bulk"

    def bulk_rows(self, batch: Batch) -> list[int]:
        return [row.key for row in batch.rows if self.tier_of(row.key) == "bulk"]


def mixed(play: Timed) -> tuple[int, list[int]]:
    """One of the fast tier beside bulk with long prompts and many decodes."""
    crowd = [play.bulk([key] * 60, max_tokens=30) for key in range(24)]
    play.step(6)
    fast = play.fast([1, 2, 3], max_tokens=30)
    return fast, crowd


def first_come(overlap: bool) -> float:
    """The longest gap of the same without tiers, in ms."""
    play = Timed(overlap=overlap, tiers=[])
    for key in range(24):
        play.submit([key] * 60, max_tokens=30)
    play.step(6)
    key = play.submit([1, 2, 3], max_tokens=30, priority=-1)
    play.drain()
    return max(play.gaps(key)[1:])


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
        # Of a target of 10 ms; or one row, or a block of a prompt, where that is more.
        assert 0.4 * share * 10e-3 < beside < max(share * 10e-3, 4 * COST.tokens) + 2e-3
    play.drain()
    check_streams(play, *play.submits)


@OVERLAP
def test_the_first_by_rank_of_a_tier_advances_though_others_of_it_decode(overlap: bool) -> None:
    """By a block in each step, where the target cannot be met and the share is next to nothing."""
    play = Timed({"gap_ms": 10}, {"share": 0.01}, overlap=overlap)
    crowd = [play.bulk([key], max_tokens=30) for key in range(4)]
    fast = play.fast([1, 2, 3], max_tokens=50)
    play.step(4)
    first = play.bulk([5] * 40, max_tokens=2, priority=-9)
    play.step(12 + overlap)
    assert first in play.order
    play.drain()
    check_streams(play, first, fast, *crowd)


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


@OVERLAP
@pytest.mark.parametrize("ttft_ms", [None, 1000])
def test_bulk_makes_way_for_a_tier_with_a_target_for_its_first_token(
    ttft_ms: int | None, overlap: bool
) -> None:
    play = Timed({"ttft_ms": ttft_ms}, max_num_seqs=4, overlap=overlap)
    crowd = [play.bulk([key] * 9, max_tokens=40) for key in range(6)]
    play.step(5)
    fast = [play.fast([1, 2, key], max_tokens=4) for key in range(2)]
    play.step(4 + overlap)
    preempted = play.scheduler.live.preemptions
    assert (fast[0] in play.order, preempted) == ((True, 2) if ttft_ms else (False, 0))
    play.drain()
    assert play.scheduler.live.preemptions == preempted
    check_streams(play, *fast, *crowd)


@OVERLAP
def test_bulk_makes_way_for_a_tier_with_a_cap_that_is_not_reached(overlap: bool) -> None:
    """A full batch is no reason not to: that is what others make way for."""
    play = Timed({"ttft_ms": 1000, "max_running": 2}, max_num_seqs=4, overlap=overlap)
    crowd = [play.bulk([key] * 9, max_tokens=40) for key in range(6)]
    play.step(5)
    fast = [play.fast([1, 2, key], max_tokens=20) for key in range(3)]
    play.step(4 + overlap)
    assert set(fast) & set(play.order) == set(fast[:2])
    assert play.scheduler.live.preemptions == 2, "the third request waits for its own tier"
    play.drain()
    check_streams(play, *fast, *crowd)


def test_decodes_leave_an_eighth_of_the_budget_to_a_prompt_that_others_make_way_for() -> None:
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 64}
    play = Timed({"gap_ms": None, "ttft_ms": 1e6}, **options)
    for key in range(64):
        play.bulk([key % 50], max_tokens=12)
    play.step(4)
    fast = play.fast([1] * 40, max_tokens=4)
    play.step()
    assert play.scheduler.live.preemptions == 1
    first = [row for row in play.batches[-1].rows if row.key == fast]
    assert [len(row.token_ids) for row in first] == [8]
    play.drain()
    check_streams(play, *play.submits)


def test_drafts_leave_its_tokens_to_a_prompt_that_others_make_way_for() -> None:
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    play = Timed({"gap_ms": None, "ttft_ms": 1e6}, speculation={"max_drafts": 8}, **options)
    play.draft(1.0)
    play.fast([2], max_tokens=90)
    play.bulk([3], max_tokens=90)
    play.step(4)
    assert any(row.drafts == 8 for row in play.batches[-1].rows)
    fast = play.fast([1] * 30, max_tokens=4)
    play.step()
    assert play.scheduler.live.preemptions == 1
    first = [row for row in play.batches[-1].rows if row.key == fast]
    assert [len(row.token_ids) for row in first] == [30]
    play.drain()
    check_streams(play, *play.submits)


@OVERLAP
def test_an_old_request_does_not_make_way(overlap: bool) -> None:
    """It has aged, so it ranks before a request of the first tier that came after it. What a
    younger one could give is not enough, so that one does not make way either."""
    limits = {"num_blocks": 24, "watermark": 0.0, "overlap": overlap}
    play = Timed({"ttft_ms": 1000}, {"aging_s": 1.0}, **limits)
    old = play.bulk([1] * 40, max_tokens=20)
    play.step(3)
    play.now += 2.0
    young = play.bulk([2] * 24, max_tokens=8)
    play.step(3)
    fast = play.fast([3] * 72, max_tokens=4)
    play.drain()
    assert play.ends[old].timing.preemptions == 0
    check_streams(play, old, young, fast)


@OVERLAP
def test_bulk_is_preempted_first_and_for_the_blocks_of_a_prompt(overlap: bool) -> None:
    play = Timed({"ttft_ms": 1000}, num_blocks=24, overlap=overlap, watermark=0.0)
    crowd = [play.bulk([key] * 20, max_tokens=30) for key in range(4)]
    play.step(3)
    fast = play.fast([1] * 40, max_tokens=40)
    play.step(5)
    assert fast in play.order, "its ten blocks were not free"
    play.drain()
    assert play.ends[fast].timing.preemptions == 0
    assert sum(play.ends[key].timing.preemptions for key in crowd) >= 3
    check_streams(play, fast, *crowd)


@OVERLAP
def test_nobody_makes_way_for_blocks_that_are_cached_hits(overlap: bool) -> None:
    """Of the ten blocks of its prompt nine are held by one that runs, or cached."""
    play = Timed({"ttft_ms": 1000}, num_blocks=26, overlap=overlap, watermark=0.0)
    prompt = [7] * 36
    first = play.fast(prompt, max_tokens=8)
    crowd = [play.bulk([key] * 16, max_tokens=8) for key in range(2)]
    play.step(3)
    again = play.fast([*prompt, 1, 2, 3], max_tokens=4)
    play.drain()
    assert play.scheduler.live.preemptions == 0
    check_streams(play, first, again, *crowd)


@OVERLAP
@pytest.mark.parametrize("shared", ["with the fast tier", "among one another"])
def test_who_gives_no_blocks_by_making_way_does_not(shared: str, overlap: bool) -> None:
    """Blocks that others hold too are free once all of these make way, and not before."""
    play = Timed({"ttft_ms": 1000}, num_blocks=24, overlap=overlap, watermark=0.0)
    prompt, among = [7] * 41, shared == "among one another"
    holder = (play.bulk if among else play.fast)(prompt, max_tokens=20)
    play.step(3)
    crowd = [play.bulk([*prompt[:40], key], max_tokens=20) for key in range(3)]
    play.step(3)
    before = len(play.scheduler.live.running)
    fast = play.fast([1] * 60, max_tokens=4)
    play.step(3)
    running = len(play.scheduler.live.running)
    assert (before, running) == (4, 1 if among else 4)
    assert play.scheduler.live.preemptions == (4 if among else 0)
    play.drain()
    check_streams(play, holder, fast, *crowd)


@OVERLAP
def test_who_holds_the_hits_of_a_prompt_gives_no_blocks_for_them(overlap: bool) -> None:
    play = Timed({"ttft_ms": 1000}, num_blocks=24, overlap=overlap, watermark=0.0)
    prompt = [7] * 40
    crowd = [play.fast([3] * 37, max_tokens=3), play.bulk(prompt, max_tokens=3)]
    play.step(2)
    fast = play.fast([*prompt, *range(24)], max_tokens=3)
    play.drain()
    assert play.scheduler.live.preemptions == 0
    check_streams(play, fast, *crowd)


@OVERLAP
def test_forks_beyond_their_tiers_cap_give_no_places_by_making_way(overlap: bool) -> None:
    """The fast request of many forks has too many places even without bulk: it keeps its own."""
    play = Timed(
        {"ttft_ms": 1000},
        {"max_running": 2},
        max_num_seqs=8,
        overlap=overlap,
        max_num_batched_tokens=32,
    )
    bulk = play.bulk([5] * 300, n=20, max_tokens=2)
    play.step(2)
    many = play.fast([6] * 300, n=12, max_tokens=2)
    play.step(2)
    last = play.fast([1, 2], max_tokens=2)
    play.step(2)
    assert play.scheduler.live.preemptions == 0
    play.drain()
    check_streams(play, bulk, many, last)


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
@pytest.mark.parametrize("eviction", ["preempt", "never"])
def test_a_tier_runs_no_more_than_its_cap_and_others_pass(overlap: bool, eviction: str) -> None:
    """Forks included: those of its second request find no place."""
    play = Timed({}, {"max_running": 3}, overlap=overlap, eviction=eviction)
    crowd = [play.bulk([key] * 5, n=1 + key, max_tokens=9) for key in range(4)]
    fast = play.fast([1, 2], max_tokens=3)
    most = 0
    while play.engine.has_work:
        play.step()
        running = [one.request.tier for one in play.scheduler.live.running]
        most = max(most, running.count(1))
        assert running.count(1) <= 3
    assert most == 3
    assert play.order[0] in (fast, crowd[0])
    assert play.order.index(fast) <= 1
    check_streams(play, fast, *crowd)


@OVERLAP
def test_forks_beyond_the_cap_of_their_tier_take_no_places_of_others(overlap: bool) -> None:
    play = Timed({}, {"max_running": 3}, max_num_seqs=8, overlap=overlap, max_num_batched_tokens=32)
    bulk = play.bulk([5] * 300, n=20, max_tokens=2)
    play.step(2)
    fast = [play.fast([key], max_tokens=2) for key in range(5)]
    play.step(4)
    assert set(play.order) == set(fast)
    play.drain()
    check_streams(play, bulk, *fast)


def test_a_tier_queues_no_more_than_its_limit() -> None:
    play = Timed({}, {"max_queued": 2, "max_running": 1})
    crowd = [play.bulk([key], max_tokens=4) for key in range(5)]
    play.step()
    assert [key in play.ends for key in crowd] == [False] * 3 + [True] * 2
    refused = play.ends[crowd[-1]]
    assert isinstance(refused, Failed)
    assert (refused.code, "queue is full: 2" in refused.message) == ("UNAVAILABLE", True)
    fast = play.fast([1], max_tokens=2)
    play.drain()
    check_streams(play, fast, *crowd[:3])


@pytest.mark.parametrize("limit", [{"max_queued": 0}, {}])
def test_bulk_that_waits_for_its_own_places_fills_no_queue_of_the_fast_tier(limit: dict) -> None:
    play = Timed(limit, {"max_running": 2}, max_num_seqs=8, max_queued=3)
    crowd = [play.bulk([key], max_tokens=9) for key in range(6)]
    play.step(2)
    assert [key in play.ends for key in crowd] == [False] * 5 + [True]
    fast = [play.fast([1, 2], max_tokens=3) for _ in range(6)]
    play.drain()
    check_streams(play, *fast, *crowd[:5])


@OVERLAP
def test_a_bulk_request_waits_no_longer_than_its_aging_and_who_came_before(overlap: bool) -> None:
    """Under a flood of the fast tier that is more than can be served: whoever comes so many seconds
    after it goes after it, and nobody of these preempts it."""
    play = Timed({"ttft_ms": 100}, {"aging_s": 1.0}, max_num_seqs=4, overlap=overlap)
    flood = [play.fast([key], max_tokens=6) for key in range(8)]
    bulk = play.bulk([7] * 9, max_tokens=12)
    overdue = 0
    while bulk not in play.ends:
        flood.append(play.fast([len(flood) % 50, 3], max_tokens=6))
        report = play.step()
        overdue += report.stats.tiers[1].overdue
        assert play.now < 10.0
        if bulk not in play.order:
            assert report.stats.tiers[1].oldest_s <= play.now
    before = [key for key in flood if play.submits[key].arrival <= 1.0]
    after = [key for key in play.order[: play.order.index(bulk)] if key not in before]
    assert len(after) <= 1, "one may be admitted in the same step"
    admitted = play.ends[bulk].timing.queue_s
    assert 1.0 < admitted <= len(before) * 6 / 4 * 14e-3 + 0.1
    assert play.ends[bulk].timing.preemptions == 0
    assert overdue == 1


@OVERLAP
@pytest.mark.parametrize("size", [5, 200])
def test_a_backlog_that_has_aged_keeps_its_share_and_no_more(size: int, overlap: bool) -> None:
    """Of places, blocks and steps: the first tier is served as if the night's queue were young."""
    play = Timed({"ttft_ms": 300}, {"aging_s": 1.0}, max_num_seqs=8, overlap=overlap)
    crowd = [play.bulk([key % 50] * size, max_tokens=40) for key in range(120)]
    fast = []
    while play.engine.has_work and len(fast) < 12:
        if play.now > 2.0 + 0.2 * len(fast):
            fast.append(play.fast([7, len(fast)], max_tokens=10))
        play.step()
    assert len(fast) == 12
    play.drain(60_000)
    assert max(play.times[key][0] - play.submits[key].arrival for key in fast) < 0.3
    check_streams(play, *fast, *crowd)


def test_the_oldest_wait_is_of_who_waits_longest_and_counts_anew_after_a_preemption() -> None:
    play = Timed({"ttft_ms": 1000}, {"aging_s": 900.0}, max_num_seqs=1)
    ran = play.bulk([1], max_tokens=9, priority=-1)
    play.step(2)
    play.now += 400.0
    old = play.bulk([2], max_tokens=2)
    play.now += 100.0
    play.bulk([3], max_tokens=2, priority=-9)
    fast = play.fast([1], max_tokens=3)
    report = play.step()
    assert (fast, ran) == (play.order[-1], play.order[0])
    assert 100.0 <= report.stats.tiers[1].oldest_s < 101.0
    play.engine.send(Cancel(old))
    assert play.step().stats.tiers[1].oldest_s < 1.0


def test_no_wait_is_negative_though_forks_begin_to_wait_when_a_step_is_complete() -> None:
    play = Timed(max_num_seqs=2)
    key = play.bulk([1, 2, 3], n=5, max_tokens=4)
    waits = []
    while play.engine.has_work:
        waits.append(play.step().stats.tiers[1].oldest_s)
    assert waits[0] == 0.0, "three forks wait, from the end of this step on"
    assert min(waits) == 0.0
    assert max(waits) > 0.0
    check_streams(play, key)


@pytest.mark.parametrize("end", ["", "cancel", "deadline"])
def test_one_is_overdue_as_soon_as_it_has_aged_however_it_ends(end: str) -> None:
    play = Timed(max_num_seqs=1)
    fast = play.fast([1], max_tokens=20)
    bulk = play.bulk([1], max_tokens=2, deadline=play.now + 6.0 if end == "deadline" else None)
    overdue = []
    for seconds in (4.0, 1.5, 1.0):
        overdue.append(play.step().stats.tiers[1].overdue)
        play.now += seconds
    if end == "cancel":
        play.engine.send(Cancel(bulk))
    while play.engine.has_work:
        overdue.append(play.step().stats.tiers[1].overdue)
    assert fast in play.ends
    assert overdue[:4] == [0, 0, 1, 0]
    assert sum(overdue) == 1


def test_one_that_did_not_wait_is_not_overdue() -> None:
    play = Timed()
    for key in range(5):
        play.bulk([key], max_tokens=3, priority=-9)
    overdue = 0
    while play.engine.has_work:
        overdue += play.step().stats.tiers[1].overdue
    assert overdue == 0


def test_the_default_tier_is_the_last_and_without_tiers_there_are_no_figures() -> None:
    play = Timed()
    play.submit([1], max_tokens=1)
    assert [one.running + one.waiting for one in play.step().stats.tiers] == [0, 0]
    play.submit([1], max_tokens=2)
    assert [one.running for one in play.step().stats.tiers] == [0, 1]
    play = Timed(tiers=[])
    play.submit([1], max_tokens=2)
    assert play.step().stats.tiers == []
    assert isinstance(play.scheduler.policies.cost, NoCosts)


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
    for gap_ms in (14.0, 14.9, 15.0, 15.2):
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
