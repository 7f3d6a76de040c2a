"""Two results side by side: what changed at each load that both have, and both in the same axes."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from jitney.errors import InvalidArgumentError
from jitney.sweep import figures, slo
from jitney.sweep.page import (
    Cell,
    Html,
    figure_grid,
    milliseconds,
    number,
    state,
    table,
    write_page,
)
from jitney.sweep.record import Distribution, Load, Measurement, Point, Result
from jitney.sweep.report import best, subject

_CLOSE = 0.05
"""A ratio that is nearer to 1 is neither better nor worse."""


def write_comparison(first: Result, second: Result, folder: Path) -> Path:
    """``report.html`` and the PNGs. Raises InvalidArgumentError if one makes tokens and the other
    does not."""
    if first.language != second.language:
        raise InvalidArgumentError(
            f"{first.model} and {second.model} cannot be compared: only one is a language model"
        )
    a, b = _named(first, second)
    pictures = figures.draw([a, b])
    parts = [f"<h1>{escape(a.title)} and {escape(b.title)}</h1>"]
    for letter, result in (("A", a), ("B", b)):
        bounds = slo.parse(result.slo, language=result.language)
        parts += [best(result, bounds, f"{letter}, {result.title}"), subject(result)]
    parts += [
        _different_options(a, b),
        "<h2>Loads of both</h2>",
        _shared(a, b),
        *([figure_grid(pictures)] if pictures else []),
    ]
    return write_page(f"{a.title} and {b.title}", parts, pictures, folder)


def _named(first: Result, second: Result) -> tuple[Result, Result]:
    """With titles that differ."""
    from msgspec.structs import replace

    if first.title != second.title:
        return first, second
    return replace(first, title=f"{first.title} (A)"), replace(second, title=f"{second.title} (B)")


def _different_options(a: Result, b: Result) -> str:
    names = sorted(set(a.options) | set(b.options))
    rows = [
        [name.replace("_", " "), a.options.get(name, "–"), b.options.get(name, "–")]
        for name in names
        if a.options.get(name) != b.options.get(name)
    ]
    if not rows:
        return "<p>Both were measured with the same options.</p>"
    return (
        "<p><strong>They were measured with different options:</strong></p>"
        f"{table(('option', 'A', 'B'), rows, label='Options that differ')}"
    )


def _shared(a: Result, b: Result) -> str:
    """Of B over A: above 1 is more throughput, or more time."""
    others = _by_load(b)
    times = figures.shown_times(a)
    rows: list[Sequence[Cell]] = []
    for load, (point, mine) in _by_load(a).items():
        if load not in others:
            continue
        other, theirs = others[load]
        row: list[Cell] = [str(load), number(mine.throughput), number(theirs.throughput)]
        row.append(_ratio(theirs.throughput, mine.throughput, more_is_better=True))
        for time in times:
            early, late = _p95(mine, time), _p95(theirs, time)
            row += [milliseconds(early), milliseconds(late)]
            row.append(_ratio(late, early, more_is_better=False))
        rows.append([*row, state(point), state(other)])
    if not rows:
        return "<p>There is no load that both have figures of.</p>"
    groups = [("", 1), (a.unit, 3), *((f"{time} p95, ms", 3) for time in times), ("state", 2)]
    head = ["load", *["A", "B", "B / A"] * (1 + len(times)), "A", "B"]
    return table(head, rows, label="Loads of both", groups=groups)


def _by_load(result: Result) -> dict[Load, tuple[Point, Measurement]]:
    return {point.load: (point, found) for point, found in figures.measured(result)}


def _p95(measured: Measurement, name: str) -> float | None:
    found: Distribution | None = getattr(measured, name)
    return None if found is None else found.at(95)


def _ratio(later: float | None, earlier: float | None, *, more_is_better: bool) -> Cell:
    if not earlier or later is None:
        return "–"
    ratio = later / earlier
    if abs(ratio - 1) < _CLOSE:
        return f"{ratio:.2f}"
    return Html(f"{ratio:.2f}", "better" if (ratio > 1) == more_is_better else "worse")
