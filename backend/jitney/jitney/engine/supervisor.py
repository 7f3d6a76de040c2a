"""The engine in a child process, which may die: it is started again, and its requests go on.

:class:`SupervisedEngine` is an :class:`~jitney.engine.handle.EngineHandle` and keeps the
:mod:`~jitney.engine.journal`. When the engine dies, or makes no step for ``watchdog_s`` seconds
although work waits, the supervisor kills what is left of it, starts a new one and submits every
open request again with what it has emitted. Clients see a pause and then the very next token,
because sampling depends on seed, index and position alone.

If an engine's load fails or hangs, or engines fail too often without completing a step, the open
requests end as UNAVAILABLE, and further ones are refused until another engine is loaded. Kills from
elsewhere are no reason for that, whatever their number: the next engine is started all the same.
"""

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from jitney.config import EngineConfig
from jitney.engine.engine import Outbox
from jitney.engine.fork_server import (
    TICK_S,
    EngineConnection,
    ForkPlan,
    ForkServer,
    ProcessEnd,
    default_plan,
)
from jitney.engine.handle import Death, Health
from jitney.engine.inbox import UNLOADED
from jitney.engine.journal import AtWork, Journal
from jitney.engine.load_watch import LONGEST_LOOK_S
from jitney.engine.start_engine import EngineStart, KilledError
from jitney.engine.wire import Logged, Making, Ready, Start, StepBegun, Stop, ToFront
from jitney.errors import UnavailableError
from jitney.messages import Cancel, Event, FrontMessage, ModelInfo, StepReport, StepStats, Submit

_log = logging.getLogger(__name__)

