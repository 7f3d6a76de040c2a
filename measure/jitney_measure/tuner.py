"""A tuning from start to end: the current setting, the search, and the best once more.

Owns the order of things and what is kept. After each setting everything so far is written to disk;
an interruption ends the server and the run, not the record.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from jitney.errors import InstallationError, InternalError, LoadError, UnavailableError
from rich.console import Console
from rich.markup import escape

from jitney_measure import choose, record
from jitney_measure.axes import Axes, Score, Setting, label, search
from jitney_measure.perf_analyzer import Driver
from jitney_measure.record import Ending, Phase, Point, Trial, Tuning
from jitney_measure.slo import Bound, judge
from jitney_measure.subject import Subject, read_setting, serve
from jitney_measure.target import Model, Target

_GAIN = 1.02
"""A load pays if it meets the bounds, and if its throughput is more than this multiple of the best
before it."""
_LOADS = 3
"""About this many loads show how good a setting is, once it is known where to begin."""


@dataclass
class Tuner:
    """One run: what was asked for, checked, and what was measured so far."""

    subject: Subject
    beside: tuple[str, ...]
    timeout_s: float
    make_axes: Callable[[Setting], Axes]  # the current setting -> what is tried
    bounds: tuple[Bound, ...]
    budget_s: float
    driver: Driver
    terminal: Console
    _trials: list[Trial] = field(default_factory=list)
    _scores: dict[Setting, Score] = field(default_factory=dict)
    _loading_s: list[float] = field(default_factory=list)
    """Of each setting, to start and to end its server."""
    _load_s: list[float] = field(default_factory=list)
    _short: bool = False  # whether anything was left out for lack of time
    _ending: Ending = "interrupted"

    def __post_init__(self) -> None:
        self._current = self.subject.current()
        self._axes = self.make_axes(self._current)

    def run(self) -> Tuning:
        """Raises JitneyError if there is no server, or if nothing can be sent to the model."""
        self._began = time.monotonic()
        self._date = record.now()
        tried = [f"{name} {', '.join(map(str, values))}" for name, values in self._axes.items()]
        most = f"up to {len(self.driver.loads)} loads each, at most {self.budget_s:,.0f} s in all"
        said = f"{self.subject.name}: {'; '.join([*tried, most])}."
        self.terminal.print(said, markup=False, soft_wrap=True)
        with self.terminal.status("") as self._status, suppress(KeyboardInterrupt):
            self._try(self._current, "current", others=3)
            for setting in search(self._axes, self._current, self._scores):
                if not self._fits(3):
                    self._short = True
                    break
                self._try(setting, "search", others=2)
            self._measure_again()
            self._ending = "out of time" if self._short else "complete"
        return self._save()

    def _measure_again(self) -> None:
        """The best and the current setting: the highest of many figures is too high by chance."""
        choice = choose.choose(self._trials)
        if choice is None or choice.is_current:
            return  # there is nothing to confirm
        best = tuple(choice.values.values())
        for others, setting in ((1, best), (0, self._current)):
            if self._fits(1 + others):
                self._try(setting, "final", others)
            else:
                self._short = True

    def _try(self, setting: Setting, phase: Phase, others: int) -> None:
        """Load a setting and put loads on it, in the time that is not needed to try ``others``, a
        number of settings, after it."""
        named = self._named(setting)
        self._show(f"loading {label(named)}")
        values = None if setting == self._current else named
        began = time.monotonic()
        try:
            with serve(self.subject, values, self.beside, self.timeout_s) as target:
                self._measure(setting, phase, others, target, time.monotonic() - began)
                ending = time.monotonic()
            # The time to end the server counts too.
            self._loading_s[-1] += time.monotonic() - ending
        except InstallationError:
            raise
        except (LoadError, UnavailableError) as error:
            self._keep(Trial(named, phase, failure=" ".join(str(error).split())), setting)

    def _measure(
        self, setting: Setting, phase: Phase, others: int, target: Target, load_s: float
    ) -> None:
        """Raises LoadError if the server has made another setting of it."""
        self._loading_s.append(load_s)
        model = target.model(self.subject.name)
        server = target.server()
        began = record.now()
        if not self.subject.language:
            there = read_setting(target.get(f"/v2/models/{model.name}/config"))
            if phase == "current":  # the server has completed the configuration
                self._axes = self.make_axes(there)
                self._current = there
                setting = there
            elif there != setting:
                raise LoadError(f"the server changed it to {label(self._named(there))}")
        points: list[Point] = []
        cut = True
        try:
            cut = self._climb(setting, phase, others, target, model, points)
        finally:  # what an interruption leaves is kept, too
            if points:
                named = self._named(setting)
                result = self.driver.result(target, model, points, label(named), server, began)
                self._keep(Trial(named, phase, load_s, "", result, cut), setting)
        # Without an exception there is at least one point, so there is a result.
        if phase == "current" and result.empty:
            why = "; ".join(points[-1].remarks)
            raise InternalError(f"no load of the current setting could be measured: {why}")

    def _climb(
        self, setting: Setting, phase: Phase, others: int, target: Target, model: Model,
        points: list[Point],
    ) -> bool:  # fmt: skip
        """Add ascending loads to ``points`` until one does not pay. Returns whether the time was
        over before that.

        Begins one load below the best load of all settings so far: a setting that breaks the bounds
        at that load is no better. A setting that is measured again begins one below its own best.
        """
        named = self._named(setting)
        own = (trial.best for trial in self._trials if trial.values == named)
        best = next(own) if phase == "final" else choose.choose(self._trials)
        first = self.driver.loads.index(best.load) - 1 if best is not None else 0
        most = 0.0
        for load in self.driver.loads[max(0, first) :]:
            if points and not self._fits(others, 1):
                self._short = True
                return True
            self._show(f"{label(named)}: {load}")
            began = time.monotonic()
            try:
                point = self.driver.run(target, model, load)
            except UnavailableError as error:  # the server ended
                point = Point(load, "failed", (str(error),))
            self._load_s.append(time.monotonic() - began)
            points.append(point)
            reached = point.measured.throughput if point.measured else 0.0
            if judge(point, self.bounds).over or reached <= most * _GAIN:
                break
            most = reached
        return False

    def _fits(self, settings: int, loads: int = 0) -> bool:
        """Whether there is time for so many settings and loads, by what those before took."""
        loading_s = sum(self._loading_s) / max(1, len(self._loading_s))
        load_s = sum(self._load_s) / max(1, len(self._load_s))
        needed_s = settings * loading_s + (settings * _LOADS + loads) * load_s
        return self._spent() + needed_s <= self.budget_s

    def _keep(self, trial: Trial, setting: Setting) -> None:
        self._trials.append(trial)
        self._scores[setting] = choose.score(trial)
        self.terminal.print(choose.trial_line(trial), soft_wrap=True)
        self._save()

    def _save(self) -> Tuning:
        choice = choose.choose(self._trials)
        change = choice is not None and not choice.is_current
        tuning = Tuning(
            model=self.subject.name,
            language=self.subject.language,
            slo=self.driver.options.slo,
            began=self._date,
            seconds=self._spent(),
            budget_s=self.budget_s,
            beside=self.beside,
            axes=dict(self._axes),
            options=self.driver.options.reported(),
            trials=tuple(self._trials),
            ending=self._ending,
            choice=choice,
            lines=self.subject.lines(choice.values) if choice and change else "",
        )
        record.write(tuning, self.driver.options.out / "tune.json")
        return tuning

    def _named(self, setting: Setting) -> dict[str, int]:
        """Axis -> value."""
        return dict(zip(self._axes, setting, strict=True))

    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _show(self, text: str) -> None:
        """What is done now, and how much of the time is over."""
        self._status.update(f"{escape(text)} ({self._spent():.0f} s of {self.budget_s:,.0f}) …")
