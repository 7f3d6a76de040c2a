"""A tuning from start to end: the current setting, the search, and the best once more.

Owns the order of things and what is kept. After each setting everything so far is written to disk;
an interruption ends the server and the run, not the record.

In this module a *start* is that of a server with a model, and a *load* is requests on it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jitney.errors import InstallationError, InternalError, LoadError, UnavailableError
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from jitney_measure import choose, record
from jitney_measure.axes import Axes, Score, Search, Setting, label
from jitney_measure.perf_analyzer import Driver
from jitney_measure.record import Ending, Load, LoadPoint, Phase, Trial, Tuning
from jitney_measure.slo import Bound, judge
from jitney_measure.subject import Subject, read_setting, serve
from jitney_measure.target import Model, Target, model_path

_GAIN = 1.02
"""A greater load pays if it meets the bounds, and if its throughput is more than this multiple of
that of the load before it."""
_LOADS_PER_SETTING = 3
"""About this many loads show how good a setting is: the search knows at which load to begin."""
_FINAL_SETTINGS = 2
"""Settings that are measured again at the end: the best one and the current one."""


@dataclass(frozen=True)
class _Attempt:
    """A setting that is being tried."""

    setting: Setting
    phase: Phase
    reserve: int
    """Settings that are to be tried after this one. A load is added only while there is time for
    these, too."""


class Tuner:
    """One run: what was asked for, checked, and what was measured so far."""

    def __init__(
        self,
        *,
        subject: Subject,
        beside: tuple[str, ...],
        timeout_s: float,
        make_axes: Callable[[Setting], Axes],
        bounds: tuple[Bound, ...],
        budget_s: float,
        driver: Driver,
        terminal: Console,
    ) -> None:
        """``make_axes``: the values to try, for a current setting. ``timeout_s``: for the start of
        a server."""
        self._subject = subject
        self._beside = beside
        self._timeout_s = timeout_s
        self._make_axes = make_axes
        self._bounds = bounds
        self._budget_s = budget_s
        self._driver = driver
        self._terminal = terminal
        self._status = Status("", console=terminal)
        self._current = subject.current()
        self._axes = make_axes(self._current)
        self._trials: list[Trial] = []
        self._seconds_per_server: list[float] = []
        """Of each setting: to start its server and to stop it."""
        self._seconds_per_load: list[float] = []
        self._out_of_time = False
        """Whether anything was left out for lack of time."""
        self._began = 0.0
        self._date = ""

    def run(self) -> Tuning:
        """Raises JitneyError if there is no server, or if nothing can be sent to the model."""
        self._began = time.monotonic()
        self._date = record.now()
        self._print_plan()
        ending: Ending
        try:
            with self._status:
                self._search()
                self._measure_again()
            ending = "out of time" if self._out_of_time else "complete"
        except KeyboardInterrupt:
            ending = "interrupted"
        return self._save(ending)

    def _print_plan(self) -> None:
        parts = []
        for axis, values in self._axes.items():
            parts.append(f"{axis} {', '.join(map(str, values))}")
        number = len(self._driver.loads)
        parts.append(f"up to {number} loads each, at most {self._budget_s:,.0f} s in all")
        text = f"{self._subject.name}: {'; '.join(parts)}."
        self._terminal.print(text, markup=False, soft_wrap=True)

    def _search(self) -> None:
        """The current setting, and then others as long as there is time for one more."""
        # To try another setting, there must be time for it and for the final ones.
        one_and_final = 1 + _FINAL_SETTINGS
        score = self._try(_Attempt(self._current, "current", reserve=one_and_final))
        search = Search(self._axes, self._current, score)
        while True:
            setting = search.next()
            if setting is None:
                return
            if not self._fits(settings=one_and_final):
                self._out_of_time = True
                return
            score = self._try(_Attempt(setting, "search", reserve=_FINAL_SETTINGS))
            search.report(setting, score)

    def _measure_again(self) -> None:
        """The best and the current setting: the highest of many figures is too high by chance."""
        leader = choose.find_leader(self._trials)
        if leader is None or leader.setting == self._current:
            return  # there is nothing to confirm
        attempts = [
            _Attempt(leader.setting, "final", reserve=1),
            _Attempt(self._current, "final", reserve=0),
        ]
        for attempt in attempts:
            if self._fits(settings=1 + attempt.reserve):
                self._try(attempt)
            else:
                self._out_of_time = True

    def _try(self, attempt: _Attempt) -> Score:
        """Start a server with the setting, put loads on it, and keep the trial. The score is the
        trial's."""
        named = self._named(attempt.setting)
        self._show(f"loading {label(named)}")
        values = None if attempt.setting == self._current else named
        began = time.monotonic()
        start_s: float | None = None
        try:
            with serve(self._subject, values, self._beside, self._timeout_s) as target:
                start_s = time.monotonic() - began
                # Kept now, because the loads go on only while there is time for more servers. What
                # the stop takes is added when it is known.
                self._seconds_per_server.append(start_s)
                self._measure(attempt, target, start_s)
                stop_began = time.monotonic()
            self._seconds_per_server[-1] += time.monotonic() - stop_began
        except InstallationError:
            raise  # it is a LoadError, but of no setting: no server starts at all
        except (LoadError, UnavailableError) as error:
            if start_s is None:  # the start failed, which takes time too, up to the timeout
                self._seconds_per_server.append(time.monotonic() - began)
            self._keep(Trial(named, attempt.phase, failure=" ".join(str(error).split())))
        return choose.score(self._trials[-1])

    def _measure(self, attempt: _Attempt, target: Target, start_s: float) -> None:
        """Put loads on the server, and keep the trial. Raises LoadError if the server changed the
        setting."""
        model = target.model(self._subject.name)
        server = target.server()
        began = record.now()
        if not self._subject.language:
            attempt = replace(attempt, setting=self._read_back(attempt, target))
        points: list[LoadPoint] = []
        was_cut = True  # stays so if ``_climb`` is interrupted
        try:
            was_cut = self._climb(attempt, target, model, points)
        finally:  # what an interruption leaves is kept, too
            if points:
                named = self._named(attempt.setting)
                result = self._driver.result(
                    target, model, points, title=label(named), server=server, began=began
                )
                trial = Trial(named, attempt.phase, start_s=start_s, result=result, cut=was_cut)
                self._keep(trial)
        # Without an exception there is at least one point, so there is a result.
        if attempt.phase == "current" and result.empty:
            why = "; ".join(points[-1].remarks)
            raise InternalError(f"no load of the current setting could be measured: {why}")

    def _read_back(self, attempt: _Attempt, target: Target) -> Setting:
        """The setting that the server really has. Raises LoadError if it is not the one that was
        asked for.

        For the current setting the repository's configuration was read. The server completes it, so
        what it has then counts as the current setting.
        """
        found = read_setting(target.get(model_path(self._subject.name, "config")))
        if attempt.phase == "current":
            self._axes = self._make_axes(found)
            self._current = found
        elif found != attempt.setting:
            raise LoadError(f"the server changed it to {label(self._named(found))}")
        return found

    def _climb(
        self, attempt: _Attempt, target: Target, model: Model, points: list[LoadPoint]
    ) -> bool:
        """Add ascending loads to ``points`` until one does not pay. Returns whether the time was
        over before that."""
        named = self._named(attempt.setting)
        throughput = 0.0
        first = self._first_load(attempt)
        for load in self._driver.loads[first:]:
            if points and not self._fits(settings=attempt.reserve, loads=1):
                self._out_of_time = True
                return True
            self._show(f"{label(named)}: {load}")
            point = self._run(target, model, load)
            points.append(point)
            reached = point.measured.throughput if point.measured else 0.0
            if judge(point, self._bounds).over or reached <= throughput * _GAIN:
                break
            throughput = reached
        return False

    def _first_load(self, attempt: _Attempt) -> int:
        """The index of the load to begin with: one below the best load that is known. A setting
        that breaks the bounds even there cannot win."""
        best = self._best_load(attempt)
        if best is None:
            return 0
        return max(0, self._driver.loads.index(best) - 1)

    def _best_load(self, attempt: _Attempt) -> Load | None:
        """The best load known so far. For a setting that is measured again: its own best load. For
        another setting: the best load of the leader."""
        if attempt.phase == "final":
            first = next(trial for trial in self._trials if trial.setting == attempt.setting)
            return first.best.load if first.best is not None else None
        leader = choose.find_leader(self._trials)
        if leader is None or leader.best is None:
            return None
        return leader.best.load

    def _run(self, target: Target, model: Model, load: Load) -> LoadPoint:
        began = time.monotonic()
        try:
            point = self._driver.run(target, model, load)
        except UnavailableError as error:  # the server ended
            point = LoadPoint(load, "failed", (str(error),))
        self._seconds_per_load.append(time.monotonic() - began)
        return point

    def _fits(self, settings: int, loads: int = 0) -> bool:
        """Whether there is time for so many settings and loads, by what those before took."""
        loads += settings * _LOADS_PER_SETTING
        servers_s = settings * _mean(self._seconds_per_server)
        loads_s = loads * _mean(self._seconds_per_load)
        return self._spent() + servers_s + loads_s <= self._budget_s

    def _keep(self, trial: Trial) -> None:
        self._trials.append(trial)
        self._terminal.print(choose.trial_line(trial), soft_wrap=True)
        # If the process dies now, the file rightly says "interrupted". The save at the end of the
        # run overwrites it.
        self._save("interrupted")

    def _save(self, ending: Ending) -> Tuning:
        choice = choose.choose_setting(self._trials)
        lines = ""
        if choice is not None and not choice.is_current:
            lines = self._subject.lines(choice.values)
        options = self._driver.options
        tuning = Tuning(
            model=self._subject.name,
            language=self._subject.language,
            slo=options.slo,
            began=self._date,
            seconds=self._spent(),
            budget_s=self._budget_s,
            beside=self._beside,
            axes=dict(self._axes),
            options=options.reported(),
            trials=tuple(self._trials),
            ending=ending,
            choice=choice,
            lines=lines,
        )
        record.write(tuning, options.out / "tune.json")
        return tuning

    def _named(self, setting: Setting) -> dict[str, int]:
        """Axis -> value."""
        return dict(zip(self._axes, setting, strict=True))

    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _show(self, text: str) -> None:
        """What is done now, and how much of the time is over."""
        self._status.update(f"{escape(text)} ({self._spent():.0f} s of {self._budget_s:,.0f}) …")


def _mean(seconds: Sequence[float]) -> float:
    """0 if nothing was measured yet."""
    return sum(seconds) / max(1, len(seconds))