_STOP_S = 4.0
"""Seconds that an engine has to end after :meth:`SupervisedEngine.stop`."""
_SILENT_S = 2.0
"""After so many seconds without a message from the engine, the supervisor itself ends requests
that were cancelled or whose deadline is reached."""
_MOST_DEATHS = 5
_DEATHS_WITHIN_S = 60.0
"""After ``_MOST_DEATHS`` within so many seconds, with no step completed between them, requests are
refused until another engine is loaded. Kills from elsewhere do not count."""
_MOST_NAMES = 32
"""Most requests that the log line about a new engine names."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between attempts to start an engine; the last one repeats."""
_PAUSES_AFTER_KILLS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""The same, after attempts that were killed from elsewhere."""
_DOES_NOT_STAY_UP = "the engine does not stay up; it is being started again"


class SupervisedEngine:
    """An engine that survives its own death. :meth:`start` first; then :meth:`run` in a thread, or
    :meth:`run_in_thread` and :meth:`step`."""

    def __init__(
        self,
        config: EngineConfig,
        loader: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``loader`` names a function that gives a ``LoadModel``, in place of the real one."""
        self.config = config
        self.health = Health(up=False)
        self._tokenizer = b""  # until the first engine has given it
        self._stopped = threading.Event()
        plan = default_plan() if loader is None else ForkPlan(loader)
        self._fork_server = ForkServer(plan, self._stopped)
        self._clock = clock
        self._lock = threading.Lock()  # guards the next three
        self._journal = Journal()
        self._connection: EngineConnection | None = None  # None: no engine is loaded
        self._refusal: str | None = None  # why new requests are refused; None: they are not
        # Time at which to kill an engine that does not stop; inf before stop().
        self._kill_at = math.inf
        # The caller's, from run() on.
        self._outbox: Outbox = queue.SimpleQueue()
        self._at_work = AtWork()
        # Stats of the last report. Until an engine's first one: those of an empty cache.
        self._stats = StepStats()
        # Since when the engine is silent: since its last message, but not while no request is open,
        # because an idle engine sends nothing. Set by _read, _receive and send.
        self._heard = 0.0
        self._looked_at = 0.0  # when _receive last looked for a message
        # Times of the deaths since an engine last completed a step.
        self._deaths_without_step: list[float] = []
        # Only with run_in_thread():
        self._reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

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
        self._stats = StepStats(blocks_total=self.info.num_blocks)
        # Another engine would find other free memory: what fits the first cache must fit the next.
        self.config = msgspec.structs.replace(
            self.config, kv_cache_bytes=self.info.kv_cache_bytes, kv_cache_fraction=None
        )
        self._tokenizer = ready.tokenizer
        return ready.tokenizer

    def kill(self) -> None:
        """End the engine's process and the fork server. Not while :meth:`run` is at work."""
        if self._connection is not None:
            self._connection.close()
        self._fork_server.close()

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        connection = self._connection
        return None if connection is None else connection.pid

    def send(self, message: FrontMessage) -> None:
        """Note a message in the journal and send it to the engine, once there is one.

        Raises UnavailableError for a Submit if the model is being unloaded or its engine does not
        come up.
        """
        with self._lock:
            if self._refusal is not None and isinstance(message, Submit):
                raise UnavailableError(self._refusal)
            if not self._journal:
                self._heard = self._clock()
            self._journal.note_message(message)
            self._send_due()

    def stop(self) -> None:
        """Make :meth:`run` return after the engine's current step, or after a few seconds."""
        with self._lock:
            self._refusal = UNLOADED
            self._kill_at = self._clock() + _STOP_S
            self._stopped.set()
            if self._connection is not None:
                self._connection.send(Stop())

    def _send_due(self) -> None:
        """Send what the journal has for the engine. Called under the lock. An engine that was told
        to stop takes nothing more."""
        if self._connection is not None and not self._stopped.is_set():
            for message in self._journal.take_unsent():
                self._connection.send(message)

    # ------------------------------------------------------------------ a front that calls step()

    @property
    def has_work(self) -> bool:
        """Never: the engine makes its steps without a call of :meth:`step`. So it completes even a
        step that is in flight when all requests have been cancelled."""
        return False

    def is_running(self, key: int) -> bool:
        """Not known here: the engine's process does not tell."""
        return False

    def run_in_thread(self) -> None:
        """Have a thread :meth:`run` it and keep the reports for :meth:`step`."""
        self._thread = threading.Thread(
            target=self.run, args=(self._reports,), name="jitney-engine", daemon=True
        )
        self._thread.start()

    def step(self) -> StepReport:
        """Wait for the next report. Only while a request is open: else none may come."""
        return self._reports.get()

    def reset(self) -> None:
        """Drop the reports that wait. The caller has cancelled all open requests."""
        while not self._reports.empty():
            self._reports.get()

    def close(self) -> None:
        """End the process and wait until it has ended."""
        self.stop()
        if self._thread is None:
            self.kill()
        else:
            self._thread.join()

    # ------------------------------------------------------------------ the supervisor's thread

    def run(self, outbox: Outbox) -> None:
        """Hand the engine's reports to ``outbox``, and replace the engine whenever it dies, until
        :meth:`stop`. On return every submitted request has had its terminal event."""
        self._outbox = outbox
        try:
            while self._connection is not None:
                end = self._read(self._connection)
                if self._stopped.is_set():
                    break
                self._replace(end)
        finally:
            try:
                self.health.up = False
                self._give_up("the engine has stopped")
            finally:
                self.kill()

    def _read(self, connection: EngineConnection) -> ProcessEnd:
        """Hand reports on until the engine ends. Returns how it ended."""
        self._heard = self._clock()
        killed_for: str | None = None
        # Both calls raise EOFError once the engine has ended and everything that it sent has been
        # received. If the engine ends by itself, the first call raises it: so `killed_for` stays
        # None.
        with contextlib.suppress(EOFError):
            killed_for = self._read_until_killed(connection)
            self._read_rest(connection)
        with self._lock:
            self.health.up = False
            self._connection = None
        end = connection.close(self._tick_while_ending)
        if killed_for is not None:
            end = replace(end, killed_for=killed_for)
        return end

    def _read_until_killed(self, connection: EngineConnection) -> str:
        """Hand reports on until there is a reason to kill the engine, and kill it. Returns the
        reason. Raises EOFError if it ends by itself."""
        while True:
            message = self._receive(connection)
            reason = self._reason_to_kill()
            # The engine is killed before the message is handed on, because that may take time. The
            # message came before the kill, so it is handed on in any case.
            if reason is not None:
                connection.kill()
            self._take(message)
            if reason is not None:
                return reason

    def _read_rest(self, connection: EngineConnection) -> None:
        """Hand on what a killed engine has sent before: it belongs to the clients. Raises EOFError
        at its end.

        Returns if nothing comes within ``TICK_S``. Its socket may stay open for long: while a call
        of the device's driver delays the kill, or while a process that it forked lives on."""
        while True:
            message = self._receive(connection)
            if message is None:
                return
            self._take(message)

    def _take(self, message: ToFront | None) -> None:
        """Do what a message asks for."""
        if isinstance(message, StepBegun):
            self._at_work.note_step(message)
        elif isinstance(message, Making):
            self._at_work.note_making(message)
        elif isinstance(message, StepReport):
            self._take_report(message)

    def _reason_to_kill(self) -> str | None:
        """One of ``CAUSES`` if the engine must be killed now."""
        now = self._clock()
        if now - self._heard > self.config.watchdog_s:
            return "hung"
        if now > self._kill_at:
            return "killed"
        return None

    def _receive(self, connection: EngineConnection) -> ToFront | None:
        """The next message; None if none comes within ``TICK_S``. Raises EOFError.

        Does what is due between two messages: it ends requests, and logs what the engine logs.
        Called while a model is still loading, too."""
        message = connection.frames.receive(TICK_S)
        now = self._clock()
        # If nobody has looked for long, this process was stopped, and perhaps the engine's, too, as
        # when a container is paused. That is no silence of the engine.
        was_stopped = now - self._looked_at > LONGEST_LOOK_S
        if message is not None or not self._journal or was_stopped:
            self._heard = now
        self._looked_at = now
        self._expire(connection, now)
        if isinstance(message, Logged):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        return message

    def _expire(self, connection: EngineConnection | None, now: float) -> None:
        """End the requests that were cancelled or whose deadline is reached, if the engine cannot
        do it. It cannot end requests that it has not got and, if it is silent, none at all.
        ``connection`` is None if there is no engine."""
        is_silent = connection is not None and now - self._heard > _SILENT_S
        with self._lock:
            events = self._journal.expire(now, engine_is_silent=is_silent)
        if connection is not None and is_silent:
            # The engine may have these requests. If it goes on after all, it must drop them.
            for event in events:
                connection.send(Cancel(event.key))
        self._report(events)

    def _tick_without_engine(self) -> None:
        """Do what is due while there is no engine."""
        self._expire(None, self._clock())

    def _tick_while_ending(self) -> None:
        """Do what is due while an engine ends: it can do nothing for its requests any more."""
        with self._lock:
            events = self._journal.expire(self._clock(), engine_is_silent=True)
        self._report(events)

    def _take_report(self, report: StepReport) -> None:
        """Note a report in the journal and hand it on."""
        if report.stats.batch_sequences:
            self._deaths_without_step.clear()
        self._at_work.note_report(report)
        self._stats = report.stats
        with self._lock:
            events = self._journal.note_report(report, self._clock())
            self._send_due()  # if the report clears a suspect, other requests can be sent
        self._outbox.put(StepReport(events, report.stats))

    def _report(self, events: Sequence[Event]) -> None:
        """Hand on events that the supervisor itself has decided on. They belong to no step."""
        if events:
            # The gauges of the last report are repeated. Its counts are not: the front adds counts
            # up, and has these already.
            self._outbox.put(StepReport(list(events), self._stats.without_counts()))

    # ------------------------------------------------------------------ another engine

    def _replace(self, end: ProcessEnd) -> None:
        """Start an engine in place of one that has died, and send it all open requests. Returns
        once one is loaded, or when this is stopped."""
        began = self._clock()
        self._note_death(end, began)
        pauses = _repeat_last(_PAUSES_S)
        pauses_after_kills = _repeat_last(_PAUSES_AFTER_KILLS_S)
        if len(self._deaths_without_step) >= _MOST_DEATHS:
            self._give_up(_DOES_NOT_STAY_UP)
            self._pause(next(pauses))
        # Unless there was a pause above, the first attempt is made at once: as a rule it succeeds.
        while not self._stopped.is_set():
            try:
                self._connect(Start(self.config, self._tokenizer))
                self._log_replaced(end.cause, self._clock() - began)
                return
            except KilledError as error:
                self._log_failed_start(error)
                self._pause(next(pauses_after_kills))
            except Exception as error:
                self._log_failed_start(error)
                self._give_up(_DOES_NOT_STAY_UP)
                self._pause(next(pauses))

    def _pause(self, seconds: float) -> None:
        """Wait for so long, or until this is stopped."""
        end = self._clock() + seconds
        while not self._stopped.wait(min(TICK_S, seconds)):
            self._tick_without_engine()
            if self._clock() >= end:
                return

    def _note_death(self, end: ProcessEnd, at: float) -> None:
        """Tell the journal of the death, which fails the requests that are guilty of it. Count it
        for the front, and for the decision to give up (:meth:`_replace`)."""
        with self._lock:
            if end.is_of_fork_server:
                failed = self._journal.note_death([])  # no request runs in it
            else:
                failed = self._journal.note_death(
                    self._at_work.rows,
                    self._at_work.making,
                    from_elsewhere=end.is_from_elsewhere,
                )
        self._at_work.clear()
        self._stats = StepStats(blocks_total=self.info.num_blocks)
        self.health.restarts[end.cause] += 1
        self.health.deaths.append(Death(at, end.cause))
        self._report(failed)

        if failed:
            self._deaths_without_step.clear()  # the request that caused them is gone
        elif not end.is_from_elsewhere:
            earliest = at - _DEATHS_WITHIN_S
            recent = [before for before in self._deaths_without_step if before > earliest]
            self._deaths_without_step = [*recent, at]

    def _log_failed_start(self, error: Exception) -> None:
        if not self._stopped.is_set():
            _log.error("the engine could not be started again: %r", error)

    def _log_replaced(self, cause: str, seconds: float) -> None:
        with self._lock:
            left = len(self._journal)
            names = self._journal.names(_MOST_NAMES)
        text = "the engine ended (%s) and is up again after %.1f s; %d requests go on: %s"
        _log.warning(text, cause, seconds, left, names or "none")

    def _give_up(self, reason: str) -> None:
        """Refuse new requests from now on, and end the open ones, as UNAVAILABLE. A reason that
        was given before stays."""
        with self._lock:
            if self._refusal is None:
                self._refusal = reason
            failed = self._journal.end_all(UnavailableError(self._refusal))
        self._report(failed)

    def _connect(self, start: Start) -> Ready:
        """Start a process and wait until it has loaded the model; then send it what is open.
        Raises LoadError."""
        attempt = EngineStart(
            self._fork_server,
            start,
            stopped=self._stopped,
            clock=self._clock,
            tick=self._tick_without_engine,
            tick_while_ending=self._tick_while_ending,
            receive=self._receive,
        )
        connection, ready = attempt.run()
        # Under one hold of the lock: else a new message could overtake the replay.
        with self._lock:
            self._connection = connection
            self.health.up = True
            self.health.replayed_requests += self._journal.num_sent()
            self.health.replayed_tokens += self._journal.num_emitted()
            self._send_due()
            if self._stopped.is_set():
                connection.send(Stop())
            else:
                self._refusal = None
        return ready


def _repeat_last(pauses: Sequence[float]) -> Iterator[float]:
    return itertools.chain(pauses, itertools.repeat(pauses[-1]))
