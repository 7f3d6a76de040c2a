"""How the front hears that its server stops, and what it does then.

The server calls ``finalize`` only once every response has been sent, and it exits after its timeout
in any case, so a long stream would be cut without an error. Whatever stops the server sends signals
to its stubs, too: our launcher those of :mod:`jitney.stop_signals`; systemd, or ``docker stop``
with an init that forwards signals to the group, SIGTERM alone.
"""

import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from jitney.frontend.worker import Worker
from jitney.stop_signals import STOPS, TIME_IS_KEPT, TIME_IS_OVER

_LOG = logging.getLogger(__name__)


class Drained(Protocol):
    """What is stopped: the service."""

    def drain(self, grace_s: float) -> None:
        """Refuse new requests, and end after ``grace_s`` seconds what is still open; never, if that
        is infinite. A later call changes the time."""

    def count_error(self) -> None:
        """An exception was logged."""


class Termination:
    """Drains a service as the signals say. After SIGTERM alone, running requests have ``drain_s``
    seconds. If a launcher keeps the time, they have exactly as long as it says."""

    def __init__(self, service: Drained, drain_s: float) -> None:
        self._service = service
        self._drain_s = drain_s
        self._is_draining = False
        self._time_is_kept = False

    def hear(self, number: int) -> None:
        """Do what a signal asks for. Each of them may come again, and in any order."""
        if number == TIME_IS_KEPT and not self._time_is_kept:
            self._service.drain(math.inf)
            self._time_is_kept = True
        elif number == TIME_IS_OVER and self._time_is_kept:
            self._service.drain(0)
        elif number == STOPS and not self._time_is_kept and not self._is_draining:
            self._service.drain(self._drain_s)
            self._is_draining = True


def drain_at_signals(service: Drained, drain_s: float) -> None:
    """Have a thread drain the service when a signal says so; the process goes on. See
    :func:`on_signals`."""
    termination = Termination(service, drain_s)
    on_signals((STOPS, TIME_IS_KEPT, TIME_IS_OVER), termination.hear, service.count_error)


class _SignalReader:
    """Reads the numbers of signals from a socket pair, to which Python's handler writes them."""

    def __init__(self, numbers: Collection[int], callback: Callable[[int], None]) -> None:
        self._numbers = numbers
        self._callback = callback
        # The writer is used by its descriptor alone. It is kept here, because it would be closed
        # once it was collected, and then no signal could come.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # a signal handler must not wait
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def turn(self) -> float:
        """Wait for one signal. Returns 0: there is no pause before the next turn."""
        number = self._reader.recv(1)[0]
        if number in self._numbers:
            self._callback(number)
        return 0.0


def on_signals(
    numbers: Collection[signal.Signals],
    callback: Callable[[int], None],
    count_error: Callable[[], None],
) -> None:
    """Run ``callback`` with the number of each of these signals, in a thread of its own; the
    process goes on. If it raises, that is counted and logged, and the next signal runs it again.
    Must be called from the main thread; elsewhere it only logs a warning.

    The stub's main thread is in C++, where Python never runs a signal handler. But Python's handler
    in C writes the signal's number to the wake-up descriptor at once, and a thread reads it there.
    """
    if threading.current_thread() is not threading.main_thread():
        _LOG.warning("not in the main thread: SIGTERM will not be caught")
        return
    reader = _SignalReader(numbers, callback)
    for number in numbers:
        # Without a handler of Python's, SIGTERM would end the process.
        signal.signal(number, lambda number, frame: None)
    Worker("signals", reader.turn, count_error)
