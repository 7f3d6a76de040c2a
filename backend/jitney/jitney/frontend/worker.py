"""A thread of the front that no exception ends, and one that waits for SIGTERM.

The service runs each of its loops in one. What fails in a turn is counted and logged, and the next
turn comes after a pause, so that a lasting fault does not spin.
"""

import logging
import signal
import socket
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


class _SigtermWaiter:
    """Reads the numbers of signals from a socket pair, to which Python's handler writes them."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._was_called = False
        # The writer is used by its descriptor alone. It is kept here, because it would be closed
        # once it was collected, and then no signal could come.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # a signal handler must not wait
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def turn(self) -> float:
        """Wait for one signal. Returns 0: there is no pause before the next turn."""
        number = self._reader.recv(1)[0]
        if number == signal.SIGTERM and not self._was_called:
            self._callback()
            self._was_called = True
        return 0.0


def on_sigterm(callback: Callable[[], None], count_error: Callable[[], None]) -> None:
    """Run ``callback`` in a thread of its own at the first SIGTERM; the process goes on. Later ones
    do nothing, unless ``callback`` has raised: that is counted and logged, and the next SIGTERM
    runs it again. Must be called from the main thread; elsewhere it only logs a warning.

    Nothing else tells us that the server is about to exit. It calls ``finalize`` only once every
    response has been sent, and it exits after its timeout in any case, so a long stream would be
    cut without an error. Whatever stops the server sends the signal to its stubs too:
    our launcher, systemd, or ``docker stop`` with an init that forwards signals to the group.

    The stub's main thread is in C++, where Python never runs a signal handler. But Python's handler
    in C writes the signal's number to the wake-up descriptor at once, and a thread reads it there.
    """
    if threading.current_thread() is not threading.main_thread():
        _LOG.warning("not in the main thread: SIGTERM will not be caught")
        return
    waiter = _SigtermWaiter(callback)
    # Without a handler of Python's, SIGTERM would end the process.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    Worker("sigterm", waiter.turn, count_error)
