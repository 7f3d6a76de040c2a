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
    """Calls ``turn`` in a daemon thread, which cannot delay the server's exit. A turn returns the
    seconds until the next one, or None to end the thread."""

    def __init__(
        self, name: str, turn: Callable[[], float | None], count_error: Callable[[], None]
    ) -> None:
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
            except Exception:
                _LOG.exception("a turn of %s failed", self._thread.name)
                self._count_error()
                pause = ERROR_PAUSE_S


def on_sigterm(callback: Callable[[], None], count_error: Callable[[], None]) -> None:
    """Run ``callback`` in a thread of its own at the first SIGTERM; the process goes on. If it
    fails, that is counted and logged, and a second SIGTERM runs it again. Must be called from the
    main thread; elsewhere it does nothing but log a warning.

    Nothing else announces that the server is about to exit: it calls ``finalize`` only when every
    response has been sent, and gives up after its exit timeout, so a long stream would be cut
    without an error. Who stops the server (our launcher, systemd, ``docker stop`` with an init that
    forwards to the group) signals the stubs too. The stub's main thread is in C++ and runs no
    Python handler, hence the wake-up descriptor, which the C-level handler writes to at once.
    """
    if threading.current_thread() is not threading.main_thread():
        _LOG.warning("not in the main thread: SIGTERM will not be caught")
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # a signal handler must not wait
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    called = False

    def wait() -> float:
        nonlocal called
        # This line also keeps the writer alive: once it was collected, no signal could come.
        assert writer.fileno() >= 0
        if reader.recv(1) == bytes([signal.SIGTERM]) and not called:
            callback()
            called = True
        return 0.0

    Worker("sigterm", wait, count_error)
