"""Two results side by side: what changed at each load that both have, and both in the same axes."""

from html import escape
from pathlib import Path

from jitney.errors import InvalidArgumentError
from jitney.sweep import figures
from jitney.sweep.record import Distribution, Load, Measurement, Point, Result
from jitney.sweep.report import figure, percentiles, state, table, write_page
from jitney.sweep.sweep import conclusion


def write_comparison(first: Result, second: Result, folder: Path) -> Path:
    """``report.html`` and the PNGs. Raises InvalidArgumentError if one makes tokens and the other
    does not."""
    if first.language != second.language:
        raise InvalidArgumentError(
            f"{first.model} and {second.model} cannot be compared: only one is a language model"
        )
    pictures = figures.draw(_named(first, second))
    a, b = _named(first, second)
    parts = [
        f"<h1>{escape(a.title)} and {escape(b.title)}</h1>",
        *(
            f'<p class="best"><strong>{escape(result.title)}</strong> ({escape(result.model)}, '
            f"{escape(result.began)}): {escape(conclusion(result))}</p>"
            for result in (a, b)
        ),
        _different_options(a, b),
        "<h2>Loads of both</h2>",
        _shared(a, b),
        *(figure(picture) for picture in pictures),
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
        [escape(name), escape(a.options.get(name, "–")), escape(b.options.get(name, "–"))]
        for name in names
        if a.options.get(name) != b.options.get(name)
    ]
    if not rows:
        return "<p>Both were measured with the same options.</p>"
    return (
        "<p><strong>They were measured with different options:</strong></p>"
        f"{table(('option', a.title, b.title), rows)}"
    )


def _shared(a: Result, b: Result) -> str:
    others = _by_load(b)
    time = "ttft" if a.language else "latency"
    head = ["load", f"{a.unit}, {a.title}", b.title, "ratio", f"{time}, {a.title}", b.title]
    head += ["p95 ratio", "state"]
    rows = []
    for load, (point, mine) in _by_load(a).items():
        if load not in others:
            continue
        other, theirs = others[load]
        early, late = _time(mine, time), _time(theirs, time)
        rows.append(
            [str(load), f"{mine.throughput:,.1f}", f"{theirs.throughput:,.1f}",
             _ratio(theirs.throughput, mine.throughput), percentiles(early), percentiles(late),
             _ratio(late.at(95), early.at(95)) if early and late else "–",
             f"{state(point)}, {state(other)}"]
        )  # fmt: skip
    if not rows:
        return "<p>There is no load that both have figures of.</p>"
    return table(head, rows)


def _by_load(result: Result) -> dict[Load, tuple[Point, Measurement]]:
    return {point.load: (point, found) for point, found in figures.measured(result)}


def _time(measured: Measurement, name: str) -> Distribution | None:
    found: Distribution | None = getattr(measured, name)
    return found


def _ratio(later: float, earlier: float) -> str:
    return f"{later / earlier:.2f}" if earlier > 0 else "–"
