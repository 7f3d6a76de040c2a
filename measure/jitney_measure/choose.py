"""How good a setting was under its loads, which is the best, and how both are said.

A setting counts by its highest throughput within the bounds. One that breaks them at every load
counts less, by how near it came; one without any figure counts least.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from jitney_measure.axes import Score, label
from jitney_measure.record import Choice, LoadVerdict, Result, Trial, Tuning
from jitney_measure.slo import line, show_time

_NOISE = 0.05
"""Two runs of one setting may differ by this much."""
HEAD = ("setting", "loaded in", "throughput", "at", "remarks")


def score(trial: Trial) -> Score:
    """For the search. The first number is 2 within the bounds, 1 with figures beyond them, else 0.
    The second one orders equals: by throughput, by how near they came, by loads that were tried."""
    if trial.best is not None:
        return (2.0, trial.best.throughput)
    near = nearest([trial])
    return (1.0, -near[0]) if near is not None else (0.0, float(len(trial.points)))


def nearest(trials: Sequence[Trial]) -> tuple[float, Trial, LoadVerdict] | None:
    """The load that broke the bounds least, with its excess; None if no load has figures."""
    found = [
        (verdict.excess, trial, verdict)
        for trial in trials
        for verdict in (trial.result.verdicts if trial.result is not None else ())
        if verdict.excess is not None
    ]
    return min(found, key=lambda near: near[0], default=None)


def choose(trials: Sequence[Trial]) -> Choice | None:
    """The best of the settings, by what counts of each; None if none meets the bounds.

    If the best was measured again, it is compared with the current setting alone: the first figures
    were the highest of many, and so too high by chance.
    """
    last = standing(trials)  # its first trial is of the current setting
    meeting = [trial for trial in last if trial.best is not None]
    if any(trial.phase == "final" for trial in meeting):
        meeting = [trial for trial in meeting if trial.phase == "final" or trial is last[0]]
    chosen = max(meeting, key=lambda trial: trial.throughput, default=None)
    if chosen is None or chosen.best is None:
        return None
    return Choice(
        values=chosen.values,
        load=chosen.best.load,
        throughput=chosen.throughput,
        is_current=chosen is last[0],
        before=last[0].throughput or None,
        cautions=tuple(_cautions(chosen, last[0], trials)),
    )


def _cautions(chosen: Trial, current: Trial, trials: Sequence[Trial]) -> Iterator[str]:
    """Why the choice may be wrong."""
    if chosen.best is not None and chosen.best.caution:
        yield chosen.best.caution
    if chosen is current:
        return
    # Unless both were measured again:
    if not chosen.phase == current.phase == "final":
        yield "there was no time to measure it and the current setting again"
    noise = _NOISE
    for again in (chosen, current):
        first = next(trial for trial in trials if trial.values == again.values)
        if first.throughput and again.throughput:
            noise = max(noise, abs(again.throughput / first.throughput - 1))
    if chosen.throughput <= current.throughput * (1 + noise):
        yield f"two runs of one setting may differ by {noise:.0%} too"


def standing(trials: Sequence[Trial]) -> list[Trial]:
    """What counts of each setting, the current one first: its last measurement that was not cut
    short, else the first."""
    made: dict[tuple[int, ...], Trial] = {}
    for trial in trials:
        setting = tuple(trial.values.values())
        if setting not in made or not trial.cut:
            made[setting] = trial
    return list(made.values())


def shown(tuning: Tuning) -> dict[str, Result]:
    """The results of the ``current`` setting and of the ``best`` (or ``nearest``) one, if they have
    figures; more than two curves could not be told apart."""
    last = standing(tuning.trials)
    made = {"current": last[0]} if last else {}
    if tuning.choice is not None:
        made["best"] = next(trial for trial in last if trial.values == tuning.choice.values)
    elif (near := nearest(last)) is not None:
        made["nearest"] = near[1]
    return {
        name: trial.result
        for name, trial in made.items()
        if trial.result is not None and (name == "current" or trial is not last[0])
    }


def trial_line(trial: Trial) -> str:
    """A setting in one line, with rich's markup."""
    name = f"{escape(label(trial.values)):<44}"
    if trial.result is None:
        return f"{name} [red]did not load[/]  {escape(trial.failure)}"
    tail = f"[dim]loads {', '.join(f'{point.load.level:g}' for point in trial.points)}[/]"
    if trial.best is None:
        return f"{name} [yellow]{escape(shortcoming(trial.result))}[/]  {tail}"
    return f"{name} {trial.best.throughput:>9,.1f} {trial.result.unit} at {trial.best.load}  {tail}"


