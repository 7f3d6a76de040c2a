"""A sweep from start to end: one load after the other, a line and the bar on the terminal.

A load that fails is a point of the result like any other; only what concerns all of them (no
perf_analyzer, no server, no such model) ends the sweep.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jitney.sweep import inputs, slo
from jitney.sweep.plan import Plan
from jitney.sweep.point import Driver
from jitney.sweep.record import Distribution, Point, Result
from jitney.sweep.slo import show_time
from jitney.sweep.target import Model, Target
from jitney.sweep.tool import PerfAnalyzer

STATES = {"steady": "green", "unstable": "yellow", "behind": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Sweep:
    """All that was asked for. ``data``: a file in perf_analyzer's format; None makes requests."""

    tool: PerfAnalyzer
    target: Target
    model: Model
    plan: Plan
    protocol: str
    prompts: inputs.Prompts
    data: Path | None
    shapes: dict[str, tuple[int, ...]]
    slo: str
    """The bounds, as slo.parse takes them."""
    title: str
    options: dict[str, str]
    """As the user gave them, for the report."""

    def run(self, terminal: Console) -> Result:
        """Raises InvalidArgumentError, UnavailableError.

        Interrupted (KeyboardInterrupt) after the first load, it gives what was measured: fewer
        points than the plan has loads.
        """
        bounds = slo.parse(self.slo, language=self.model.language)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        server = self.target.server()
        driver = Driver(self.tool, self.target, self.model, self.plan, self.protocol)
        with tempfile.TemporaryDirectory(prefix="jitney-sweep-") as folder:
            write = self._writer(Path(folder))
            points = self._points(driver, write, terminal)
        verdicts = tuple(slo.judge(point, bounds) for point in points)
        return Result(
            title=self.title,
            model=self.model.name,
            language=self.model.language,
            address=self.target.grpc if self.protocol == "grpc" else self.target.http,
            server=server,
            perf_analyzer=self.tool.version,
            began=began,
            options=self.options,
            points=points,
            slo=self.slo,
            verdicts=verdicts,
            best=slo.best(points, verdicts),
        )

    def _writer(self, folder: Path) -> Callable[[int], tuple[Path, Path]]:
        """Number of a load -> its input file, and that of its warm-up."""
        if self.data is not None:
            given = self.data
            return lambda number: (given, given)
        ratio = 1.0
        rows: list[inputs.Entry] = []
        if not self.model.language:
            rows = inputs.rows(self.model, self.shapes, self.prompts.seed)
        elif not self.prompts.given:
            ratio = inputs.words_per_token(self.target, self.model)

        def write(name: str) -> Path:
            entries = rows or self.prompts.entries(self.model, ratio, name)
            path = folder / f"{name}.json"
            path.write_text(json.dumps({"data": entries}), encoding="utf-8")
            return path

        return lambda number: (write(f"{number}"), write(f"{number} warm-up"))

    def _points(
        self, driver: Driver, write: Callable[[int], tuple[Path, Path]], terminal: Console
    ) -> tuple[Point, ...]:
        points: list[Point] = []
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
                   TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())  # fmt: skip
        with Progress(*columns, console=terminal, transient=True) as progress:
            task = progress.add_task(self.model.name, total=len(self.plan.loads))
            for number, load in enumerate(self.plan.loads):
                progress.update(task, description=f"{escape(self.model.name)}, {load}")

                def tick(share: float, number: int = number) -> None:
                    progress.update(task, completed=number + 0.95 * share)

                try:
                    requests, warm_up = write(number)
                    point = driver.run(load, requests, tick, warm_up)
                except KeyboardInterrupt:
                    if not points:
                        raise
                    terminal.print("Interrupted: the report is of the loads before.")
                    break
                points.append(point)
                progress.update(task, completed=number + 1)
                terminal.print(line(point, language=self.model.language), soft_wrap=True)
        return tuple(points)


def line(point: Point, *, language: bool) -> str:
    """A point in one line of the terminal, with rich's markup."""
    state = f"[{STATES[point.state]}]{point.state}[/]"
    said = f"  [dim]{escape('; '.join(point.remarks))}[/]" if point.remarks else ""
    measured = point.measured
    if measured is None:
        return f"{point.load!s:>12}  {state}{said}"
    figures = [f"{measured.throughput:>9,.1f} {'tokens/s' if language else 'rows/s'}"]
    times = ("ttft", "itl") if language else ("latency",)
    figures += [f"{name} {_p50_p95(getattr(measured, name))}" for name in times]
    return f"{point.load!s:>12}  {'  '.join(figures)}  {state}{said}"


def _p50_p95(found: Distribution | None) -> str:
    return "–" if found is None else f"{show_time(found.at(50))} / {show_time(found.at(95))}"


def conclusion(result: Result) -> str:
    """What the terminal and the report say at the end."""
    if all(point.measured is None for point in result.points):
        return "No load could be measured."
    if result.best is None:
        return f"No load meets {result.slo}." if result.slo else "Every load failed or fell behind."
    bounds = f"with {result.slo}" if result.slo else "with no bound on latency"
    caution = f" Caution: {result.best.caution}." if result.best.caution else ""
    return (
        f"Best {bounds}: {result.best.load}, {result.best.throughput:,.1f} {result.unit}.{caution}"
    )
