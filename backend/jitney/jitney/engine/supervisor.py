"""The engine in a child process, which may die: it is started again, and its requests go on.

:class:`EngineProcess` has the methods of :class:`~jitney.engine.engine.Engine` that a front calls,
and keeps the :mod:`~jitney.engine.journal`. When the engine dies, or makes no step for
``watchdog_s`` seconds although work waits, what is left of it is killed, a new one is started, and
every open request is submitted again with what it has emitted. Clients see a pause and then the
very next token, because what is drawn depends on seed, index and position alone.

An engine that dies while loading, or too often without completing a step, ends the open requests
as UNAVAILABLE; further ones are refused until a later attempt has succeeded.
"""

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from jitney import errors
from jitney.config import EngineConfig
from jitney.engine.engine import Health, Outbox
from jitney.engine.journal import Journal
from jitney.engine.nursery import TICK_S, EngineConnection, Nursery
from jitney.engine.process import DEVICE_LOST
from jitney.engine.wire import Logged, Ready, Refused, Span, Start, StepBegun, Stop, Up
from jitney.errors import LoadError, UnavailableError
from jitney.messages import Cancel, Event, Message, ModelInfo, StepReport, StepStats, Submit

_log = logging.getLogger(__name__)

LOADER = "jitney.kernels.cpu.ahead:compile_ahead jitney.engine.assemble:prepare"

CAUSES = ("killed", "device_lost", "failed", "hung")
"""Why an engine ended: by a signal, for want of its device, in another way, by the watchdog."""

