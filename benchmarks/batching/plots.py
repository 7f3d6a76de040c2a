"""The plots of docs/batching.md: load curves, the grid and the batch sizes, as SVG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.batching.one_call import Results
from benchmarks.batching.outcomes import Summary

# Okabe and Ito's colours, for colour-blind readers.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7")
MARKERS = "osDv^P"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jitney",  # the same results give the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.facecolor": "white",
}
_PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")


def plot(results: Results, folder: Path) -> list[Path]:
    """Write the plots of one model; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        figures = {"load": _load_curves(results), "batches": _batch_sizes(results)}
        if results.grid:
            figures["grid"] = _grid(results)
        written = []
        for kind, figure in figures.items():
            if figure is not None:
                path = folder / f"batching-{results.name}-{kind}.svg"
                figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
                pyplot.close(figure)
                written.append(path)
    return written


def _load_curves(results: Results) -> Figure:
    """A row for Poisson arrivals and one for closed loops: throughput, p50, p95, p99."""
    loads = [
        (load, label)
        for load, label in (
            ("rate", "requests/s offered (Poisson)"),
            ("concurrency", "requests at once (closed loop)"),
        )
        if any(run.load == load for run in results.runs)
    ]
    modes = list(dict.fromkeys(run.mode for run in results.runs))
    figure, rows = pyplot.subplots(
        len(loads), 4, figsize=(12, 2.9 * len(loads)), squeeze=False, layout="constrained"
    )
    for (load, label), axes in zip(loads, rows, strict=True):
        for mode, colour, marker in zip(modes, COLOURS, MARKERS, strict=False):
            runs = [
                run
                for run in results.runs
                if run.mode == mode and run.load == load and not run.stalled
            ]
            _curve(axes[0], runs, "throughput", mode, colour, marker)
            for axis, name in zip(axes[1:], _PERCENTILES, strict=True):
                _curve(axis, runs, name, mode, colour, marker)
        for axis, title in zip(
            axes, ("requests/s completed", "p50, ms", "p95, ms", "p99, ms"), strict=True
        ):
            axis.set_title(title, fontsize=9)
            axis.set_xlabel(label)
            if load == "concurrency":
                _concurrency_axis(axis, [run.level for run in results.runs if run.load == load])
        for axis in axes[1:]:
            axis.set_yscale("log")
        if load == "rate":
            top = max(run.level for run in results.runs if run.load == load)
            axes[0].plot([0, top], [0, top], color="grey", linewidth=0.8, linestyle=":")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _curve(
    axis: Any, runs: Sequence[Summary], name: str, mode: str, colour: str, marker: str
) -> None:
    """A line through all points; hollow where the mode fell behind."""
    levels = [run.level for run in runs]
    values = [getattr(run, name) for run in runs]
    axis.plot(levels, values, color=colour, marker=marker, markersize=5, linewidth=1.3, label=mode)
    behind = [(run.level, getattr(run, name)) for run in runs if run.behind]
    if behind:
        axis.plot(
            *zip(*behind, strict=True), linestyle="", color=colour, marker=marker, markersize=5,
            markerfacecolor="white", zorder=3,
        )  # fmt: skip


def _concurrency_axis(axis: Any, levels: Sequence[float]) -> None:
    ticks = sorted(set(levels))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _batch_sizes(results: Results) -> Figure | None:
    """Where requests were executed: the share of rows in batches of each size, at each rate."""
    runs = [run for run in results.runs if run.load == "rate" and run.mode.startswith("dynamic")]
    if not runs:
        return None
    modes = list(dict.fromkeys(run.mode for run in runs))
    levels = sorted({run.level for run in runs})
    figure, rows = pyplot.subplots(
        len(modes), len(levels), figsize=(2.4 * len(levels), 1.9 * len(modes)), squeeze=False,
        sharey=True, layout="constrained",
    )  # fmt: skip
    for mode, axes in zip(modes, rows, strict=True):
        for level, axis in zip(levels, axes, strict=True):
            run = next((r for r in runs if r.mode == mode and r.level == level), None)
            axis.set_title(f"{mode} · {_rate(level)}/s", fontsize=8)
            if run is None:
                axis.text(0.5, 0.5, "fell behind earlier", transform=axis.transAxes, ha="center")
                continue
            total = sum(size * count for size, count in run.batches.items())
            axis.bar(
                list(run.batches),
                [100 * size * count / total for size, count in run.batches.items()],
                color=COLOURS[2 + modes.index(mode) % 3],
                width=0.9,
            )
            axis.set_xlim(0.2, max(max(r.batches) for r in runs if r.mode == mode) + 0.8)
        axes[0].set_ylabel("% of requests")
    figure.supxlabel("rows in the execution (the server's batch_stats)", fontsize=9)
    return figure


def _rate(level: float) -> str:
    return f"{level:,.0f}" if level >= 10 else f"{level:.2g}"


def _grid(results: Results) -> Figure:
    """Maps of batch size by window: p95 latency and rows per execution, at each load."""
    shares = sorted({cell.share for cell in results.grid})
    sizes = sorted({cell.size for cell in results.grid})
    windows = sorted({cell.window_us for cell in results.grid})
    figure, rows = pyplot.subplots(
        len(shares), 3, figsize=(11, 2.3 * len(shares)), squeeze=False, layout="constrained"
    )
    for share, axes in zip(shares, rows, strict=True):
        cells = {(c.size, c.window_us): c.summary for c in results.grid if c.share == share}
        level = next(iter(cells.values())).level
        for axis, name, title, colours in zip(
            axes,
            ("p50_ms", "p95_ms", "mean_batch"),
            ("p50, ms", "p95, ms", "rows per execution"),
            ("viridis_r", "viridis_r", "viridis"),
            strict=True,
        ):
            values = [[getattr(cells[s, w], name) or 0.0 for w in windows] for s in sizes]
            _map(axis, values, sizes, windows, colours)
            axis.set_title(f"{title} at {_rate(level)} requests/s", fontsize=9)
    return figure


def _map(
    axis: Any,
    values: Sequence[Sequence[float]],
    sizes: Sequence[int],
    windows: Sequence[int],
    colours: str,
) -> None:
    axis.grid(visible=False)
    low, high = min(map(min, values)), max(map(max, values))
    axis.pcolormesh(values, cmap=colours, norm="log" if low > 0 else None)
    axis.set_xticks([i + 0.5 for i in range(len(windows))], [f"{w / 1000:g} ms" for w in windows])
    axis.set_yticks([i + 0.5 for i in range(len(sizes))], [str(size) for size in sizes])
    axis.set_xlabel("window")
    axis.set_ylabel("largest batch")
    middle = (low * high) ** 0.5 if low > 0 else (low + high) / 2
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            dark = (value > middle) == colours.endswith("_r")
            axis.text(
                column + 0.5, row + 0.5, f"{value:.3g}", ha="center", va="center",
                color="white" if dark else "black",
            )  # fmt: skip
