"""Option ``priority_preempts``: who waits preempts who runs at a lower priority."""

from typing import Any

import pytest
from jitney.messages import Finished

from tests.core.play import Play


def full(**options: Any) -> tuple[Play, list[int]]:
    """An engine all of whose places are taken by requests of a low priority."""
    play = Play(max_num_seqs=2, **options)
    keys = [play.submit([key] * 5, max_tokens=60, priority=5) for key in range(2)]
    for _ in range(3):
        play.step()
    return play, keys


def steps_to_first_token(play: Play, key: int) -> int:
    for steps in range(1, 200):
        play.step()
        if play.got(key)[0]:
            return steps
    raise AssertionError("it gets no token")


def check(play: Play) -> None:
    """At the end every request has had what it would have got alone."""
    play.drain()
    for key in play.submits:
        assert isinstance(play.ends[key], Finished)
        assert play.got(key) == play.run_alone(key)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tiers", [[], [{"name": "a"}, {"name": "b"}]], ids=["no tiers", "tiers"])
def test_a_waiting_request_preempts_one_of_a_lower_priority(
    tiers: list[dict[str, Any]], overlap: bool
) -> None:
    play, _ = full(priority_preempts=True, tiers=tiers, overlap=overlap)
    urgent = play.submit([7] * 5, max_tokens=4, priority=-5)
    assert steps_to_first_token(play, urgent) <= 3
    assert play.scheduler.live.preemptions == 1, "one is enough"
    check(play)


def test_without_the_option_it_waits_for_a_place() -> None:
    play, keys = full()
    urgent = play.submit([7] * 5, max_tokens=4, priority=-5)
    assert steps_to_first_token(play, urgent) > 50
    assert play.scheduler.live.preemptions == 0
    assert play.order == [*keys, urgent]


@pytest.mark.parametrize(
    ("priority", "now"), [(5, 0.0), (6, 0.0), (0, 1000.0)], ids=["equal", "lower", "aged"]
)
def test_nobody_makes_way_for_an_equal_a_lower_or_one_that_came_much_later(
    priority: int, now: float
) -> None:
    """Ranks count: what has waited or run for long comes before a newcomer, so none starves."""
    play, _ = full(priority_preempts=True)
    play.now = now
    late = play.submit([7] * 5, max_tokens=4, priority=priority)
    assert steps_to_first_token(play, late) > 50
    assert play.scheduler.live.preemptions == 0


def test_with_eviction_never_nobody_is_preempted() -> None:
    play, _ = full(priority_preempts=True, eviction="never")
    urgent = play.submit([7] * 5, max_tokens=4, priority=-5)
    assert steps_to_first_token(play, urgent) > 50
    assert play.scheduler.live.preemptions == 0


def test_as_many_make_way_as_it_needs_blocks() -> None:
    play = Play(num_blocks=12, max_num_seqs=8, priority_preempts=True)
    keys = [play.submit([key] * 8, max_tokens=8, priority=5) for key in range(3)]
    play.step()
    urgent = play.submit([7] * 32, max_tokens=4, priority=-5)
    assert steps_to_first_token(play, urgent) <= 3
    assert play.scheduler.live.preemptions == 2
    assert play.order == [*keys, urgent]
    check(play)


def test_a_request_does_not_preempt_one_of_its_own_priority_that_came_later() -> None:
    """It may come late into the queue, because it waited for a grammar or an adapter."""
    play = Play(max_num_seqs=1, priority_preempts=True)
    running = play.submit([1] * 5, max_tokens=60, priority=5)
    play.step(3)
    play.now = -1.0  # it arrived before the other one
    early = play.submit([7] * 5, max_tokens=4, priority=5)
    play.now = 0.0
    play.drain()
    assert play.scheduler.live.preemptions == 0
    assert play.order == [running, early]


def test_a_request_that_has_waited_long_is_not_preempted_though_a_newer_one_is() -> None:
    play = Play(num_blocks=12, max_num_seqs=8, priority_preempts=True, aging_s=1.0)
    play.now = -1000.0
    old = play.submit([1] * 8, max_tokens=8, priority=9)
    play.now = 0.0
    newer = play.submit([2] * 8, max_tokens=8, priority=9)
    play.step()
    urgent = play.submit([7] * 40, max_tokens=4, priority=-5)  # it needs the blocks of both
    check(play)
    assert play.ends[old].timing.preemptions == 0
    assert play.order == [old, newer, urgent]