_STOP_S = 4.0
"""Seconds that an engine has to end after :meth:`EngineProcess.stop`."""
_SILENT_S = 2.0
"""After so many seconds without a sign of life from the engine, deadlines are kept here."""
_MOST_DEATHS = 5
_DEATHS_WITHIN_S = 60.0
_MOST_NAMES = 32
"""Requests that the line about another engine names."""
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class EngineProcess:
    """An engine that survives its own death. :meth:`start` first, then :meth:`run` in a thread."""

    def __init__(
        self,
        config: EngineConfig,
        loader: str = LOADER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.health = Health(up=False)
        self._tokenizer = b""  # until the first engine has given it
        self._stopped = threading.Event()
        self._nursery = Nursery(loader, self._stopped)
        self._clock = clock
        self._lock = threading.Lock()  # the journal, the connection, and who may be refused
        self._journal = Journal()
        self._connection: EngineConnection | None = None
        self._refusal: str | None = None
        self._stop_by = math.inf  # once it is stopped
        self._outbox: Outbox = queue.SimpleQueue()  # the caller's, once it runs
        self._rows: list[Span] = []  # of the step that the engine is in
        self._stats = StepStats()
        self._heard = 0.0  # when the engine last gave a sign of life, or had nothing to do
        self._idle_deaths: list[float] = []  # of engines that had completed no step since the last

    # ------------------------------------------------------------------ any thread

    def start(self) -> bytes:
        """Start the first engine and load the model. Returns the tokenizer's data. Raises a
        LoadError if that fails."""
        try:
            ready = self._connect(Start(self.config, self._tokenizer))
        except BaseException:
            self.kill()
            raise
        self.info: ModelInfo = ready.info
        # Another engine would find other free memory: what fits the first cache must fit the next.
        self.config = msgspec.structs.replace(
            self.config, kv_cache_bytes=self.info.kv_cache_bytes, kv_cache_fraction=None
        )
        self._tokenizer = ready.tokenizer
        return ready.tokenizer

    def kill(self) -> None:
        """End the processes of an engine that does not :meth:`run`."""
        if self._connection is not None:
            self._connection.close()
        self._nursery.close()

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        connection = self._connection
        return None if connection is None else connection.pid

    def send(self, message: Message) -> None:
        """Note a message and send it to the engine, once there is one.

        Raises UnavailableError for a Submit if the model is being unloaded or its engine does not
        come up; other messages are then dropped.
        """
        with self._lock:
            if self._refusal is not None and isinstance(message, Submit):
                raise UnavailableError(self._refusal)
            waiting, most = self._journal.num_held, self.config.max_queued
            if isinstance(message, Submit) and waiting >= most + self.config.max_num_seqs:
                raise UnavailableError.of_queue(waiting, most)
            if not self._journal:
                self._heard = self._clock()
            self._journal.take(message)
            self._send_due()

    def _send_due(self) -> None:
        """Under the lock. An engine that was told to stop takes nothing more."""
        if self._connection is not None and not self._stopped.is_set():
            for message in self._journal.due():
                self._connection.send(message)

    def stop(self) -> None:
        """Make :meth:`run` return after the engine's current step, or after a few seconds."""
        with self._lock:
            self._refusal = "the model is being unloaded"
            self._stop_by = self._clock() + _STOP_S
            self._stopped.set()
            if self._connection is not None:
                self._connection.send(Stop())

    # ------------------------------------------------------------------ the supervisor's thread

    def run(self, outbox: Outbox) -> None:
        """Hand the engine's reports to ``outbox``, and replace the engine whenever it dies, until
        :meth:`stop`. On return every submitted request has had its terminal event."""
        self._outbox = outbox
        try:
            while self._connection is not None:
                cause = self._read(self._connection)
                if self._stopped.is_set():
                    break
                self._replace(cause)
        finally:
            try:
                self.health.up = False
                self._give_up("the engine has stopped")
            finally:
                self.kill()

    def _read(self, connection: EngineConnection) -> str:
        """Hand reports on until the engine ends. Why it did: one of ``CAUSES``."""
        self._heard = self._clock()
        killed = ""
        with contextlib.suppress(EOFError):
            while (message := self._receive(connection)) is not None or not killed:
                now = self._clock()
                hung = now - self._heard > self.config.watchdog_s
                if hung or now > self._stop_by:
                    killed = "hung" if hung else "killed"
                    connection.kill()
                if isinstance(message, StepBegun):
                    self._rows = message.rows
                elif isinstance(message, StepReport):
                    self._take_report(message)
        status = connection.close()
        ended = "device_lost" if status == DEVICE_LOST else "failed"
        return killed or ("killed" if status < 0 else ended)

    def _receive(self, connection: EngineConnection) -> Up | None:
        """The next message, None after a while without one. Log records are logged. Meanwhile what
        no engine has, and what one has that is silent, ends when its deadline comes."""
        message = connection.frames.receive(TICK_S)
        now = self._clock()
        if message is not None or not self._journal:
            self._heard = now
        silent = now - self._heard > _SILENT_S
        with self._lock:
            events = self._journal.expire(now, silent)
        if silent:
            for event in events:  # if it goes on after all, it must not go on with these
                connection.send(Cancel(event.key))
        self._report(events)
        if isinstance(message, Logged):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        return message

    def _take_report(self, report: StepReport) -> None:
        if report.stats.batch_sequences:
            self._idle_deaths.clear()
        if not self.info.overlap:  # else the next step is in flight
            self._rows = []
        self._stats = report.stats
        with self._lock:
            events = self._journal.read(report, self._clock())
            self._send_due()  # a suspect was cleared: the others' turn
        self._outbox.put(StepReport(events, report.stats))

    def _report(self, events: Sequence[Event]) -> None:
        if events:
            self._outbox.put(StepReport(list(events), self._stats))

    # ------------------------------------------------------------------ another engine

    def _replace(self, cause: str) -> None:
        """Start an engine in place of one that has died, and send it all open requests."""
        began = self._clock()
        with self._lock:
            self.health.up = False
            self._connection = None
            failed = self._journal.crashed(self._rows)
            self._rows = []
        self.health.restarts[cause] += 1
        self.health.deaths.append((began, cause))
        self._report(failed)
        recent = [at for at in self._idle_deaths if at > began - _DEATHS_WITHIN_S]
        self._idle_deaths = [] if failed else [*recent, began]  # who was at fault is gone
        for attempt in itertools.count():
            if len(self._idle_deaths) >= _MOST_DEATHS or attempt:
                self._give_up("the engine does not stay up; it is being started again")
                if self._stopped.wait(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]):
                    return
            try:
                self._connect(Start(self.config, self._tokenizer))
            except Exception as error:
                if self._stopped.is_set():
                    return
                _log.error("the engine could not be started again: %r", error)
                continue
            with self._lock:
                left, names = len(self._journal), self._journal.names(_MOST_NAMES)
            again = "the engine ended (%s) and is up again after %.1f s; %d requests go on: %s"
            _log.warning(again, cause, self._clock() - began, left, names or "none")
            return

    def _give_up(self, reason: str) -> None:
        """Refuse requests and end the open ones as UNAVAILABLE."""
        with self._lock:
            self._refusal = self._refusal or reason
            failed = self._journal.end_all(UnavailableError(self._refusal))
        self._report(failed)

    def _connect(self, start: Start) -> Ready:
        """Start a process and wait until it has loaded the model; then send it what is open.
        Raises LoadError."""
        connection = EngineConnection(self._nursery, start)
        try:
            ready = self._wait_until_loaded(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._connection = connection
            self.health.up = True
            self.health.replayed_requests += len(self._journal)
            self.health.replayed_tokens += self._journal.num_emitted()
            self._send_due()
            if self._stopped.is_set():
                connection.send(Stop())
            else:
                self._refusal = None
        return ready

    def _wait_until_loaded(self, connection: EngineConnection) -> Ready:
        while not self._stopped.is_set():
            try:
                message = self._receive(connection)
            except EOFError:
                status = connection.close()
                how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
                raise LoadError(
                    f"the engine's process ended while it loaded the model ({how})"
                ) from None
            if isinstance(message, Ready):
                return message
            if isinstance(message, Refused):
                raise getattr(errors, message.kind)(message.message)
        raise LoadError("the model is being unloaded")
