"""The pictures of one result, or of several in the same axes: curves, distributions, batches.

Each is drawn once and written twice: as SVG for the report, as PNG beside it. drawing.py knows how.
"""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from jitney.sweep.drawing import (
    BEST,
    COLOURS,
    GREY,
    Note,
    Picture,
    line,
    logarithmic,
    picture,
    short,
    show_number,
    show_seconds,
)
from jitney.sweep.record import PERCENTS, Distribution, Load, Measurement, Point, Result
from jitney.sweep.slo import Bound, show_time

_PERCENTILES = (50.0, 95.0, 99.0)
_KINDS = {"concurrency": ("closed loop", "-"), "rate": ("by rate", "--")}
_LOADS = {"concurrency": "requests at once", "rate": "requests/s sent"}
_NARROW = 4.7
"""Inches: two such pictures stand side by side in the report."""
_STATES = "Hollow points are not steady, crosses failed in part."
Sizes = tuple[int, int | None]
"""Batches that are counted together: from, and up to, if there is an end."""
NAMES = {
    "latency": "request latency",
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "gap": "gap between responses",
    "tpot": "time per output token",
}


def draw(results: Sequence[Result], bounds: Sequence[Bound] = ()) -> list[Picture]:
    """The pictures for which there are figures. Several results are told apart by colour."""
    if not any(measured(result) for result in results):
        return []
    times = shown_times(results[0])
    made: list[Picture | None] = [_throughput(results, times, bounds), _levels(results)]
    made += [_distributions(results, time, bounds) for time in times]
    made += [_batches(result) for result in results] if len(results) == 1 else []
    made += [_queues(results)]
    return [found for found in made if found is not None]


def measured(result: Result) -> list[tuple[Point, Measurement]]:
    """The points that have figures."""
    return [(point, point.measured) for point in result.points if point.measured is not None]


def shown_times(result: Result) -> tuple[str, ...]:
    """The times that a reader chooses a load by."""
    return ("ttft", "itl", "latency") if result.language else ("latency",)


def bounded(time: str, bounds: Sequence[Bound]) -> Bound:
    """The bound on a time, or p95 without any."""
    return next((bound for bound in bounds if bound.time == time), Bound(time, 95.0, math.inf))


def statistic(bound: Bound) -> str:
    """``p95`` or ``mean``."""
    return bound.name.partition("-")[2]


def _throughput(
    results: Sequence[Result], times: Sequence[str], bounds: Sequence[Bound]
) -> Picture:
    """Each time, as it is bounded, against the throughput: what a setting is chosen by."""

    def paint(axes: Sequence[Axes]) -> list[Note]:
        notes = []
        for axis, time in zip(axes, times, strict=True):
            bound = bounded(time, bounds)
            for label, colour, style, points in _series(results):
                chosen = [
                    (p, m.throughput, bound.of(getattr(m, time)))
                    for p, m in points
                    if getattr(m, time) is not None and m.throughput > 0
                ]
                line(axis, chosen, label, colour, style)
                notes += [Note(axis, f"{p.load.level:g}", x, y) for p, x, y in chosen]
                _ring(axis, results, chosen)
            if bound.seconds < math.inf:
                axis.axhline(bound.seconds, color=GREY, linestyle=":", linewidth=1.1)
            axis.set(xlabel=results[0].unit, title=f"{NAMES[time]}, {statistic(bound)}")
            axis.margins(0.12)
            logarithmic(axis.xaxis, show_number)
            logarithmic(axis.yaxis, show_seconds)
        return notes

    return picture(
        "throughput", len(times), paint,
        f"Latency against throughput. Numbers are the loads{_ringed(results)}."
        f"{' Dotted lines are the bounds.' if bounds else ''} {_STATES}",
        f"{_and(NAMES[time] for time in times)} against {results[0].unit}, a point for each load: "
        f"{_ends(results)}",
        legend=True, width=3.3 if len(times) > 1 else _NARROW,
    )  # fmt: skip


def _ring(
    axis: Axes, results: Sequence[Result], points: Sequence[tuple[Point, float, float]]
) -> None:
    best = results[0].best if len(results) == 1 else None
    for point, x, y in points:
        if best is not None and point.load == best.load:
            axis.plot(x, y, marker="o", markersize=11, color=BEST, markerfacecolor="none",
                      markeredgewidth=1.8, linestyle="none")  # fmt: skip


def _ringed(results: Sequence[Result]) -> str:
    return ", the best one ringed" if len(results) == 1 and results[0].best is not None else ""


