"""The engine: sole owner of scheduler and runner, and the loop that makes the steps.

A front sends messages from any thread (:meth:`Engine.send`); one thread makes the steps, by
:meth:`Engine.run` or by calling :meth:`Engine.step` itself. What comes of them leaves as one
:class:`StepReport` per step. Nothing else is shared, so the engine may as well live in a process of
its own.

A step is three calls: schedule, execute, update. Execute is a launch and the wait for its end. If
the runner can overlap steps and the option ``overlap`` is set, step n + 1 is scheduled and launched
before the engine waits for step n and updates. So one step is in flight between two calls of
:meth:`Engine.step`. Without overlap none is.

A request that needs a grammar or an adapter waits for it in :mod:`jitney.engine.pending`.

Failures, from the small to the large: a row that could not be served fails its request; a step that
raises is executed again in halves, with nothing else in flight, until the request at fault raises
alone in one, for the second time at least; a fault of the loop itself (our bug) ends every open
request with Failed, and the loop goes on with a fresh scheduler.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jitney.config import EngineConfig
from jitney.core.scheduler import Scheduler
from jitney.engine.grammars import Compile, Grammars, refuse
from jitney.engine.pending import Held, Made, Pending, Source
from jitney.errors import DeviceLostError, InternalError, JitneyError, UnavailableError
from jitney.execution.protocols import LaunchedStep, Runner
from jitney.messages import (
    TERMINAL,
    Adapter,
    Batch,
    Cancel,
    Event,
    Failed,
    Message,
    ModelInfo,
    Row,
    StepOutput,
    StepReport,
    Submit,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_CHECK_S = 0.25
"""Idle for so long, the engine checks its integrity: not between two requests of a busy client."""
_CHECK_PAUSE_S = 0.001
"""Between two slices of that check, each of which takes about as long."""
_UNLOADED = "the model is being unloaded"


class Outbox(Protocol):
    """Where reports go: a queue, or a front's responder."""

    def put(self, item: StepReport, /) -> object:
        """Take a report. Called from the engine's thread: must not raise. While too many reports
        wait it may hold the engine back, for a bounded time."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was launched."""

    batch: Batch
    step: LaunchedStep


