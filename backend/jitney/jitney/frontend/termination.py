"""How the front learns that its server stops, and what it does then.

The server calls ``finalize`` only after every response has been sent, and it exits when its timeout
is over: that would cut a long stream without an error. So whatever stops the server also sends
signals to the models' processes. Our launcher sends LOOK and writes a note
(:mod:`jitney.stop_signals`). Others send SIGTERM alone: systemd does, and ``docker stop`` with an
init that forwards signals to the process group.
"""

import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from jitney.frontend.worker import Worker
from jitney.stop_signals import LOOK, STOPS, Note, read_note

_LOG = logging.getLogger(__name__)

REOPEN_S = 60.0
"""A SIGTERM came, and ``drain_s`` is over. If this process still runs so many seconds later, new
requests are served again. A server that stops has ended by then, or takes no requests any more."""


class Drained(Protocol):
    """What is stopped: the service."""

    def drain(self, grace_s: float) -> None:
        """Refuse new requests. End what is still open after ``grace_s`` seconds, or never if that
        is infinite. A later call changes the time."""

    def reopen(self) -> None:
        """Serve new requests again."""

    def count_error(self) -> None:
        """An exception was logged."""


class Termination:
    """Drains a service as the launcher's notes and SIGTERM say.

    A note counts for good. After it, only another note counts.

    SIGTERM without a note gives running requests ``drain_s`` seconds. If the process still runs
    ``reopen_s`` seconds after these are over, nobody has stopped the server, and the service opens
    again.
    """

    def __init__(
        self,
        service: Drained,
        drain_s: float,
        *,
        read_note: Callable[[], Note | None] = read_note,
        reopen_s: float = REOPEN_S,
    ) -> None:
        self._service = service
        self._drain_s = drain_s
        self._read_note = read_note
        self._reopen_s = reopen_s
        self._obeyed: Note | None = None
        """The last note that was acted upon."""
        self._reopening: threading.Timer | None = None
        """Opens the service again. None: no SIGTERM without a note has closed it."""
        self._lock = threading.Lock()
        """The timer runs in a thread of its own."""

    def hear(self, number: int) -> None:
        """Act upon a signal. Signals may come several times, and in any order."""
        note = self._read_note()
        with self._lock:
            if note is not None:
                self._obey(note)
            # Without a note, LOOK came from somebody else and means nothing. A note that was obeyed
            # counts even if its file cannot be read any more.
            elif number == STOPS and self._obeyed is None and self._reopening is None:
                self._drain_for_a_while()

    def _obey(self, note: Note) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        if note == Note.END and self._obeyed != Note.END:
            self._service.drain(0)
            self._obeyed = note
        elif note == Note.WAIT and self._obeyed is None:
            self._service.drain(math.inf)
            self._obeyed = note

    def _drain_for_a_while(self) -> None:
        self._service.drain(self._drain_s)
        self._reopening = threading.Timer(self._drain_s + self._reopen_s, self._reopen)
        self._reopening.daemon = True
        self._reopening.start()

    def _reopen(self) -> None:
        note = self._read_note()  # its signal may come in a moment
        with self._lock:
            self._reopening = None
            if note is not None:
                self._obey(note)
            if self._obeyed is None:
                _LOG.warning("SIGTERM came, but the server still runs: new requests are served")
                self._service.reopen()


def drain_at_signals(service: Drained, drain_s: float) -> None:
    """Have a thread drain the service when a signal says so. The process goes on. See
    :func:`on_signals`."""
    termination = Termination(service, drain_s)
    on_signals((STOPS, LOOK), termination.hear, service.count_error)
    # The stop may have begun while this model was loaded: then its signals came too early.
    termination.hear(LOOK)


class _SignalReader:
    """Reads the numbers of signals from a socket pair, to which Python's handler writes them."""

    def __init__(self, numbers: Collection[int], callback: Callable[[int], None]) -> None:
        self._numbers = numbers
        self._callback = callback
        # Only the writer's descriptor is used. But without this reference the writer would be
        # collected, and so closed.
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
    """Have a thread call ``callback`` with the number of each of these signals. The process goes
    on. An exception of ``callback`` is counted and logged, and the next signal calls it again.

    Must be called from the main thread. Elsewhere it only logs a warning.

    Why a thread: Python runs a signal handler in the main thread only, between two of its
    instructions, and the stub's main thread runs C++. But the interpreter also writes the signal's
    number to the wake-up descriptor. It does so at once, whatever the main thread does. The thread
    reads the number there.
    """
    if threading.current_thread() is not threading.main_thread():
        _LOG.warning("not in the main thread: SIGTERM will not be caught")
        return
    reader = _SignalReader(numbers, callback)
    for number in numbers:
        # Without a handler of Python's, SIGTERM would end the process.
        signal.signal(number, lambda number, frame: None)
    Worker("signals", reader.turn, count_error)
