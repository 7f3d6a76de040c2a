"""How good a setting was under its loads, which setting is the best, and the sentences about it.

A setting counts by its highest throughput within the bounds. A setting that breaks them at every
load counts less, and the less the further it was from them. A setting that did not load, or whose
load failed or fell behind, counts least.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from jitney_measure.axes import NO_FIGURES, OVER_BOUNDS, WITHIN_BOUNDS, Score, label
from jitney_measure.record import Choice, LoadVerdict, Result, Trial, Tuning
from jitney_measure.slo import point_line, show_time

_NOISE = 0.05
"""Two runs of one setting may differ by this share of their throughput."""
RESULT_NAMES = ("current", "best", "nearest")
"""The names that :func:`shown` gives to results."""
HEAD = ("setting", "loaded in", "throughput", "at", "remarks")


def score(trial: Trial) -> Score:
    """For the search."""
    if trial.best is not None:
        return Score(WITHIN_BOUNDS, trial.best.throughput)
    near = nearest([trial])
    if near is not None:
        return Score(OVER_BOUNDS, -near.excess)
    # It did not load, or its only load failed or fell behind. The latter is still better.
    return Score(NO_FIGURES, float(len(trial.points)))


@dataclass(frozen=True)
class Nearest:
    """A load that breaks the bounds."""

    excess: float
    """Its worst figure as a multiple of the bound."""
    trial: Trial
    verdict: LoadVerdict


def nearest(trials: Sequence[Trial]) -> Nearest | None:
    """The load that broke the bounds least; None if no load has an excess."""
    found = []
    for trial in trials:
        if trial.result is None:
            continue
        for verdict in trial.result.verdicts:
            if verdict.excess is not None:
                found.append(Nearest(verdict.excess, trial, verdict))
    return min(found, key=lambda near: near.excess, default=None)


def choose_setting(trials: Sequence[Trial]) -> Choice | None:
    """The setting to serve with; None if none meets the bounds.

    It is the setting of :func:`find_leader` if its gain over the current setting is greater than
    the difference that two runs of one setting may have. Otherwise it is the current setting:
    nothing better was found.
    """
    leader = find_leader(trials)
    if leader is None or leader.best is None:
        return None
    current = standing(trials)[0]
    chosen = leader
    best = leader.best
    cautions = list(_cautions(leader, current, trials))
    if leader.values != current.values and current.best is not None:
        noise = _noise(leader, current, trials)
        if leader.throughput <= current.throughput * (1 + noise):
            chosen = current
            best = current.best
            gain = leader.throughput / current.throughput - 1
            cautions = [
                f"{label(leader.values)} gave {gain:+.0%}, but two runs of one setting may differ "
                f"by {noise:.0%}"
            ]
    return Choice(
        values=chosen.values,
        load=best.load,
        throughput=chosen.throughput,
        is_current=chosen.values == current.values,
        before=current.throughput or None,
        cautions=tuple(cautions),
    )


def find_leader(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the highest throughput within the bounds, of the trials that count (see
    :func:`standing`). Its lead may be noise. None if no setting meets the bounds.

    If the best setting was measured again, only its new trial and the current setting are compared:
    its first figures were the highest of many, and so too high by chance.
    """
    if not trials:
        return None
    current, *others = standing(trials)
    meeting = [trial for trial in (current, *others) if trial.best is not None]
    best_was_repeated = any(trial.phase == "final" for trial in others)
    # If neither the repeated best setting nor a repeated current one meets the bounds, there is
    # nothing to go by but the first figures of all.
    a_repeated_one_meets = any(trial.phase == "final" for trial in meeting)
    if best_was_repeated and a_repeated_one_meets:
        meeting = [
            trial for trial in meeting if trial.phase == "final" or trial.values == current.values
        ]
    return max(meeting, key=lambda trial: trial.throughput, default=None)


