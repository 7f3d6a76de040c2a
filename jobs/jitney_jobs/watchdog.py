"""Ends a run in which nothing moves: a row, a model or a storage that neither ends nor fails would
hold up this run for ever, and all that a scheduler starts after it."""

import os
import sys
import threading
import time
from collections.abc import Mapping

from jitney.errors import UnavailableError

from jitney_jobs.outcome import ExitStatus

_MOVING = ("done", "taken", "position", "steps", "tokens", "tries")
"""Figures of a run of which at least one changes while it works, or while it waits for a server as
long as ``patience`` says."""
_GRACE_S = 60.0
"""So much later than the job's thread should have ended the run, the process is ended."""


class Watchdog:
    """Of one run. The job's thread calls :meth:`check` all the time; a thread notices if it does
    not, because a call into the model does not return."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: list[float | None] = []
        self._moved_at = time.monotonic()
        self._checked_at = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def check(self, figures: Mapping[str, float]) -> None:
        """Raises UnavailableError if nothing has moved for too long."""
        now = time.monotonic()
        self._checked_at = now
        values = [figures.get(name) for name in _MOVING]
        if values != self._last:
            self._last = values
            self._moved_at = now
        elif now - self._moved_at > self._seconds:
            raise UnavailableError(self._text)

    @property
    def _text(self) -> str:
        return (
            f"nothing has moved for {self._seconds:,.0f} s (watchdog); row_timeout makes a row bad "
            "that does not end"
        )

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            if time.monotonic() - self._checked_at > self._seconds + _GRACE_S:
                print(f"error: {self._text}", file=sys.stderr, flush=True)
                os._exit(ExitStatus.JOB_ERROR)  # what is committed counts, as after a kill
