"""Plots for a page, drawn by matplotlib, all in one style."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from jitney.errors import InstallationError, install_extra

from jitney_measure.pages.page import Plot

# "as colormaps" says that the name is for others, too, who draw with it.
try:
    from matplotlib import colormaps as colormaps
    from matplotlib import rc_context as rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise InstallationError(
        f"the report's plots need matplotlib, which is not installed: {install_extra('bench')}"
    ) from None

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#000000")
"""Of Okabe and Ito's colours, which colour-blind people can tell apart."""
STYLE: Any = {
    "svg.hashsalt": "jitney",  # the same plot is the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.markersize": 5,
}


def subplots(count: int, width: float = 3.4) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many axes, side by side."""
    figure = Figure((width * max(count, 1.4), 3.2), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def saved(figure: Figure, name: str, caption: str) -> Plot:
    """The figure as a page takes it."""
    svg = io.BytesIO()
    png = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=150)
    return Plot(name, caption, svg.getvalue(), png.getvalue(), len(figure.axes))


def over_time(
    name: str, caption: str, seconds: Sequence[float], panels: Mapping[str, Sequence[float]]
) -> Plot:
    """Each of ``panels``, by its label, against the time. A value is of the interval that ends at
    its time."""
    with rc_context(STYLE):
        figure, axes = subplots(len(panels))
        for axis, (label, values) in zip(axes, panels.items(), strict=True):
            axis.plot(seconds, values, "o", color=COLOURS[0], drawstyle="steps-pre", linestyle="-")
            axis.set(xlabel="s", title=label)
            axis.set_ylim(bottom=0)
        return saved(figure, name, caption)
