"""A thread of the front that no exception ends.

The service runs each of its loops in one. What fails in a turn is counted and logged, and the next
turn comes after a pause, so that a lasting fault does not spin.
"""

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

ERROR_PAUSE_S = 0.1
"""Seconds between a turn that failed and the next one."""


class Worker:
    """Calls ``turn`` again and again, in a daemon thread, which cannot delay the server's exit."""

    def __init__(
        self, name: str, turn: Callable[[], float | None], count_error: Callable[[], None]
    ) -> None:
        """``turn`` returns the seconds until the next turn, or None to end the thread.
        ``count_error`` is called when a turn has raised."""
        self._turn = turn
        self._count_error = count_error
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"jitney-{name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Begin no further turn. Does not wait."""
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)
        if self.is_alive:
            _LOG.warning("%s did not end within %g s", self._thread.name, timeout_s)

    def _run(self) -> None:
        pause: float | None = 0.0
        while pause is not None and not self._stopped.wait(pause):
            try:
                pause = self._turn()
            except BaseException:  # a panic of native code is no Exception
                _LOG.exception("a turn of %s failed", self._thread.name)
                self._count_error()
                pause = ERROR_PAUSE_S
