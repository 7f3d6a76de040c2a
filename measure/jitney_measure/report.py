"""The report pages: of one sweep, of two side by side, and of a tuning."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jitney.errors import InvalidArgumentError

from jitney_measure import choose, slo
from jitney_measure.pages.page import Block, Heading, Table, TableRow, Terms, Text, write_page
from jitney_measure.plots import measured, plots, shown_statistic
from jitney_measure.record import EngineWork, Load, LoadPoint, Result, Stage, Tuning, write
from jitney_measure.slo import Bound, Statistic, conclusion, shown_metrics

_ENGINE_HEAD = [
    "load", "steps", "mean batch", "queue, ms", "prompt tokens", "hit tokens", "generated tokens",
    "preemptions",
]  # fmt: skip
_STAGE_HEAD = [
    "load", "model", "inferences", "executions", "mean batch", "queue, ms", "compute, ms",
]  # fmt: skip


def write_report(result: Result, folder: Path) -> Path:
    """``report.html`` of one sweep, and the plots as PNG."""
    bounds = slo.parse(result.slo, language=result.language)
    blocks: list[Block] = [
        *_head(result),
        _loads_table(result, bounds),
        plots([result], bounds),
        _server_table(result.points),
        Heading("How it was measured"),
    ]
    if any(found.tokens_from == "responses" for _, found in measured(result)):
        blocks.append(Text("The server does not count tokens: each response counts as one."))
    blocks.append(Terms(result.options))
    return write_page(result.title, blocks, folder)


def _head(result: Result, name: str = "") -> list[Block]:
    """The conclusion, and what was measured, where and when."""
    if result.best is None:
        style = "best none"
    elif result.best.caution:
        style = "best caution"
    else:
        style = "best"
    return [
        Text(
            f"{result.model} · {result.address} · {result.server} · "
            f"perf_analyzer {result.perf_analyzer} · {result.began}",
            "dim",
        ),
        Text(f"{name}{conclusion(result)}", style),
    ]


def _loads_table(result: Result, bounds: Sequence[Bound]) -> Table:
    """A row for each load, and below it what to consider about its figures."""
    statistics = [shown_statistic(metric, bounds) for metric in shown_metrics(result.language)]
    head = [
        "load", "state", result.unit, "requests/s",
        *(f"{statistic.name}, ms" for statistic in statistics),
        "input tokens", "requests", "bounds",
    ]  # fmt: skip
    rows = []
    for point, verdict in zip(result.points, result.verdicts, strict=True):
        is_best = result.best is not None and point.load == result.best.load
        found = point.measured
        cells = [
            f"{point.load} (best)" if is_best else str(point.load),
            point.state,
            _figure(found.throughput if found else None),
            _figure(found.requests_per_s if found else None),
            *(_milliseconds(statistic.of(found)) for statistic in statistics),
            _figure(found.input_tokens_mean if found else None),
            _figure(found.requests if found else None),
            "over" if verdict.over else "met",
        ]
        note = "; ".join(dict.fromkeys((*point.remarks, *verdict.over)))
        rows.append(TableRow(cells, "chosen" if is_best else "", note))
    return Table("Loads", head, rows)


def _server_table(points: Sequence[LoadPoint]) -> Table:
    """The server's own counts: of the engine where there are any, else of each model."""
    engines = [(point.load, point.engine) for point in points if point.engine is not None]
    stages = [(point.load, stage) for point in points for stage in point.stages]
    if engines:
        head = _ENGINE_HEAD
        rows = [TableRow(_engine_cells(load, work)) for load, work in engines]
    elif stages:
        head = _STAGE_HEAD
        rows = [TableRow(_stage_cells(load, stage)) for load, stage in stages]
    else:
        head = ["load"]
        rows = []
    return Table("On the server", head, rows)


def _engine_cells(load: Load, work: EngineWork) -> list[str]:
    """A row under _ENGINE_HEAD."""
    return [
        str(load),
        _count(work.steps),
        _figure(work.mean_batch),
        _milliseconds(work.queue_s),
        _count(work.prompt_tokens),
        _count(work.hit_tokens),
        _count(work.generated_tokens),
        _count(work.preemptions),
    ]


