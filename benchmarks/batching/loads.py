"""Loads on the models of one server, put there by ``jitney_measure``'s driver of perf_analyzer.

A *mode* is one way to batch a model. Every mode gets the same loads; at each load the modes take
turns, so that a machine that drifts is the same for all of them. Called by ``one_call``,
``language`` and ``figures``.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitney_measure.inputs import Inputs
from jitney_measure.options import Shared
from jitney_measure.perf_analyzer import Driver, PerfAnalyzer
from jitney_measure.record import Load, LoadPoint, Result, now
from jitney_measure.target import Model, Target

from benchmarks.batching.subjects import ROOT


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Where the requests of one way to batch go, and what they are."""

    target: Target
    model: Model
    data: Path
    """The requests, in perf_analyzer's own format."""
    rows: int = 1
    """Of a request."""
    whole_batches: int = 1
    """More than 1: the model answers full batches of so many requests alone."""
    protocol: str = "grpc"
    more: tuple[str, ...] = ()
    """Further arguments of perf_analyzer."""

    def can_take(self, load: Load) -> bool:
        """Whether its batches fill: fewer users than a full batch has rows wait for ever."""
        return load.kind == "rate" or load.level >= self.whole_batches


class Bench:
    """Runs perf_analyzer; prints a dot for each load."""

    def __init__(self, folder: Path) -> None:
        """``folder``: for its own files. Fetches perf_analyzer if it is not there."""
        self._folder = folder
        fetch = ROOT / "scripts" / "fetch_perf_analyzer.py"
        subprocess.run([sys.executable, str(fetch)], check=True, stdout=subprocess.DEVNULL)
        self._tool = PerfAnalyzer.find()

    def run(self, mode: Mode, load: Load, seconds: float) -> LoadPoint:
        """One load, after a warm-up. Raises InternalError if it failed."""
        driver = self._driver(mode, seconds)
        point = driver.run(mode.target, mode.model, load)
        if point.measured is None or point.measured.failed:
            raise RuntimeError(f"{mode.model.name} at {load}: {'; '.join(point.remarks)}")
        print(".", end="", file=sys.stderr, flush=True)
        return point

    def compare(
        self, modes: Mapping[str, Mode], loads: Sequence[Load], seconds: float
    ) -> dict[str, Result]:
        """Every load on every mode. A mode that falls behind one rate gets no greater one, for it
        would only wait longer."""
        points: dict[str, list[LoadPoint]] = {name: [] for name in modes}
        behind = set[str]()
        began = now()
        for load in loads:
            for name, mode in modes.items():
                if not mode.can_take(load) or (load.kind == "rate" and name in behind):
                    continue
                point = self.run(mode, load, seconds)
                points[name].append(point)
                if point.state == "behind":
                    behind.add(name)
        return {
            name: self._driver(mode, seconds).result(
                mode.target, mode.model, points[name], title=name, server="Triton", began=began
            )
            for name, mode in modes.items()
        }

    def _driver(self, mode: Mode, seconds: float) -> Driver:
        options = Shared(
            seconds=seconds,
            rows=mode.rows,
            data=mode.data,
            protocol=mode.protocol,  # type: ignore[arg-type]
        )
        return Driver(
            options=options,
            loads=(),
            inputs=Inputs(options, self._folder),
            tool=self._tool,
            whole_batches=mode.whole_batches,
            more=mode.more,
        )


def rates(levels: Sequence[float]) -> list[Load]:
    """Poisson arrivals of so many a second; whole numbers, for perf_analyzer sends at least as many
    requests as arrive in a second."""
    return [Load("rate", round(level) if level >= 10 else round(level, 2)) for level in levels]


def users(levels: Sequence[int]) -> list[Load]:
    """Closed loops of so many users."""
    return [Load("concurrency", level) for level in levels]
