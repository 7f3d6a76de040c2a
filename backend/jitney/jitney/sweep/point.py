"""One load: warm up, count, run perf_analyzer, count again, read.

Runs are by number of requests: windows of time that must agree with each other fail on a noisy
machine and leave no report. How steady a run was is judged by its own moments instead.
"""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitney.errors import InternalError
from jitney.sweep import counters
from jitney.sweep.access import Access
from jitney.sweep.plan import Plan
from jitney.sweep.profile import measure, read_export
from jitney.sweep.record import Load, Measurement, Point, printable
from jitney.sweep.target import Model, Target
from jitney.sweep.tool import PerfAnalyzer

_ATTEMPTS = 2
"""perf_analyzer now and then waits for ever near the end of a run by number of requests; the server
is idle then. Such a run is ended and made again."""
_SETTLE_S = 0.6
"""Metrics are up to a quarter of a second late."""
_PATIENCE_S = 60.0
"""A run may take three times as long as expected, and so much more."""


class _HungError(Exception):
    """perf_analyzer took too long and was ended."""


Tick = Callable[[float], None]
"""Called a few times a second with the share of the measurement that is over, from 0 to 1."""


@dataclass(frozen=True)
class Driver:
    """What all loads of a sweep share."""

    tool: PerfAnalyzer
    target: Target
    model: Model
    plan: Plan
    protocol: str
    """``grpc`` or ``http``."""
    words: tuple[str, ...] = ()
    """More for perf_analyzer, last."""

    def run(self, load: Load, inputs: Path, tick: Tick, warm_up: Path | None = None) -> Point:
        """``warm_up``: requests of the time before the measurement, in place of ``inputs``.

        Never raises for what a load does to the server: a failed point says what happened.
        """
        try:
            return self._run(load, inputs, warm_up or inputs, tick)
        except InternalError as error:
            # perf_analyzer ends where it is refused the statistics, in words that say nothing of
            # them.
            missing = counters.snapshot(self.target, self._models, None).missing
            hint = [f"{text}: perf_analyzer needs them too" for text in missing]
            return Point(load, "failed", (str(error), *hint))

    @property
    def _models(self) -> tuple[str, ...]:
        return self.model.parts or (self.model.name,)

    def _run(self, load: Load, inputs: Path, warm_up: Path, tick: Tick) -> Point:
        warmed = self._measure(*self.plan.warm_up(load), warm_up, 0, lambda share: None)[0]
        pace = load.level if load.kind == "rate" else warmed.requests_per_s
        count = self.plan.count(load, pace)
        engine = self.model.name if self.model.language else None
        time.sleep(_SETTLE_S if engine else 0)
        before = counters.snapshot(self.target, self._models, engine)
        measured, remarks = self._measure(load, count, inputs, count / max(pace, 1e-3), tick)
        time.sleep(_SETTLE_S if engine else 0)
        after = counters.snapshot(self.target, self._models, engine)
        state, doubts = self.plan.doubts(load, measured)
        return Point(
            load,
            state,
            (*remarks, *doubts, *dict.fromkeys((*before.missing, *after.missing))),
            measured,
            counters.stages(before, after),
            counters.engine_work(before, after),
        )

    def _measure(
        self, load: Load, count: int, inputs: Path, expected_s: float, tick: Tick
    ) -> tuple[Measurement, list[str]]:
        """One run; the second is what there is to say about it. Raises InternalError."""
        remarks = []
        for _ in range(_ATTEMPTS):
            with tempfile.TemporaryDirectory(prefix="jitney-sweep-") as folder:
                export = Path(folder, "profile.json")
                command = self.command(load, inputs, count, export)
                try:
                    access = self.target.access
                    _execute(command, self.tool, access, Path(folder), expected_s, tick)
                except _HungError:
                    remarks.append("perf_analyzer hung and was run again")
                    continue
                exchanges = read_export(export)
            made = measure(exchanges, language=self.model.language, rows=self.plan.batch)
            return made, remarks
        raise InternalError(f"perf_analyzer hung {_ATTEMPTS} times")

    def command(self, load: Load, inputs: Path, count: int, export: Path) -> list[str]:
        """perf_analyzer's command line. It holds the secrets of the target: show it nowhere."""
        words = [str(self.tool.binary), "-m", self.model.name]
        words += ["-u", self.target.address(self.protocol), "-i", self.protocol]
        # Rates are kept by asynchronous calls only; over HTTP, users are threads.
        if self.protocol == "grpc" or load.kind == "rate":
            words.append("--async")
        if self.model.language:
            words.append("--streaming")
        if self.model.max_batch:
            words += ["-b", str(self.plan.batch)]
        words += ["--input-data", str(inputs), *self.plan.shape(load)]
        # -s: whatever the windows look like, there is a report.
        words += ["--request-count", str(count), "-s", "999"]
        words += ["--profile-export-file", str(export)]
        return [*words, *self.target.access.words(self.protocol), *self.words]


def _execute(
    command: Sequence[str],
    tool: PerfAnalyzer,
    access: Access,
    folder: Path,
    expected_s: float,
    tick: Tick,
) -> None:
    """Raises _HungError, after the process is gone; InternalError with what it said last."""
    log = folder / "output"
    began = time.monotonic()
    limit = 3 * expected_s + _PATIENCE_S
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=tool.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        try:
            while (status := _ended(process)) is None:
                spent = time.monotonic() - began
                tick(min(spent / expected_s, 1.0) if expected_s else 0.0)
                if spent > limit:
                    raise _HungError
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if status != 0:
        text = access.hide(log.read_text(encoding="utf-8", errors="replace"))
        raise InternalError(f"perf_analyzer ended with status {status}: {_told(text)}")


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """The status, if it comes soon. The library's own error shows the command line, with the key in
    it: a traceback through here must not have it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.25)
    return None


def _told(text: str) -> str:
    """The lines that say why, in one."""
    lines = [printable(line.strip()) for line in text.splitlines() if line.strip()]
    telling = [
        line for line in lines if any(w in line.lower() for w in ("error", "fail", "invalid"))
    ]
    return " / ".join((telling or lines)[-3:])[:600] or "it said nothing"
