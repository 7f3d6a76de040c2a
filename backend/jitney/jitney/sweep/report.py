"""The page of one result: one HTML file that needs nothing beside it, no script and no network."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from jitney.sweep import figures, slo
from jitney.sweep.record import Distribution, Measurement, Point, Result
from jitney.sweep.slo import show_time
from jitney.sweep.sweep import conclusion

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; }
.dim { color: #5c5c5c; }
.best { border-left: 4px solid #009e73; background: #f0faf6; padding: .7rem 1rem; }
.none { border-left-color: #d55e00; background: #fdf3ec; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e3e3e3;
  white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
td.text { white-space: normal; min-width: 16rem; }
.steady { color: #00704f; } .unstable, .behind { color: #8a5300; } .failed { color: #b00020; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
figcaption { color: #5c5c5c; }
"""
_LANGUAGE_TIMES = ("ttft", "itl", "gap", "tpot", "latency")
_SHOWN = (50.0, 95.0, 99.0)


def write_report(result: Result, folder: Path) -> Path:
    """``report.html`` and the PNGs; returns the page."""
    bounds = slo.parse(result.slo, language=result.language)
    pictures = figures.draw([result], bounds)
    parts = [
        f"<h1>{escape(result.title)}</h1>",
        _subject(result),
        _best(result),
        "<h2>Loads</h2>",
        _loads(result),
        *(figure(picture) for picture in pictures),
        "<h2>On the server</h2>",
        _server(result.points),
        "<h2>How it was measured</h2>",
        _method(result),
    ]
    return write_page(result.title, parts, pictures, folder)


def write_page(
    title: str, parts: Sequence[str], pictures: Sequence[figures.Picture], folder: Path
) -> Path:
    """The parts as a page, and the pictures beside it. Well-formed as XML, too."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    page = folder / "report.html"
    body = "\n".join(parts)
    page.write_text(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<title>{escape(title)}</title>"
        '<link rel="icon" href="data:," />'
        f"<style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )
    return page


def figure(picture: figures.Picture) -> str:
    """The picture as part of the page itself."""
    encoded = base64.b64encode(picture.svg).decode("ascii")
    return (
        f'<figure><img src="data:image/svg+xml;base64,{encoded}" alt="{escape(picture.alt)}" />'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; ``text:`` before a cell lets it wrap."""

    def cell(text: str) -> str:
        if text.startswith("text:"):
            return f'<td class="text">{text[5:]}</td>'
        return f"<td>{text}</td>"

    made = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{made}</tbody></table></div>"
    )


def state(point: Point) -> str:
    """With its colour."""
    return f'<span class="{point.state}">{point.state}</span>'


def percentiles(found: Distribution | None) -> str:
    """p50 / p95 / p99."""
    return "–" if found is None else " / ".join(show_time(found.at(p)) for p in _SHOWN)


def _subject(result: Result) -> str:
    kind = "language model, streams" if result.language else "one call a request"
    return (
        f'<p class="dim">{escape(result.model)} ({kind}) at {escape(result.address)}, '
        f"{escape(result.server)}; perf_analyzer {escape(result.perf_analyzer)}; "
        f"{escape(result.began)}</p>"
    )


def _best(result: Result) -> str:
    mark = "best" if result.best is not None else "best none"
    return f'<p class="{mark}"><strong>{escape(conclusion(result))}</strong></p>'


def _loads(result: Result) -> str:
    times = _LANGUAGE_TIMES if result.language else ("latency",)
    head = ["load", "state", result.unit, "requests/s"]
    head += [f"{time} p50 / p95 / p99" for time in times]
    head += [*(["input tokens"] if result.language else []), "requests", "bounds", "remarks"]
    rows = []
    verdicts = result.verdicts or (None,) * len(result.points)
    for point, verdict in zip(result.points, verdicts, strict=True):
        found = point.measured
        row = [str(point.load), state(point)]
        if found is None:
            row += ["–"] * (len(head) - 4)
        else:
            row += [f"{found.throughput:,.1f}", f"{found.requests_per_s:,.2f}"]
            row += [percentiles(getattr(found, time)) for time in times]
            row += [_mean_input(found)] if result.language else []
            row.append(f"{found.requests:,}")
        over = verdict.over if verdict is not None and result.slo else ()
        row.append(f"text:{escape('; '.join(over))}" if over else "met" if result.slo else "–")
        row.append(f"text:{escape('; '.join(point.remarks))}")
        rows.append(row)
    return table(head, rows)


def _mean_input(found: Measurement) -> str:
    return "–" if found.input_tokens_mean is None else f"{found.input_tokens_mean:,.0f}"


def _server(points: Sequence[Point]) -> str:
    rows = []
    engine_rows = []
    for point in points:
        for stage in point.stages:
            mean = "–" if stage.mean_batch is None else f"{stage.mean_batch:,.2f}"
            rows.append(
                [str(point.load), escape(stage.model), f"{stage.inferences:,}",
                 f"{stage.executions:,}", mean, show_time(stage.queue_s),
                 show_time(stage.compute_s)]
            )  # fmt: skip
        work = point.engine
        if work is not None:
            mean = "–" if work.mean_batch is None else f"{work.mean_batch:,.2f}"
            engine_rows.append(
                [str(point.load), f"{work.steps:,.0f}", mean, show_time(work.queue_s),
                 f"{work.prompt_tokens:,.0f}", f"{work.hit_tokens:,.0f}",
                 f"{work.generated_tokens:,.0f}", f"{work.preemptions:,.0f}"]
            )  # fmt: skip
    if not rows and not engine_rows:
        return "<p>No load came so far.</p>"
    if engine_rows:
        note = "<p>The engine, by its metrics.</p>"
        head = ("load", "steps", "sequences in a step", "queue", "prompt tokens",
                "found in the prefix cache", "generated tokens", "preemptions")  # fmt: skip
        return note + table(head, engine_rows)
    return table(
        ("load", "model", "inferences", "executions", "mean batch", "queue", "compute"), rows
    )


def _method(result: Result) -> str:
    chosen = "".join(
        f"<li>{escape(name)}: {escape(value)}</li>" for name, value in result.options.items()
    )
    tokens = {found.tokens_from for point in result.points if (found := point.measured) is not None}
    counted = (
        "<p>The server did not say how many tokens a response holds: each counts as one.</p>"
        if "responses" in tokens
        else ""
    )
    return (
        "<p>Figures are computed from the moments of every request and response that perf_analyzer "
        "exports. Throughput is taken from the first request sent to the last one sent, while the "
        "load was whole; latencies are of all requests. A load is <em>unstable</em> if thirds of "
        "its run differ by more than the allowed share, and <em>behind</em> if less was completed "
        "than was sent: its latencies say how long the run lasted. ttft: until the first response "
        "with a token; gap: between responses; itl: the gap divided among the response's tokens; "
        "tpot: per request, first to last response over the tokens after the first.</p>"
        f"{counted}<ul>{chosen}</ul>"
    )
