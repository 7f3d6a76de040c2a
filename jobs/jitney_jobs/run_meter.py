"""Measures one run: how long it has taken, what it has done, and how fast in the last minutes."""

import time
from collections import deque

from jitney_jobs.journal import Record
from jitney_jobs.output import Output
from jitney_jobs.run_figures import RunFigures

_RECENT_S = 300.0
"""When a job will end is estimated from its rate in the last so many seconds."""
_SAMPLE_S = 2.0
"""Between two samples for that rate."""


class RunMeter:
    """Of one run, which begins with it. A pipeline counts in ``figures``."""

    def __init__(self, record: Record, output: Output) -> None:
        """``record``: what the journal says before the run."""
        self.figures = RunFigures(moved_at=time.time())
        self.bad_before = record.failed
        """Bad rows of the runs before."""
        self.done_before = record.failed + record.written
        """All rows of the runs before."""
        self._output = output
        self._began = time.monotonic()
        self._cpu_began = time.process_time()
        self._first_part = record.next_number
        """The number of this run's first part. The journal knows the run by it."""
        self._samples: deque[tuple[float, int]] = deque()
        """From the last minutes: seconds since the run began, and the rows that had ended then."""

    @property
    def bad(self) -> int:
        """Bad rows of all runs."""
        return self.bad_before + self.figures.bad + self._output.misfits

    @property
    def done(self) -> int:
        """Rows of all runs that have ended, bad ones too."""
        return self.done_before + self.figures.done

    def sample(self) -> None:
        """Note how far the run is, at most every ``_SAMPLE_S``. Call it often."""
        seconds = time.monotonic() - self._began
        samples = self._samples
        if samples and seconds - samples[-1][0] < _SAMPLE_S:
            return
        samples.append((seconds, self.figures.done))
        while samples[0][0] < seconds - _RECENT_S:
            samples.popleft()

    def snapshot(self) -> dict[str, float]:
        """The figures of this run so far: those of :class:`RunFigures`,

        - ``run``: the number of its first part;
        - ``cpu_s``: CPU seconds of this process;
        - ``seconds``, ``at``: how long the run has taken, and when that was;
        - ``recent_s``, ``recent_done``: the last minutes, and the rows that ended in them;
        - and what is counted of its committed rows.
        """
        figures = self.figures.to_dict()
        figures["bad"] += self._output.misfits
        figures |= self._output.counts.to_dict()
        figures["run"] = self._first_part
        figures["cpu_s"] = time.process_time() - self._cpu_began
        figures["seconds"] = time.monotonic() - self._began
        figures["at"] = time.time()
        if self._samples:
            began_s, done = self._samples[0]
            figures["recent_s"] = figures["seconds"] - began_s
            figures["recent_done"] = figures["done"] - done
        return figures
