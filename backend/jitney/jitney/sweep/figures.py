"""The pictures of one result, or of several in the same axes: curves, distributions, batches.

Each is drawn once and written twice: as SVG for the report, as PNG beside it.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from jitney.sweep.record import PERCENTS, Distribution, Load, Measurement, Point, Result
from jitney.sweep.slo import Bound

# Okabe and Ito's colours, which the colour-blind tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_STYLE: Any = {
    "svg.hashsalt": "jitney",  # the same picture is the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.facecolor": "white",
}
_PERCENTILES = (50.0, 95.0, 99.0)
_KINDS = {"concurrency": "closed loop", "rate": "by rate"}
NAMES = {
    "latency": "request latency",
    "ttft": "time to first token",
    "itl": "inter-token latency",
}


@dataclass(frozen=True)
class Picture:
    """``alt`` says in words what is to be seen."""

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes


def draw(results: Sequence[Result], bounds: Sequence[Bound] = ()) -> list[Picture]:
    """The pictures for which there are figures. Several results are told apart by colour."""
    if not any(measured(result) for result in results):
        return []
    language = all(result.language for result in results)
    times = ("ttft", "itl", "latency") if language else ("latency",)
    made: list[Picture | None] = [_throughput(results, times, bounds), _levels(results)]
    made += [_distributions(results, time, bounds) for time in times]
    made += [_batches(result) for result in results] if len(results) == 1 else []
    made += [_queues(results)]
    return [picture for picture in made if picture is not None]


def measured(result: Result) -> list[tuple[Point, Measurement]]:
    """The points that have figures."""
    return [(point, point.measured) for point in result.points if point.measured is not None]


def _throughput(
    results: Sequence[Result], times: Sequence[str], bounds: Sequence[Bound]
) -> Picture | None:
    """p95 of each time against the throughput: the curve that a setting is chosen by."""

    def paint(axes: Sequence[Axes]) -> None:
        for axis, time in zip(axes, times, strict=True):
            for label, colour, points in _series(results):
                chosen = [
                    (p, m.throughput, getattr(m, time).at(95) * 1e3)
                    for p, m in points
                    if getattr(m, time) is not None
                ]
                _line(axis, chosen, label, colour)
                for point, x, y in chosen:
                    axis.annotate(
                        f"{point.load.level:g}", (x, y), xytext=(4, 4), textcoords="offset points",
                        fontsize=7, color=colour,
                    )  # fmt: skip
            for bound in bounds:
                if bound.time == time:
                    axis.axhline(bound.seconds * 1e3, color="grey", linestyle="--", linewidth=0.9)
            axis.set(xlabel=results[0].unit, title=f"{NAMES[time]}, p95, ms")
            _logarithmic(axis.yaxis)

    return _picture(
        "throughput", len(times), paint, results,
        "Throughput against latency. Numbers are the loads; hollow points are not steady; dashed "
        "lines are the bounds.",
        f"p95 latency over {results[0].unit}, a point for each load",
    )  # fmt: skip


def _levels(results: Sequence[Result]) -> Picture | None:
    """Throughput and latency percentiles against the load."""

    def paint(axes: Sequence[Axes]) -> None:
        for label, colour, points in _series(results):
            rates = [(p, p.load.level, m.throughput) for p, m in points]
            _line(axes[0], rates, label, colour)
            for axis, percent in zip(axes[1:], _PERCENTILES, strict=True):
                found = [(p, p.load.level, m.latency.at(percent) * 1e3) for p, m in points]
                _line(axis, found, label, colour)
                axis.set(title=f"latency p{percent:g}, ms")
                _logarithmic(axis.yaxis)
        axes[0].set_title(results[0].unit)
        for axis in axes:
            axis.set(xlabel="load (at once, or requests/s)")
            _logarithmic(axis.xaxis)

    return _picture(
        "load", 4, paint, results, "Throughput and request latency against the load.",
        "throughput and latency percentiles for each load",
    )  # fmt: skip


def _distributions(results: Sequence[Result], time: str, bounds: Sequence[Bound]) -> Picture | None:
    """Cumulative distribution of one time, a line for each load, a panel for each result."""

    def paint(axes: Sequence[Axes]) -> None:
        for axis, result in zip(axes, results, strict=True):
            points = measured(result)
            shades = pyplot.get_cmap("viridis")
            for i, (point, figures) in enumerate(points):
                found: Distribution | None = getattr(figures, time)
                if found is None:
                    continue
                axis.plot(
                    [value * 1e3 for value in found.quantiles], [p / 100 for p in PERCENTS],
                    color=shades(0.9 * i / max(1, len(points) - 1)), linewidth=1.2,
                    linestyle="-" if point.state == "steady" else ":", label=str(point.load),
                )  # fmt: skip
            for bound in bounds:
                if bound.time == time:
                    axis.axvline(bound.seconds * 1e3, color="grey", linestyle="--", linewidth=0.9)
            axis.set(xlabel="ms", ylabel="share at most", title=result.title)
            _logarithmic(axis.xaxis)
            axis.legend(fontsize=7, frameon=False)

    if not any(getattr(m, time) for result in results for _, m in measured(result)):
        return None
    return _picture(
        time, len(results), paint, (), f"Distribution of the {NAMES[time]}. Dotted: not steady.",
        f"share of cases within a {NAMES[time]}, a line for each load", width=4.6,
    )  # fmt: skip


def _batches(result: Result) -> Picture | None:
    """Where requests were executed: the share of executions, or of steps, by batch size, in powers
    of two as the engine's metrics have them."""
    columns: dict[str, list[tuple[Load, dict[str, float]]]] = {}
    for point in result.points:
        if point.engine is not None and point.engine.steps:
            bounds = [f"≤ {bound:g}" for bound in point.engine.batch_bounds] + ["more"]
            work = point.engine
            share = {
                bound: steps / work.steps
                for bound, steps in zip(bounds, work.batch_steps, strict=True)
                if steps
            }
            columns.setdefault(f"{result.model}: steps by sequences", []).append(
                (point.load, share)
            )
        for stage in point.stages if point.engine is None else ():
            total = sum(stage.batches.values())
            shares: dict[str, float] = {}
            for size, count in stage.batches.items():
                name = f"≤ {2 ** math.ceil(math.log2(max(size, 1)))}"
                shares[name] = shares.get(name, 0.0) + count / total
            if shares:
                columns.setdefault(f"{stage.model}: executions by batch size", []).append(
                    (point.load, shares)
                )
    if not columns:
        return None

    def paint(axes: Sequence[Axes]) -> None:
        for axis, (title, bars) in zip(axes, columns.items(), strict=True):
            sizes = sorted({size for _, shares in bars for size in shares}, key=_size)
            shades = pyplot.get_cmap("viridis")
            bottoms = [0.0] * len(bars)
            for i, size in enumerate(sizes):
                heights = [shares.get(size, 0.0) for _, shares in bars]
                colour = shades(i / max(1, len(sizes) - 1))
                axis.bar(range(len(bars)), heights, bottom=bottoms, color=colour, label=size)
                bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
            axis.set_xticks(
                range(len(bars)), [str(load) for load, _ in bars], rotation=45, ha="right",
                fontsize=7,
            )  # fmt: skip
            axis.set_title(title, fontsize=9)
            axis.legend(fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))

    return _picture(
        "batches", len(columns), paint, (), "Batch sizes, by the server's own count.",
        "share of executions by batch size, a column for each load", width=4.6,
    )  # fmt: skip


