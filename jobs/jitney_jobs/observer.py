"""Shows the user and Prometheus how far a run is, and warns if it will be late."""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from jitney.progress import Deadline, Progress, State

from jitney_jobs.job import Job
from jitney_jobs.journal import JobJournal

if TYPE_CHECKING:
    from jitney_jobs.metrics import Metrics


class Observer:
    """Shows one run. The metrics are served from its beginning, and the display begins once the
    model is loaded."""

    def __init__(self, job: Job, journal: JobJournal, begun: State, closing: ExitStack) -> None:
        """``begun``: the state at the beginning of the run. Metrics are served from now on, until
        ``closing`` closes. Raises UnavailableError if they cannot be."""
        self._journal = journal
        self._begun = begun
        self._closing = closing
        self._progress: Progress | None = None
        self._deadline = Deadline(begun.due)
        self._metrics: Metrics | None = None
        if job.metrics_port is not None or job.push_gateway is not None:
            from jitney_jobs import metrics  # prometheus_client may be missing

            self._metrics = metrics.Metrics(job, begun)
            closing.callback(self._metrics.close)

    def begin_display(self) -> None:
        """Show a line from now on: loading the model may have printed some."""
        self._progress = Progress()
        self._closing.callback(self._progress.close)

    def say(self, text: str) -> None:
        """Print a line beside the one that is shown."""
        assert self._progress is not None, "the display has begun"
        self._progress.say(text)

    def show(self, figures: dict[str, float]) -> None:
        """``figures``: of the run so far, as the journal has them."""
        assert self._progress is not None, "the display has begun"
        complete = self._journal.record.end is not None
        state = replace(self._begun, figures=figures, complete=complete)
        warning = self._deadline.judge(figures["at"], figures["seconds"], state.left_s)
        if warning is not None:
            self._progress.say(warning)
        self._progress.show(state)
        if self._metrics is not None:
            self._metrics.show(replace(state, late=self._deadline.late))