def _cautions(chosen: Trial, current: Trial, trials: Sequence[Trial]) -> Iterator[str]:
    """Why the choice may be wrong."""
    if chosen.best is not None and chosen.best.caution:
        yield chosen.best.caution
    if chosen.values == current.values:
        return
    unrepeated = []
    if chosen.phase != "final":
        unrepeated.append("it")
    if current.phase != "final":
        unrepeated.append("the current setting")
    if unrepeated:
        failed = [trial for trial in trials if trial.phase == "final" and trial.result is None]
        if failed:
            yield f"{label(failed[0].values)} did not load when it was to be measured again"
        else:
            were = "was" if len(unrepeated) == 1 else "were"
            yield f"{' and '.join(unrepeated)} {were} not measured again"


def _noise(leader: Trial, current: Trial, trials: Sequence[Trial]) -> float:
    """By which share of its throughput two runs of one setting may differ: _NOISE, or more if the
    runs of the leader or of the current setting differed by more. It is the share of the lower
    one, in which a gain is counted, too."""
    noise = _NOISE
    for counting in (leader, current):
        runs = []
        for trial in trials:
            if trial.values == counting.values and trial.throughput and not trial.cut:
                runs.append(trial.throughput)
        if runs:
            noise = max(noise, max(runs) / min(runs) - 1)
    return noise


def standing(trials: Sequence[Trial]) -> list[Trial]:
    """For each setting the trial that counts: the last one that was measured and not cut short,
    else the first. The current setting comes first."""
    by_setting: dict[tuple[int, ...], Trial] = {}
    for trial in trials:
        was_measured = trial.result is not None and not trial.cut
        if was_measured or trial.setting not in by_setting:
            by_setting[trial.setting] = trial
    return list(by_setting.values())


def shown(tuning: Tuning) -> dict[str, Result]:
    """At most two results, because more curves could not be told apart: that of the ``current``
    setting, and that of the ``best`` one. If there is no choice, the second is that of the setting
    ``nearest`` to the bounds. A setting without a result is left out."""
    if not tuning.trials:
        return {}
    current, *others = standing(tuning.trials)
    results = {}
    if current.result is not None:
        results["current"] = current.result
    near = nearest([current, *others])
    for trial in others:
        if trial.result is None:
            continue
        if tuning.choice is not None and trial.values == tuning.choice.values:
            results["best"] = trial.result
        if tuning.choice is None and near is not None and trial.values == near.trial.values:
            results["nearest"] = trial.result
    return results


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
    if choice is None:
        return _why_none(tuning)
    setting = label(choice.values)
    figure = f"{choice.throughput:,.1f} {tuning.unit} at {choice.load}"
    if choice.is_current:
        return f"Nothing better than the current setting {within}: {setting}, {figure}."
    if choice.before is None:
        current = standing(tuning.trials)[0]
        comparison = shortcoming(current.result)
    else:
        gain = choice.throughput / choice.before - 1
        comparison = f"{choice.before:,.1f} ({gain:+.0%})"
    return f"Best {within}: {setting}: {figure}; the current setting {comparison}."


def _why_none(tuning: Tuning) -> str:
    near = nearest(standing(tuning.trials))
    if near is None:
        return "No setting could be measured, or requests failed or fell behind at every load."
    return (
        f"No setting meets {tuning.slo}. Nearest: {label(near.trial.values)} at "
        f"{near.verdict.load}, where {'; '.join(near.verdict.over)}: {near.excess:.2g} times its "
        "bound at worst."
    )


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
            terminal.print(point_line(point, tuning.language), soft_wrap=True)
    terminal.print(f"\n[bold]{escape(conclusion(tuning))}[/]", soft_wrap=True)
    for text in remarks(tuning):
        terminal.print(text, markup=False, soft_wrap=True)
    if tuning.lines:
        terminal.print(f"\n{instruction(tuning, file)}\n", markup=False, soft_wrap=True)
        terminal.print(f"{tuning.lines}\n", markup=False, soft_wrap=True)


def cells(trial: Trial) -> list[str]:
    """A row of the table of all settings, under HEAD."""
    best = trial.best
    notes: list[str] = [trial.phase]
    if best is None:
        notes.append(shortcoming(trial.result))
    if trial.failure:
        notes.append(trial.failure)
    return [
        label(trial.values),
        show_time(trial.start_s),
        "–" if best is None else f"{best.throughput:,.1f}",
        "–" if best is None else str(best.load),
        ", ".join(notes),
    ]
