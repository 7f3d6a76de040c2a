"""The figures of a job, as its journal has them: those of its runs added up, and its throughput
from part to part. The status and the report show them."""

from collections.abc import Sequence
from typing import NamedTuple

from jitney_jobs.journal import OutputPart, Record


class JobFigures:
    """The figures of all runs of a job. Each part has the figures of its run up to then, so the
    last part of a run has those of the whole run."""

    def __init__(self, record: Record) -> None:
        self._rows = record.written + record.failed
        runs = {part.figures["run"]: part.figures for part in record.parts}
        self._runs = list(runs.values())

    @property
    def run_count(self) -> int:
        """How many runs have committed a part."""
        return len(self._runs)

    def total(self, name: str) -> float:
        """A figure, added up over all runs."""
        return sum(figures.get(name, 0.0) for figures in self._runs)

    @property
    def seconds(self) -> float:
        """How long the runs took together. More than 0, so that one can divide by it."""
        return max(1e-9, self.total("seconds"))

    @property
    def rate_text(self) -> str:
        """Seconds, rows a second and, for a language model, tokens a second."""
        text = f"{self.seconds:,.1f} s without loading: {self._rows / self.seconds:,.1f} rows/s"
        tokens = self.total("tokens")
        return f"{text}, {tokens / self.seconds:,.0f} tokens/s" if tokens else text

    @property
    def cost_text(self) -> str:
        """Core-seconds for a thousand rows."""
        thousands_of_rows = max(1, self._rows) / 1000
        return f"{self.total('cpu_s') / thousands_of_rows:,.2f} core-seconds a thousand rows"


class Throughput(NamedTuple):
    """Values between each part's commit and the one before it. The pauses between runs are left
    out."""

    ends: list[float]
    """When each part was committed, in seconds of all runs."""
    rates: list[float]
    """Rows a second."""
    filled: list[float]
    """The share of the batch that was filled. 0 for executors without steps."""


def throughput_of(parts: Sequence[OutputPart]) -> Throughput:
    """``parts``: as they were committed."""
    throughput = Throughput([], [], [])
    end = 0.0
    before: dict[str, float] = {}  # the figures of the part before
    for part in parts:
        figures = part.figures
        if before.get("run") != figures["run"]:
            before = {}  # the figures of a run begin with 0
        # What each figure has grown by since the part before.
        growth = {name: value - before.get(name, 0.0) for name, value in figures.items()}
        seconds = max(1e-9, growth["seconds"])
        end += seconds
        throughput.ends.append(end)
        throughput.rates.append((part.written + part.failed) / seconds)
        most_rows_in_steps = figures.get("most_rows", 0.0) * growth.get("steps", 0.0)
        filled = 0.0
        if most_rows_in_steps:
            filled = growth["rows_in_steps"] / most_rows_in_steps
        throughput.filled.append(filled)
        before = figures
    return throughput
