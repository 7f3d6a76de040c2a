"""Percentiles, throughput, batch sizes and what counts as having fallen behind."""

import json

import numpy as np
import pytest

from benchmarks.batching.outcomes import (
    Run,
    batches_between,
    from_json,
    percentiles_ms,
    summarize,
)


def make_run(latencies: list[float], seconds: float = 1.0, **fields: object) -> Run:
    values = np.array(latencies)
    return Run(values, np.zeros(len(values)), seconds, cpu_seconds=0.25, **fields)  # type: ignore[arg-type]


def test_percentiles_are_nearest_ranks() -> None:
    """Of 100 values the 95th percentile is the 95th of them, whatever their order."""
    values = np.random.default_rng(1).permutation(np.arange(1, 101)) / 1e3
    assert percentiles_ms(values, (1, 50, 95, 99, 100)) == pytest.approx((1, 50, 95, 99, 100))


def test_few_values_give_the_largest_and_nothing_in_between() -> None:
    assert percentiles_ms(np.array([0.001, 0.1]), (50, 95, 99)) == pytest.approx((1, 100, 100))


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no request"):
        percentiles_ms(np.array([]), (50,))


def test_a_summary_of_a_run() -> None:
    run = make_run([0.01, 0.02, 0.03, 0.04], seconds=2.0, first=np.array([0.005] * 4))
    summary = summarize("dynamic", "rate", 2.1, run, batches={1: 2, 2: 1}, tokens=100)
    assert summary.throughput == 2
    assert (summary.p50_ms, summary.p99_ms) == pytest.approx((20, 40))
    assert summary.first_p50_ms == pytest.approx(5)
    assert summary.tokens_per_s == 50
    assert summary.generator_cores == 0.125
    assert summary.generator_us == pytest.approx(62_500)
    assert summary.mean_batch == pytest.approx(4 / 3)
    assert not summary.behind


@pytest.mark.parametrize(
    ("load", "level", "behind"),
    [("rate", 100, False), ("rate", 112, True), ("concurrency", 1000, False)],
)
def test_falling_behind_is_of_open_loops_alone(load: str, level: float, behind: bool) -> None:
    latencies = np.linspace(0.01, 0.1, 100).tolist()
    assert summarize("none", load, level, make_run(latencies)).behind is behind


def test_a_long_last_answer_is_not_falling_behind() -> None:
    """Four requests, each of which takes as long as the others, in a run that ends with the last
    answer: less than offered was completed in that time, and yet nothing piled up."""
    assert not summarize("static", "rate", 4, make_run([1.0] * 4, seconds=2.0)).behind


@pytest.mark.parametrize(("late_s", "bound"), [(0.004, False), (0.006, True)])
def test_a_late_generator_is_told(late_s: float, bound: bool) -> None:
    run = Run(np.full(10, 0.01), np.full(10, late_s), 1.0, cpu_seconds=0.1)
    assert summarize("none", "rate", 10, run).generator_bound is bound


def test_no_batches_have_no_mean() -> None:
    assert summarize("naive", "rate", 1, make_run([0.01])).mean_batch is None


def test_a_summary_survives_json() -> None:
    summary = summarize("dynamic", "rate", 3, make_run([0.1, 0.2]), batches={1: 1, 16: 2})
    assert from_json(json.loads(json.dumps(summary.as_json()))) == summary


def test_batches_between_two_readings() -> None:
    assert batches_between({1: 5, 8: 2}, {1: 5, 8: 4, 3: 1}) == {3: 1, 8: 2}
    assert batches_between({}, {}) == {}
    with pytest.raises(ValueError, match="went down"):
        batches_between({1: 5}, {1: 4})
