"""How a command on the terminal, or process 1 of a container, is asked to stop: by a signal."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Until the block ends, SIGINT, SIGTERM and the closing of the terminal raise KeyboardInterrupt
    in the main thread and set the event. A signal that the caller ignores (``nohup``) stays
    ignored.

    The exception ends whatever the main thread is doing, such as a load. But if it is raised in a
    finalizer, Python drops it. So a loop must look at the event too, which stays set.
    """
    asked_to_stop = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        asked_to_stop.set()
        raise KeyboardInterrupt

    handlers_before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers_before[number] = signal.signal(number, interrupt)
    try:
        yield asked_to_stop
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