def _levels(results: Sequence[Result]) -> Picture:
    """Throughput and latency percentiles against the load."""

    def paint(axes: Sequence[Axes]) -> list[Note]:
        for label, colour, style, points in _series(results):
            rates = [(p, p.load.level, m.throughput) for p, m in points]
            line(axes[0], rates, label, colour, style)
            for axis, percent in zip(axes[1:], _PERCENTILES, strict=True):
                found = [(p, p.load.level, m.latency.at(percent)) for p, m in points]
                line(axis, found, label, colour, style)
        axes[0].set_title(f"throughput, {results[0].unit}")
        axes[0].set_ylim(bottom=0)
        for axis, percent in zip(axes[1:], _PERCENTILES, strict=True):
            axis.set_title(f"request latency, p{percent:g}")
            logarithmic(axis.yaxis, show_seconds)
        for axis in axes:
            axis.set_xlabel(_load_label(results))
            logarithmic(axis.xaxis, show_number)
        return []

    return picture(
        "load", 4, paint, f"Throughput and request latency against the load. {_STATES}",
        f"throughput and percentiles of the request latency against the load: {_ends(results)}",
        legend=True,
    )  # fmt: skip


def _distributions(results: Sequence[Result], time: str, bounds: Sequence[Bound]) -> Picture | None:
    """Cumulative distribution of one time, a line for each load, a panel for each result."""
    marks = [bound for bound in bounds if bound.time == time]

    def paint(axes: Sequence[Axes]) -> list[Note]:
        for axis, result in zip(axes, results, strict=True):
            colours = _shades(result)
            for point, figures in measured(result):
                found: Distribution | None = getattr(figures, time)
                if found is None:
                    continue
                axis.plot(
                    found.quantiles, [percent / 100 for percent in PERCENTS],
                    color=colours[point.load], linewidth=1.4, label=str(point.load),
                    linestyle="-" if point.state == "steady" else ":",
                )  # fmt: skip
            for bound in marks:
                axis.axvline(bound.seconds, color=GREY, linestyle=":", linewidth=1.1)
                if bound.percent is not None:
                    axis.plot(bound.seconds, bound.percent / 100, marker="D", markersize=5,
                              color="black", linestyle="none", zorder=5)  # fmt: skip
            axis.set(xlabel=NAMES[time], ylabel="share within that time")
            if len(results) > 1:
                axis.set_title(short(result.title))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            logarithmic(axis.xaxis, show_seconds)
        drawn = [axis for axis in axes if axis.get_legend_handles_labels()[1]]
        # Of two results the same edges, unless all that one has is zeros.
        edges = [edge for axis in drawn if axis.get_xscale() == "log" for edge in axis.get_xlim()]
        for axis in drawn:
            if axis.get_xscale() == "log":
                axis.set_xlim(min(edges), max(edges))
                logarithmic(axis.xaxis, show_seconds)
            axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        return []

    with_figures = [m for result in results for _, m in measured(result) if getattr(m, time)]
    if not with_figures:
        return None
    hint = " A line meets the bound if it passes above the diamond." if marks else ""
    medians = [getattr(found, time).at(50) for found in with_figures]
    return picture(
        time, len(results), paint,
        f"Distribution of the {NAMES[time]}, a line for each load; dotted: not steady.{hint}",
        f"cumulative distribution of the {NAMES[time]}, a line for each load: medians from "
        f"{show_time(min(medians))} to {show_time(max(medians))}",
        width=_NARROW,
    )  # fmt: skip


def _shades(result: Result) -> dict[Load, Any]:
    """Blue to green by level for the closed loops, yellow to red for the rates; none so light that
    it is lost on white."""
    made = {}
    for kind, name, low, high in (("concurrency", "viridis", 0.0, 0.75),
                                  ("rate", "autumn_r", 0.4, 1.0)):  # fmt: skip
        loads = [point.load for point in result.points if point.load.kind == kind]
        for i, load in enumerate(loads):
            made[load] = colormaps[name](low + (high - low) * i / max(1, len(loads) - 1))
    return made


