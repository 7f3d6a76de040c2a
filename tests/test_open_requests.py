"""What an LLM counts of the reports that its engine gives."""

from typing import cast

import pytest
from jitney.engine.handle import EngineHandle
from jitney.messages import StepReport, StepStats
from jitney.open_requests import OpenRequests
from jitney.progress import State
from jitney.text.tokenizer import Tokenizer


class Reporting:
    """An engine that gives these reports, one after the other."""

    def __init__(self, *stats: StepStats) -> None:
        self._reports = [StepReport([], each) for each in stats]

    def step(self) -> StepReport:
        return self._reports.pop(0)


def test_a_report_without_rows_is_no_step() -> None:
    """The first step with overlap has none yet, and some reports belong to no step. So the batch is
    not shown emptier than it is."""
    full = StepStats(batch_sequences=4, generated_tokens=4)
    engine = Reporting(StepStats(), full, full.without_counts(), full)
    requests = OpenRequests(cast("EngineHandle", engine), cast("Tokenizer", None))
    for _ in range(4):
        requests.step()
    figures = requests.figures
    assert (figures["steps"], figures["rows_in_steps"], figures["tokens"]) == (2, 8, 8)
    assert State({**figures, "most_rows": 4}).filled == pytest.approx(1.0)