def shortcoming(result: Result | None) -> str:
    """Why a setting has no best load, in words."""
    if result is None:
        return "did not load"
    return "could be measured at no load" if result.empty else "meets the bounds at no load"


def conclusion(tuning: Tuning) -> str:
    """The result in a sentence or two."""
    within = f"with {tuning.slo}" if tuning.slo else "with no bound on latency"
    choice = tuning.choice
    near = nearest(standing(tuning.trials))
    if choice is not None:
        figure = f"{choice.throughput:,.1f} {tuning.unit} at {choice.load}"
        if choice.is_current:
            here = f"{label(choice.values)}, {figure}"
            return f"Nothing better than the current setting {within}: {here}."
        if choice.before is None:
            than = shortcoming(standing(tuning.trials)[0].result)
        else:
            than = f"{choice.before:,.1f} ({choice.throughput / choice.before - 1:+.0%})"
        return f"Best {within}: {label(choice.values)}: {figure}; the current setting {than}."
    if near is not None:
        excess, trial, verdict = near
        return (
            f"No setting meets {tuning.slo}. Nearest: {label(trial.values)} at {verdict.load}, "
            f"where {'; '.join(verdict.over)}: {excess:.2g} times its bound at worst."
        )
    return "No setting could be measured, or requests failed or fell behind at every load."


def remarks(tuning: Tuning) -> Iterator[str]:
    """What to consider about the conclusion."""
    for caution in tuning.choice.cautions if tuning.choice else ():
        yield f"Caution: {caution}."
    if tuning.ending == "interrupted":
        yield "Interrupted: this is of what was measured until then."
    if tuning.ending == "out of time":
        yield "The time was over before everything was tried; --budget gives more."


def instruction(tuning: Tuning, file: str) -> str:
    """What to do with the lines."""
    if tuning.language:
        return f"In {file}, in place of its parameters of these names, if it has them:"
    blocks = [name for name in ("instance_group", "dynamic_batching") if name in tuning.lines]
    return f"In {file}, in place of its {' and '.join(blocks)}, which are to be deleted:"


def print_end(tuning: Tuning, terminal: Console, file: str) -> None:
    """Everything after the last measurement."""
    for name, result in shown(tuning).items():
        terminal.print(f"\n{name}: {escape(result.title)}", style="bold")
        for point in result.points:
            terminal.print(line(point, tuning.language), soft_wrap=True)
    terminal.print(f"\n[bold]{escape(conclusion(tuning))}[/]", soft_wrap=True)
    for text in remarks(tuning):
        terminal.print(text, markup=False, soft_wrap=True)
    if tuning.lines:
        terminal.print(f"\n{instruction(tuning, file)}\n", markup=False, soft_wrap=True)
        terminal.print(f"{tuning.lines}\n", markup=False, soft_wrap=True)


def cells(trial: Trial) -> list[str]:
    """A row of the table of all settings, whose head is HEAD."""
    best = trial.best
    figures = (f"{best.throughput:,.1f}", str(best.load)) if best else ("–", "–")
    missed = "" if best else shortcoming(trial.result)
    remarks = ", ".join(filter(None, [trial.phase, missed, trial.failure]))
    return [label(trial.values), show_time(trial.load_s), *figures, remarks]
