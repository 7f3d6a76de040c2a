"""How a picture of a sweep is drawn: ticks that can be read, labels that do not lie on each other,
marks for the state of a point, and the two files. What is in the pictures is up to figures.py.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from jitney.sweep.record import Point, printable
from jitney.sweep.slo import show_time

# Of Okabe and Ito's colours, which the colour-blind tell apart, those that stand out from white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
GREY = "#555555"
BEST = "#009E73"
_STYLE: Any = {
    "svg.hashsalt": "jitney",  # the same picture is the same file
    "text.parse_math": False,  # a title may have dollars in it
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "figure.facecolor": "white",
}
_LADDERS = (
    (1.0,),
    (1.0, 3.0),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
)
"""Ticks within a decade, sparse to dense."""
_MOST_TICKS = {"x": 6, "y": 8}
_LETTER_IN = 0.065
"""Inches that a letter of a legend takes; the line before it takes as much as eight."""
_LONGEST = 30
_MARGIN_PT = 1.5
_PLACES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1), (1, 1), (-1, -1))
"""Beside a point, the better ones first."""


@dataclass(frozen=True)
class Picture:
    """``alt`` says in words what is to be seen; ``panels`` stand beside each other."""

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes
    panels: int


@dataclass(frozen=True)
class Note:
    """A text at a point of the axes, put where there is room for it."""

    axes: Axes
    text: str
    x: float
    y: float


def picture(
    name: str,
    panels: int,
    paint: Callable[[Sequence[Axes]], Sequence[Note]],
    caption: str,
    alt: str,
    *,
    width: float = 3.3,
    legend: bool = False,
) -> Picture:
    """``paint`` fills the panels and returns what is to be written beside points; ``legend``: one
    for all panels, below them."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(
            1, panels, figsize=(width * panels, 3.2), squeeze=False, layout="constrained"
        )
        try:
            notes = paint(list(axes[0]))
            handles, labels = axes[0][0].get_legend_handles_labels()
            if legend and len(labels) > 1:
                entry = _LETTER_IN * (8 + max(map(len, labels)))
                columns = max(1, min(len(labels), int(width * panels / entry)))
                figure.legend(
                    handles, labels, loc="outside lower center", ncols=columns, frameon=False,
                    fontsize=8,
                )  # fmt: skip
            _write(figure, notes)
            svg, png = _saved(figure, "svg"), _saved(figure, "png")
        finally:
            pyplot.close(figure)
    return Picture(name, caption, alt, svg, png, panels)


def short(text: str) -> str:
    """For legends and titles of panels: the beginning and the end of a long one."""
    text = printable(text)
    text = f" {text}" if text.startswith("_") else text  # or matplotlib leaves it out of legends
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half].rstrip()}…{text[-half:].lstrip()}"


def line(
    axis: Axes,
    points: Sequence[tuple[Point, float, float]],
    label: str,
    colour: str,
    style: str,
) -> None:
    """Through the points that did not fail: filled where steady, hollow otherwise. A failed one is
    a cross beside the line: its figures are of the requests that were answered."""
    kept = [(x, y) for point, x, y in points if point.state != "failed"]
    axis.plot(
        [x for x, _ in kept], [y for _, y in kept], color=colour, label=label, linewidth=1.4,
        linestyle=style,
    )  # fmt: skip
    for point, x, y in points:
        if point.state == "failed":
            axis.plot(x, y, marker="x", markersize=6, color=colour, linestyle="none")
        else:
            face = colour if point.state == "steady" else "white"
            axis.plot(x, y, marker="o", markersize=5, color=colour, markerfacecolor=face)


def logarithmic(axis: Any, show: Callable[[float], str]) -> None:
    """After everything is drawn: a few ticks at round numbers, however much the axis spans."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    values = axis.get_data_interval()
    if not np.isfinite(values).all() or values.max() <= 0:
        return  # nothing that a logarithm could show
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = sorted(axis.get_view_interval())
    if 0 < low < high:
        axis.set_major_locator(FixedLocator(ticks(low, high, _MOST_TICKS[axis.axis_name])))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axis.set_minor_locator(NullLocator())


def ticks(low: float, high: float, most: int) -> list[float]:
    """The densest of the ladders with at most so many between the bounds, which are above zero."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for ladder in reversed(_LADDERS):
        made = [
            step * 10.0**decade
            for decade in decades
            for step in ladder
            if low <= step * 10.0**decade <= high
        ]
        if len(made) <= most:
            break
    made = made[:: math.ceil(len(made) / most) or 1]
    return made or [math.sqrt(low * high)]  # a sliver without a round number


def show_number(value: float) -> str:
    """A tick of a count or a rate."""
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def show_seconds(value: float) -> str:
    """A tick of a time."""
    return show_time(value) if value else "0"


def _write(figure: Figure, notes: Sequence[Note]) -> None:
    """Each beside its point where nothing is written yet and no line passes; not at all if there is
    no such place: the neighbours on the line say where it stands."""
    figure.draw_without_rendering()  # the layout is fixed only then
    figure.set_layout_engine("none")
    scale = figure.dpi / 72
    taken = {id(note.axes): _occupied(note.axes, 3.5 * scale) for note in notes}
    for note in notes:
        x, y = note.axes.transData.transform((note.x, note.y))
        label = note.axes.annotate(
            note.text, (note.x, note.y), xytext=(0, 0), textcoords="offset points", fontsize=7,
            color=GREY, va="bottom",
        )  # fmt: skip
        extent = label.get_window_extent()
        wide, high = extent.width + 2 * _MARGIN_PT * scale, extent.height
        for across, up in _PLACES:
            left = x - wide / 2 + across * (wide / 2 + 6 * scale)
            low = y - high / 2 + up * (high / 2 + 5 * scale)
            box = np.array([left, low, left + wide, low + high])
            others = taken[id(note.axes)]
            if not _meets(box, others) and _inside(box, note.axes):
                taken[id(note.axes)] = np.vstack([others, box])
                label.xyann = ((left - x) / scale + _MARGIN_PT, (low - y) / scale)
                break
        else:
            label.remove()


def _occupied(axes: Axes, radius: float) -> np.ndarray:
    """Small boxes along every line of the axes, as (left, low, right, high) in pixels."""
    places = [np.empty((0, 2))]
    for drawn in axes.get_lines():
        path = drawn.get_transform().transform(np.asarray(drawn.get_xydata(), float))
        places.append(path)
        for (x0, y0), (x1, y1) in pairwise(path):
            steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / radius))
            places.append(np.linspace((x0, y0), (x1, y1), steps))
    at = np.vstack(places)
    half = radius / 2
    return np.hstack([at - half, at + half])


def _meets(box: np.ndarray, others: np.ndarray) -> bool:
    apart = (others[:, 2:] < box[:2]) | (others[:, :2] > box[2:])
    return bool((~apart.any(axis=1)).any())


def _inside(box: np.ndarray, axes: Axes) -> bool:
    whole = axes.get_window_extent()
    return bool(whole.x0 < box[0] and box[2] < whole.x1 and whole.y0 < box[1])


def _saved(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 150}
    figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()
