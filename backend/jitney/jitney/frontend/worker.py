"""A thread of the front that no exception ends.

The service runs each of its loops in one. What fails in a turn is counted and logged, and the next
turn comes after a pause, so that a lasting fault does not spin. An error that comes again and again
is logged once a minute, so that it does not fill the log.
"""

import logging
import threading
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

ERROR_PAUSE_S = 0.1
"""Seconds between a turn that failed and the next one."""
_REPEAT_S = 60.0
"""Seconds after which an error that comes again is logged again."""


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
        self._logged = ""  # the error that was logged last
        self._logged_at = 0.0  # monotonic seconds
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
            except BaseException as error:  # a panic of native code is no Exception
                self._log(error)
                self._count_error()
                pause = ERROR_PAUSE_S

    def _log(self, error: BaseException) -> None:
        """Log the error of a turn, unless it is the one that was logged a moment ago."""
        now = time.monotonic()
        text = repr(error)
        if text == self._logged and now - self._logged_at < _REPEAT_S:
            return
        self._logged = text
        self._logged_at = now
        _LOG.error("a turn of %s failed", self._thread.name, exc_info=error)
