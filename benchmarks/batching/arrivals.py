"""When requests arrive: the same moments for every way of batching under test.

Owns the seeded generation of Poisson arrivals. A Poisson stream is what many independent users make
together: gaps between requests are exponential, with bursts and pauses.
"""

import numpy as np


def poisson(rate: float, seconds: float, seed: int) -> np.ndarray:
    """Arrival times of one stream: f64 [n], ascending, each in [0, ``seconds``).

    ``rate`` is the mean number per second. Conditioned on its count, a Poisson stream is uniform:
    so the count is fixed at ``rate * seconds``, rounded, and at least one. Two seeds at one rate
    then offer exactly the same load. Raises ValueError for a rate or a duration that is not above
    zero.
    """
    if rate <= 0:
        raise ValueError(f"rate {rate} must be above 0")
    if seconds <= 0:
        raise ValueError(f"seconds {seconds} must be above 0")
    count = max(1, round(rate * seconds))
    times = np.random.default_rng(seed).uniform(0.0, seconds, count)
    return np.sort(times)
