"""The tables of ``batching_modes`` and ``dynamic_batching``, out of measure's records."""

from collections.abc import Mapping, Sequence

from jitney_measure.record import Load, LoadPoint, Result

ABSENT = "–"


def by_load(results: Mapping[str, Result], kind: str, head: str) -> str:
    """A row for each mode, a column for each load of that kind. Empty without any load."""
    loads = loads_of(results, kind)
    if not loads:
        return ""
    lines = [header([head, *(number(load.level) for load in loads)])]
    for name, result in results.items():
        found = {point.load: point for point in result.points}
        lines.append(line([name, *(cell(found.get(load)) for load in loads)]))
    return "\n".join(lines)


def loads_of(results: Mapping[str, Result], kind: str) -> list[Load]:
    """The loads of a kind that any of them has, ascending."""
    found = {point.load for result in results.values() for point in result.points}
    return sorted((load for load in found if load.kind == kind), key=lambda load: load.level)


def cell(point: LoadPoint | None) -> str:
    """Requests a second, p50 / p95 / p99 of the latency in ms, and rows of an execution. In
    brackets if the mode was behind its load."""
    if point is None or point.measured is None:
        return ABSENT
    found = point.measured
    text = f"{number(found.requests_per_s)} · {latency(point)}"
    if found.ttft is not None:
        text += f", first token {number(1e3 * found.ttft.at(50))}"
    batch = mean_batch(point)
    if batch is not None:
        text += f" [{batch:.1f}]"
    return f"({text})" if point.state == "behind" else text


def latency(point: LoadPoint) -> str:
    """p50 / p95 / p99 in ms."""
    assert point.measured is not None
    found = point.measured.latency
    return " / ".join(number(1e3 * found.at(percent)) for percent in (50, 95, 99))


def mean_batch(point: LoadPoint) -> float | None:
    """Rows, or sequences, of an execution; None if the server counted none."""
    if point.engine is not None:
        return point.engine.mean_batch
    return point.stages[0].mean_batch if point.stages else None


def header(names: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"{line(names)}\n{'|---' * len(names)}|"


def line(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    """Three digits or so."""
    if value >= 100 or value == round(value):
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
