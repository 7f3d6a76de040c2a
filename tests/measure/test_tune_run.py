"""A whole run with a server that is made up: order, lack of time, failures, an interruption."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from jitney.errors import InternalError, LoadError, UnavailableError
from jitney_measure import tuner
from jitney_measure.axes import Setting
from jitney_measure.loads import read_loads
from jitney_measure.options import Shared
from jitney_measure.perf_analyzer import Driver, PerfAnalyzer
from jitney_measure.record import Load, LoadPoint, Tuning
from jitney_measure.subject import Subject
from jitney_measure.target import Model, Target
from rich.console import Console
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.measure.models import CONFIG
from tests.measure.trials import BOUNDS, SLO, point

MODEL = Model((), "m", 16)
AXES = {"batch_size": (1, 4, 8, 16), "window_us": (0, 300, 5000), "instances": (1, 2)}


class Server:
    """In place of the server and of the driver; time stands still but for what they take. Up to
    ``room`` requests at once take 5 ms, more of them proportionally longer."""

    result = Driver.result

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, room: Callable[[Setting], float], out: Path
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(tuner, "serve", self.serve)
        self.room = room
        self.setting: Setting = ()
        self.measured: list[tuple[Setting, float]] = []
        self.running = 0
        self.reasons: dict[Setting, str] = {}
        self.slow: dict[Setting, float] = {}
        """Seconds that the server takes to start, if not 2."""
        self.interrupt_after: int | None = None
        self.broken: set[Setting] = set()
        """Settings under which the server ends at the first load."""
        self.gone: set[Setting] = set()
        """Settings under which the server ends as soon as it is ready."""
        self.changed: dict[Setting, Setting] = {}
        """What the server makes of a setting."""
        self.mute = False
        self.tool = PerfAnalyzer(Path("none"), "0")
        self.options = Shared(slo=SLO, out=out)
        self.loads = read_loads(self.options, "1,2,4,8,16,32")

    @contextmanager
    def serve(self, _: Subject, values: Mapping[str, int] | None, *__: object) -> Iterator[Target]:
        assert not self.running
        self.setting = (8, 300, 1) if values is None else tuple(values.values())
        self.now += self.slow.get(self.setting, 2)
        if self.setting in self.reasons:
            raise LoadError(self.reasons[self.setting])
        self.running += 1
        try:
            yield self.target()
        finally:
            self.running -= 1

    def target(self) -> Target:
        fake = self

        class Known(Target):
            def model(self, name: str | None) -> Model:
                if fake.setting in fake.gone:
                    raise UnavailableError("nobody answers")
                return MODEL

            def server(self) -> str:
                return "made up"

            def get(self, path: str, body: object = None) -> Any:
                batch, window, count = fake.changed.get(fake.setting, fake.setting)
                return {
                    "dynamic_batching": {
                        "preferred_batch_size": [batch], "max_queue_delay_microseconds": window,
                    },
                    "instance_group": [{"count": count}], "max_batch_size": 16,
                }  # fmt: skip

        return Known("here:1", "here:2", None)

    def run(self, target: Target, model: Model, load: Load) -> LoadPoint:
        if self.interrupt_after is not None and len(self.measured) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.now += 4
        self.measured.append((self.setting, load.level))
        if self.mute:
            return LoadPoint(load, "failed", ("perf_analyzer ended with status 99",))
        if self.setting in self.broken:
            raise UnavailableError("nobody answers")
        latency = 0.005 * max(1.0, load.level / self.room(self.setting))
        return point(load.level, load.level / latency, latency)


def by_batch(setting: Setting) -> float:
    """More room for greater batches and more instances, less for long windows."""
    batch, window, instances = setting
    return batch * instances * (0.5 if window > 1000 else 1.0) / 4


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    def made(budget_s: float = 600) -> tuple[Server, Any]:
        server = Server(monkeypatch, by_batch, tmp_path / "out")
        subject = Subject("m", tmp_path, text_format.Parse(CONFIG, ModelConfig()), None)
        driver: Any = server
        return server, tuner.Tuner(
            subject=subject, beside=(), timeout_s=9.0, make_axes=lambda now: AXES, bounds=BOUNDS,
            budget_s=budget_s, driver=driver, terminal=Console(quiet=True),
        )  # fmt: skip

    return made


def written(server: Server) -> Tuning:
    return msgspec.json.decode((server.options.out / "tune.json").read_bytes(), type=Tuning)


def failures(tuning: Tuning) -> dict[Setting, str]:
    return {tuple(t.values.values()): t.failure for t in tuning.trials if t.failure}


def test_with_time_for_everything(make: Callable[..., Any]) -> None:
    """The current setting, the search, and the best and the current one once more."""
    server, run = make(budget_s=3600)
    tuning = run.run()
    assert tuning.ending == "complete"
    assert [trial.phase for trial in tuning.trials[::-1]][:2] == ["final", "final"]
    assert tuning.trials[0].phase == "current"
    searched = [tuple(t.values.values()) for t in tuning.trials if t.phase != "final"]
    assert len(searched) == len(set(searched)) < 2 + 4 * 3 * 2, "tried twice, or a whole grid"
    assert tuning.choice is not None
    assert (tuning.choice.values["batch_size"], tuning.choice.values["instances"]) == (16, 2)
    # More at once than there is room for wait, and make it no faster.
    assert (str(tuning.choice.load), tuning.choice.throughput) == ("8 at once", 8 / 0.005)
    assert tuning.choice.before == pytest.approx(2 / 0.005)
    assert tuning.choice.cautions == ()
    assert "count: 2" in tuning.lines
    assert not server.running
    assert written(server) == tuning


def test_the_loads_ascend_until_one_does_not_pay(make: Callable[..., Any]) -> None:
    """The current setting from the lowest on, others from below the best load so far."""
    server, run = make()
    run.run()
    levels = [level for setting, level in server.measured if setting == (8, 300, 1)]
    assert levels[:3] == [1, 2, 4], "4 is as fast as 2"
    assert levels[3:] == [1, 2, 4], "and so when it is measured again"
    assert [level for setting, level in server.measured if setting == (4, 300, 1)] == [1, 2]
    last = [level for setting, level in server.measured if setting == (16, 300, 2)]
    assert last[-3:] == [4, 8, 16]


@pytest.mark.parametrize("budget_s", [7, 60, 120])
def test_the_time_is_kept_to(make: Callable[..., Any], budget_s: int) -> None:
    """What was found is measured again, and the current setting beside it."""
    server, run = make(budget_s=budget_s)
    tuning = run.run()
    assert tuning.ending == "out of time"
    assert server.now <= budget_s + 4
    assert tuning.trials[0].cut == (budget_s == 7)
    phases = [trial.phase for trial in tuning.trials]
    assert phases[-2:] == (["final", "final"] if "search" in phases[:-2] else phases[-2:])
    if budget_s > 100:
        assert tuning.choice.throughput > tuning.choice.before


def test_a_start_that_fails_takes_time_too(make: Callable[..., Any]) -> None:
    """After one that ran into its timeout there is no time for another."""
    server, run = make(budget_s=1300)
    others = [setting for setting in product(*AXES.values()) if setting != (8, 300, 1)]
    server.reasons = dict.fromkeys(others, "it was not ready within 600 s")
    server.slow = dict.fromkeys(others, 600)
    tuning = run.run()
    assert [bool(trial.failure) for trial in tuning.trials] == [False, True]
    assert tuning.ending == "out of time"


def test_settings_that_fail_are_reported(make: Callable[..., Any]) -> None:
    """Also if the current one does, or the server is gone, or has made another setting of it."""
    server, run = make()
    server.reasons = {(16, 300, 1): "out of memory", (8, 300, 1): "the file is broken"}
    server.gone = {(4, 300, 1)}
    server.changed = {(1, 0, 1): (16, 0, 1)}
    tuning = run.run()
    assert failures(tuning) == {
        **server.reasons, (4, 300, 1): "nobody answers",
        (1, 0, 1): "the server changed it to batch 16, window 0us, instances 1",
    }  # fmt: skip
    assert tuning.trials[0].failure == "the file is broken"
    assert tuning.choice is not None
    assert tuning.choice.before is None


def test_a_server_that_dies_under_load(make: Callable[..., Any]) -> None:
    server, run = make()
    server.broken = {(16, 300, 1)}
    tuning = run.run()
    (dead,) = [t for t in tuning.trials if tuple(t.values.values()) in server.broken]
    assert [each.state for each in dead.points] == ["failed"]
    assert dead.points[0].remarks == ("nobody answers",)
    assert tuning.choice is not None


def test_what_the_server_has_completed_is_the_current_setting(make: Callable[..., Any]) -> None:
    server, run = make()
    server.changed = {(8, 300, 1): (16, 300, 1)}
    assert run.run().trials[0].values["batch_size"] == 16


def test_where_nothing_can_be_measured_it_ends(make: Callable[..., Any]) -> None:
    """The fault is not the setting's; the others would take minutes for the same."""
    server, run = make()
    server.mute = True
    with pytest.raises(InternalError, match=r"no load of the current setting could .* status 99"):
        run.run()
    assert not server.running
    assert len(written(server).trials) == 1


def test_an_interruption_keeps_what_was_measured(make: Callable[..., Any]) -> None:
    server, run = make()
    server.interrupt_after = 4
    tuning = run.run()
    assert tuning.ending == "interrupted"
    assert [len(trial.points) for trial in tuning.trials] == [3, 1]
    assert [trial.cut for trial in tuning.trials] == [False, True]
    assert not server.running
    assert written(server) == tuning
