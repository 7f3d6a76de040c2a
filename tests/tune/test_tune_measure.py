"""The requests of a load, and the end of the server that a run started."""

import json
from pathlib import Path
from typing import Any

import pytest
from jitney.sweep.inputs import Prompts
from jitney.sweep.plan import Plan, loads
from jitney.sweep.point import Driver
from jitney.sweep.record import Load, Point
from jitney.sweep.target import Model, Target, Tensor
from jitney.sweep.tool import PerfAnalyzer
from jitney.tune import measure
from jitney.tune.measure import Gauge
from jitney.tune.session import Session

SPEAKING = Model("m", (Tensor("text_input", "BYTES", (1,), False),), 0, True, (), ("text_output",))
TARGET = Target("here:1", "here:2", None)


def test_no_measurement_finds_its_prompts_in_the_prefix_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of its warm-up, another load or a second attempt; the same load of another setting gets
    the same."""
    sent: list[set[str]] = []

    def texts(path: Path) -> set[str]:
        data = json.loads(path.read_text(encoding="utf-8"))["data"]
        return {entry["text_input"][0] for entry in data}

    def run(driver: Driver, load: Load, inputs: Path, tick: Any, warm_up: Path) -> Point:
        sent.append(texts(inputs))
        assert not texts(warm_up) & texts(inputs)
        return Point(load, "steady")

    monkeypatch.setattr(Driver, "run", run)
    monkeypatch.setattr(measure.inputs, "words_per_token", lambda *_: 1.0)
    levels = loads("1,2", "")
    gauge = Gauge(
        PerfAnalyzer(Path("none"), "0"), Plan(levels, 1.0, None, True, 0.2, 1), "grpc",
        Prompts((32, 32), (1, 1)), {}, None, tmp_path,
    )  # fmt: skip
    for load, attempt in ((levels[0], 1), (levels[1], 1), (levels[1], 2), (levels[1], 1)):
        gauge.point(TARGET, SPEAKING, load, attempt, lambda share: None)
    low, high, again, other = sent
    assert not low & high
    assert not high & again
    assert high == other


def test_a_second_interruption_ends_the_server_at_once() -> None:
    """And is no reason not to report what was measured."""
    stops: list[float | None] = []

    class Server:
        def stop(self, grace_s: float | None = None) -> None:
            stops.append(grace_s)
            if grace_s is None:
                raise KeyboardInterrupt

    session = Session.__new__(Session)
    session._server = Server()  # type: ignore[assignment]
    session.stop()
    assert stops == [None, 0]
