"""The arrivals of the batching benchmarks: seeded, of the stated rate, and Poisson."""

import numpy as np
import pytest

from benchmarks.batching.arrivals import poisson


def test_the_same_seed_gives_the_same_moments() -> None:
    assert poisson(200, 2, seed=7).tolist() == poisson(200, 2, seed=7).tolist()
    assert poisson(200, 2, seed=7).tolist() != poisson(200, 2, seed=8).tolist()


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 3.0), (10, 0.7), (1000, 4)])
def test_the_rate_is_exact_and_the_moments_are_in_order(rate: float, seconds: float) -> None:
    times = poisson(rate, seconds, seed=1)
    assert len(times) == max(1, round(rate * seconds))
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < seconds


def test_there_is_always_one() -> None:
    assert len(poisson(0.01, 1, seed=1)) == 1


def test_gaps_are_exponential() -> None:
    """Of an exponential distribution mean and deviation are equal, and 1/e of it is above the mean:
    equal steps or bursts would fail both."""
    gaps = np.diff(poisson(1000, 50, seed=3))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    assert (gaps > gaps.mean()).mean() == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize(("rate", "seconds", "named"), [(0, 1, "rate 0"), (5, -1, "seconds -1")])
def test_what_cannot_be_is_refused(rate: float, seconds: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        poisson(rate, seconds, seed=1)
