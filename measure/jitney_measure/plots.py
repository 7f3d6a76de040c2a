"""The plots of one result, or of two in the same axes. A point is hollow where the load was not
steady."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jitney_measure.lengths import Lengths
from jitney_measure.pages.page import Plot
from jitney_measure.pages.plots import COLOURS, STYLE, Axes, colormaps, rc_context, saved, subplots
from jitney_measure.record import PERCENTS, Measurement, Point, Result
from jitney_measure.slo import Bound

_LINES = {"concurrency": ("closed loop", "-"), "rate": ("by rate", "--")}
_NAMES = {"latency": "request latency", "ttft": "time to first token", "itl": "inter-token latency"}


def plots(results: Sequence[Result], bounds: Sequence[Bound] = ()) -> list[Plot]:
    """The plots for which there are figures. Two results are called A and B."""
    found = [m for result in results for _, m in measured(result)]
    if not found:
        return []
    times = [time for time in shown_times(results[0]) if any(m.time(time) for m in found)]
    with rc_context(STYLE):
        made = [_throughput(results, times, bounds)]
        return made + [_distribution(results, time, bounds) for time in times]


def measured(result: Result) -> list[tuple[Point, Measurement]]:
    """The points that have figures."""
    return [(point, point.measured) for point in result.points if point.measured is not None]


def shown_times(result: Result) -> tuple[str, ...]:
    """The times by which a reader chooses a load."""
    return ("ttft", "itl", "latency") if result.language else ("latency",)


def bound_on(time: str, bounds: Sequence[Bound]) -> Bound:
    """The bound on a time; without any, one at p95 that nothing exceeds."""
    return next((bound for bound in bounds if bound.time == time), Bound(time, 95.0, float("inf")))


def _throughput(results: Sequence[Result], times: Sequence[str], bounds: Sequence[Bound]) -> Plot:
    """Each time, as it is bounded, against the throughput: the plot to choose a load by."""
    names = ("",) if len(results) == 1 else ("A", "B")
    shown = [bound_on(time, bounds) for time in times]
    return curves(dict(zip(names, results, strict=True)), shown)


def curves(results: Mapping[str, Result], shown: Sequence[Bound]) -> Plot:
    """Each of ``shown`` against the throughput: a line for each result, by its name."""
    figure, axes = subplots(len(shown))
    unit = next(iter(results.values())).unit
    for bound, axis in zip(shown, axes, strict=True):
        for (name, result), colour in zip(results.items(), COLOURS, strict=False):
            for kind, (loop, style) in _LINES.items():
                label = f"{name}, {loop}" if name else loop
                _curve(axis, result, bound, kind, color=colour, linestyle=style, label=label)
        if bound.seconds < float("inf"):
            axis.axhline(bound.seconds, color="#555", linestyle=":")
        axis.set(xlabel=unit, ylabel="s", title=f"{_NAMES[bound.time]}, {bound.name}")
        axis.set(xscale="log", yscale="log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    caption = (
        "Latency against throughput. Numbers are the loads, dotted lines the bounds. Hollow points "
        "are not steady; the best load is ringed."
    )
    return saved(figure, "throughput", caption)


def _curve(axis: Axes, result: Result, bound: Bound, kind: str, **line: Any) -> None:
    """Through the loads of one kind."""
    marks = []
    for point, found in measured(result):
        time = bound.of(found)
        if point.load.kind == kind and time is not None:
            marks.append((point, _rounded(found.throughput), _rounded(time)))
    if marks:
        axis.plot([x for _, x, _ in marks], [max(y, 1e-6) for _, _, y in marks], **line)
    for point, x, y in marks:
        face = line["color"] if point.state == "steady" else "white"
        axis.plot(x, y, "o", color=line["color"], markerfacecolor=face)
        axis.annotate(f"{point.load.level:g}", (x, y), (4, 4), textcoords="offset points")
        if result.best is not None and point.load == result.best.load:
            axis.plot(x, y, "o", markersize=11, color="#009E73", markerfacecolor="none")


def _rounded(value: float) -> float:
    """To four digits, more than a plot shows.

    Equal times may differ in their last bits, which depend on the processor. Then they have one
    logarithm, and matplotlib, which widens an axis for equal values alone, divides by zero.
    """
    return float(f"{value:.4g}")


def _distribution(results: Sequence[Result], time: str, bounds: Sequence[Bound]) -> Plot:
    """Cumulative distribution of one time, a line for each load, axes for each result."""
    figure, axes = subplots(len(results), width=4.7)
    for name, result, axis in zip("AB", results, axes, strict=False):
        pairs = [(p, found) for p, m in measured(result) if (found := m.time(time))]
        for i, (point, found) in enumerate(pairs):
            axis.plot(
                [max(_rounded(time_s), 1e-6) for time_s in found.quantiles], PERCENTS,
                linestyle="-" if point.state == "steady" else ":",
                color=colormaps["viridis"](0.85 * i / len(pairs)), label=str(point.load),
            )  # fmt: skip
        for bound in (bound for bound in bounds if bound.time == time):
            axis.plot(bound.seconds, bound.percent or 50, "kD", zorder=5)
        axis.set(xlabel=f"{_NAMES[time]}, s", ylabel="percent within that time", xscale="log")
        axis.set_title(name if len(results) > 1 else "")
        if pairs:
            axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    caption = (
        f"Distribution of the {_NAMES[time]}, a line for each load; dotted: not steady. A line "
        "meets a bound if it passes above its diamond."
    )
    return saved(figure, time, caption)


def sizing_plot(
    memory: Mapping[str, int],
    requests: Lengths,
    curve: Mapping[int, float],
    simulated: Sequence[tuple[int, float]],
) -> Plot:
    """Where the memory goes (bytes), the lengths, and the sequences that run by the requests at a
    time: expected, and as simulated."""
    with rc_context(STYLE):
        figure, (of_memory, of_lengths, of_streams) = subplots(3)
        below = 0.0
        for (name, size), share in zip(memory.items(), (0.0, 0.3, 0.6, 0.95), strict=True):
            colour = colormaps["viridis"](share)
            of_memory.bar([""], [size / 2**30], bottom=below, label=name, color=colour, width=0.4)
            below += size / 2**30
        of_memory.set(title="memory", ylabel="GiB", xlim=(-0.4, 1.6))
        of_memory.legend(loc="upper right", fontsize=7)
        lengths = {"prompt": requests.prompt, "output": requests.output}
        lengths["together"] = requests.prompt + requests.output
        for name, tokens in lengths.items():
            of_lengths.plot(np.quantile(tokens, np.arange(101) / 100), range(101), label=name)
        of_lengths.set(title="lengths", xlabel="tokens", ylabel="percent of requests up to it")
        of_lengths.legend()
        of_streams.plot(list(curve), list(curve.values()), color=COLOURS[0], label="expected")
        of_streams.plot(*zip(*simulated, strict=True), "o", color=COLOURS[1], label="simulated")
        of_streams.set(title="sequences that run", xlabel="requests at a time")
        of_streams.set_ylim(bottom=0)
        of_streams.legend()
        return saved(figure, "plan", "")
