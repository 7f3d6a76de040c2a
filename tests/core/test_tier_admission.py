"""Latency tiers: who makes way for whom, who may run and wait, and that none starves."""

import pytest
from jitney.core.policy.plain import NoCosts
from jitney.core.policy.tiers import TierAdmission
from jitney.messages import Cancel, Failed

from tests.core.play import check_streams
from tests.core.timed import OVERLAP, Timed


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


def test_a_request_behind_the_cap_of_its_tier_does_not_queue_those_of_a_tier_without() -> None:
    """The next step has a place for each of them."""
    play = Timed({}, {"max_running": 1}, max_num_seqs=16, max_queued=3)
    fast = [play.fast([key], max_tokens=3) for key in range(8)]
    bulk = play.bulk([1], max_tokens=3)
    play.drain()
    check_streams(play, *fast, bulk)


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


@pytest.mark.parametrize(("size", "overlap"), [(5, False), (200, True)])
def test_a_backlog_that_has_aged_keeps_its_share_and_no_more(size: int, overlap: bool) -> None:
    """Of places, blocks and steps: the first tier is served as if the night's queue were young."""
    play = Timed({"ttft_ms": 300}, {"aging_s": 1.0}, max_num_seqs=8, overlap=overlap)
    crowd = [play.bulk([key % 50] * size, max_tokens=40) for key in range(90)]
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


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    """Although their tier ages slowly."""
    play = Timed()
    for key in range(5):
        play.bulk([key], max_tokens=3)
    while play.engine.has_work:
        play.step()
    admission = play.engine.scheduler.live.admission
    assert isinstance(admission, TierAdmission)
    assert not any(admission._may_be_overdue)


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
