"""The bounds of ``--slo``, how loads are judged by them, and how the terminal says it.

``ttft-p95=200ms,itl-p95=50ms``: a metric, a percentile (or ``mean``) and its upper bound.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

from jitney.errors import InvalidArgumentError, nearest
from msgspec.structs import replace
from rich.markup import escape

from jitney_measure.record import Best, LoadPoint, LoadVerdict, Measurement, Metric, Result

METRICS: tuple[Metric, ...] = get_args(Metric)
_BOUND = re.compile(r"([a-z]+)-(?:mean|p(\d+(?:\.\d+)?))=([\d.]+(?:us|ms|s))", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)", re.ASCII)
_COLOURS = {"steady": "green", "unstable": "yellow", "behind": "yellow", "failed": "red"}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


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
    unreadable = InvalidArgumentError.of(
        "slo", text, "like ttft-p95=200ms: a percentile to 100, and more than 0 us, ms or s"
    )
    match = _BOUND.fullmatch(text)
    if match is None:
        raise unreadable
    name = match[1]
    percent = float(match[2]) if match[2] else None  # without one it is the mean
    seconds = read_time(match[3])
    if not seconds or (percent is not None and percent > 100):
        raise unreadable
    if name not in METRICS:
        expected = f"a bound on one of {', '.join(METRICS)}{nearest(name, METRICS)}"
        raise InvalidArgumentError.of("slo", text, expected)
    if name != "latency" and not language:
        raise InvalidArgumentError.of("slo", text, "on latency: the model makes no tokens")
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
    """``meeting``: the points that meet the bounds. There is at least one. Of equally good points
    the first is the best."""
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
