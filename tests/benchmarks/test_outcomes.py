"""Percentiles, throughput, batch sizes and what counts as having fallen behind."""

import numpy as np
import pytest

from benchmarks.batching.outcomes import (
    Run,
    batches_between,
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


def test_batches_between_two_readings() -> None:
    assert batches_between({1: 5, 8: 2}, {1: 5, 8: 4, 3: 1}) == {3: 1, 8: 2}
    assert batches_between({}, {}) == {}
    with pytest.raises(ValueError, match="went down"):
        batches_between({1: 5}, {1: 4})
