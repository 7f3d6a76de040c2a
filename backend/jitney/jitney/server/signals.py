"""How a command on the terminal is asked to stop: ``jitney serve`` and ``jitney tune`` use it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """SIGINT, SIGTERM and the closing of the terminal set the event and raise KeyboardInterrupt in
    the main thread, until the block ends. A signal that the caller ignores (``nohup``) stays
    ignored."""
    asked = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        asked.set()
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
