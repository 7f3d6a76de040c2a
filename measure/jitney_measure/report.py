"""The report pages: of one sweep, of two side by side, and of a tuning."""

from collections.abc import Sequence
from pathlib import Path

from jitney.errors import InvalidArgumentError
from msgspec.structs import asdict

from jitney_measure import choose, slo
from jitney_measure.pages.page import Block, Table, TableRow, Text, write_page
from jitney_measure.plots import bound_on, measured, plots, shown_times
from jitney_measure.record import Point, Result, Tuning, write
from jitney_measure.slo import Bound, conclusion


def write_report(result: Result, folder: Path) -> Path:
    """``report.html`` of one sweep, and the plots as PNG."""
    bounds = slo.parse(result.slo, language=result.language)
    blocks: list[Block] = [
        *_head(result),
        _loads(result, bounds),
        plots([result], bounds),
        _server(result.points),
        "How it was measured",
    ]
    if any(found.tokens_from == "responses" for _, found in measured(result)):
        blocks.append(Text("The server does not count tokens: each response counts as one."))
    blocks.append(result.options)
    return write_page(result.title, blocks, folder)


def _head(result: Result, name: str = "") -> list[Block]:
    """The conclusion, and what was measured, where and when."""
    best = result.best
    style = "best none" if best is None else "best caution" if best.caution else "best"
    return [
        Text(
            f"{result.model} · {result.address} · {result.server} · "
            f"perf_analyzer {result.perf_analyzer} · {result.began}",
            "dim",
        ),
        Text(f"{name}{conclusion(result)}", style),
    ]


def _loads(result: Result, bounds: Sequence[Bound]) -> Table:
    """A row for each load, and below it what to consider about its figures."""
    shown = [bound_on(time, bounds) for time in shown_times(result)]
    head = ["load", "state", result.unit, "requests/s", *(f"{bound.name}, ms" for bound in shown)]
    head += ["input tokens", "requests", "bounds"]
    rows = []
    for point, verdict in zip(result.points, result.verdicts, strict=True):
        chosen = result.best is not None and point.load == result.best.load
        cells = [f"{point.load} (best)" if chosen else str(point.load), point.state]
        found = point.measured
        rates = (found.throughput, found.requests_per_s) if found else (None, None)
        sent = (found.input_tokens_mean, found.requests) if found else (None, None)
        times = [_milliseconds(bound.of(found)) for bound in shown]
        cells += [*map(_figure, rates), *times, *map(_figure, sent)]
        cells.append("over" if verdict.over else "met")
        note = "; ".join(dict.fromkeys((*point.remarks, *verdict.over)))
        rows.append(TableRow(cells, "chosen" if chosen else "", note))
    return Table("Loads", head, rows)


def _server(points: Sequence[Point]) -> Table:
    """Its own counts: of the engine where there are any, else of each model."""
    engines = [(point.load, point.engine) for point in points if point.engine is not None]
    stages = [(point.load, stage) for point in points for stage in point.stages]
    heads = ["load"]
    rows = []
    for load, record in engines or stages:
        figures = asdict(record).items()
        heads = ["load", *(name.replace("_s", ", ms").replace("_", " ") for name, _ in figures)]
        cells = (_milliseconds(v) if name.endswith("_s") else _figure(v) for name, v in figures)
        rows.append(TableRow([str(load), *cells]))
    return Table("On the server", heads, rows)


def write_comparison(a: Result, b: Result, folder: Path) -> Path:
    """``report.html`` and the plots of two sweeps. Raises InvalidArgumentError if only one is of a
    language model."""
    if a.language != b.language:
        raise InvalidArgumentError(
            f"{a.model} and {b.model} cannot be compared: only one is a language model"
        )
    blocks = _head(a, f"A, {a.title}: ") + _head(b, f"B, {b.title}: ")
    differ = [
        TableRow([name, a.options.get(name, "–"), b.options.get(name, "–")])
        for name in sorted(a.options | b.options)
        if a.options.get(name) != b.options.get(name)
    ]
    if differ:
        blocks.append(Table("Measured with different options", ("option", "A", "B"), differ))
    blocks += [_shared(a, b), plots([a, b])]
    return write_page(f"{a.title} and {b.title}", blocks, folder)


def _shared(a: Result, b: Result) -> Table:
    """B over A: above 1 is more throughput, or more time."""
    later = {point.load: (point, found) for point, found in measured(b)}
    bounds = [Bound(time, 95.0, 0.0) for time in shown_times(a)]
    rows = []
    for point, mine in measured(a):
        if point.load not in later:
            continue
        other, theirs = later[point.load]
        cells = [str(point.load), _figure(mine.throughput), _figure(theirs.throughput)]
        cells.append(f"{theirs.throughput / mine.throughput:.2f}" if mine.throughput else "–")
        for bound in bounds:
            early = bound.of(mine)
            late = bound.of(theirs)
            ratio = f"{late / early:.2f}" if early and late is not None else "–"
            cells += [_milliseconds(early), _milliseconds(late), ratio]
        rows.append(TableRow([*cells, point.state, other.state]))
    columns = [a.unit, *(f"{bound.name}, ms" for bound in bounds)]
    head = [text for name in columns for text in (f"A {name}", f"B {name}", "B / A")]
    return Table("Loads of both", ["load", *head, "state of A", "state of B"], rows)


def write_tuning(tuning: Tuning, folder: Path) -> Path:
    """``report.html``, the plots, and the two results for ``jitney bench --compare``."""
    choice = tuning.choice
    results = choose.shown(tuning)
    for name, result in results.items():
        write(result, folder / f"{name}.json")
    chosen = choice.values if choice is not None else None
    rows = []
    for trial in tuning.trials:
        unsteady = (point for point in trial.points if point.state != "steady")
        note = "; ".join(f"{p.load} {p.state}: {', '.join(p.remarks)}" for p in unsteady)
        style = "chosen" if trial.values == chosen else ""
        rows.append(TableRow(choose.cells(trial), style, note))
    blocks: list[Block] = [
        Text(f"{tuning.began}; {tuning.seconds:,.0f} s of {tuning.budget_s:,.0f} s", "dim"),
        Text(choose.conclusion(tuning), "best" if choice is not None else "best none"),
        *map(Text, choose.remarks(tuning)),
    ]
    if tuning.lines:
        blocks += [Text(choose.instruction(tuning, "config.pbtxt")), Text(tuning.lines, tag="pre")]
    blocks += [
        Table("All settings", choose.HEAD, rows),
        "Latency and throughput of the current setting and the best",
        {f"{'AB'[i]}, {name}": result.title for i, (name, result) in enumerate(results.items())},
        plots([*results.values()], slo.parse(tuning.slo, language=tuning.language)),
        "How it was measured",
        {name: ", ".join(map(str, values)) for name, values in tuning.axes.items()}
        | ({"beside": ", ".join(tuning.beside)} if tuning.beside else {})
        | tuning.options,
    ]
    return write_page(f"{tuning.model}, tuned", blocks, folder)


def _figure(value: float | str | None) -> str:
    """Three digits at least."""
    if value is None or isinstance(value, str):
        return value or "–"
    digits = 0 if isinstance(value, int) or value >= 1000 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    """Without the unit, which is in the head of the column."""
    return _figure(None if seconds is None else seconds * 1e3)
