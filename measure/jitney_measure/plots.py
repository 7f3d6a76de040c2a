"""The plots of one result, or of two in the same axes. A point is hollow where the load was not
steady."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jitney_measure.lengths import Lengths
from jitney_measure.pages.page import Plot
from jitney_measure.pages.plots import COLOURS, STYLE, Axes, colormaps, rc_context, saved, subplots
from jitney_measure.record import PERCENTS, LoadPoint, Measurement, Metric, Result
from jitney_measure.slo import Bound, Statistic, shown_metrics

_LEAST_S = 1e-6
"""What is drawn of a time of zero, for which an axis in logarithms has no place."""
_MEMORY_SHADES = (0.0, 0.3, 0.6, 0.95)
"""Of the four parts of the memory: weights, activations, cache, and what is left."""
_LINES = {"concurrency": ("closed loop", "-"), "rate": ("by rate", "--")}
_NAMES = {"latency": "request latency", "ttft": "time to first token", "itl": "inter-token latency"}


def plots(results: Sequence[Result], bounds: Sequence[Bound] = ()) -> list[Plot]:
    """The plots for which there are figures. Two results are called A and B."""
    found = [m for result in results for _, m in measured(result)]
    if not found:
        return []
    metrics = []
    for metric in shown_metrics(results[0].language):
        if any(m.distribution(metric) is not None for m in found):
            metrics.append(metric)
    with rc_context(STYLE):
        throughput = _throughput(results, metrics, bounds)
        return [throughput, *(_distribution(results, metric, bounds) for metric in metrics)]


def measured(result: Result) -> list[tuple[LoadPoint, Measurement]]:
    """The points that have figures."""
    return [(point, point.measured) for point in result.points if point.measured is not None]


def shown_statistic(metric: Metric, bounds: Sequence[Bound]) -> Statistic:
    """What is shown of a metric: the statistic that is bounded, else its p95."""
    for bound in bounds:
        if bound.statistic.metric == metric:
            return bound.statistic
    return Statistic(metric, 95.0)


def _throughput(
    results: Sequence[Result], metrics: Sequence[Metric], bounds: Sequence[Bound]
) -> Plot:
    """The plot to choose a load by: the throughput, and for each metric the statistic that is
    bounded."""
    names = ("",) if len(results) == 1 else ("A", "B")
    shown = [shown_statistic(metric, bounds) for metric in metrics]
    return curves(dict(zip(names, results, strict=True)), shown, bounds)


def curves(
    results: Mapping[str, Result], shown: Sequence[Statistic], bounds: Sequence[Bound] = ()
) -> Plot:
    """Each of ``shown`` against the throughput: a line for each result, by its name, and a dotted
    line for the bound, if there is one."""
    figure, axes = subplots(len(shown))
    unit = next(iter(results.values())).unit
    for statistic, axis in zip(shown, axes, strict=True):
        for (name, result), colour in zip(results.items(), COLOURS, strict=False):
            for kind, (loop, style) in _LINES.items():
                label = f"{name}, {loop}" if name else loop
                _curve(axis, result, statistic, kind, color=colour, linestyle=style, label=label)
        for bound in bounds:
            if bound.statistic == statistic:
                axis.axhline(bound.seconds, color="#555", linestyle=":")
        axis.set(xlabel=unit, ylabel="s", title=f"{_NAMES[statistic.metric]}, {statistic.name}")
        axis.set(xscale="log", yscale="log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    caption = (
        "Latency against throughput. Numbers are the loads, dotted lines the bounds. Hollow points "
        "are not steady; the best load is ringed."
    )
    return saved(figure, "throughput", caption)


def _curve(axis: Axes, result: Result, statistic: Statistic, kind: str, **line: Any) -> None:
    """Through the loads of one kind."""
    points = []
    throughputs = []
    heights = []
    for point, found in measured(result):
        seconds = statistic.of(found)
        if point.load.kind == kind and seconds is not None:
            points.append(point)
            throughputs.append(_rounded(found.throughput))
            heights.append(max(_rounded(seconds), _LEAST_S))
    if points:
        axis.plot(throughputs, heights, **line)
    for point, x, y in zip(points, throughputs, heights, strict=True):
        face = line["color"] if point.state == "steady" else "white"
        axis.plot(x, y, "o", color=line["color"], markerfacecolor=face)
        axis.annotate(f"{point.load.level:g}", (x, y), (4, 4), textcoords="offset points")
        if result.best is not None and point.load == result.best.load:
            axis.plot(x, y, "o", markersize=11, color="#009E73", markerfacecolor="none")


def _rounded(value: float) -> float:
    """To four digits, more than a plot shows.

    Two values that differ only in their last bits have equal logarithms. matplotlib then divides by
    zero: it widens an axis only if the values themselves are equal. Rounding makes them equal.
    """
    return float(f"{value:.4g}")


def _distribution(results: Sequence[Result], metric: Metric, bounds: Sequence[Bound]) -> Plot:
    """Cumulative distribution of one metric, a line for each load, axes for each result."""
    figure, axes = subplots(len(results), width=4.7)
    for name, result, axis in zip("AB", results, axes, strict=False):
        pairs = []
        for point, found in measured(result):
            distribution = found.distribution(metric)
            if distribution is not None:
                pairs.append((point, distribution))
        for i, (point, distribution) in enumerate(pairs):
            axis.plot(
                [max(_rounded(seconds), _LEAST_S) for seconds in distribution.quantiles],
                PERCENTS,
                linestyle="-" if point.state == "steady" else ":",
                color=colormaps["viridis"](0.85 * i / len(pairs)),
                label=str(point.load),
            )
        for bound in bounds:
            if bound.statistic.metric == metric:
                # A mean is at no percent of its own: its diamond stands at the median.
                percent = 50 if bound.statistic.percent is None else bound.statistic.percent
                axis.plot(bound.seconds, percent, "kD", zorder=5)
        axis.set(xlabel=f"{_NAMES[metric]}, s", ylabel="percent within that time", xscale="log")
        axis.set_title(name if len(results) > 1 else "")
        if pairs:
            axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    caption = (
        f"Distribution of the {_NAMES[metric]}, a line for each load; dotted: not steady. A line "
        "meets a bound if it passes above its diamond."
    )
    return saved(figure, metric, caption)


def sizing_plot(
    memory: Mapping[str, int],
    requests: Lengths,
    curve: Mapping[int, float],
    simulated: Sequence[tuple[int, float]],
) -> Plot:
    """Where the memory goes, the lengths, and the sequences that run by the requests at a time.

    ``memory``: the bytes of the four parts that _MEMORY_SHADES names, in this order. ``curve``: the
    expected sequences by the requests at a time; ``simulated``: pairs of requests
    at a time and sequences.
    """
    with rc_context(STYLE):
        figure, (of_memory, of_lengths, of_streams) = subplots(3)
        _draw_memory(of_memory, memory)
        _draw_lengths(of_lengths, requests)
        of_streams.plot(list(curve), list(curve.values()), color=COLOURS[0], label="expected")
        streams = [each for each, _ in simulated]
        running = [each for _, each in simulated]
        of_streams.plot(streams, running, "o", color=COLOURS[1], label="simulated")
        of_streams.set(title="sequences that run", xlabel="requests at a time")
        of_streams.set_ylim(bottom=0)
        of_streams.legend()
        return saved(figure, "plan", "")


def _draw_memory(axis: Axes, memory: Mapping[str, int]) -> None:
    """One bar, each part on top of those before it."""
    below = 0.0
    for (name, size), shade in zip(memory.items(), _MEMORY_SHADES, strict=True):
        gib = size / 2**30
        colour = colormaps["viridis"](shade)
        axis.bar([""], [gib], bottom=below, label=name, color=colour, width=0.4)
        below += gib
    axis.set(title="memory", ylabel="GiB", xlim=(-0.4, 1.6))
    axis.legend(loc="upper right", fontsize=7)


def _draw_lengths(axis: Axes, requests: Lengths) -> None:
    lengths = {
        "prompt": requests.prompt,
        "output": requests.output,
        "together": requests.prompt + requests.output,
    }
    for name, tokens in lengths.items():
        axis.plot(np.quantile(tokens, np.arange(101) / 100), range(101), label=name)
    axis.set(title="lengths", xlabel="tokens", ylabel="percent of requests up to it")
    axis.legend()
