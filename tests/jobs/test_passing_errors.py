"""Errors that pass are waited for: for how long, and what becomes of the row and of the job."""

from typing import Any

import pytest
from jitney.errors import InternalError, InvalidArgumentError, UnavailableError
from jitney_jobs import executors, feeder
from jitney_jobs.feeder import Feeder
from jitney_jobs.outcome import RetryPolicy
from jitney_jobs.prepare import Item
from jitney_jobs.rows import RowId


class Failing(executors.PassThrough):
    """Each row fails for as long as ``errors`` has something for it."""

    def __init__(self, errors: dict[int, list[Exception]]) -> None:
        super().__init__()
        self.errors = errors
        self.asked: list[int] = []

    def step(self) -> list[executors.Outcome]:
        ended = []
        for key, result in super().step():
            self.asked.append(key)
            errors = self.errors.get(key)
            ended.append((key, errors.pop(0) if errors else result))
        return ended


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def fed(
    monkeypatch: pytest.MonkeyPatch, executor: Failing, rows: int, seconds: float
) -> tuple[dict[int, Any], float]:
    """What becomes of the rows, and how long that takes."""
    clock = Clock()
    monkeypatch.setattr(feeder, "time", clock)
    feeding = Feeder(executor, RetryPolicy(seconds, 3))
    for key in range(rows):
        feeding.add(Item(RowId(0, key), prepared=key, key=key))
    ended: dict[int, Any] = {}
    while len(feeding):
        ended |= {item.key: result for item, result in feeding.step(has_input_ended=True)}
    return ended, clock.now - 1000.0


def test_an_error_is_waited_for_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Failing({0: [UnavailableError("away")] * 8})
    ended, took = fed(monkeypatch, executor, 1, 600)
    assert ended == {0: 0}
    assert 127 <= took < 400


def test_a_row_that_fails_while_others_do_not_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Failing({1: [UnavailableError("503 {}")] * 10_000})
    ended, took = fed(monkeypatch, executor, 3, 60)
    assert isinstance(ended[1], InvalidArgumentError)
    assert str(ended[1]) == "503 {}"
    assert took == pytest.approx(60, abs=5)
    assert executor.asked.count(0) == 1


def test_a_server_that_is_away_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    away: dict[int, list[Exception]] = {
        key: [UnavailableError("away")] * 10_000 for key in range(3)
    }
    ended, took = fed(monkeypatch, Failing(away), 3, 60)
    assert all(isinstance(error, UnavailableError) for error in ended.values())
    assert took == pytest.approx(60, abs=5)


def test_a_fault_may_be_the_rows_and_is_tried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Failing({0: [InternalError("fault")] * 10_000})
    ended, _ = fed(monkeypatch, executor, 1, 600)
    assert isinstance(ended[0], InternalError)
    assert len(executor.asked) == 4
