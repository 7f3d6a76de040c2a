"""A run from start to end: the current setting, the search, refinement, and the best once more.

Owns the order of things and what is kept. After each setting everything so far is on the disk; an
interruption ends the server and the run, not the record.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jitney.errors import InternalError, JitneyError, LoadError, UnavailableError
from jitney.sweep.inputs import Prompts
from jitney.sweep.plan import Plan
from jitney.sweep.record import Load, Point, Result
from jitney.sweep.slo import Bound
from jitney.sweep.target import Model
from jitney.sweep.tool import PerfAnalyzer
from jitney.tune import budget, candidates, choose, record
from jitney.tune.budget import Budget
from jitney.tune.ladder import Seen, next_load, refined
from jitney.tune.measure import Gauge
from jitney.tune.record import Ending, Phase, Trial, Tuning
from jitney.tune.search import Score, Strategy, propose
from jitney.tune.session import Session
from jitney.tune.setting import Axis, Setting, Space, label
from jitney.tune.subject import Subject
from jitney.tune.terminal import trial_line

_WHOLE, _LOCAL = 2, 1
"""Loads in a row that do not pay: a whole ladder bears with a noisy one."""
_HOPELESS = 3
"""Settings that load, and of which no load has figures, until the fault is not theirs."""


@dataclass(frozen=True)
class Wanted:
    """All that was asked for, checked."""

    subject: Subject
    beside: tuple[str, ...]
    timeout_s: float
    space: Callable[[Setting], Space]
    """The current setting -> what is tried."""
    loads: tuple[Load, ...]
    slo: str
    bounds: tuple[Bound, ...]
    budget_s: float
    tool: PerfAnalyzer
    plan: Plan
    protocol: str
    prompts: Prompts
    shapes: dict[str, tuple[int, ...]]
    data: Path | None
    options: dict[str, str]
    out: Path


class Tuner:
    """One run."""

    def __init__(self, wanted: Wanted, terminal: Console) -> None:
        self.wanted = wanted
        self.terminal = terminal
        self._space = wanted.space(wanted.subject.current())
        self._budget = Budget(
            wanted.budget_s, wanted.plan.seconds, len(wanted.loads), wanted.subject.language
        )
        self._trials: list[Trial] = []
        self._scores: dict[Setting, Score] = {}
        self._strategy: Strategy = "axes"
        self._short = False  # whether anything was left out for lack of time
        self._until = wanted.budget_s  # when the setting that is measured at the end must be done
        self._ending: Ending | None = None

    def run(self) -> Tuning:
        """Raises JitneyError if the server does not start, or nothing can be sent to the model."""
        wanted = self.wanted
        self._began = time.monotonic()
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._announce()
        self._session = Session(wanted.subject, wanted.beside, wanted.timeout_s)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
                   TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="jitney-tune-") as folder:
            self._gauge = Gauge(
                wanted.tool, wanted.plan, wanted.protocol, wanted.prompts, wanted.shapes,
                wanted.data, Path(folder),
            )  # fmt: skip
            with Progress(*columns, console=self.terminal, transient=True) as self._progress:
                self._task = self._progress.add_task("", total=wanted.budget_s)
                try:
                    self._phases()
                    self._ending = "out of time" if self._short else "complete"
                except KeyboardInterrupt:
                    self._ending = "interrupted"
                finally:
                    self._show("ending the server")
                    self._session.stop()
        return self._save()

    # ------------------------------------------------------------------ the phases

    def _phases(self) -> None:
        self._measure_current()
        self._strategy = self._budget.strategy(self._spent(), self._space.size())
        self.terminal.print(
            f"[dim]{'Every setting' if self._strategy == 'grid' else 'One axis at a time'}; a "
            f"setting takes about {budget.show(self._budget.trials_s(1))} here.[/]"
        )
        self._search(self._space, self._strategy, self._space.current, "search")
        if not self._short:
            best = self._best()
            self._search(self._refined(best), "axes", best, "refine")
        self._measure_finals()

    def _measure_current(self) -> None:
        self._show("starting the server")
        try:
            load_s = self._session.start()
        except LoadError as error:
            self._fail(self._space.current, "current", str(error))
            return
        self._budget.loaded(load_s)
        if not self.wanted.subject.language:  # the server may have completed the configuration
            self._space = self.wanted.space(self._session.setting())
        self._measure(self._space.current, "current", load_s, self.wanted.loads, 0, _WHOLE)

    def _search(self, space: Space, strategy: Strategy, start: Setting, phase: Phase) -> None:
        while (setting := propose(space, strategy, start, self._scores)) is not None:
            if not self._budget.may_try(self._spent()):
                self._short = True
                return
            self._try(setting, phase, self.wanted.loads, self._first_load(), _LOCAL)

    def _refined(self, best: Setting) -> Space:
        """Halfway to the neighbours of the best, on the axes that the user left to us."""
        axes = tuple(
            axis if axis.given else Axis(axis.name, candidates.midpoints(axis.values, value))
            for axis, value in zip(self._space.axes, best, strict=True)
        )
        return Space(axes, best)

    def _measure_finals(self) -> None:
        best = self._best()
        if best == self._space.current:
            return
        won = self._trial_of(best).result
        if won is None or won.best is None:
            return  # it meets no bound: there is nothing to confirm
        kind, level = won.best.load.kind, won.best.load.level
        levels = refined(
            [load.level for load in self.wanted.loads], level, whole=kind == "concurrency"
        )
        loads = tuple(Load(kind, level) for level in levels)
        loads_at_all = self._trial_of(self._space.current).result is not None
        settings = [best, self._space.current] if loads_at_all else [best]
        for number, setting in enumerate(settings, 1):
            # The first leaves the second its share of what time there is.
            left = self._budget.limit_s - self._spent()
            self._until = self._budget.limit_s - left * (1 - number / len(settings))
            if self._spent() + self._budget.loading_s + self._budget.load_s > self._until:
                self._short = True
                return
            self._try(setting, "final", loads, 0, _WHOLE)

    # ------------------------------------------------------------------ one setting

    def _try(
        self, setting: Setting, phase: Phase, loads: Sequence[Load], start: int, patience: int
    ) -> None:
        self._show(f"loading {label(self._space.named(setting))}")
        try:
            load_s = self._session.load(self._space.named(setting))
        except LoadError as error:
            self._fail(setting, phase, str(error))
            return
        self._budget.loaded(load_s)
        self._measure(setting, phase, load_s, loads, start, patience)

    def _fail(self, setting: Setting, phase: Phase, reason: str) -> None:
        self._keep(setting, Trial(self._space.named(setting), phase, failure=reason))

    def _measure(
        self,
        setting: Setting,
        phase: Phase,
        load_s: float,
        loads: Sequence[Load],
        start: int,
        patience: int,
    ) -> None:
        """Loads until the ladder is climbed or the time is over; at least one."""
        try:
            model = self._session.target.model(self.wanted.subject.name)
        except JitneyError as error:  # the server has just died of it
            self._fail(setting, phase, str(error))
            return
        points: dict[int, Point] = {}
        cut = True
        try:
            while (number := self._next(loads, start, points, patience)) is not None:
                if points and not self._may_measure(final=phase == "final"):
                    self._short = True
                    break
                final = phase == "final"
                points[number] = self._steadied(setting, model, loads[number], final=final)
            else:
                cut = False
        finally:  # what an interruption leaves is kept, too
            if points:
                ordered = tuple(points[number] for number in sorted(points))
                result = self._result(setting, model, ordered)
                named = self._space.named(setting)
                self._keep(setting, Trial(named, phase, load_s, "", result, cut))
        self._check_measurable()

    def _may_measure(self, *, final: bool) -> bool:
        """Whether one more load fits, into its share if the setting is measured at the end."""
        if final:
            return self._spent() + self._budget.load_s <= self._until
        return self._budget.may_measure(self._spent())

    def _check_measurable(self) -> None:
        """Raise InternalError if nothing came of the first settings at all: the next ones would
        fail of the same."""
        loaded = [trial.result for trial in self._trials if trial.result is not None]
        points = [point for result in loaded for point in result.points]
        if len(loaded) == _HOPELESS and all(point.measured is None for point in points):
            why = "; ".join(points[-1].remarks)
            raise InternalError(f"no load of {_HOPELESS} settings could be measured: {why}")

    def _next(
        self, loads: Sequence[Load], start: int, points: dict[int, Point], patience: int
    ) -> int | None:
        seen = {}
        for number, point in points.items():
            found = point.measured
            met = not choose.over(point, self.wanted.bounds)
            seen[number] = Seen(met and found is not None, found.throughput if found else 0.0)
        return next_load(len(loads), start, seen, patience)

    def _steadied(self, setting: Setting, model: Model, load: Load, *, final: bool) -> Point:
        """The load; once more if it was unsteady and broke a bound, which may be another program's
        doing. The second figures count."""
        first = self._point(setting, model, load)
        over = choose.over(first, self.wanted.bounds)
        if first.state != "unstable" or not over or not self._may_measure(final=final):
            return first
        second = self._point(setting, model, load, attempt=2)
        remark = f"measured a second time: unsteady at first, when {'; '.join(over)}"
        return msgspec.structs.replace(second, remarks=(*second.remarks, remark))

    def _point(self, setting: Setting, model: Model, load: Load, attempt: int = 1) -> Point:
        self._show(f"{label(self._space.named(setting))}: {load}")
        began = time.monotonic()
        try:
            target = self._session.target
            point = self._gauge.point(target, model, load, attempt, lambda share: self._tick())
        except UnavailableError as error:  # the server died of it; the next setting starts another
            point = Point(load, "failed", (str(error),))
        self._budget.took(time.monotonic() - began)
        return point

    def _result(self, setting: Setting, model: Model, points: tuple[Point, ...]) -> Result:
        target = self._session.target
        try:
            server = target.server()
        except JitneyError:
            server = "ended"
        result = Result(
            title=label(self._space.named(setting)),
            model=model.name,
            language=model.language,
            address=target.grpc if self.wanted.protocol == "grpc" else target.http,
            server=server,
            perf_analyzer=self.wanted.tool.version,
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            options=self.wanted.options,
            points=points,
            slo=self.wanted.slo,
        )
        return choose.judged(result, self.wanted.bounds)

    # ------------------------------------------------------------------ what is kept

    def _keep(self, setting: Setting, trial: Trial) -> None:
        self._trials.append(trial)
        self._scores[setting] = choose.score(trial, self.wanted.bounds)
        unit = "tokens/s" if self.wanted.subject.language else "rows/s"
        self.terminal.print(trial_line(trial, unit), soft_wrap=True)
        self._save()

    def _save(self) -> Tuning:
        wanted = self.wanted
        choice = choose.choose(self._trials, wanted.bounds)
        change = choice is not None and not choice.is_current
        tuning = Tuning(
            model=wanted.subject.name,
            language=wanted.subject.language,
            slo=wanted.slo,
            began=self._date,
            seconds=self._spent(),
            budget_s=wanted.budget_s,
            strategy=self._strategy,
            axes={axis.name: axis.values for axis in self._space.axes},
            options=wanted.options,
            trials=tuple(self._trials),
            ending=self._ending or "interrupted",
            choice=choice,
            nearest=None if choice else choose.nearest(self._trials, wanted.bounds),
            lines=wanted.subject.lines(choice.values) if choice and change else "",
        )
        record.write(tuning, wanted.out / "tune.json")
        return tuning

    def _best(self) -> Setting:
        return max(self._scores, key=lambda setting: self._scores[setting])

    def _trial_of(self, setting: Setting) -> Trial:
        values = self._space.named(setting)
        return next(trial for trial in reversed(self._trials) if trial.values == values)

    def _first_load(self) -> int:
        """Where the best so far had its best load: there settings differ."""
        best = choose.choose(self._trials, self.wanted.bounds)
        near = choose.nearest(self._trials, self.wanted.bounds)
        load = best.load if best else near.load if near else self.wanted.loads[0]
        return self.wanted.loads.index(load)

    # ------------------------------------------------------------------ the terminal

    def _announce(self) -> None:
        known, count = self._budget, self._space.size()
        subject = self.wanted.subject
        for axis in self._space.axes:
            shown = ", ".join(label({axis.name: value}) for value in axis.values)
            self.terminal.print(f"[dim]{escape(shown)}[/]", soft_wrap=True)
        loads = len(self.wanted.loads)
        every = budget.show(known.trials_s(count) + 3 * known.whole_s)
        self.terminal.print(
            f"{escape(subject.name)}: {count} settings, each under a few of {loads} loads. All of "
            f"them: some {every}, by a guess; at most {budget.show(known.limit_s)} are given.",
            soft_wrap=True,
        )

    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _show(self, text: str) -> None:
        self._progress.update(self._task, description=escape(text), completed=self._spent())

    def _tick(self) -> None:
        self._progress.update(self._task, completed=self._spent())