class Engine:
    """Takes messages, makes steps, gives reports."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[list[Batch]], None] = lambda batches: None,
        compile_grammar: Compile = refuse,
        adapters: Source[Adapter] | None = None,
    ) -> None:
        """``before_step`` is told what is about to be computed, steps in flight included;
        ``compile_grammar`` is called in a thread of its own. Without ``adapters``, no request
        names one."""
        self.config = config
        self.runner = runner
        self._clock = clock
        self._before_step = before_step
        overlaps = config.overlap and runner.info.overlap
        self._most_in_flight = 2 if overlaps else 1
        self._in_flight: list[_InFlight] = []  # the oldest first
        self._busy_since = 0.0  # when the device could begin with the oldest
        self.scheduler = self._make_scheduler()
        self._out_of_memory = 0  # steps, within one call of step()
        self._open: set[int] = set()  # keys whose terminal event has not been reported
        grammars = Grammars(compile_grammar, config.grammar_cache)
        self.pending = Pending(grammars, adapters, self._post)
        self._woken = threading.Condition()
        self._inbox: list[Message] = []  # this and the two below: under _woken
        self._results: list[Made] = []  # for requests that wait
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
            if not self._stopped:
                self._inbox.append(message)
                self._woken.notify()
            elif isinstance(message, Submit):
                raise UnavailableError(_UNLOADED)

    def stop(self) -> None:
        """Make :meth:`run` return after the current step. Requests that are open then fail."""
        with self._woken:
            self._stopped = True
            self._woken.notify()

    def _post(self, made: Made) -> None:
        """A result for requests that wait; from a thread of its source."""
        with self._woken:
            self._results.append(made)
            self._woken.notify()

    # ------------------------------------------------------------------ the engine's thread

    @property
    def has_work(self) -> bool:
        """Whether a step would find anything to do."""
        has_come = self._inbox or self._results
        return bool(has_come or self.scheduler.has_work or self._in_flight or self.pending)

    def step(self) -> StepReport | None:
        """Make one step. None: there was nothing to do, and nothing is in flight. If all that is
        to be done waits for a grammar or an adapter, the step waits for it too.

        With overlap the events are those of the step before, so the first step has none.
        ``step_seconds`` is the time of this call: in steady state what a step on the device takes,
        because the call waits for the end of one.
        """
        self.scheduler.reset_counts()
        self._out_of_memory = 0
        events: list[Event] = []
        now = self._take_messages(events)
        events += self.scheduler.expire(now)
        if not (events or self.scheduler.has_work or self._in_flight):
            if not self.pending:
                return None
            self._wait_for_resource(now)
        events += self._make_step(now)
        self._close({event.key for event in events if isinstance(event, TERMINAL)}, now)
        stats = self.scheduler.stats(self._clock() - now, self._out_of_memory)
        self.pending.report(stats)
        return StepReport(events, stats)

    def abandon(self) -> None:
        """Wait until nothing is in flight and drop the outputs."""
        for each in self._in_flight:
            try:
                each.step.wait()
            except Exception:
                log.warning("a step that is dropped raised", exc_info=True)
        self._in_flight.clear()

    def reset(self) -> None:
        """Forget every request and message, without an event: the caller keeps track of them."""
        self.abandon()
        with self._woken:
            self._inbox.clear()
        self._close(self._open.copy(), self._clock())
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
        if self._open:
            outbox.put(self._fail_open(UnavailableError(_UNLOADED)))

    # ------------------------------------------------------------------ messages

    def _take_messages(self, events: list[Event]) -> float:
        """Apply all messages that have come, in order, and begin the requests whose resources are
        there by now. Returns the time after the last arrival."""
        while True:
            with self._woken:
                results = self._results
                messages = self._inbox
                self._results = []
                self._inbox = []
                now = self._clock()
            # All of them first: whatever fails below, each gets its terminal event.
            self._open.update(each.key for each in messages if isinstance(each, Submit))
            for made in results:
                self.pending.receive(made, now)
            for message in messages:
                events += self._apply(message, now)
            for held in self.pending.take_ready():
                events += self._begin(held, now)
            if not (messages or results):
                return now

    def _apply(self, message: Message, now: float) -> list[Event]:
        if isinstance(message, Submit):
            return self._accept(message, now)
        if isinstance(message, Cancel):
            events = self.scheduler.cancel(message.key)
            # At once: its resources may come in this very step.
            self._close({event.key for event in events}, now)
            return events
        if self.pending.keep(message):
            return []
        return self.scheduler.finish(message.key, message.index, now)

    def _accept(self, message: Submit, now: float) -> list[Event]:
        """Submit a request, or hold it if it needs a resource. The scheduler may refuse it."""
        if not self.pending.is_needed_by(message):
            return self.scheduler.submit(message)
        refusal = self.scheduler.hold(message)
        if not refusal:
            self.pending.hold(message, now)
        return refusal

    def _begin(self, held: Held, now: float) -> list[Event]:
        """Submit a request whose resources are there."""
        message = held.message
        try:
            resources = self.pending.resources_of(message)
        except JitneyError as error:
            return self.scheduler.fail(message.key, error)
        events = self.scheduler.submit(message, resources.grammar, resources.adapter)
        for finish in held.later:
            events += self.scheduler.finish(finish.key, finish.index, now)
        return events

    def _close(self, keys: set[int], now: float) -> None:
        """These requests have had their terminal event."""
        if keys:
            self._open -= keys
            self.pending.release(keys, now)

    # ------------------------------------------------------------------ parts of a step

    def _make_step(self, now: float) -> list[Event]:
        """Schedule and launch a step, and complete the oldest in flight if there are enough. With
        overlap that is the step before: it runs while this one is scheduled."""
        events: list[Event] = []
        if not (self.scheduler.has_work or self._in_flight):
            return events
        if self._in_flight and not self.scheduler.can_plan_ahead:
            # This step depends on what the one before samples.
            events += self._complete_oldest()
        batch = self.scheduler.schedule(now)
        if self._in_flight and _asks(batch):
            # A step that asks a draft model overlaps with no other: its launch ends with it, and
            # each step's time is to be its own. So it is planned again once the other is complete.
            self.scheduler.revert(batch)
            events += self._complete_oldest()
            batch = self.scheduler.schedule(now)
        if not batch.rows:
            if self._in_flight:
                events += self._complete_oldest()
            return events
        if not self._launch(batch):
            self.scheduler.revert(batch)
            if self._in_flight:
                events += self._complete_oldest()
            return events + self._execute_again(batch.rows)
        if _asks(batch) or len(self._in_flight) == self._most_in_flight:
            events += self._complete_oldest()
        return events

    def _complete_oldest(self) -> list[Event]:
        """Wait for the oldest step in flight and update. If it failed, the later one, which took
        its tokens, is dropped: the scheduler plans its rows again."""
        batch = self._in_flight[0].batch
        output = self._wait_for_oldest()
        if output is not None:
            began = self._busy_since
            done = self._clock()
            self._busy_since = done
            return self.scheduler.update(batch, output, now=done, seconds=done - began)
        later = [each.batch for each in self._in_flight]
        self.abandon()
        for each in later:
            self.scheduler.revert(each)
        self.scheduler.revert(batch)
        return self._execute_again(batch.rows)

    def _execute_again(self, rows: list[Row]) -> list[Event]:
        """Execute the rows of a reverted step in halves, and those of a half that raises in halves
        again. A row that raises alone fails its request. Nothing else is in flight."""
        events: list[Event] = []
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            part = self.scheduler.retry(half)
            if not part.rows:
                continue
            output = self._wait_for_oldest() if self._launch(part) else None
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

    def _launch(self, batch: Batch) -> bool:
        """Begin a step. False: it raised, and nothing of it runs."""
        self._before_step([*(each.batch for each in self._in_flight), batch])
        began = self._clock()
        step = self._try(lambda: self.runner.launch(batch))
        if step is None:
            return False
        if not self._in_flight:
            self._busy_since = began
        self._in_flight.append(_InFlight(batch, step))
        return True

    def _wait_for_oldest(self) -> StepOutput | None:
        """The output of the oldest step in flight, which is over then. None: it raised."""
        output = self._try(self._in_flight[0].step.wait)
        del self._in_flight[0]
        return output

    def _try(self, call: Callable[[], T]) -> T | None:
        """Call the runner. None: the step raised."""
        try:
            return call()
        except DeviceLostError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError):
                self._out_of_memory += 1
            log.exception("a step raised")
            return None

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
        self._close(self._open.copy(), self._clock())
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

    def _wait_for_resource(self, now: float) -> None:
        """Sleep until a message comes, or until a request that waits reaches its deadline."""
        deadline = self.scheduler.next_deadline
        self._wait_for_message(None if deadline is None else max(0.0, deadline - now))

    def _wait_for_message(self, timeout: float | None) -> bool:
        with self._woken:
            return self._woken.wait_for(self._has_news, timeout)

    def _has_news(self) -> bool:
        """Under the lock."""
        return bool(self._inbox or self._results or self._stopped)

    def _make_scheduler(self) -> Scheduler:
        info = self.runner.info
        return Scheduler(
            self.config,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
        )


def _asks(batch: Batch) -> bool:
    """Whether the step asks a draft model."""
    return any(row.propose for row in batch.rows)
