"""A whole run with a server that is made up: order, lack of time, failures, an interruption."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from jitney.errors import InternalError, LoadError, UnavailableError
from jitney.sweep.inputs import Prompts
from jitney.sweep.plan import Plan, loads
from jitney.sweep.record import Load, Point
from jitney.sweep.target import Model, Target
from jitney.sweep.tool import PerfAnalyzer
from jitney.tune import record, tuner
from jitney.tune.record import Tuning
from jitney.tune.setting import Axis, Setting, Space
from jitney.tune.subject import Subject
from rich.console import Console
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.tune.models import CONFIG
from tests.tune.trials import BOUNDS, SLO, point

LEVELS = "1,2,4,8,16,32"
MODEL = Model("m", (), 16, False, (), ())


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Server:
    """In place of the session and of the gauge. Up to ``room`` requests at once take 5 ms, more of
    them proportionally longer."""

    def __init__(self, clock: Clock, room: Callable[[Setting], float]) -> None:
        self.clock, self.room = clock, room
        self.loaded: list[Setting] = []
        self.measured: list[tuple[Setting, float]] = []
        self.stopped = 0
        self.reasons: dict[Setting, str] = {}
        self.interrupt_after: int | None = None
        self.broken: set[Setting] = set()
        self.attempts: list[int] = []
        self.mute = False
        self.gone: set[Setting] = set()
        """Settings after whose loading the server is gone."""
        self.disturbed: set[int] = set()
        """Numbers of measurements that something else makes slow."""

    def session(self, *_: Any) -> "Server":
        return self

    def gauge(self, *_: Any) -> "Server":
        return self

    def start(self) -> float:
        return self._load((8, 300, 1))

    def setting(self) -> Setting:
        return self.loaded[-1]

    def load(self, values: Mapping[str, int]) -> float:
        return self._load(tuple(values.values()))

    def _load(self, setting: Setting) -> float:
        self.clock.now += 2
        if setting in self.reasons:
            raise LoadError(self.reasons[setting])
        self.loaded.append(setting)
        return 2.0

    def stop(self) -> None:
        self.stopped += 1

    @property
    def target(self) -> Target:
        server = self

        class Known(Target):
            def model(self, name: str | None) -> Model:
                if server.loaded[-1] in server.gone:
                    raise UnavailableError("nobody answers")
                return MODEL

            def server(self) -> str:
                return "made up"

        return Known("here:1", "here:2", None)

    def point(self, target: Target, model: Model, load: Load, attempt: int, tick: Any) -> Point:
        setting = self.loaded[-1]
        if self.interrupt_after is not None and len(self.measured) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.clock.now += 4
        self.measured.append((setting, load.level))
        self.attempts.append(attempt)
        if self.mute:
            return Point(load, "failed", ("perf_analyzer ended with status 99",))
        if setting in self.broken:
            raise UnavailableError("nobody answers")
        latency = 0.005 * max(1.0, load.level / self.room(setting))
        if len(self.measured) in self.disturbed:
            return point(load.level, load.level, 1.0, "unstable")
        return point(load.level, load.level / latency, latency)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    def made(room: Callable[[Setting], float], budget_s: float = 600) -> tuple[Server, Any]:
        clock = Clock(monkeypatch)
        server = Server(clock, room)
        monkeypatch.setattr(tuner, "Session", server.session)
        monkeypatch.setattr(tuner, "Gauge", server.gauge)
        subject = Subject("m", tmp_path, text_format.Parse(CONFIG, ModelConfig()), None)
        axes = (
            Axis("batch_size", (1, 4, 8, 16)),
            Axis("window_us", (0, 300, 5000), True),
            Axis("instances", (1, 2), True),
        )
        levels = loads(LEVELS, "")
        wanted = tuner.Wanted(
            subject=subject, beside=(), timeout_s=9.0, space=lambda now: Space(axes, now),
            loads=levels, slo=SLO, bounds=BOUNDS, budget_s=budget_s,
            tool=PerfAnalyzer(Path("none"), "0"),
            plan=Plan(levels, 3.0, None, True, 0.2, 1), protocol="grpc",
            prompts=Prompts((1, 1), (1, 1)), shapes={}, data=None, options={},
            out=tmp_path / "out",
        )  # fmt: skip
        return server, tuner.Tuner(wanted, Console(quiet=True))

    return made


def by_batch(setting: Setting) -> float:
    """More room for greater batches and more instances, less for long windows."""
    batch, window, instances = setting
    return batch * instances * (0.5 if window > 1000 else 1.0) / 4


def phases(tuning: Tuning) -> list[str]:
    return [trial.phase for trial in tuning.trials]


def test_with_time_for_everything(make: Callable[..., Any]) -> None:
    """The grid, what lies between, and the best and the current one once more."""
    server, run = make(by_batch, budget_s=3600)
    tuning = run.run()
    assert (tuning.ending, tuning.strategy) == ("complete", "grid")
    assert phases(tuning)[0] == "current"
    assert phases(tuning)[-2:] == ["final", "final"]
    searched = {tuple(t.values.values()) for t in tuning.trials if t.phase in ("current", "search")}
    assert len(searched) == 2 + 3 * 3 * 2
    assert tuning.choice is not None
    assert tuning.choice.values["batch_size"] == 16
    assert tuning.choice.values["instances"] == 2
    # More at once than there is room for wait, and make it no faster.
    assert (str(tuning.choice.load), tuning.choice.throughput) == ("8 at once", 8 / 0.005)
    assert tuning.choice.before == pytest.approx(2 / 0.005)
    assert "count: 2" in tuning.lines
    assert server.stopped == 1
    assert record.read(run.wanted.out / "tune.json") == tuning


def test_a_short_time_is_kept_to(make: Callable[..., Any]) -> None:
    """One axis after the other, and still the best is measured again."""
    server, run = make(by_batch, budget_s=150)
    tuning = run.run()
    assert (tuning.ending, tuning.strategy) == ("out of time", "axes")
    assert server.clock.now <= 150
    assert "final" in phases(tuning)
    assert tuning.choice is not None
    assert tuning.choice.throughput > tuning.choice.before


def test_no_more_than_a_moment(make: Callable[..., Any]) -> None:
    server, run = make(by_batch, budget_s=7)
    tuning = run.run()
    assert len(server.measured) == 1
    assert phases(tuning) == ["current"]
    assert tuning.ending == "out of time"


def test_settings_that_fail_are_reported(make: Callable[..., Any]) -> None:
    server, run = make(by_batch)
    server.reasons = {(16, 300, 1): "out of memory", (8, 300, 1): "the file is broken"}
    tuning = run.run()
    failures = {tuple(t.values.values()): t.failure for t in tuning.trials if t.failure}
    assert failures == server.reasons
    assert tuning.trials[0].failure == "the file is broken"
    assert tuning.choice is not None
    assert tuning.choice.before is None
    assert server.stopped == 1


def test_a_server_that_dies_under_load(make: Callable[..., Any]) -> None:
    server, run = make(by_batch)
    server.broken = {(16, 300, 1)}
    tuning = run.run()
    (dead,) = [t for t in tuning.trials if tuple(t.values.values()) in server.broken]
    assert dead.result is not None
    assert {each.state for each in dead.result.points} == {"failed"}
    assert "nobody answers" in dead.result.points[0].remarks
    assert tuning.choice is not None


def test_a_server_that_dies_when_it_has_loaded(make: Callable[..., Any]) -> None:
    server, run = make(by_batch)
    server.gone = {(16, 300, 1)}
    tuning = run.run()
    failures = {tuple(t.values.values()): t.failure for t in tuning.trials if t.failure}
    assert failures == {(16, 300, 1): "nobody answers"}
    assert tuning.choice is not None


def test_where_nothing_can_be_measured_it_ends(make: Callable[..., Any]) -> None:
    """The fault is not the settings'; the others would take minutes for the same."""
    server, run = make(by_batch)
    server.mute = True
    with pytest.raises(InternalError, match=r"no load of 3 settings could be .* status 99"):
        run.run()
    assert server.stopped == 1
    assert len(record.read(run.wanted.out / "tune.json").trials) == 3


