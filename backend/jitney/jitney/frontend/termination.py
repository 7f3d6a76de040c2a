"""Catches SIGTERM in the stub, because nothing else announces that the server is about to exit.

The server calls ``finalize`` only when every response has been sent, and gives up after its exit
timeout; so a long stream would be cut without an error. Who stops the server (our launcher,
systemd, ``docker stop`` with an init that forwards to the group) signals the stubs too, and the
model then ends its requests in time. The stub's main thread is in C++ and runs no Python handler,
hence the wake-up descriptor, which the C-level handler writes to at once.
"""

import logging
import signal
import socket
import threading
from collections.abc import Callable

from jitney.frontend.worker import Worker

_LOG = logging.getLogger(__name__)


def on_sigterm(callback: Callable[[], None], count_error: Callable[[], None]) -> None:
    """Run ``callback`` in a thread of its own at the first SIGTERM; the process goes on. If it
    fails, that is counted and logged, and a second SIGTERM runs it again.

    Must be called from the main thread; elsewhere it does nothing but log a warning.
    """
    if threading.current_thread() is not threading.main_thread():
        _LOG.warning("not in the main thread: SIGTERM will not be caught")
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    called = False

    def wait() -> float:
        nonlocal called
        assert writer.fileno() >= 0  # both stay open: a second signal must find them too
        if reader.recv(1) == bytes([signal.SIGTERM]) and not called:
            callback()
            called = True
        return 0.0

    Worker("sigterm", wait, count_error)