def _stage_cells(load: Load, stage: Stage) -> list[str]:
    """A row under _STAGE_HEAD."""
    return [
        str(load),
        stage.model,
        _figure(stage.inferences),
        _figure(stage.executions),
        _figure(stage.mean_batch),
        _milliseconds(stage.queue_s),
        _milliseconds(stage.compute_s),
    ]


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
    blocks += [_common_loads_table(a, b), plots([a, b])]
    return write_page(f"{a.title} and {b.title}", blocks, folder)


def _common_loads_table(a: Result, b: Result) -> Table:
    """B over A: above 1 is more throughput, or more time."""
    of_b = {point.load: (point, found) for point, found in measured(b)}
    statistics = [Statistic(metric, 95.0) for metric in shown_metrics(a.language)]
    rows = []
    for a_point, a_found in measured(a):
        if a_point.load not in of_b:
            continue
        b_point, b_found = of_b[a_point.load]
        cells = [
            str(a_point.load),
            _figure(a_found.throughput),
            _figure(b_found.throughput),
            _ratio(b_found.throughput, a_found.throughput),
        ]
        for statistic in statistics:
            a_seconds = statistic.of(a_found)
            b_seconds = statistic.of(b_found)
            cells += [
                _milliseconds(a_seconds),
                _milliseconds(b_seconds),
                _ratio(b_seconds, a_seconds),
            ]
        rows.append(TableRow([*cells, a_point.state, b_point.state]))
    head = ["load"]
    for name in [a.unit, *(f"{statistic.name}, ms" for statistic in statistics)]:
        head += [f"A {name}", f"B {name}", "B / A"]
    return Table("Loads of both", [*head, "state of A", "state of B"], rows)


def write_tuning(tuning: Tuning, folder: Path) -> Path:
    """``report.html``, the plots, and the two results for ``jitney bench --compare``."""
    results = choose.shown(tuning)
    _write_results(results, folder)
    blocks: list[Block] = [
        Text(f"{tuning.began}; {tuning.seconds:,.0f} s of {tuning.budget_s:,.0f} s", "dim"),
        Text(choose.conclusion(tuning), "best" if tuning.choice is not None else "best none"),
        *map(Text, choose.remarks(tuning)),
    ]
    if tuning.lines:
        blocks += [Text(choose.instruction(tuning, "config.pbtxt")), Text(tuning.lines, tag="pre")]
    titles = {}
    for letter, name in zip("AB", results, strict=False):  # as the plots call the two
        titles[f"{letter}, {name}"] = results[name].title
    bounds = slo.parse(tuning.slo, language=tuning.language)
    blocks += [
        _settings_table(tuning),
        Heading("Latency and throughput of the current setting and the best"),
        Terms(titles),
        plots([*results.values()], bounds),
        Heading("How it was measured"),
        Terms(_tuning_terms(tuning)),
    ]
    return write_page(f"{tuning.model}, tuned", blocks, folder)


def _write_results(results: Mapping[str, Result], folder: Path) -> None:
    """Write each result into a file of its name, and remove those of an earlier run in the same
    folder."""
    for name in choose.RESULT_NAMES:
        (folder / f"{name}.json").unlink(missing_ok=True)
    for name, result in results.items():
        write(result, folder / f"{name}.json")


def _tuning_terms(tuning: Tuning) -> dict[str, str]:
    """The values that were tried, and the options of the loads."""
    terms = {}
    for axis, values in tuning.axes.items():
        terms[axis] = ", ".join(map(str, values))
    if tuning.beside:
        terms["beside"] = ", ".join(tuning.beside)
    return terms | tuning.options


def _settings_table(tuning: Tuning) -> Table:
    chosen = tuning.choice.values if tuning.choice is not None else None
    rows = []
    for trial in tuning.trials:
        unsteady = [point for point in trial.points if point.state != "steady"]
        note = "; ".join(f"{p.load} {p.state}: {', '.join(p.remarks)}" for p in unsteady)
        style = "chosen" if trial.values == chosen else ""
        rows.append(TableRow(choose.cells(trial), style, note))
    return Table("All settings", choose.HEAD, rows)


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return "–"
    return f"{value / base:.2f}"


def _count(value: float) -> str:
    """A whole number, which metrics have as a float."""
    return f"{value:,.0f}"


def _figure(value: float | None) -> str:
    """An int and a float from 1,000 on have no decimals, a float from 10 on has one, others two."""
    if value is None:
        return "–"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:,.1f}"
    return f"{value:,.2f}"


def _milliseconds(seconds: float | None) -> str:
    """Without the unit, which is in the head of the column."""
    return _figure(None if seconds is None else seconds * 1e3)
