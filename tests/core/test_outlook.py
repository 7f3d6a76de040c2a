"""Option ``refuse_late``: what the scheduler expects of a first token, and whom it refuses for it.

The clock is the steps' own: each takes what a linear cost says.
"""

from typing import Any

import msgspec
import pytest
from jitney.core.cost import StepShape
from jitney.messages import Batch, Emitted, Failed, Finished

from tests.core.play import Play

COST = StepShape(steps=0.01, chunked=0.002, tokens=1e-4, samples=1e-4)


class Timed(Play):
    """A step takes time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"refuse_late": True, "num_blocks": 4096, "max_num_seqs": 8, **options})
        self.first: dict[int, float] = {}

    def _note_execute(self, batch: Batch) -> Any:
        self.now += sum(a * b for a, b in zip(COST, StepShape.of(batch), strict=True))
        return super()._note_execute(batch)

    def _take(self, event: Any) -> None:
        super()._take(event)
        self.first.setdefault(event.key, self.now)

    def learn(self) -> None:
        """Some 20 sequences of 20 tokens each."""
        for key in range(20):
            self.submit([key] * 30, max_tokens=20)
        self.drain()

    def crowd(self, count: int, **params: Any) -> list[int]:
        keys = [self.submit([key] * 30, max_tokens=20, **params) for key in range(count)]
        self.step()
        return keys

    def refusal(self, key: int) -> str:
        end = self.ends.get(key)
        return f"{end.code}: {end.message}" if isinstance(end, Failed) else ""


def measured(waiting: int) -> float:
    """Seconds to the first token of one that comes behind so many, without a deadline."""
    play = Timed()
    play.learn()
    play.crowd(waiting)
    before = play.now
    key = play.submit([1, 2, 3])
    play.drain()
    return play.first[key] - before


@pytest.mark.parametrize("waiting", [4, 24, 60])
def test_what_cannot_be_in_time_is_refused_with_the_estimate(waiting: int) -> None:
    took = measured(waiting)
    play = Timed()
    play.learn()
    play.crowd(waiting)
    late = play.submit([1, 2, 3], deadline=play.now + 0.5 * took)
    soon = play.submit([1, 2, 3], deadline=play.now + 2.0 * took)
    play.step()
    said = play.refusal(late)
    assert said.startswith("UNAVAILABLE: the first token is expected in ")
    assert f" s, but its deadline leaves {0.5 * took:.3f} s: " in said
    assert f"{max(waiting - 8, 0):,} requests wait before it" in said
    assert "(refuse_late)" in said
    play.drain()
    assert isinstance(play.ends[soon], Finished)
    assert play.first[soon] < play.submits[soon].deadline  # type: ignore[operator]


def test_the_prompts_before_a_request_count_where_there_are_places() -> None:
    play = Timed(max_num_seqs=64, max_num_batched_tokens=128, prefix_caching=False)
    for _ in range(2):
        play.learn()
    for key in range(30):
        play.submit([key] * 400, max_tokens=2)
    play.step()
    late, soon = (play.submit([1, 2, 3], deadline=play.now + within) for within in (1.0, 5.0))
    play.step()
    assert play.refusal(late).startswith("UNAVAILABLE: the first token is expected in 2.")
    play.drain()
    assert 2.0 < play.first[soon] - play.submits[soon].arrival < 3.0


def test_a_tier_has_its_target_and_others_behind_it_do_not_count() -> None:
    tiers = [{"name": "fast", "ttft_ms": 100}, {"name": "bulk"}]
    play = Timed(tiers=tiers)
    play.learn()
    play.crowd(40)
    fast = play.submit([1, 2, 3], tier="fast")
    bulk = play.submit([1, 2, 3])
    play.step()
    assert play.refusal(fast) == play.refusal(bulk) == ""
    crowd = [play.submit([key] * 30, tier="fast", max_tokens=20) for key in range(40)]
    play.step()
    assert "UNAVAILABLE" not in play.refusal(crowd[0])
    said = play.refusal(crowd[-1])
    assert "but its tier's ttft_ms leaves 0.100 s" in said
    play.drain()


def test_prompts_that_make_way_are_not_waited_for() -> None:
    tiers = [{"name": "fast", "ttft_ms": 300}, {"name": "bulk", "aging_s": 100.0}]
    play = Timed(tiers=tiers, max_num_batched_tokens=128, prefix_caching=False)
    play.learn()
    crowd = [play.submit([key] * 4000) for key in range(3)]
    play.step()
    fast = play.submit([1] * 9, tier="fast", max_tokens=2)
    play.drain()
    assert play.refusal(fast) == ""
    assert play.first[fast] - play.submits[fast].arrival < 0.3
    assert isinstance(play.ends[crowd[0]], Finished)


def test_old_bulk_that_waits_for_its_own_places_is_not_waited_for() -> None:
    bulk = {"name": "bulk", "aging_s": 0.5, "max_running": 2}
    play = Timed(tiers=[{"name": "fast", "ttft_ms": 300}, bulk], prefix_caching=False)
    play.learn()
    for key in range(42):
        play.submit([key] * 300, max_tokens=50)
    play.step(3)
    play.now += 2.0
    fast = play.submit([1] * 9, tier="fast", max_tokens=2)
    play.drain()
    assert play.refusal(fast) == ""
    assert play.first[fast] - play.submits[fast].arrival < 0.3


def test_who_knows_nothing_refuses_nobody() -> None:
    play = Timed()
    play.crowd(60)
    keys = [play.submit([1, 2, 3], deadline=play.now + 1e-6) for _ in range(9)]
    play.step()
    assert not any("UNAVAILABLE" in play.refusal(key) for key in keys)


def test_an_idle_engine_refuses_nobody() -> None:
    """Else one that has learned too long a step would never learn another."""
    play = Timed()
    play.learn()
    key = play.submit([1] * 500, deadline=play.now + 1e-3)
    play.step()
    assert "UNAVAILABLE" not in play.refusal(key)


@pytest.mark.parametrize("crowd", [0, 1])
def test_the_target_counts_from_when_the_scheduler_has_the_request(crowd: int) -> None:
    """Its adapter was read, or its grammar compiled, for a second."""
    play = Timed(tiers=[{"name": "fast", "ttft_ms": 100}])
    play.learn()
    play.crowd(crowd)
    slow = msgspec.structs.replace(play.submits[0], key=999, arrival=play.now - 1.0)
    assert play.scheduler.submit(slow, play.now) == []


def test_without_the_option_all_are_queued() -> None:
    play = Timed(refuse_late=False)
    play.learn()
    play.crowd(60)
    key = play.submit([1, 2, 3], deadline=play.now + 1e-3)
    play.step(2)
    assert play.refusal(key).startswith("DEADLINE_EXCEEDED")


def test_one_that_is_resumed_is_not_asked() -> None:
    play = Timed()
    play.learn()
    play.crowd(60)
    changes = {"key": 999, "deadline": play.now + 1e-6, "first_token": play.now}
    resumed = msgspec.structs.replace(play.submits[0], emitted=[Emitted([1, 2])], **changes)
    assert play.scheduler.submit(resumed, play.now) == []
