"""The results as Markdown tables, as they stand in the documents."""

from collections.abc import Callable, Sequence

from benchmarks.batching.one_call import Results
from benchmarks.batching.outcomes import Summary

LATENCY = "p50 / p95 / p99, ms"


def tables(results: Results) -> str:
    """All tables of one model, each with a line that says what its cells are."""
    parts = []
    for load, unit, text in (
        ("rate", "requests/s offered", "Poisson arrivals"),
        ("concurrency", "at once", "Closed loop"),
    ):
        runs = [run for run in results.runs if run.load == load]
        if runs:
            parts.append(
                f"{text}: requests/s completed, and {LATENCY} of the wait for an answer.\n\n"
                + _by_level(runs, unit, _cell)
            )
    language = [run for run in results.runs if run.tokens_per_s is not None]
    if language:
        text = "Wanted tokens/s, and p50 / p95 until the first token, ms (Poisson arrivals).\n\n"
        rates = [run for run in language if run.load == "rate"]
        parts.append(text + _by_level(rates, "requests/s offered", _token_cell))
    if results.grid:
        parts.append(_grid(results))
    if results.mixes:
        parts.append(_mixes(results))
    batched = [run for run in results.runs if run.load == "rate" and run.batches]
    if batched:
        text = (
            "Rows per execution on average, by the server's own statistics (Poisson arrivals).\n\n"
        )
        parts.append(text + _by_level(batched, "requests/s offered", _batch_cell))
    parts.append(_generator(results.runs))
    return "\n\n".join(parts)


def _by_level(runs: Sequence[Summary], unit: str, cell: Callable[[Summary], str]) -> str:
    """A row for each mode, a column for each load."""
    levels = sorted({run.level for run in runs})
    modes = list(dict.fromkeys(run.mode for run in runs))
    found = {(run.mode, run.level): run for run in runs}
    lines = [
        f"| {unit} | " + " | ".join(f"{_number(level)}" for level in levels) + " |",
        "|---|" + "---|" * len(levels),
    ]
    for mode in modes:
        cells = [cell(found[mode, level]) if (mode, level) in found else "–" for level in levels]
        lines.append(f"| {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(run: Summary) -> str:
    if run.stalled:
        return "stalls"
    latency = " / ".join(_number(value) for value in (run.p50_ms, run.p95_ms, run.p99_ms))
    text = f"{_number(run.throughput)} · {latency}" + (" †" if run.generator_bound else "")
    return f"({text})" if run.behind else text


def _token_cell(run: Summary) -> str:
    assert run.tokens_per_s is not None
    # Without a stream the first token comes with the last one.
    p50 = run.p50_ms if run.first_p50_ms is None else run.first_p50_ms
    p95 = run.p95_ms if run.first_p95_ms is None else run.first_p95_ms
    text = f"{_number(run.tokens_per_s)} · {_number(p50)} / {_number(p95)}"
    return f"({text})" if run.behind else text


def _batch_cell(run: Summary) -> str:
    return "–" if run.mean_batch is None else f"{run.mean_batch:.1f}"


def _grid(results: Results) -> str:
    windows = sorted({cell.window_us for cell in results.grid})
    parts = []
    for share in sorted({cell.share for cell in results.grid}):
        cells = {(c.size, c.window_us): c.summary for c in results.grid if c.share == share}
        level = next(iter(cells.values())).level
        lines = [
            f"Dynamic batching at {_number(level)} requests/s ({share:g} of the unbatched "
            f"capacity): requests/s completed, {LATENCY}, rows per execution in brackets.",
            "",
            "| largest batch | " + " | ".join(f"{w / 1000:g} ms" for w in windows) + " |",
            "|---|" + "---|" * len(windows),
        ]
        for size in sorted({size for size, _ in cells}):
            row = [
                f"{_cell(cells[size, window])} [{_batch_cell(cells[size, window])}]"
                for window in windows
            ]
            lines.append(f"| {size} | " + " | ".join(row) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _mixes(results: Results) -> str:
    bulk, urgent = results.mixes[0].bulk, results.mixes[0].urgent
    lines = [
        f"Urgent requests ({_number(urgent.level)} requests/s, Poisson) beside bulk work "
        f"({_number(bulk.level)} at once, closed loop).",
        "",
        f"| | urgent: {LATENCY} | bulk: requests/s | bulk: p50, ms |",
        "|---|---|---|---|",
    ]
    for mix in results.mixes:
        latency = " / ".join(
            _number(value) for value in (mix.urgent.p50_ms, mix.urgent.p95_ms, mix.urgent.p99_ms)
        )
        lines.append(
            f"| {mix.name} | {latency} | {_number(mix.bulk.throughput)} | "
            f"{_number(mix.bulk.p50_ms)} |"
        )
    return "\n".join(lines)


def _generator(runs: Sequence[Summary]) -> str:
    """The generator's share, where it was largest."""
    busiest = max(runs, key=lambda run: run.generator_cores)
    latest = max(
        (run for run in runs if run.load == "rate" and not (run.behind or run.generator_bound)),
        key=lambda run: run.late_p99_ms,
        default=busiest,
    )
    return (
        "In brackets: the mode fell behind what was offered, and the wait grew to the run's end. "
        "†: more than half of the p99 is the generator's own lateness.\n\n"
        f"The load generator: at most {busiest.generator_cores:.2f} of a core ({busiest.mode}, "
        f"{_number(busiest.throughput)} requests/s, {busiest.generator_us:.0f} µs each); apart "
        f"from both it sent at most {latest.late_p99_ms:.1f} ms late (p99; {latest.mode} at "
        f"{_number(latest.level)} requests/s)."
    )


def _number(value: float) -> str:
    """Three digits or so."""
    if value >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")
