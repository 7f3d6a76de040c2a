"""The loads of a sweep, when their figures count as steady, the bounds on them, and the best load.

``ttft-p95=200ms,itl-p95=50ms``: a time, a percentile (or ``mean``) and its upper bound.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from jitney.errors import InvalidArgumentError, nearest
from msgspec.structs import replace
from rich.markup import escape

from jitney_measure.options import Shared
from jitney_measure.record import Best, Load, LoadVerdict, Measurement, Point, Result, State

TIMES = ("ttft", "itl", "gap", "tpot", "latency")
_BOUND = re.compile(r"([a-z]+)-(?:mean|p(\d+(?:\.\d+)?))=([\d.]+(?:us|ms|s))", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)", re.ASCII)
_COLOURS = {"steady": "green", "unstable": "yellow", "behind": "yellow", "failed": "red"}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_ROUNDS = 4
"""Requests per user of a closed loop at least, so that the first, which all begin at once, do not
decide."""
_WARM_UP_REQUESTS = 8
_MOST_REQUESTS = 20_000
"""perf_analyzer exports the answers too."""
_BACKLOG = 0.05
"""A server is behind a rate if at the end of the run more than this share of the requests is in
flight, and these are more than twice as many as after a third of it: then a queue grows."""
_PACE = 0.1
"""How far the rate that was sent may be from the one asked for, apart from chance."""
_Users = list[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]]
_Rates = list[Annotated[float, msgspec.Meta(gt=0, le=1e6)]]


def warm_up(load: Load) -> tuple[Load, int]:
    """The load and the number of requests of the warm-up. That of a closed loop also tells how many
    requests per second the measurement will have."""
    if load.kind == "rate":
        return Load("concurrency", 2), _WARM_UP_REQUESTS
    return load, max(_WARM_UP_REQUESTS, 2 * int(load.level))


def count(options: Shared, load: Load, pace: float) -> int:
    """Requests of the measurement, at ``pace`` requests per second."""
    closed = load.kind == "concurrency"
    least = _LEAST_ROUNDS * int(load.level) if closed else _WARM_UP_REQUESTS
    lasting = min(round(pace * options.seconds), _MOST_REQUESTS)
    return max(least, options.requests or lasting)


def doubts(options: Shared, load: Load, measured: Measurement) -> tuple[State, list[str]]:
    """The state of the point and its remarks."""
    remarks = []
    spreads = {"median latency": measured.latency_spread}
    if load.kind == "concurrency":  # of a rate, chance decides how many arrive in each third
        spreads["throughput"] = measured.spread
    for what, spread in spreads.items():
        if spread > options.stability:
            remarks.append(f"{what} in thirds of the run differs by {spread:.0%}")
    behind = False
    if load.kind == "rate":
        chance = 2 / math.sqrt(measured.requests) if options.arrivals == "poisson" else 0.0
        if abs(measured.sent_per_s / load.level - 1) > _PACE + chance:
            remarks.append(f"perf_analyzer sent {measured.sent_per_s:,.1f} requests/s")
        early = measured.under_way[0]
        late = measured.under_way[-1]
        behind = late > max(_BACKLOG * measured.requests, 2 + 2 * early)
    state: State = "behind" if behind else "unstable" if remarks else "steady"
    if behind:
        remarks.append(f"{late:,} requests were under way at the end, {early:,} after a third")
    if measured.failed:
        state = "failed"
        remarks.append(f"{measured.failed:,} of {measured.requests:,} requests failed")
    return state, remarks


def loads(options: Shared, default: str) -> tuple[Load, ...]:
    """Those that are asked for, ascending; with neither option ``default``, numbers of requests at
    once. Raises InvalidArgumentError."""
    concurrency = options.concurrency or ("" if options.rate else default)
    users = _levels("concurrency", concurrency, _Users, "whole numbers from 1")
    rates = _levels("rate", options.rate, _Rates, "numbers above 0")
    return tuple([Load("concurrency", level) for level in users] + [Load("rate", r) for r in rates])


def _levels(field: str, text: str, kind: Any, bound: str) -> list[float]:
    parts = [part.strip() for part in text.split(",")] if text else []
    try:
        return sorted(set(msgspec.convert(parts, kind, strict=False)))
    except msgspec.ValidationError:
        raise InvalidArgumentError.of(field, text, f"{bound}, with commas between") from None


def span(field: str, text: str) -> tuple[int, int]:
    """``N`` or ``LOW:HIGH``. Raises InvalidArgumentError."""
    match = re.fullmatch(r"([1-9]\d*)(?::(\d+))?", text, re.ASCII)
    if match is not None and int(match[1]) <= int(match[2] or match[1]):
        return int(match[1]), int(match[2] or match[1])
    raise InvalidArgumentError.of(field, text, "N or LOW:HIGH, numbers from 1")


@dataclass(frozen=True)
class Bound:
    """``time`` at ``percent`` (None: the mean) may be ``seconds`` at most."""

    time: str
    percent: float | None
    seconds: float

    @property
    def name(self) -> str:
        """Such as ``ttft-p95``."""
        return f"{self.time}-mean" if self.percent is None else f"{self.time}-p{self.percent:g}"

    def of(self, measured: Measurement | None) -> float | None:
        """The bounded figure; None if it was not measured."""
        found = measured.time(self.time) if measured is not None else None
        if found is None:
            return None
        return found.mean if self.percent is None else found.at(self.percent)


def read_time(text: str) -> float | None:
    """``500us``, ``2ms``, ``90s``, ``10m`` or ``1h`` in seconds; None for anything else."""
    match = _TIME.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match is not None else None


def parse(text: str, *, language: bool) -> tuple[Bound, ...]:
    """Raises InvalidArgumentError that names the part that cannot be read."""
    return tuple(_bound(part.strip(), language) for part in text.split(",") if part.strip())


def _bound(text: str, language: bool) -> Bound:
    match = _BOUND.fullmatch(text)
    seconds = read_time(match[3]) if match is not None else None
    if match is None or not seconds or float(match[2] or 0) > 100:
        bound = "like ttft-p95=200ms: a percentile to 100, and more than 0 us, ms or s"
        raise InvalidArgumentError.of("slo", text, bound)
    if match[1] not in TIMES:
        bound = f"a bound on one of {', '.join(TIMES)}{nearest(match[1], TIMES)}"
        raise InvalidArgumentError.of("slo", text, bound)
    if match[1] != "latency" and not language:
        raise InvalidArgumentError.of("slo", text, "on latency: the model makes no tokens")
    return Bound(match[1], float(match[2]) if match[2] else None, seconds)


def judge(point: Point, bounds: Sequence[Bound]) -> LoadVerdict:
    """A load that failed or fell behind meets no bound: its queue only grows."""
    behind = point.state in ("failed", "behind")
    over = ["; ".join(point.remarks) or point.state] if behind else []
    excess = []
    for bound in bounds if point.measured is not None else ():
        found = bound.of(point.measured)
        # Infinite: it is not known by how much.
        excess.append(math.inf if found is None else found / bound.seconds)
        if found is None:
            over.append(f"{bound.name} was not measured")
        elif found > bound.seconds:
            over.append(f"{bound.name} is {show_time(found)}")
    worst = math.inf if behind else max(excess, default=math.inf)
    return LoadVerdict(point.load, tuple(over), worst if worst < math.inf else None)


def judged(result: Result, bounds: Sequence[Bound]) -> Result:
    """The result with its verdicts and its best load: of the largest throughput among those that
    meet the bounds, steady ones first."""
    verdicts = tuple(judge(point, bounds) for point in result.points)
    meeting = [
        (point.state == "steady", point.measured.throughput, point.load)
        for point, verdict in zip(result.points, verdicts, strict=True)
        if not verdict.over and point.measured is not None
    ]
    if not meeting:
        return replace(result, verdicts=verdicts, best=None)
    steady, throughput, load = max(meeting, key=lambda found: found[:2])
    _, most, other = max(meeting, key=lambda found: found[1])
    caution = f"{other} gave more ({most:,.1f}/s), but not steadily" if most > throughput else ""
    if not steady:
        caution = "no load that meets the bounds was measured steadily"
    return replace(result, verdicts=verdicts, best=Best(load, throughput, caution))


def show_time(seconds: float | None) -> str:
    """Three digits with a unit."""
    if seconds is None:
        return "–"
    unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:.3g} {unit}"


def line(point: Point, language: bool) -> str:
    """A point in one line of the terminal, with rich's markup."""
    words = [f"{point.load!s:>12}"]
    if (measured := point.measured) is not None:
        words.append(f"{measured.throughput:>9,.1f} {'tokens/s' if language else 'rows/s'}")
        for time in ("ttft", "itl") if language else ("latency",):
            found = measured.time(time)
            quantiles = (show_time(found.at(percent) if found else None) for percent in (50, 95))
            words.append(f"{time} {' / '.join(quantiles)}")
    words.append(f"[{_COLOURS[point.state]}]{point.state}[/] [dim]")
    return "  ".join(words) + escape("; ".join(point.remarks)) + "[/]"


def conclusion(result: Result) -> str:
    """What the terminal and the report say at the end."""
    if result.empty:
        return "No load could be measured."
    best = result.best
    if best is None:
        return f"No load meets {result.slo}." if result.slo else "Every load failed or fell behind."
    bounds = f"with {result.slo}" if result.slo else "with no bound on latency"
    caution = f" Caution: {best.caution}." if best.caution else ""
    return f"Best {bounds}: {best.load}, {best.throughput:,.1f} {result.unit}.{caution}"
