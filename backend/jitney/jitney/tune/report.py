"""The page of a run: the conclusion, the lines, every setting, and the curves of the best and the
current one. The pictures and the page itself are those of ``sweep``."""

from html import escape
from pathlib import Path

from msgspec.structs import replace

from jitney.sweep import figures, slo
from jitney.sweep.page import Cell, Html, figure_grid, state, table, write_page
from jitney.sweep.record import write as write_result
from jitney.tune.choose import unstable
from jitney.tune.record import Tuning
from jitney.tune.setting import label
from jitney.tune.terminal import cells, conclusion, ending, instruction, shown_results


def write_report(tuning: Tuning, folder: Path) -> Path:
    """``report.html``, the pictures, and the two results for ``jitney bench --compare``."""
    bounds = slo.parse(tuning.slo, language=tuning.language)
    results = shown_results(tuning)
    named = [replace(result, title=name) for name, result in results.items()]
    pictures = figures.draw(named, bounds) if named else []
    mark = "best" if tuning.choice is not None else "best none"
    choice = tuning.choice
    parts = [
        f"<h1>{escape(tuning.model)}, tuned</h1>",
        f'<p class="dim">{escape(tuning.began.replace("T", " "))}; {tuning.seconds:,.0f} s of '
        f"{tuning.budget_s:,.0f} s; {len(tuning.trials)} measurements</p>",
        f'<p class="{mark}"><strong>{escape(conclusion(tuning))}</strong></p>',
        *(f"<p>Caution: {escape(text)}.</p>" for text in (choice.cautions if choice else ())),
        *([f"<p>{escape(said)}</p>"] if (said := ending(tuning)) else []),
        *_lines(tuning),
        "<h2>All settings</h2>",
        _settings(tuning),
        "<h2>The curves</h2>",
        *(f"<p>{name}: {escape(result.title)}</p>" for name, result in results.items()),
        figure_grid(pictures) if pictures else "<p>No load came so far.</p>",
        *_unstable(tuning),
        "<h2>How it was measured</h2>",
        _method(tuning),
    ]
    page = write_page(f"{tuning.model}, tuned", parts, pictures, folder)
    for name, result in results.items():
        write_result(result, folder / f"{name}.json")
    return page


def _lines(tuning: Tuning) -> list[str]:
    if not tuning.lines:
        return []
    return [
        f"<p>{escape(instruction(tuning, 'config.pbtxt'))}</p>",
        f"<pre>{escape(tuning.lines)}</pre>",
    ]


def _settings(tuning: Tuning) -> str:
    head = [*tuning.axes, "loaded in", tuning.unit, "at", "not steady", "remarks"]
    chosen = tuning.choice.values if tuning.choice is not None else None
    return table(
        head,
        [cells(trial) for trial in tuning.trials],
        label="All settings",
        marks=["chosen" if trial.values == chosen else "" for trial in tuning.trials],
        texts=[len(head) - 1],
    )


def _unstable(tuning: Tuning) -> list[str]:
    found = unstable(tuning.trials)
    if not found:
        return []
    rows: list[list[Cell]] = [
        [label(trial.values), str(point.load), state(point), Html(escape("; ".join(point.remarks)))]
        for trial, point in found
    ]
    made = table(
        ("setting", "load", "state", "why"), rows, label="Loads that were not steady", texts=[3]
    )
    return ["<h2>Not steady</h2>", made]


def _method(tuning: Tuning) -> str:
    how = {
        "grid": "Every combination of the values was tried.",
        "axes": "One axis was varied at a time, the others being at their best so far, until a "
        "round changed nothing.",
    }[tuning.strategy]
    values = "".join(
        f"<li>{escape(name)}: {', '.join(f'{value:,}' for value in tried)}</li>"
        for name, tried in tuning.axes.items()
    )
    options = "".join(
        f"<li>{escape(name)}: {escape(value)}</li>" for name, value in tuning.options.items()
    )
    return (
        f"<p>{how} A setting counts by its greatest throughput within the bounds. Loads are as in "
        f'<code>jitney bench</code>.</p><ul class="options">{values}{options}</ul>'
    )
