"""Starts an engine's process, and waits until it has loaded the model.

Called by the supervisor, for the first engine and for each that replaces one. Whatever goes wrong
is a LoadError of ``errors``.
"""

import threading
from collections.abc import Callable

from jitney.engine.fork_server import EngineConnection, ForkServer, ProcessEnd
from jitney.engine.inbox import UNLOADED
from jitney.engine.load_watch import LoadWatch
from jitney.engine.wire import LoadRefused, Logged, Ready, Start, ToFront
from jitney.errors import (
    CheckpointError,
    ConfigError,
    InstallationError,
    JitneyError,
    LoadError,
    UnsupportedModelError,
)

_LOAD_ERRORS: dict[str, type[JitneyError]] = {
    kind.__name__: kind
    for kind in (CheckpointError, ConfigError, InstallationError, UnsupportedModelError)
}
"""The error that a load raises, by ``LoadRefused.kind``; for any other kind it is a LoadError."""


class KilledError(LoadError):
    """Somebody has killed the engine, or the fork server, while it loaded the model."""


class EngineStart:
    """One attempt to start an engine."""

    def __init__(
        self,
        fork_server: ForkServer,
        start: Start,
        *,
        stopped: threading.Event,
        clock: Callable[[], float],
        tick: Callable[[], None],
        tick_while_ending: Callable[[], None],
        receive: Callable[[EngineConnection], ToFront | None],
    ) -> None:
        """``tick`` is called while the fork server gets ready, ``tick_while_ending`` while an
        engine whose load has failed ends. ``receive`` returns the next message of an engine, or
        None if none comes soon, and raises EOFError. Once ``stopped`` is set, the attempt is given
        up."""
        self._fork_server = fork_server
        self._start = start
        self._stopped = stopped
        self._clock = clock
        self._tick = tick
        self._tick_while_ending = tick_while_ending
        self._receive = receive
        self._watch = LoadWatch(start.config.load_watchdog_s, clock())

    def run(self) -> tuple[EngineConnection, Ready]:
        """Start a process and wait until it has loaded the model. Raises LoadError."""
        connection = EngineConnection(self._fork_server, self._start, self._tick_while_forking)
        try:
            return connection, self._wait_until_loaded(connection)
        except BaseException:
            connection.close(self._tick_while_ending)
            raise

    def _tick_while_forking(self) -> None:
        self._tick()
        self._check_progress(None)

    def _wait_until_loaded(self, connection: EngineConnection) -> Ready:
        while not self._stopped.is_set():
            try:
                message = self._receive(connection)
            except EOFError:
                raise _error_of(connection.close(self._tick_while_ending)) from None
            if isinstance(message, Ready):
                return message
            if isinstance(message, LoadRefused):
                raise _LOAD_ERRORS.get(message.kind, LoadError)(message.message)
            if isinstance(message, Logged):
                self._watch.note_message(message.text, self._clock())
            self._check_progress(connection.pid)
        raise LoadError(UNLOADED)

    def _check_progress(self, engine_pid: int | None) -> None:
        """Raise LoadError if the load hangs. ``engine_pid`` is None before the fork."""
        pids = [pid for pid in (self._fork_server.pid, engine_pid) if pid is not None]
        if not self._watch.look(pids, self._clock()):
            seconds = self._start.config.load_watchdog_s
            raise LoadError(
                "the engine's process has made no progress in loading the model for "
                f"{seconds:g} s (load_watchdog_s)"
            )


def _error_of(end: ProcessEnd) -> LoadError:
    """The error for an engine's process that ended while it loaded the model."""
    how = f"killed by signal {-end.status}" if end.status < 0 else f"exit status {end.status}"
    text = f"the engine's process ended while it loaded the model ({how})"
    return KilledError(text) if end.is_from_elsewhere else LoadError(text)
