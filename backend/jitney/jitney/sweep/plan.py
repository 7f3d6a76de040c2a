"""What a sweep does: its loads, how long each is kept up, and when a figure counts as steady."""

import math
from dataclasses import dataclass

from jitney.errors import InvalidArgumentError
from jitney.sweep.record import Load, Measurement, State

DEFAULT_CONCURRENCY = "1,2,4,8,16,32"
LEAST_ROUNDS = 4
"""A closed loop makes at least so many requests per user, so that the first, which all begin at
once, do not decide."""
_WARM_REQUESTS = 8
_MOST_REQUESTS = 20_000
"""perf_analyzer exports what was answered, too."""
_BACKLOG = 0.05
"""A rate was not kept up with if more than this share of what was sent is under way at the end, and
it is more than twice what it was after a third: a queue that grows."""
_PACE = 0.1
"""How far the rate that was sent may be from the one wanted, chance apart."""


@dataclass(frozen=True)
class Plan:
    """``stability`` is how far the thirds of a measurement may be apart, as a share."""

    loads: tuple[Load, ...]
    seconds: float
    requests: int | None
    """Per load, in place of ``seconds``."""
    poisson: bool
    stability: float
    batch: int

    def warm_up(self, load: Load) -> tuple[Load, int]:
        """The load and the requests before the measurement: a closed loop shows its pace too."""
        if load.kind == "rate":
            return Load("concurrency", 2), _WARM_REQUESTS
        return load, max(_WARM_REQUESTS, 2 * int(load.level))

    def count(self, load: Load, pace: float) -> int:
        """Requests of the measurement, at ``pace`` requests per second."""
        least = LEAST_ROUNDS * int(load.level) if load.kind == "concurrency" else _WARM_REQUESTS
        if self.requests is not None:
            return max(self.requests, least)
        return max(least, min(round(pace * self.seconds), _MOST_REQUESTS))

    def shape(self, load: Load) -> list[str]:
        """perf_analyzer's words for the load."""
        if load.kind == "concurrency":
            return ["--concurrency-range", f"{load.level:g}"]
        distribution = "poisson" if self.poisson else "constant"
        words = ["--request-rate-range", f"{load.level:g}"]
        # One sender: several divide the requests among them and end at different times.
        return [*words, "--request-distribution", distribution, "--max-threads", "1"]

    def doubts(self, load: Load, measured: Measurement) -> tuple[State, list[str]]:
        """The state of the point and its remarks."""
        remarks = []
        state: State = "steady"
        spreads = [(measured.latency_spread, "median latency")]
        if load.kind == "concurrency":  # else chance decides how many arrive in each third
            spreads.insert(0, (measured.spread, "throughput"))
        for spread, what in spreads:
            if spread > self.stability:
                state = "unstable"
                remarks.append(
                    f"{what} in thirds of the run differs by {spread:.0%}, "
                    f"more than {self.stability:.0%}"
                )
        if load.kind == "rate":
            chance = 2 / math.sqrt(measured.requests) if self.poisson else 0.0
            if abs(measured.sent_per_s / load.level - 1) > _PACE + chance:
                state = "unstable"
                remarks.append(f"perf_analyzer sent {measured.sent_per_s:,.1f} requests/s")
            early, late = measured.under_way[0], measured.under_way[-1]
            if late > max(_BACKLOG * measured.requests, 2 + 2 * early):
                # Growing latency is the nature of such a run, so it is no news beside this.
                state = "behind"
                remarks.append(
                    f"{measured.requests_per_s:,.1f} of {measured.sent_per_s:,.1f} requests/s "
                    f"completed; {late:,} were under way at the end, {early:,} after a third"
                )
        if measured.failed:
            state = "failed"
            remarks.append(f"{measured.failed:,} of {measured.requests:,} requests failed")
        return state, remarks


def loads(concurrency: str, rate: str) -> tuple[Load, ...]:
    """Comma-separated levels, ascending. Raises InvalidArgumentError."""
    made = [Load("concurrency", level) for level in _levels("concurrency", concurrency, whole=True)]
    made += [Load("rate", level) for level in _levels("rate", rate, whole=False)]
    if not made:
        raise InvalidArgumentError("no load is asked for: give --concurrency or --rate")
    return tuple(made)


def _levels(field: str, text: str, *, whole: bool) -> list[float]:
    levels = set()
    for part in text.split(","):
        if not part.strip():
            continue
        try:
            level = float(part)
        except ValueError:
            level = -1.0
        if not 0 < level <= 1e6 or (whole and level != int(level)):
            bound = "whole numbers from 1" if whole else "numbers above 0"
            raise InvalidArgumentError.of(field, text, f"{bound}, with commas between")
        levels.add(level)
    return sorted(levels)


def span(field: str, text: str) -> tuple[int, int]:
    """``N`` or ``LOW:HIGH``. Raises InvalidArgumentError."""
    parts = text.split(":")
    if all(part.isdigit() for part in parts) and len(parts) in (1, 2):
        low, high = int(parts[0]), int(parts[-1])
        if 1 <= low <= high:
            return low, high
    raise InvalidArgumentError.of(field, text, "N or LOW:HIGH, numbers from 1")
