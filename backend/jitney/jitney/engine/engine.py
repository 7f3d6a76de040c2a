"""The engine: sole owner of scheduler and runner, and the loop that makes the steps.

A front sends messages from any thread (:meth:`Engine.send`); one thread makes the steps, by
:meth:`Engine.run` or by calling :meth:`Engine.step` itself. What comes of them leaves as one
:class:`StepReport` per step. Nothing else is shared, so the engine may as well live in a process of
its own.

A step is three calls: schedule, execute, update. If the runner can overlap steps and the option
``overlap`` is set, execute is two calls, launch and wait: step n + 1 is scheduled and launched,
then the engine waits for step n and updates. So one step is in flight between two calls of
:meth:`Engine.step`.

Failures, from the small to the large: a row that could not be served fails its request; a step that
raises is executed again in halves, with nothing else in flight, until the request at fault raises
alone in one, for the second time at least; a fault of the loop itself (our bug) ends every open
request with Failed, and the loop goes on with a fresh scheduler.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from jitney.config import EngineConfig
from jitney.core.scheduler import Scheduler
from jitney.engine.grammars import Compile, Grammars, refuse
from jitney.errors import DeviceLostError, InternalError, JitneyError, UnavailableError
from jitney.execution.protocols import LaunchedStep, Runner
from jitney.messages import (
    TERMINAL,
    Adapter,
    Batch,
    Cancel,
    Event,
    Failed,
    Finish,
    Message,
    ModelInfo,
    Row,
    StepOutput,
    StepReport,
    StepStats,
    Submit,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_CHECK_S = 0.25
"""Idle for so long, the engine checks its integrity: not between two requests of a busy client."""
_CHECK_PAUSE_S = 0.001
"""Between two slices of that check, each of which takes about as long."""
_UNLOADED = "the model is being unloaded"


class AdapterPool(Protocol):
    """The adapters that are in memory, and the requests that wait for one. Everything but
    ``waiting`` is called under the lock of the engine's inbox."""

    @property
    def waiting(self) -> Collection[int]:
        """Keys of requests whose adapter is not in memory yet."""

    def connect(self, woken: threading.Condition, inbox: list[Message]) -> None:
        """What waits no more goes into ``inbox``."""

    def admit(self, messages: list[Message], now: float) -> list[Message]:
        """Those that need not wait, in order, and what waits beyond its deadline."""

    def take(self, message: Submit) -> Adapter | None:
        """The adapter of an admitted request; None if it has none, or must not run. Raises what
        its loading did."""

    def release(self, keys: Iterable[int]) -> None:
        """These requests have ended."""

    def next_deadline(self) -> float | None:
        """The earliest of a request that waits."""

    def stats(self, stats: StepStats) -> StepStats:
        """With the pool's figures; its counts begin from zero again."""


class Outbox(Protocol):
    """Where reports go: a queue, or a front's responder."""

    def put(self, item: StepReport, /) -> object:
        """Take a report. Called from the engine's thread: must not raise. While too many reports
        wait it may hold the engine back, for a bounded time."""


