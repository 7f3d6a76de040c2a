"""What is asked of a sweep and how it is judged, in four parts: the loads, how steady each was, the
bounds with their verdicts and the best load, and how all this is said in the terminal.

``ttft-p95=200ms,itl-p95=50ms``: a metric, a percentile (or ``mean``) and its upper bound.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

import msgspec
from jitney.errors import InvalidArgumentError, nearest
from msgspec.structs import replace
from rich.markup import escape

from jitney_measure.options import Shared
from jitney_measure.record import (
    Best,
    Load,
    LoadPoint,
    LoadState,
    LoadVerdict,
    Measurement,
    Metric,
    Result,
)

METRICS: tuple[Metric, ...] = get_args(Metric)
_BOUND = re.compile(r"([a-z]+)-(?:mean|p(\d+(?:\.\d+)?))=([\d.]+(?:us|ms|s))", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)", re.ASCII)
_COLOURS = {"steady": "green", "unstable": "yellow", "behind": "yellow", "failed": "red"}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_ROUNDS = 4
"""The least number of requests for each user of a closed loop. The first ones all begin at once,
and must not decide the figures."""
_WARM_UP_REQUESTS = 8
_MAX_REQUESTS = 20_000
"""perf_analyzer exports the answers too: with more its file would be too large."""
_BACKLOG = 0.05
"""A server is behind a rate if its queue grows. Two things must hold of the requests in flight at
the end of the run: they are more than ``_BACKLOG * requests``, and more than
``2 * (in flight after a third of the run) + 2``. The 2 keeps tiny numbers from counting."""
_RATE_TOLERANCE = 0.1
"""How far the rate that was sent may be from the one asked for; random arrivals may be off by more,
as the square root of their number allows."""
_Users = list[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]]
_Rates = list[Annotated[float, msgspec.Meta(gt=0, le=1e6)]]


# --------------------------------------------------------------------------- loads


def loads(options: Shared, default: str) -> tuple[Load, ...]:
    """Those that are asked for, ascending; with neither option ``default``, numbers of requests at
    once. Raises InvalidArgumentError."""
    concurrency = options.concurrency or ("" if options.rate else default)
    users = _levels("concurrency", concurrency, _Users, "whole numbers from 1")
    rates = _levels("rate", options.rate, _Rates, "numbers above 0")
    closed_loops = [Load("concurrency", level) for level in users]
    return tuple(closed_loops + [Load("rate", level) for level in rates])


def _levels(field: str, text: str, kind: Any, expected: str) -> list[float]:
    parts = [part.strip() for part in text.split(",")] if text else []
    try:
        return sorted(set(msgspec.convert(parts, kind, strict=False)))
    except msgspec.ValidationError:
        raise InvalidArgumentError.of(field, text, f"{expected}, with commas between") from None


def span(field: str, text: str) -> tuple[int, int]:
    """``N`` or ``LOW:HIGH``. Raises InvalidArgumentError."""
    match = re.fullmatch(r"([1-9]\d*)(?::(\d+))?", text, re.ASCII)
    if match is not None:
        low = int(match[1])
        high = int(match[2] or low)
        if low <= high:
            return low, high
    raise InvalidArgumentError.of(field, text, "N or LOW:HIGH, numbers from 1")


def warm_up(load: Load) -> tuple[Load, int]:
    """The load and the number of requests of the warm-up. The warm-up of a closed loop also gives
    the request rate to expect of the measurement."""
    if load.kind == "rate":
        return Load("concurrency", 2), _WARM_UP_REQUESTS
    return load, max(_WARM_UP_REQUESTS, 2 * int(load.level))


def request_count(options: Shared, load: Load, requests_per_s: float) -> int:
    """Requests of the measurement, if so many are served each second."""
    closed = load.kind == "concurrency"
    least = _LEAST_ROUNDS * int(load.level) if closed else _WARM_UP_REQUESTS
    of_the_seconds = min(round(requests_per_s * options.seconds), _MAX_REQUESTS)
    return max(least, options.requests or of_the_seconds)


# --------------------------------------------------------------------------- steadiness


@dataclass(frozen=True)
class Assessment:
    """How far the figures of a point can be trusted."""

    state: LoadState
    remarks: tuple[str, ...]


def assess(options: Shared, load: Load, measured: Measurement) -> Assessment:
    """The state of a point, and why it is not steady. Of several states the worst one counts."""
    state: LoadState = "steady"
    remarks = _signs_of_instability(options, load, measured)
    if remarks:
        state = "unstable"
    early = measured.under_way[0]
    late = measured.under_way[-1]
    many = max(_BACKLOG * measured.requests, 2 + 2 * early)
    if load.kind == "rate" and late > many:
        state = "behind"
        remarks.append(f"{late:,} requests were under way at the end, {early:,} after a third")
    if measured.failed:
        state = "failed"
        remarks.append(f"{measured.failed:,} of {measured.requests:,} requests failed")
    return Assessment(state, tuple(remarks))


def _signs_of_instability(options: Shared, load: Load, measured: Measurement) -> list[str]:
    """Why another run might have other figures: it wavered, or another load was sent."""
    remarks = []
    spreads = {"median latency": measured.latency_spread}
    if load.kind == "concurrency":
        # Of a rate it is random how many requests arrive in each third.
        spreads["throughput"] = measured.spread
    for name, spread in spreads.items():
        if spread > options.stability:
            remarks.append(f"{name} in thirds of the run differs by {spread:.0%}")
    if load.kind == "rate":
        tolerance = _RATE_TOLERANCE
        if options.arrivals == "poisson":
            # Two standard deviations of a Poisson number, relative to its mean.
            tolerance += 2 / math.sqrt(measured.requests)
        if abs(measured.sent_per_s / load.level - 1) > tolerance:
            remarks.append(f"perf_analyzer sent {measured.sent_per_s:,.1f} requests/s")
    return remarks


# --------------------------------------------------------------------------- bounds, the best load


@dataclass(frozen=True)
class Statistic:
    """A percentile of a metric, or its mean."""

    metric: Metric
    percent: float | None
    """None: the mean."""

    @property
    def name(self) -> str:
        """Such as ``ttft-p95``."""
        return f"{self.metric}-mean" if self.percent is None else f"{self.metric}-p{self.percent:g}"

    def of(self, measured: Measurement | None) -> float | None:
        """In seconds; None if it was not measured."""
        if measured is None:
            return None
        distribution = measured.distribution(self.metric)
        if distribution is None:
            return None
        return distribution.mean if self.percent is None else distribution.at(self.percent)


@dataclass(frozen=True)
class Bound:
    """The statistic may be ``seconds`` at most."""

    statistic: Statistic
    seconds: float


def shown_metrics(language: bool) -> tuple[Metric, ...]:
    """The metrics by which a reader chooses a load."""
    return ("ttft", "itl", "latency") if language else ("latency",)


def read_time(text: str) -> float | None:
    """``500us``, ``2ms``, ``90s``, ``10m`` or ``1h`` in seconds; None for anything else."""
    match = _TIME.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match is not None else None


def parse(text: str, *, language: bool) -> tuple[Bound, ...]:
    """The bounds of ``--slo``. Raises InvalidArgumentError that names the part that cannot be
    read."""
    return tuple(_bound(part.strip(), language) for part in text.split(",") if part.strip())


def _bound(text: str, language: bool) -> Bound:
    match = _BOUND.fullmatch(text)
    seconds = read_time(match[3]) if match is not None else None
    if match is None or not seconds or float(match[2] or 0) > 100:
        expected = "like ttft-p95=200ms: a percentile to 100, and more than 0 us, ms or s"
        raise InvalidArgumentError.of("slo", text, expected)
    name = match[1]
    if name not in METRICS:
        expected = f"a bound on one of {', '.join(METRICS)}{nearest(name, METRICS)}"
        raise InvalidArgumentError.of("slo", text, expected)
    if name != "latency" and not language:
        raise InvalidArgumentError.of("slo", text, "on latency: the model makes no tokens")
    percent = float(match[2]) if match[2] else None
    return Bound(Statistic(cast(Metric, name), percent), seconds)


def judge(point: LoadPoint, bounds: Sequence[Bound]) -> LoadVerdict:
    """A load that failed, or fell behind so that its queue grew, meets no bound."""
    is_void = point.state in ("failed", "behind")
    over = []
    excesses = []
    if is_void:
        over.append("; ".join(point.remarks) or point.state)
    if point.measured is not None:
        for bound in bounds:
            name = bound.statistic.name
            found = bound.statistic.of(point.measured)
            if found is None:
                over.append(f"{name} was not measured")
                continue
            excesses.append(found / bound.seconds)
            if found > bound.seconds:
                over.append(f"{name} is {show_time(found)}")
    # How near the load came is known only if each bound has its figure.
    is_known = not is_void and len(excesses) == len(bounds)
    excess = max(excesses, default=None) if is_known else None
    return LoadVerdict(point.load, tuple(over), excess)


def judged(result: Result, bounds: Sequence[Bound]) -> Result:
    """The result with its verdicts and its best load: of the largest throughput among those that
    meet the bounds, steady ones first."""
    verdicts = []
    meeting = []
    for point in result.points:
        verdict = judge(point, bounds)
        verdicts.append(verdict)
        if not verdict.over and point.measured is not None:
            meeting.append(point)
    best = _best(meeting) if meeting else None
    return replace(result, verdicts=tuple(verdicts), best=best)


def _best(meeting: Sequence[LoadPoint]) -> Best:
    """Of the points that meet the bounds, at least one. Of equals the first is taken."""
    best = max(meeting, key=lambda point: (point.state == "steady", _throughput(point)))
    fastest = max(meeting, key=_throughput)
    caution = ""
    if best.state != "steady":
        caution = "no load that meets the bounds was measured steadily"
    elif _throughput(fastest) > _throughput(best):
        caution = f"{fastest.load} gave more ({_throughput(fastest):,.1f}/s), but not steadily"
    return Best(best.load, _throughput(best), caution)


def _throughput(point: LoadPoint) -> float:
    return point.measured.throughput if point.measured is not None else 0.0


# --------------------------------------------------------------------------- the terminal


def show_time(seconds: float | None) -> str:
    """Three digits with a unit; whole seconds from 1,000 s on."""
    if seconds is None:
        return "–"
    for unit, scale in (("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        value = seconds * scale
        if value < 999.5:  # with three digits it is at most 999
            return f"{value:.3g} {unit}"
    return f"{seconds:,.0f} s"


def point_line(point: LoadPoint, language: bool) -> str:
    """A point in one line of the terminal, with rich's markup."""
    words = [f"{point.load!s:>12}"]
    measured = point.measured
    if measured is not None:
        words.append(f"{measured.throughput:>9,.1f} {'tokens/s' if language else 'rows/s'}")
        metrics: tuple[Metric, ...] = ("ttft", "itl") if language else ("latency",)
        for metric in metrics:
            p50 = show_time(Statistic(metric, 50.0).of(measured))
            p95 = show_time(Statistic(metric, 95.0).of(measured))
            words.append(f"{metric} {p50} / {p95}")
    remarks = f"[dim]{escape('; '.join(point.remarks))}[/]"
    words.append(f"[{_COLOURS[point.state]}]{point.state}[/] {remarks}")
    return "  ".join(words)


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
