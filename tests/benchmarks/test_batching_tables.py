"""The tables and the plot of the batching benchmarks, out of records."""

from pathlib import Path

from jitney_measure.record import (
    PERCENTS,
    Distribution,
    Load,
    LoadPoint,
    Measurement,
    Result,
    Stage,
)

from benchmarks.batching.one_call import tables
from benchmarks.batching_modes import _plot, _read, _write


def point(
    load: Load, rate: float, *, behind: bool = False, batch: float | None = None
) -> LoadPoint:
    latency = Distribution(100, 0.05, tuple(percent / 1e3 for percent in PERCENTS))
    found = Measurement(100, 0, 1.0, rate, rate, rate, latency)
    stages = (Stage("m", 100, 50, batch, None, None),) if batch else ()
    return LoadPoint(load, "behind" if behind else "steady", (), found, stages)


def result(name: str, *points: LoadPoint) -> Result:
    return Result(name, "m", False, "here", "Triton", "2", "", {}, points)


SLOW = Load("rate", 20)
FAST = Load("rate", 120)
USERS = Load("concurrency", 16)
GROUPS = {
    "modes": {
        "none": result("none", point(SLOW, 19.4, batch=1.0), point(FAST, 90.0, behind=True)),
        "dynamic 8, 2 ms": result("dynamic 8, 2 ms", point(SLOW, 20.0), point(USERS, 333.3)),
    },
    "mixes": {"shared": result("shared", point(SLOW, 20.0), point(USERS, 314.0))},
}


def test_each_mode_stands_at_each_load_with_what_was_measured() -> None:
    text = tables(GROUPS)
    assert "| mode; requests/s offered | 20 | 120 |" in text
    assert "| none | 19.4 · 50 / 95 / 99 [1.0] | (90 · 50 / 95 / 99) |" in text
    assert "| dynamic 8, 2 ms | 20 · 50 / 95 / 99 | – |" in text
    assert "| mode; at once | 16 |" in text
    assert "| shared | 50 / 95 / 99 | 314 | 50 |" in text


def test_results_are_read_back_in_their_order_and_plotted(tmp_path: Path) -> None:
    _write(GROUPS, tmp_path)
    assert _read(tmp_path) == GROUPS
    assert [*_read(tmp_path)["modes"]] == ["none", "dynamic 8, 2 ms"]
    assert b"dynamic 8, 2 ms" in _plot("m", GROUPS, tmp_path).read_bytes()