class Engine:
    """Takes messages, makes steps, gives reports."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[list[Batch]], None] = lambda batches: None,
        compile_grammar: Compile = refuse,
        adapters: AdapterPool | None = None,
    ) -> None:
        """``before_step`` is told what is about to be computed, steps in flight included;
        ``compile_grammar`` is called in a thread of its own. Without ``adapters``, no request
        names one."""
        self.config = config
        self.runner = runner
        self._clock = clock
        self._before_step = before_step
        self._overlaps = config.overlap and runner.info.overlap
        self._in_flight: list[tuple[Batch, LaunchedStep]] = []  # the oldest first, at most two
        self._busy_since = 0.0  # when the device could begin with the oldest
        self.scheduler = self._make_scheduler()
        self._out_of_memory = 0  # steps, within one call of step()
        self._open: set[int] = set()  # keys whose terminal event has not been reported
        self._woken = threading.Condition()
        self._inbox: list[Message] = []  # this and the two below: under _woken
        most = config.grammar_cache
        self._grammars = Grammars(compile_grammar, most, self._woken, self._inbox)
        self._adapters = adapters
        if adapters is not None:
            adapters.connect(self._woken, self._inbox)
        self._stopped = False

    @property
    def info(self) -> ModelInfo:
        """What is known of the loaded model."""
        return self.runner.info

    # ------------------------------------------------------------------ any thread

    def send(self, message: Message) -> None:
        """Put a message into the inbox and wake the loop.

        After :meth:`stop`, and once :meth:`run` has ended, raises UnavailableError for a Submit and
        drops the others.
        """
        with self._woken:
            if self._stopped:
                if isinstance(message, Submit):
                    raise UnavailableError(_UNLOADED)
            elif not self._grammars.hold(message):
                self._inbox.append(message)
                self._woken.notify()

    def stop(self) -> None:
        """Make :meth:`run` return after the current step. Requests that are open then fail."""
        with self._woken:
            self._stopped = True
            self._woken.notify()

    # ------------------------------------------------------------------ the engine's thread

    @property
    def has_work(self) -> bool:
        """Whether a step would find anything to do. For the engine's thread."""
        return self.scheduler.has_work or bool(self._in_flight) or self._waits

    def step(self) -> StepReport | None:
        """Make one step. None: there was nothing to do, and nothing is in flight. If all that is
        to be done waits for a grammar or an adapter, the step waits for it too.

        With overlap the events are those of the step before, so the first step has none.
        ``step_seconds`` is the time of this call: in steady state what a step on the device takes,
        because the call waits for the end of one.
        """
        messages, now = self._read_inbox()
        self.scheduler.reset_counts()
        self._out_of_memory = 0
        events = self._apply(messages, now) + self.scheduler.expire(now)
        if not (events or self.scheduler.has_work or self._in_flight):
            if not self._waits:
                return None
            with self._woken:
                deadline = None if self._adapters is None else self._adapters.next_deadline()
            self._wait_for_message(None if deadline is None else max(0.0, deadline - now))
        if self._overlaps:
            events += self._step_overlapped(now)
        elif self.scheduler.has_work:
            batch = self.scheduler.schedule(now)
            began = self._clock()
            output = self._try_step(self._execute, batch)
            if output is not None:
                done = self._clock()
                events += self.scheduler.update(batch, output, done, done - began)
            else:
                self.scheduler.revert(batch)
                events += self._execute_again(batch.rows)
        self._close({one.key for one in events if isinstance(one, TERMINAL)})
        stats = self.scheduler.stats(self._clock() - now, self._out_of_memory)
        if self._adapters is not None:
            with self._woken:
                stats = self._adapters.stats(stats)
        return StepReport(events, stats)

    def abandon(self) -> None:
        """Wait until nothing is in flight and drop the outputs."""
        for _, launched in self._in_flight:
            try:
                launched.wait()
            except Exception:
                log.warning("a step that is dropped raised", exc_info=True)
        self._in_flight.clear()

    def reset(self) -> None:
        """Forget every request and message, without an event: the caller keeps track of them."""
        self.abandon()
        with self._woken:
            self._close_all()
            self._inbox.clear()
            self._grammars.forget()
        self.scheduler = self._make_scheduler()

    def run(self, outbox: Outbox) -> None:
        """Make steps until :meth:`stop`, putting each report into ``outbox``; sleep while there is
        nothing to do. On return every submitted request has had its terminal event.

        Raises DeviceLostError and whatever ``outbox`` raises; what is open then stays so, for the
        caller to end or to resume in another engine.
        """
        try:
            while not self._stopped:
                report = self._step_or_recover()
                if report is not None:
                    outbox.put(report)
                else:
                    self._wait()
        finally:
            self.stop()
            self.abandon()
            with self._woken:
                self._open.update(one.key for one in self._inbox if isinstance(one, Submit))
                self._open.update(self._grammars.waiting)
                self._grammars.forget()
        if self._open:
            outbox.put(self._fail_open(UnavailableError(_UNLOADED)))

    # ------------------------------------------------------------------ parts of a step

    @property
    def _waits(self) -> bool:
        """Whether anything has come, or is to come once a grammar or an adapter is there."""
        if self._grammars.waiting or self._inbox:  # in this order: it may just be ready
            return True
        return self._adapters is not None and bool(self._adapters.waiting or self._inbox)

    def _read_inbox(self) -> tuple[list[Message], float]:
        """Take all messages that have come, in order, and the time after the last arrival."""
        with self._woken:
            messages = self._inbox.copy()
            self._inbox.clear()
            now = self._clock()
            self._open.update(one.key for one in messages if isinstance(one, Submit))
            if self._adapters is not None:
                messages = self._adapters.admit(messages, now)
        return messages, now

    def _close(self, keys: set[int]) -> None:
        """These requests have had their terminal event."""
        self._open -= keys
        if self._adapters is not None and keys:
            with self._woken:
                self._adapters.release(keys)

    def _close_all(self) -> None:
        """Close what is open, and drop what the pool has put back into the inbox for it."""
        with self._woken:
            if self._adapters is not None:
                self._adapters.release(self._open)
            self._inbox[:] = [one for one in self._inbox if one.key not in self._open]
        self._open.clear()

    def _apply(self, messages: list[Message], now: float) -> list[Event]:
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Submit):
                events += self._submit(message)
            elif isinstance(message, Finish):
                events += self.scheduler.finish(message.key, message.index, now)
            else:
                assert isinstance(message, Cancel)
                events += self.scheduler.cancel(message.key)
        return events

    def _submit(self, message: Submit) -> list[Event]:
        try:
            with self._woken:
                grammar = self._grammars.take(message)
                adapter = None if self._adapters is None else self._adapters.take(message)
        except JitneyError as error:
            return [Failed(message.key, error.code, str(error))]
        return self.scheduler.submit(message, grammar, adapter)

    def _step_overlapped(self, now: float) -> list[Event]:
        """Schedule and launch a step, then wait for the one before it and update: that one runs
        while this one is scheduled. What cannot be scheduled ahead waits for the update first. Nor
        does anything overlap with a step that asks a draft model: its launch ends with it, and each
        step's time is to be its own."""
        events: list[Event] = []
        if not self.scheduler.can_plan_ahead:
            events += self._complete_oldest()
        batch = self.scheduler.schedule(now)
        if self._in_flight and _asks(batch):  # planned again, when all is known that it may use
            self.scheduler.revert(batch)
            events += self._complete_oldest()
            batch = self.scheduler.schedule(now)
        if not batch.rows:
            return events + self._complete_oldest() if self._in_flight else events
        began = self._clock()
        launched = self._try_step(self.runner.launch, batch)
        if launched is None:
            self.scheduler.revert(batch)
            if self._in_flight:
                events += self._complete_oldest()
            return events + self._execute_again(batch.rows)
        if not self._in_flight:
            self._busy_since = began
        self._in_flight.append((batch, launched))
        over = _asks(batch) or len(self._in_flight) == 2
        return events + self._complete_oldest() if over else events

    def _complete_oldest(self) -> list[Event]:
        """Wait for the oldest step in flight and update. If it failed, the later one, which took
        its tokens, is dropped: the scheduler plans its rows again."""
        batch, launched = self._in_flight[0]
        output = self._try(launched.wait)
        del self._in_flight[0]
        if output is not None:
            done = self._clock()
            began, self._busy_since = self._busy_since, done
            return self.scheduler.update(batch, output, done, done - began)
        later = [each for each, _ in self._in_flight]
        self.abandon()
        for each in [*later, batch]:
            self.scheduler.revert(each)
        return self._execute_again(batch.rows)

    def _execute(self, batch: Batch) -> StepOutput:
        """Compute a whole step, with nothing else in flight."""
        return self.runner.launch(batch).wait()

    def _try_step(self, call: Callable[[Batch], T], batch: Batch) -> T | None:
        """Begin a step. None: it raised."""
        self._before_step([*(each for each, _ in self._in_flight), batch])
        return self._try(call, batch)

    def _try(self, call: Callable[..., T], *arguments: Batch) -> T | None:
        """Call the runner. None: the step raised."""
        try:
            return call(*arguments)
        except DeviceLostError:
            raise
        except Exception as error:
            self._out_of_memory += isinstance(error, MemoryError)
            log.exception("a step raised")
            return None

    def _execute_again(self, rows: list[Row]) -> list[Event]:
        """Execute the rows of a reverted step in halves, and those of a half that raises in halves
        again. A row that raises alone fails its request."""
        events: list[Event] = []
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            part = self.scheduler.retry(half)
            if not part.rows:
                continue
            output = self._try_step(self._execute, part)
            if output is not None:
                events += self.scheduler.update(part, output, self._clock())
                continue
            self.scheduler.revert(part)
            if len(part.rows) > 1:
                events += self._execute_again(part.rows)
            else:
                error = InternalError("the request failed in a step")
                events += self.scheduler.fail(part.rows[0].key, error)
        return events

    # ------------------------------------------------------------------ parts of the loop

    def _step_or_recover(self) -> StepReport | None:
        """A step. If the loop itself fails, which is our bug, every open request ends, and the
        scheduler, which may be inconsistent, is replaced."""
        try:
            return self.step()
        except DeviceLostError:
            raise
        except Exception:
            log.exception("the engine's loop failed; %d requests end", len(self._open))
            return self._fail_open(InternalError("the engine failed"))

    def _fail_open(self, error: JitneyError) -> StepReport:
        """End every open request and begin with an empty scheduler."""
        self.abandon()
        self.scheduler = self._make_scheduler()
        events: list[Event] = [Failed(key, error.code, str(error)) for key in sorted(self._open)]
        self._close_all()
        return StepReport(events, self.scheduler.stats())

    def _wait(self) -> None:
        """Sleep until a message comes. Once idle for a while, check the integrity, one time, in
        slices: a message ends the check, and other threads run in the pauses."""
        if self._wait_for_message(IDLE_CHECK_S):
            return
        try:
            for _ in self.scheduler.integrity_checks():
                if self._wait_for_message(_CHECK_PAUSE_S):
                    return
        except AssertionError:
            log.exception("blocks or queues are inconsistent while idle; the scheduler is replaced")
            self.scheduler = self._make_scheduler()
        self._wait_for_message(None)

    def _wait_for_message(self, timeout: float | None) -> bool:
        with self._woken:
            return self._woken.wait_for(lambda: bool(self._inbox) or self._stopped, timeout)

    def _make_scheduler(self) -> Scheduler:
        info = self.runner.info
        return Scheduler(
            self.config,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
        )


def _asks(batch: Batch) -> bool:
    return any(row.propose for row in batch.rows)
