"""Hears SIGTERM in the stub, which nobody else tells that the server is about to exit.

The server calls ``finalize`` only when every response has been sent, and gives up after its exit
timeout; so a long stream would be cut without a word. Whoever stops the server (our launcher,
systemd, ``docker stop`` with an init that forwards to the group) signals the stubs too, and the
model then ends what is left in time. The stub's main thread sits in C++ and runs no Python handler,
hence the wake-up descriptor, which the C-level handler writes to at once.
"""

import logging
import signal
import socket
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


def on_sigterm(callback: Callable[[], None]) -> None:
    """Run ``callback`` in a thread of its own at the first SIGTERM; the process goes on.

    Must be called from the main thread; elsewhere there is nothing to hear, and a line in the log
    says so.
    """
    if threading.current_thread() is not threading.main_thread():
        _LOG.warning("not in the main thread: SIGTERM will not be heard")
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def wait() -> None:
        told = False
        with reader, writer:  # both stay open: a second signal must find them too
            while True:
                if reader.recv(1) == bytes([signal.SIGTERM]) and not told:
                    told = True
                    callback()

    threading.Thread(target=wait, name="jitney-sigterm", daemon=True).start()
