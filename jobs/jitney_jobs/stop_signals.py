"""SIGINT and SIGTERM while a job runs: the first one has the run end in order."""

import signal
import threading
from typing import Any


class StopSignals:
    """Within ``with`` the first SIGINT and the first SIGTERM only set ``is_stopped``. A second
    signal of the same kind has its usual effect. In a thread other than the main one this does
    nothing: such a thread gets no signals."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._before: dict[int, Any] = {}
        """The handlers that are put back."""

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.is_stopped = True
        signal.signal(number, self._before[number])