def _size(text: str) -> float:
    digits = text.removeprefix("≤ ")
    return float(digits) if digits != "more" else float("inf")


def queue_s(point: Point) -> float | None:
    """Mean wait of a request before its first step; of an ensemble, the sum over its parts."""
    if point.engine is not None:
        return point.engine.queue_s
    waits = [stage.queue_s for stage in point.stages if stage.queue_s is not None]
    return sum(waits) if waits else None


def _queues(results: Sequence[Result]) -> Picture | None:
    def paint(axes: Sequence[Axes]) -> None:
        for label, colour, points in _series(results):
            found = [
                (p, p.load.level, wait * 1e3) for p, _ in points if (wait := queue_s(p)) is not None
            ]
            _line(axes[0], found, label, colour)
        axes[0].set(xlabel="load (at once, or requests/s)", title="mean wait in the queue, ms")
        _logarithmic(axes[0].xaxis)

    if all(queue_s(point) is None for result in results for point in result.points):
        return None
    return _picture(
        "queue", 1, paint, results, "Mean wait of a request in the server's queue.",
        "mean wait in the queue for each load", width=4.6,
    )  # fmt: skip


def _series(
    results: Sequence[Result],
) -> list[tuple[str, str, list[tuple[Point, Measurement]]]]:
    """(label, colour, points) for each result and each kind of load in it."""
    made: list[tuple[str, str, list[tuple[Point, Measurement]]]] = []
    for result in results:
        for kind in dict.fromkeys(point.load.kind for point in result.points):
            points = [(p, m) for p, m in measured(result) if p.load.kind == kind]
            label = _KINDS[kind] if len(results) == 1 else f"{result.title}, {_KINDS[kind]}"
            made.append((label, _COLOURS[len(made) % len(_COLOURS)], points))
    return made


def _line(
    axis: Axes, points: Sequence[tuple[Point, float, float]], label: str, colour: str
) -> None:
    """Through all points; hollow where a point is not steady."""
    if not points:
        return
    axis.plot([x for _, x, _ in points], [y for _, _, y in points], color=colour, label=label,
              linewidth=1.3)  # fmt: skip
    for point, x, y in points:
        face = colour if point.state == "steady" else "white"
        axis.plot(x, y, marker="o", markersize=5, color=colour, markerfacecolor=face)


def _logarithmic(axis: Any) -> None:
    """With ticks at 1, 2 and 5 that read as plain numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _picture(
    name: str,
    panels: int,
    paint: Callable[[Sequence[Axes]], None],
    legend: Sequence[Result],
    caption: str,
    alt: str,
    width: float = 3.3,
) -> Picture:
    """``legend``: the results whose series need one, none if the panels have their own."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(
            1, panels, figsize=(width * panels, 3.2), squeeze=False, layout="constrained"
        )
        try:
            paint(list(axes[0]))
            handles, labels = axes[0][0].get_legend_handles_labels()
            if legend and len(labels) > 1:
                figure.legend(
                    handles, labels, loc="outside lower center", ncols=len(labels), frameon=False
                )
            svg, png = _saved(figure, "svg"), _saved(figure, "png")
        finally:
            pyplot.close(figure)
    return Picture(name, caption, alt, svg, png)


def _saved(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 150}
    figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()
