"""How good a setting was under its loads, which is the best, and how both are said.

A setting counts by its greatest throughput within the bounds. One that breaks them at every load
counts less, by how near it came; one without any figure counts least.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from jitney.measure.axes import Score, label
from jitney.measure.record import Choice, Near, Result, Trial, Tuning
from jitney.measure.slo import Bound, line, show_time

_NOISE = 0.05
"""Two runs of one setting may differ by this much."""
HEAD = ("setting", "loaded in", "throughput", "at", "remarks")


def score(trial: Trial, bounds: Sequence[Bound]) -> Score:
    """For the search."""
    if trial.best is not None:
        return (2.0, trial.best.throughput)
    near = nearest([trial], bounds)
    return (1.0, -near.excess) if near is not None else (0.0, float(len(trial.points)))


def nearest(trials: Sequence[Trial], bounds: Sequence[Bound]) -> Near | None:
    """The load of any setting that broke the bounds least; None if no load has figures."""
    found = []
    for trial in trials:
        for point in trial.points:
            if point.measured is None or point.state in ("failed", "behind") or not bounds:
                continue
            ratios = [
                (value / bound.seconds, f"{bound.name} is {show_time(value)}")
                for bound in bounds
                if (value := bound.of(point.measured)) is not None
            ]
            if len(ratios) == len(bounds):
                found.append(Near(trial.values, point.load, *max(ratios)))
    return min(found, key=lambda near: near.excess, default=None)


def choose(trials: Sequence[Trial]) -> Choice | None:
    """The best of the settings, by what counts of each; None if none meets the bounds.

    If the best was measured again, it is compared with the current setting alone: the first figures
    were the greatest of many, and so too great by chance.
    """
    last = standing(trials)
    current = last[0] if last else None
    meeting = [trial for trial in last if trial.best is not None]
    if any(trial.phase == "final" for trial in meeting):
        meeting = [trial for trial in meeting if trial.phase == "final" or trial is current]
    chosen = max(meeting, key=lambda t: t.best.throughput if t.best else 0.0, default=None)
    if chosen is None or chosen.best is None:
        return None
    return Choice(
        values=chosen.values,
        load=chosen.best.load,
        throughput=chosen.best.throughput,
        is_current=chosen is current,
        before=current.best.throughput if current is not None and current.best else None,
        cautions=tuple(filter(None, _cautions(chosen, current, trials))),
    )


def _cautions(chosen: Trial, current: Trial | None, trials: Sequence[Trial]) -> Iterator[str]:
    """Why the choice may be wrong."""
    assert chosen.best is not None
    yield chosen.best.caution
    if chosen is current or current is None:
        return
    if not chosen.phase == current.phase == "final":
        yield "there was no time to measure it and the current setting again"
    if current.best is None:
        return
    gain = chosen.best.throughput / current.best.throughput - 1
    noise = _NOISE
    for again in (chosen, current):
        first = next(trial for trial in trials if trial.values == again.values)
        if first.best is not None and again.best is not None:
            noise = max(noise, abs(again.best.throughput / first.best.throughput - 1))
    if gain <= noise:
        yield f"two runs of one setting may differ by {noise:.0%} too"


def standing(trials: Sequence[Trial]) -> list[Trial]:
    """What counts of each setting, the current one first: its last measurement that was not cut
    short, else the first."""
    made: dict[tuple[tuple[str, int], ...], Trial] = {}
    for trial in trials:
        if trial.setting not in made or not trial.cut:
            made[trial.setting] = trial
    return list(made.values())


def shown(trials: Sequence[Trial], other: Choice | Near | None) -> dict[str, Result]:
    """The results of the ``current`` setting and of the ``best`` (or ``nearest``) one, if they have
    figures; more than two curves could not be told apart."""
    last = standing(trials)
    made = {"current": last[0].result} if last else {}
    if other is not None and other.values != last[0].values:
        name = "best" if isinstance(other, Choice) else "nearest"
        made[name] = next(trial.result for trial in last if trial.values == other.values)
    return {name: result for name, result in made.items() if result is not None}


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
    choice, near = tuning.choice, tuning.nearest
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
        return (
            f"No setting meets {tuning.slo}. Nearest: {label(near.values)} at {near.load}, where "
            f"{near.figure}, {near.excess:.2g} times its bound."
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
    for name, result in shown(tuning.trials, tuning.choice or tuning.nearest).items():
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
