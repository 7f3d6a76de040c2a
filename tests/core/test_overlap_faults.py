"""Faults while a step is in flight: no token is lost or made twice."""

import pytest
from jitney.batch import Batch
from jitney.errors import InternalError
from jitney.messages import Failed

from tests.core.play import carried, check_streams, overlapped

pytestmark = pytest.mark.usefixtures("quiet")


class Once:
    """A fault that passes: raises at the call of that number."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, batch: Batch, written: bool = True) -> None:
        if written:
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError("passing")


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("where", ["faults", "launch_faults"])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("pace", [0.0, 1.0])
def test_a_passing_fault_loses_and_repeats_nothing(
    at: int, where: str, requests: int, pace: float
) -> None:
    once = Once(at)
    play = overlapped(**{where: once}, device=lambda: pace == 1.0)
    keys = [play.submit([key, 1, 2], max_tokens=8) for key in range(requests)]
    play.drain()
    assert once.calls >= at
    check_streams(play, *keys)
    assert not play.scheduler.live.in_flight
    assert play.scheduler.kv.num_used == 0


def test_a_failed_step_is_executed_in_halves_with_known_tokens() -> None:
    play = overlapped(faults=Once(3))
    keys = [play.submit([key, 1, 2], max_tokens=8) for key in range(4)]
    play.step(3)
    assert carried(play, 2) == [0, 1, 2, 3]  # it will fail; a fourth is launched before that shows
    play.step()
    failed, dropped, *halves = play.batches[2:]
    assert carried(play, 3) == [0, 1, 2, 3]
    assert [len(half.rows) for half in halves] == [2, 2]
    again = [row for half in halves for row in half.rows]
    assert all(row.carried is None for row in again)
    assert [row.token_ids[0] for row in again] == [play.run_alone(key)[0][1] for key in keys]
    assert [row.start for row in again] == [row.start for row in failed.rows] == [4] * 4
    assert not play.runner.in_flight
    play.step()
    assert [row.start for row in play.batches[-1].rows] == [row.start for row in dropped.rows]
    play.drain()
    check_streams(play, *keys)


@pytest.mark.parametrize("culprit", range(5))
@pytest.mark.parametrize("at_launch", [False, True])
def test_a_raising_request_fails_alone(culprit: int, at_launch: bool) -> None:
    def faults(batch: Batch, written: bool = True) -> None:
        if written and any(row.key == culprit and row.end > 8 for row in batch.rows):
            raise RuntimeError("of one request")

    options = {"faults": faults} | ({"launch_faults": faults} if at_launch else {})
    play = overlapped(**options)
    keys = [play.submit([key, 1, 2, 3, 4], n=1 + key % 2, max_tokens=9) for key in range(5)]
    play.drain()
    end = play.ends[culprit]
    assert isinstance(end, Failed)
    assert end.code == "INTERNAL"
    assert play.got(culprit)[0] == play.run_alone(culprit)[0][:4]
    check_streams(play, *(key for key in keys if key != culprit))


def test_a_fault_of_the_loop_leaves_nothing_in_flight() -> None:
    play = overlapped()
    key = play.submit([1, 2, 3], max_tokens=9)
    play.step(2)
    play.scheduler.update = None  # type: ignore[method-assign, assignment]
    report = play.engine._step_or_recover()
    assert report is not None
    assert report.events == [Failed(key, "INTERNAL", str(InternalError("the engine failed")))]
    assert not play.runner.in_flight
    play.scheduler = play.engine.scheduler
    later = play.submit([1, 2, 3], max_tokens=9)
    play.drain()
    check_streams(play, later)
