"""What the page of one result says: the best load, a table of all, the pictures, the server's side.

page.py makes HTML of it: one file that needs nothing beside it, no script and no network.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from jitney.sweep import figures, slo
from jitney.sweep.page import (
    Cell,
    figure_grid,
    milliseconds,
    note,
    number,
    state,
    table,
    write_page,
)
from jitney.sweep.record import Distribution, Measurement, Point, Result
from jitney.sweep.slo import Bound, show_time
from jitney.sweep.sweep import conclusion

_LANGUAGE_TIMES = ("ttft", "itl", "gap", "tpot", "latency")
_SHOWN = (50.0, 95.0, 99.0)


def write_report(result: Result, folder: Path) -> Path:
    """``report.html`` and the PNGs; returns the page."""
    bounds = slo.parse(result.slo, language=result.language)
    pictures = figures.draw([result], bounds)
    parts = [
        f"<h1>{escape(result.title)}</h1>",
        subject(result),
        best(result, bounds),
        "<h2>Loads</h2>",
        _loads(result, bounds),
        *([figure_grid(pictures)] if pictures else []),
        *_percentiles(result),
        "<h2>On the server</h2>",
        _server(result.points),
        "<h2>How it was measured</h2>",
        _method(result),
    ]
    return write_page(result.title, parts, pictures, folder)


def subject(result: Result) -> str:
    """What was measured, where and when, in a line."""
    kind = "language model, streamed" if result.language else "one call a request"
    began = result.began.replace("T", " ").removesuffix("+00:00").removesuffix(":00")
    said = (
        f"{result.model}: {kind}", result.address, result.server,
        f"perf_analyzer {result.perf_analyzer}", f"{began} UTC",
    )  # fmt: skip
    return f'<p class="dim">{" · ".join(map(escape, said))}</p>'


def best(result: Result, bounds: Sequence[Bound], name: str = "") -> str:
    """The conclusion, with the figures of the best load under it."""
    mark = "best" if result.best is not None else "best none"
    mark += " caution" if result.best is not None and result.best.caution else ""
    title = f"{escape(name)}: " if name else ""
    under = ""
    chosen = [
        found
        for point, found in figures.measured(result)
        if result.best is not None and point.load == result.best.load
    ]
    for found in chosen:
        said = [f"{number(found.requests_per_s)} requests/s"]
        for time in figures.shown_times(result):
            bound = figures.bounded(time, bounds)
            if (times := getattr(found, time)) is not None:
                said.append(f"{time} {figures.statistic(bound)} {show_time(bound.of(times))}")
        unbroken = (text.replace(" ", "\N{NO-BREAK SPACE}") for text in said)
        under = f"<br />There: {', '.join(unbroken)}."
    return f'<p class="{mark}"><strong>{title}{escape(conclusion(result))}</strong>{under}</p>'


def _loads(result: Result, bounds: Sequence[Bound]) -> str:
    """A row for each load, and under it what is to be held against it."""
    times = [(time, figures.bounded(time, bounds)) for time in figures.shown_times(result)]
    head: list[Cell] = ["load", "state", result.unit, "requests/s"]
    head += [f"{time} {figures.statistic(bound)}, ms" for time, bound in times]
    head += [*(["input tokens"] if result.language else []), "requests"]
    head += ["bounds"] if result.slo else []
    rows: list[Sequence[Cell]] = []
    marks = []
    verdicts = result.verdicts or (None,) * len(result.points)
    for point, verdict in zip(result.points, verdicts, strict=True):
        chosen = result.best is not None and point.load == result.best.load
        name = f"{point.load} (best)" if chosen else str(point.load)
        over = verdict.over if verdict is not None and result.slo else ()
        row: list[Cell] = [name, state(point), *_figures(result, point.measured, times)]
        if result.slo:
            row.append("over" if over else "met")
        rows.append(row)
        marks.append("chosen" if chosen else "")
        said = dict.fromkeys((*point.remarks, *over))
        repeated = "; ".join(point.remarks)  # as slo.judge has them
        if words := [text for text in said if text != repeated or text in point.remarks]:
            rows.append(note("; ".join(words), len(head)))
            marks.append("note")
    return table(head, rows, label="Loads", marks=marks)


def _figures(
    result: Result, found: Measurement | None, times: Sequence[tuple[str, Bound]]
) -> list[Cell]:
    if found is None:
        return ["–"] * (3 + len(times) + result.language)
    row: list[Cell] = [number(found.throughput), number(found.requests_per_s)]
    for time, bound in times:
        distribution: Distribution | None = getattr(found, time)
        row.append("–" if distribution is None else milliseconds(bound.of(distribution)))
    if result.language:
        asked = found.input_tokens_mean
        row.append("–" if asked is None else f"{asked:,.0f}")
    return [*row, f"{found.requests:,}"]


def _percentiles(result: Result) -> list[str]:
    """Every time at each load, in milliseconds."""
    points = figures.measured(result)
    times = [
        time
        for time in (_LANGUAGE_TIMES if result.language else ("latency",))
        if any(getattr(found, time) for _, found in points)
    ]
    if not points:
        return []
    rows: list[Sequence[Cell]] = []
    for point, found in points:
        row: list[Cell] = [str(point.load)]
        for time in times:
            of: Distribution | None = getattr(found, time)
            row += ["–"] * 3 if of is None else [milliseconds(of.at(p)) for p in _SHOWN]
        rows.append(row)
    head = ["load", *(f"p{p:g}" for _ in times for p in _SHOWN)]
    groups = [("", 1), *((f"{time}, ms", len(_SHOWN)) for time in times)]
    return ["<h2>Percentiles</h2>", table(head, rows, label="Percentiles", groups=groups)]


def _server(points: Sequence[Point]) -> str:
    rows: list[Sequence[Cell]] = []
    engine_rows: list[Sequence[Cell]] = []
    for point in points:
        for stage in point.stages:
            rows.append(
                [str(point.load), stage.model, f"{stage.inferences:,}",
                 f"{stage.executions:,}", _mean(stage.mean_batch), milliseconds(stage.queue_s),
                 milliseconds(stage.compute_s)]
            )  # fmt: skip
        work = point.engine
        if work is not None:
            engine_rows.append(
                [str(point.load), f"{work.steps:,.0f}", _mean(work.mean_batch),
                 milliseconds(work.queue_s), f"{work.prompt_tokens:,.0f}",
                 f"{work.hit_tokens:,.0f}", f"{work.generated_tokens:,.0f}",
                 f"{work.preemptions:,.0f}"]
            )  # fmt: skip
    if engine_rows:
        head = ("load", "steps", "sequences in a step", "queue, ms", "prompt tokens",
                "found in the prefix cache", "generated tokens", "preemptions")  # fmt: skip
        return table(head, engine_rows, label="The engine, by its metrics")
    if rows:
        return table(
            ("load", "model", "inferences", "executions", "mean batch", "queue, ms", "compute, ms"),
            rows, label="The models, by the server's statistics", texts=(1,),
        )  # fmt: skip
    return "<p>The server's counts were not recorded.</p>"


def _mean(batch: float | None) -> str:
    return "–" if batch is None else f"{batch:,.2f}"


def _method(result: Result) -> str:
    chosen = "".join(
        f"<li>{escape(name.replace('_', ' '))} <b>{escape(value)}</b></li>"
        for name, value in result.options.items()
    )
    tokens = {found.tokens_from for _, found in figures.measured(result)}
    counted = (
        "<p>The server did not say how many tokens a response holds: each counts as one.</p>"
        if "responses" in tokens
        else ""
    )
    streams = (
        "<dt>ttft</dt><dd>until the first response with a token</dd>"
        "<dt>gap</dt><dd>between two responses</dd>"
        "<dt>itl</dt><dd>the gap, divided among the tokens of the response that ends it</dd>"
        "<dt>tpot</dt><dd>of a request: first to last response, over the tokens after the first"
        "</dd>"
        if result.language
        else ""
    )
    return (
        "<p>Figures are computed from the moments of every request and response that perf_analyzer "
        "exports. Throughput is taken from the first request sent to the last one sent, while the "
        "load was whole; latencies are of all requests.</p>"
        f"{counted}<dl>"
        "<dt>unstable</dt><dd>thirds of the run differ by more than the allowed share, or the "
        "wanted rate was not sent</dd>"
        "<dt>behind</dt><dd>less was completed than was sent: the latencies say how long the run "
        "lasted</dd><dt>failed</dt><dd>requests were refused, or there are no figures</dd>"
        f"<dt>latency</dt><dd>from a request's departure to the end of its answer</dd>{streams}"
        f'</dl><ul class="options">{chosen}</ul>'
    )