def test_the_time_at_the_end_is_shared(make: Callable[..., Any]) -> None:
    """However short it is, the current setting is measured beside the best one."""
    for budget_s in range(90, 200, 10):
        _, run = make(by_batch, budget_s=budget_s)
        finals = [trial for trial in run.run().trials if trial.phase == "final"]
        assert len(finals) == 2, budget_s
        best, current = (len(trial.result.points) for trial in finals)
        assert abs(best - current) <= 1 or not finals[1].cut, (budget_s, best, current)


def test_a_disturbed_load_is_measured_again(make: Callable[..., Any]) -> None:
    """Once: what is slow both times is slow."""
    server, run = make(by_batch)
    server.disturbed = {2, 4, 5}
    tuning = run.run()
    assert [level for _, level in server.measured[:6]] == [1, 2, 2, 4, 4, 8]
    assert server.attempts[:6] == [1, 1, 2, 1, 2, 1]
    points = tuning.trials[0].result.points
    assert [point.state for point in points[:4]] == ["steady", "steady", "unstable", "steady"]
    assert "measured a second time: unsteady at first, when latency-p95 is 1 s" in (
        points[1].remarks
    )
    assert tuning.trials[0].result.best.load.level == 2


def test_an_interruption_keeps_what_was_measured(make: Callable[..., Any]) -> None:
    server, run = make(by_batch)
    server.interrupt_after = 9
    tuning = run.run()
    assert tuning.ending == "interrupted"
    kept = [load.load.level for t in tuning.trials if t.result for load in t.result.points]
    assert len(kept) == 9
    assert server.stopped == 1
    assert tuning.choice is not None
    assert record.read(run.wanted.out / "tune.json") == tuning


def test_an_interruption_before_anything(make: Callable[..., Any]) -> None:
    server, run = make(by_batch)
    server.interrupt_after = 0
    tuning = run.run()
    assert (tuning.trials, tuning.choice, tuning.nearest) == ((), None, None)
    assert server.stopped == 1


def test_no_setting_meets_the_bounds(make: Callable[..., Any]) -> None:
    """Every load takes 10 times too long with one instance, 5 times with two."""
    _, run = make(lambda setting: 0.0025 * setting[2])
    tuning = run.run()
    assert tuning.choice is None
    assert tuning.lines == ""
    assert tuning.nearest is not None
    assert (tuning.nearest.values["instances"], tuning.nearest.load.level) == (2, 1)
    assert "final" not in phases(tuning)


def test_the_current_setting_is_the_best(make: Callable[..., Any]) -> None:
    _, run = make(lambda setting: 8.0 if setting == (8, 300, 1) else 1.0)
    tuning = run.run()
    assert tuning.choice is not None
    assert tuning.choice.is_current
    assert tuning.lines == ""
    assert "final" not in phases(tuning)


def test_candidates_are_measured_where_they_differ(make: Callable[..., Any]) -> None:
    """Not from the lowest load on, but from the best load of the best setting so far."""
    server, run = make(by_batch)
    run.run()
    first = [level for setting, level in server.measured if setting == (8, 300, 1)][:6]
    assert first[:4] == [1, 2, 4, 8], "its best load is 2; two more in a row do not pay"
    (fresh, *_) = [level for setting, level in server.measured if setting == (4, 300, 1)]
    assert fresh == 2
