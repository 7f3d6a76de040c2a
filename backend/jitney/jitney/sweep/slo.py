"""Bounds on what clients see, and which load is the best one within them.

``ttft-p95=200ms,itl-p95=50ms``: a time, a percentile (or ``mean``) and the most that it may be.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jitney.errors import InvalidArgumentError, nearest
from jitney.sweep.record import Best, Distribution, Load, Point, Verdict

TIMES = ("latency", "ttft", "itl", "gap", "tpot")
LANGUAGE_ONLY = TIMES[1:]
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BOUND = re.compile(r"([a-z]+)-(mean|p[0-9.]+)=([0-9.]+)(us|ms|s)")


@dataclass(frozen=True)
class Bound:
    """``time`` at ``percent`` (None: the mean) may be ``seconds`` at most."""

    time: str
    percent: float | None
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.time}-{'mean' if self.percent is None else f'p{self.percent:g}'}"

    def of(self, distribution: Distribution) -> float:
        """The figure that is bounded."""
        return distribution.mean if self.percent is None else distribution.at(self.percent)


def parse(text: str, *, language: bool) -> tuple[Bound, ...]:
    """Raises InvalidArgumentError that names the part that cannot be read."""
    return tuple(_bound(part.strip(), language) for part in text.split(",") if part.strip())


def _bound(text: str, language: bool) -> Bound:
    match = _BOUND.fullmatch(text)
    if match is None:
        raise InvalidArgumentError.of("slo", text, "like ttft-p95=200ms, unit us, ms or s")
    time, which, number, unit = match.groups()
    if time not in TIMES:
        raise InvalidArgumentError.of(
            "slo", text, f"a bound on one of {', '.join(TIMES)}{nearest(time, TIMES)}"
        )
    if time in LANGUAGE_ONLY and not language:
        raise InvalidArgumentError.of("slo", text, "on latency: the model makes no tokens")
    try:
        percent = None if which == "mean" else float(which[1:])
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        raise InvalidArgumentError.of("slo", text, "a number after p and after =") from None
    if percent is not None and not 0 <= percent <= 100:
        raise InvalidArgumentError.of("slo", text, "of a percentile from 0 to 100")
    if seconds <= 0:
        raise InvalidArgumentError.of("slo", text, "more than 0")
    return Bound(time, percent, seconds)


def judge(point: Point, bounds: Sequence[Bound]) -> Verdict:
    """A load that failed, or fell behind what was sent, meets no bound: its queue only grows."""
    over = []
    if point.state in ("failed", "behind"):
        over.append("; ".join(point.remarks) or point.state)
    for bound in bounds if point.measured is not None else ():
        found: Distribution | None = getattr(point.measured, bound.time)
        if found is None:
            over.append(f"{bound.name} was not measured")
        elif bound.of(found) > bound.seconds:
            over.append(f"{bound.name} is {show_time(bound.of(found))}")
    return Verdict(point.load, tuple(over))


def best(points: Sequence[Point], verdicts: Sequence[Verdict]) -> Best | None:
    """The largest throughput among those that meet the bounds; steady ones come first.

    None if no load meets them.
    """
    meets: dict[bool, list[tuple[float, Load]]] = {True: [], False: []}
    for point, verdict in zip(points, verdicts, strict=True):
        if not verdict.over and point.measured is not None:
            meets[point.state == "steady"].append((point.measured.throughput, point.load))
    steady, unstable = (max(meets[key], key=lambda found: found[0], default=None) for key in meets)
    if steady is None and unstable is None:
        return None
    if steady is None:
        assert unstable is not None
        return Best(unstable[1], unstable[0], "no load that meets the bounds was measured steadily")
    caution = ""
    if unstable is not None and unstable[0] > steady[0]:
        caution = f"{unstable[1]} gave more ({unstable[0]:,.1f}/s), but not steadily"
    return Best(steady[1], steady[0], caution)


def show_time(seconds: float | None) -> str:
    """With the unit that suits it, three digits."""
    if seconds is None:
        return "–"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
