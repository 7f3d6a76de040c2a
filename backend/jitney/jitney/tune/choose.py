"""How good a setting was under its loads, and what is to be said of the best one.

Pure: works on records. A setting counts by its greatest throughput within the bounds; one without
any counts by how near it came, and below every one that has; one that did not load counts least.
"""

from collections.abc import Sequence

import msgspec

from jitney.sweep import slo
from jitney.sweep.record import Distribution, Point, Result
from jitney.sweep.slo import Bound, show_time
from jitney.tune.record import Choice, Near, Trial
from jitney.tune.search import Score
from jitney.tune.setting import label

NOISE = 0.05
"""A gain below it is within what two runs of one setting differ by."""


def score(trial: Trial, bounds: Sequence[Bound]) -> Score:
    """For the search."""
    result = trial.result
    if result is None or all(point.measured is None for point in result.points):
        return (0.0, 0.0)
    if result.best is not None:
        return (2.0, result.best.throughput)
    near = nearest([trial], bounds)
    return (1.0, -near.excess) if near is not None else (0.0, 1.0)


def nearest(trials: Sequence[Trial], bounds: Sequence[Bound]) -> Near | None:
    """The load of any setting that broke the bounds least; None if none was measured whole."""
    found = []
    for trial in trials:
        for point in trial.result.points if trial.result is not None else ():
            excess = _excess(point, bounds)
            if excess is not None:
                found.append(Near(trial.values, point.load, *excess))
    return min(found, key=lambda near: near.excess, default=None)


def _excess(point: Point, bounds: Sequence[Bound]) -> tuple[float, str] | None:
    """(largest ratio of a figure to its bound, that in words); None without figures of all, or if
    requests failed or fell behind."""
    if point.measured is None or point.state in ("failed", "behind"):
        return None
    ratios = []
    for bound in bounds:
        found: Distribution | None = getattr(point.measured, bound.time)
        if found is None:
            return None
        value = bound.of(found)
        ratios.append((value / bound.seconds, f"{bound.name} is {show_time(value)}"))
    return max(ratios, default=None)


def broken_below(result: Result) -> tuple[str, ...]:
    """Loads below the best one that broke the bounds, in words: whoever sends less waits longer."""
    if result.best is None:
        return ()
    level = result.best.load.level
    return tuple(
        f"{verdict.load} breaks the bounds ({'; '.join(verdict.over)})"
        for verdict in result.verdicts
        if verdict.over and verdict.load.level < level
    )


def choose(trials: Sequence[Trial], bounds: Sequence[Bound]) -> Choice | None:
    """The best of the settings, by their last measurement each; None if none meets the bounds.

    Where the best and the current one were measured again, both stand with those figures: the
    first ones were the greatest of many, and so too great by chance. If there was time for one of
    them only, it still has to beat what the current one gave at first.
    """
    last = standing(trials)
    current = _current(last, trials)
    finals = [trial for trial in last if trial.phase == "final"]
    again = [trial for trial in last if trial.phase == "final" or trial is current]
    entitled = [trial for trial in (again if finals else last) if _met(trial)]
    entitled = entitled or [trial for trial in last if _met(trial)]
    if not entitled:
        return None
    best = max(entitled, key=lambda trial: score(trial, bounds))
    assert best.result is not None
    assert best.result.best is not None
    was = _throughput(current)
    throughput = best.result.best.throughput
    same = current is not None and best.values == current.values
    cautions = [best.result.best.caution, *broken_below(best.result)]
    if not same and best.phase != "final":
        cautions.append("it was measured once: there was no time to measure it again")
    elif not same and was is not None and current is not None and current.phase != "final":
        cautions.append("there was no time to measure the current setting again beside it")
    if was is not None and current is not None and not same:
        cautions.append(_shortfall(current))
        cautions.append(_doubt(trials, throughput / was - 1))
    return Choice(
        values=best.values,
        load=best.result.best.load,
        throughput=throughput,
        is_current=same,
        before=was,
        cautions=tuple(filter(None, cautions)),
    )


def standing(trials: Sequence[Trial]) -> list[Trial]:
    """What counts of each setting: its last measurement, unless that one was cut short on its way
    up, before the load at which the setting was best at first."""
    made: dict[tuple[tuple[str, int], ...], Trial] = {}
    for trial in trials:
        before = made.get(tuple(trial.values.items()))
        if before is None or not trial.cut or _reached(trial, before):
            made[tuple(trial.values.items())] = trial
    return list(made.values())


def _reached(trial: Trial, before: Trial) -> bool:
    """Whether the loads of a trial go as far as the best one of the trial before it."""
    best = before.result.best if before.result is not None else None
    points = trial.result.points if trial.result is not None else ()
    return best is None or any(point.load.level >= best.load.level for point in points)


def _shortfall(current: Trial) -> str:
    """Why the current setting may be better than its figure."""
    best = current.result.best if current.result is not None else None
    if best is not None and best.caution:
        return f"of the current setting, {best.caution}"
    return "the current setting was not put under all loads, for lack of time" * current.cut


def _doubt(trials: Sequence[Trial], gain: float) -> str:
    """Whether one setting, measured twice, differed from itself by as much as the gain."""
    for last in (trial for trial in standing(trials) if trial.phase == "final"):
        first = next(trial for trial in trials if trial.values == last.values)
        early, late = _throughput(first), _throughput(last)
        if early is not None and late is not None and abs(late / early - 1) >= gain:
            return (
                f"{label(last.values)} gave {early:,.1f} at first and {late:,.1f} when measured "
                f"again, which is no less apart than the best and the current setting are"
            )
    return f"two runs of one setting may differ by {NOISE:.0%}, too" if gain < NOISE else ""


def _current(last: Sequence[Trial], trials: Sequence[Trial]) -> Trial | None:
    """What stands of the setting that was there before."""
    first = next((trial for trial in trials if trial.phase == "current"), None)
    return next((t for t in last if first is not None and t.values == first.values), None)


def _throughput(trial: Trial | None) -> float | None:
    """Within the bounds."""
    if trial is None or trial.result is None or trial.result.best is None:
        return None
    return trial.result.best.throughput


def _met(trial: Trial) -> bool:
    return trial.result is not None and trial.result.best is not None


def unstable(trials: Sequence[Trial]) -> list[tuple[Trial, Point]]:
    """Every load whose figures are to be taken with caution, or that has none."""
    return [
        (trial, point)
        for trial in trials
        if trial.result is not None
        for point in trial.result.points
        if point.state != "steady"
    ]


def over(point: Point, bounds: Sequence[Bound]) -> tuple[str, ...]:
    """Which bounds a load breaks, in words."""
    return slo.judge(point, bounds).over


def judged(result: Result, bounds: Sequence[Bound]) -> Result:
    """With its verdicts and its best load."""
    verdicts = tuple(slo.judge(point, bounds) for point in result.points)
    return msgspec.structs.replace(
        result, verdicts=verdicts, best=slo.best(result.points, verdicts)
    )