def _batches(result: Result) -> Picture | None:
    """The share of executions, or of an engine's steps, by batch size, for each load."""
    columns: dict[str, list[tuple[Load, dict[Sizes, float]]]] = {}
    for point in result.points:
        work = point.engine
        if work is not None and work.steps:
            limits = [round(bound) for bound in work.batch_bounds]
            sizes = zip([1, *(limit + 1 for limit in limits)], [*limits, None], strict=True)
            share = {
                size: steps / work.steps
                for size, steps in zip(sizes, work.batch_steps, strict=True)
                if steps
            }
            title = "steps by sequences in them"
            columns.setdefault(title, []).append((point.load, share))
        for stage in point.stages if work is None else ():
            total = sum(stage.batches.values())
            shares: dict[Sizes, float] = {}
            for size, count in stage.batches.items():
                limit = 2 ** math.ceil(math.log2(max(size, 1)))
                found = (limit // 2 + 1, limit)
                shares[found] = shares.get(found, 0.0) + count / total
            if shares:
                title = f"{short(stage.model)}: executions by batch size"
                columns.setdefault(title, []).append((point.load, shares))
    if not columns:
        return None

    def paint(axes: Sequence[Axes]) -> list[Note]:
        for axis, (title, bars) in zip(axes, columns.items(), strict=True):
            _stack(axis, bars)
            axis.set_title(title)
        return []

    return picture(
        "batches", len(columns), paint, "Batch sizes, by the server's own count.",
        f"share of each batch size, a column for each load: {_and(columns)}", width=_NARROW,
    )  # fmt: skip


def _stack(axis: Axes, bars: Sequence[tuple[Load, dict[Sizes, float]]]) -> None:
    """A column for each load; small batches are at the bottom and dark."""
    sizes = sorted({size for _, shares in bars for size in shares}, key=lambda size: size[0])
    bottoms = [0.0] * len(bars)
    for i, size in enumerate(sizes):
        heights = [shares.get(size, 0.0) for _, shares in bars]
        colour = colormaps["viridis"](i / max(1, len(sizes) - 1))
        axis.bar(range(len(bars)), heights, bottom=bottoms, color=colour, label=_words(size))
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axis.set_xticks(
        range(len(bars)), [str(load) for load, _ in bars], rotation=40, ha="right", fontsize=7,
        rotation_mode="anchor",
    )  # fmt: skip
    axis.grid(visible=False, axis="x")
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def _words(size: Sizes) -> str:
    low, high = size
    if high is None:
        return f"from {low}"
    return str(low) if low == high else f"{low}–{high}"


def queue_s(point: Point) -> float | None:
    """Mean wait of a request before its first step; of an ensemble, the sum over its parts."""
    if point.engine is not None:
        return point.engine.queue_s
    waits = [stage.queue_s for stage in point.stages if stage.queue_s is not None]
    return sum(waits) if waits else None


def _queues(results: Sequence[Result]) -> Picture | None:
    waits = [w for r in results for point, _ in measured(r) if (w := queue_s(point)) is not None]
    if not waits:
        return None

    def paint(axes: Sequence[Axes]) -> list[Note]:
        for label, colour, style, points in _series(results):
            found = [(p, p.load.level, w) for p, _ in points if (w := queue_s(p)) is not None]
            line(axes[0], found, label, colour, style)
        axes[0].set(xlabel=_load_label(results), title="mean wait in the queue")
        axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter(lambda value, _: show_seconds(value))
        logarithmic(axes[0].xaxis, show_number)
        return []

    return picture(
        "queue", 1, paint, "Mean wait of a request in the server's queue.",
        f"mean wait in the queue for each load: {show_time(min(waits))} to "
        f"{show_time(max(waits))}",
        width=_NARROW, legend=True,
    )  # fmt: skip


def _series(
    results: Sequence[Result],
) -> list[tuple[str, str, str, list[tuple[Point, Measurement]]]]:
    """(label, colour, style of line, points) for each result and each kind of load in it."""
    made: list[tuple[str, str, str, list[tuple[Point, Measurement]]]] = []
    for i, result in enumerate(results):
        for j, (kind, (name, style)) in enumerate(_KINDS.items()):
            points = [(p, m) for p, m in measured(result) if p.load.kind == kind]
            if not points:
                continue
            label = name if len(results) == 1 else f"{short(result.title)}, {name}"
            colour = COLOURS[(j if len(results) == 1 else i) % len(COLOURS)]
            made.append((label, colour, style, points))
    return made


def _load_label(results: Sequence[Result]) -> str:
    kinds = {point.load.kind for result in results for point, _ in measured(result)}
    return ", or ".join(name for kind, name in _LOADS.items() if kind in kinds)


def _ends(results: Sequence[Result]) -> str:
    """The first and the last load of each curve in words, for who cannot see them."""
    said = []
    for label, _, _, points in _series(results):
        shown = dict.fromkeys((0, len(points) - 1))
        at = [
            f"{points[i][0].load} {points[i][1].throughput:,.1f} {results[0].unit} with a p95 "
            f"latency of {show_time(points[i][1].latency.at(95))}"
            for i in shown
        ]
        said.append(f"{label}, {' to '.join(at)}")
    return "; ".join(said)


def _and(names: Any) -> str:
    """``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)
