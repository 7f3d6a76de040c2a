"""What a run says on the terminal: a line for each setting, and the end."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitney.sweep.record import Result
from jitney.sweep.slo import show_time
from jitney.sweep.sweep import line
from jitney.tune.choose import standing, unstable
from jitney.tune.record import Trial, Tuning
from jitney.tune.setting import label

_MOST_UNSTABLE = 8
"""Lines on the terminal; the report has them all."""


def trial_line(trial: Trial, unit: str) -> str:
    """A setting in one line, with rich's markup."""
    name = f"{escape(label(trial.values)):<44}"
    if trial.result is None:
        return f"{name} [red]did not load[/]  {escape(trial.failure)}"
    best = trial.result.best
    levels = ", ".join(f"{point.load.level:g}" for point in trial.result.points)
    tail = f"[dim]loads {levels}[/]"
    if best is None:
        return f"{name} [yellow]{escape(shortcoming(trial.result))}[/]  {tail}"
    doubt = " [yellow]unstable[/]" if best.caution.startswith("no load") else ""
    return f"{name} {best.throughput:>9,.1f} {unit} at {best.load}{doubt}  {tail}"


def shortcoming(result: Result) -> str:
    """Why a setting has no best load, in words."""
    if all(point.measured is None for point in result.points):
        return "could be measured at no load"
    if all(point.state in ("failed", "behind") for point in result.points):
        return "failed or fell behind at every load"
    return "meets the bounds at no load"


def conclusion(tuning: Tuning) -> str:
    """The result in a sentence or two, plain text; the report has it, too."""
    within = f"with {tuning.slo}" if tuning.slo else "with no bound on latency"
    choice = tuning.choice
    if choice is not None:
        figure = f"{choice.throughput:,.1f} {tuning.unit} at {choice.load}"
        if choice.is_current:
            here = f"{label(choice.values)}, {figure}"
            return f"Nothing better than the current setting {within}: {here}."
        if choice.before is None:
            than = f"; the current setting {_current_shortcoming(tuning)}"
        else:
            than = (
                f"; the current setting {choice.before:,.1f} "
                f"({choice.throughput / choice.before - 1:+.0%})"
            )
        return f"Best {within}: {label(choice.values)}: {figure}{than}."
    if tuning.nearest is None:
        return _nothing(tuning)
    near = tuning.nearest
    return (
        f"No setting meets {tuning.slo}. Nearest: {label(near.values)} at {near.load}, where "
        f"{near.figure}, {near.excess:.2g} times its bound."
    )


def _current_shortcoming(tuning: Tuning) -> str:
    """Of one that is not there as a figure."""
    values = next(trial.values for trial in tuning.trials if trial.phase == "current")
    last = next(trial for trial in standing(tuning.trials) if trial.values == values)
    return shortcoming(last.result) if last.result is not None else "did not load"


def _nothing(tuning: Tuning) -> str:
    """Neither a best setting nor a nearest one."""
    results = [trial.result for trial in tuning.trials if trial.result is not None]
    if any(point.measured is not None for result in results for point in result.points):
        return "At every load requests failed, or more were sent than any setting keeps up with."
    return "No setting could be measured."


def instruction(tuning: Tuning, file: str) -> str:
    """What to do with the lines."""
    if tuning.language:
        return f"In {file}, in place of its parameters of these names, if it has them:"
    blocks = [name for name in ("instance_group", "dynamic_batching") if name in tuning.lines]
    return f"In {file}, in place of its {' and '.join(blocks)}, which are to be deleted:"


def ending(tuning: Tuning) -> str:
    """How the run ended, if not by having tried everything."""
    if tuning.ending == "interrupted":
        return "Interrupted: this is of what was measured until then."
    if tuning.ending == "out of time":
        return "The time was over before everything was tried; --budget gives more."
    return ""


def shown_results(tuning: Tuning) -> dict[str, Result]:
    """``current`` and ``best`` (or ``nearest``) as they were measured last, so far as there are
    figures; of more than these two the curves would not be told apart."""
    last = {tuple(trial.values.items()): trial for trial in standing(tuning.trials)}
    current = next((t.values for t in tuning.trials if t.phase == "current"), None)
    other = tuning.choice or tuning.nearest
    wanted = {
        "current": current,
        "best" if tuning.choice else "nearest": other.values if other is not None else None,
    }
    made: dict[str, Result] = {}
    for name, values in wanted.items():
        trial = last.get(tuple(values.items())) if values is not None else None
        if trial is not None and trial.result is not None and trial.result not in made.values():
            made[name] = trial.result
    return made


def print_end(tuning: Tuning, terminal: Console, file: str) -> None:
    """Everything after the last measurement."""
    terminal.print(_table(tuning))
    for name, result in shown_results(tuning).items():
        terminal.print(f"\n{name}: {escape(result.title)}", style="bold")
        for point in result.points:
            terminal.print(line(point, language=tuning.language), soft_wrap=True)
    doubtful = unstable(tuning.trials)
    if doubtful:
        terminal.print(f"\nNot steady: {len(doubtful)} of the loads.", style="yellow")
    for trial, point in doubtful[:_MOST_UNSTABLE]:
        text = f"  {label(trial.values)}, {point.load}: {'; '.join(point.remarks) or point.state}"
        terminal.print(escape(text), style="dim", soft_wrap=True)
    if len(doubtful) > _MOST_UNSTABLE:
        terminal.print("  … the others are in the report", style="dim")
    terminal.print(f"\n[bold]{escape(conclusion(tuning))}[/]", soft_wrap=True)
    for caution in tuning.choice.cautions if tuning.choice else ():
        terminal.print(f"Caution: {escape(caution)}.", soft_wrap=True)
    if said := ending(tuning):
        terminal.print(said, style="yellow", soft_wrap=True)
    if tuning.lines:
        terminal.print(f"\n{instruction(tuning, file)}\n", markup=False, soft_wrap=True)
        terminal.print(tuning.lines, markup=False, soft_wrap=True)
        terminal.print()


def _table(tuning: Tuning) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = [name.replace("max_num_", "max_num_\n") for name in tuning.axes]
    for name in (*names, "loaded\nin", tuning.unit, "at", "not\nsteady", ""):
        # Figures stand in one line however narrow the terminal is; the remarks take what is left.
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    for trial in tuning.trials:
        table.add_row(*map(escape, cells(trial)))
    return table


def cells(trial: Trial) -> list[str]:
    """A row of the table of all settings, here and in the report: plain text."""
    row = [f"{value:,}" for value in trial.values.values()]
    row.append("–" if trial.load_s is None else show_time(trial.load_s))
    mark = {"current": "current", "final": "again", "refine": "refined", "search": ""}[trial.phase]
    if trial.result is None:
        return [*row, "–", "–", "–", f"did not load: {trial.failure}"]
    best = trial.result.best
    shaky = sum(point.state != "steady" for point in trial.result.points)
    row += ["–", "–"] if best is None else [f"{best.throughput:,.1f}", str(best.load)]
    row.append(f"{shaky} of {len(trial.result.points)}")
    missed = shortcoming(trial.result) if best is None else ""
    return [*row, ", ".join(filter(None, [mark, missed]))]
