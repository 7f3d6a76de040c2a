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

Failures, from the small to the large:

- a row that could not be served fails its request;
- a step that raises is executed again in halves, with nothing else in flight, and so is each half
  that raises. A request is failed only if a step with this request alone raises;
- a fault of the loop itself (our bug) ends every open request with Failed, and the loop goes on
  with a fresh scheduler.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jitney.batch import Adapter, Batch, Row, StepOutput
from jitney.config import EngineConfig
from jitney.core.scheduler import Scheduler
from jitney.engine.grammars import Compile, Grammars, refuse
from jitney.engine.pending import Held, Made, Pending, Source
from jitney.errors import DeviceLostError, InternalError, JitneyError, UnavailableError
from jitney.execution.protocols import LaunchedStep, Runner
from jitney.messages import TERMINAL, Cancel, Event, Failed, Message, ModelInfo, StepReport, Submit

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_CHECK_S = 0.25
"""Once idle for so long, the engine checks its integrity. Long enough to leave out the moments
between two requests of a busy client."""
_READS = 2
"""Of the inbox in a step, at most: what comes while the first messages are applied joins the very
next step, and a flood of messages keeps no step from being made."""
_CHECK_PAUSE_S = 0.001
"""Pause between two slices of that check. A slice takes about as long."""
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
        """``before_step`` is called before each launch, with the batches in flight and the new one,
        the oldest first. ``compile_grammar`` is called in a thread of its own. Without
        ``adapters``, no request names one."""
        self.config = config
        self.runner = runner
        self._clock = clock
        self._before_step = before_step
        overlaps = config.overlap and runner.info.overlap
        # So many are in flight right after a launch; then the oldest is completed.
        self._most_in_flight = 2 if overlaps else 1
        self._in_flight: list[_InFlight] = []  # the oldest first
        # When the device began with the oldest: at its launch, or at the end of the one before it.
        self._busy_since = 0.0
        self.scheduler = self._make_scheduler()
        self._out_of_memory = 0  # steps, within one call of step()
        self._open: set[int] = set()  # keys whose terminal event has not been reported
        grammars = Grammars(compile_grammar, config.grammar_cache)
        self.pending = Pending(grammars, adapters, self._post)
        # What other threads put here, guarded by _woken:
        self._woken = threading.Condition()
        self._inbox: list[Message] = []
        self._results: deque[Made] = deque()  # resources that requests wait for
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
        """Called by a thread that makes resources."""
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
        """Make one step. None: there was nothing to do, and nothing is in flight. If every open
        request waits for a grammar or an adapter, sleep until a message or one of these comes.

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
            # What has come is applied by the next call; this one returns an empty report.
            self._wait_for_resource(now)
        events += self._make_step(now)
        self._close({event.key for event in events if isinstance(event, TERMINAL)}, now)
        stats = self.scheduler.stats(self._clock() - now, self._out_of_memory)
        self.pending.report(stats)
        return StepReport(events, stats)

    def abandon(self) -> None:
        """Wait until nothing is in flight and drop the outputs."""
        for launched in self._in_flight:
            try:
                launched.step.wait()
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
            # What was sent just before stop() has never been looked at, but must end too.
            with self._woken:
                self._note_open(self._inbox)
        if self._open:
            outbox.put(self._fail_open(UnavailableError(_UNLOADED)))

    # ------------------------------------------------------------------ messages

    def _take_messages(self, events: list[Event]) -> float:
        """Apply all messages that have come, in order, and begin the requests whose resources are
        there by now. Returns the present, which is not before any request's arrival."""
        for _ in range(_READS):
            with self._woken:
                messages = self._inbox
                self._inbox = []
                now = self._clock()
            # First of all: if anything below raises, each of them gets its terminal event.
            self._note_open(messages)
            has_received = self._receive_results(now)
            for message in messages:
                events += self._apply(message, now)
            for held in self.pending.take_ready():
                events += self._begin(held, now)
            if not (messages or has_received):
                break
        return now

    def _receive_results(self, now: float) -> bool:
        """Hand on what was made for requests that wait; whether there was any. One at a time: if
        one raises, the others are still there."""
        has_received = False
        while True:
            with self._woken:
                if not self._results:
                    return has_received
                made = self._results.popleft()
            self.pending.receive(made, now)
            has_received = True

    def _note_open(self, messages: list[Message]) -> None:
        self._open.update(message.key for message in messages if isinstance(message, Submit))

    def _apply(self, message: Message, now: float) -> list[Event]:
        if isinstance(message, Submit):
            return self._accept(message, now)
        if isinstance(message, Cancel):
            events = self.scheduler.cancel(message.key)
            # Not only at the end of the step: if its resources came before, it would be begun.
            self._close({event.key for event in events}, now)
            return events
        # A Finish.
        if self.pending.keep(message):
            return []
        return self.scheduler.finish(message.key, message.index, now)

    def _accept(self, message: Submit, now: float) -> list[Event]:
        """Submit a request, or hold it if it needs a resource. In both cases the scheduler may
        refuse it, by its terminal event."""
        if not self.pending.is_needed_by(message):
            return self.scheduler.submit(message)
        # The scheduler counts it as queued; its resources are made meanwhile.
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
        """Schedule and launch a step, then complete the oldest in flight: this one, or with overlap
        the step before, which runs while this one is scheduled."""
        events: list[Event] = []
        if not (self.scheduler.has_work or self._in_flight):
            return events
        if self._in_flight and not self.scheduler.can_plan_ahead:
            # What to schedule depends on what the step in flight samples.
            events += self._complete_oldest()
        batch = self.scheduler.schedule(now)
        if self._in_flight and _runs_draft_model(batch):
            # A step that runs a draft model overlaps with no other: its launch returns at its end,
            # and the time of each step has to be measured alone. So complete the step in flight,
            # and schedule again.
            self.scheduler.revert(batch)
            events += self._complete_oldest()
            batch = self.scheduler.schedule(now)
        if not batch.rows:
            # Nothing to compute now: what is left depends on the step in flight, if there is one.
            if self._in_flight:
                events += self._complete_oldest()
            return events
        if not self._launch(batch):
            self.scheduler.revert(batch)
            # To execute it again, nothing else may be in flight.
            if self._in_flight:
                events += self._complete_oldest()
            return events + self._execute_again(batch.rows)
        if _runs_draft_model(batch) or len(self._in_flight) == self._most_in_flight:
            events += self._complete_oldest()
        return events

    def _complete_oldest(self) -> list[Event]:
        """Wait for the oldest step in flight and update.

        If it failed, execute it again. A later step in flight then has no input, because it
        continues what this one samples: drop it. The scheduler will schedule its rows again.
        """
        batch = self._in_flight[0].batch
        output = self._wait_for_oldest()
        if output is not None:
            began = self._busy_since
            done = self._clock()
            self._busy_since = done
            return self.scheduler.update(batch, output, now=done, seconds=done - began)
        later = [launched.batch for launched in self._in_flight]
        self.abandon()
        # The later one first: each revert undoes the last schedule that is left.
        for later_batch in later:
            self.scheduler.revert(later_batch)
        self.scheduler.revert(batch)
        return self._execute_again(batch.rows)

    def _execute_again(self, rows: list[Row]) -> list[Event]:
        """Execute the rows of a reverted step in halves, and those of a half that raises in halves
        again. A row that raises alone fails its request. Nothing else is in flight."""
        events: list[Event] = []
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            # Without the rows of requests that have ended since, so it may be empty.
            batch = self.scheduler.retry(half)
            if not batch.rows:
                continue
            output = None
            if self._launch(batch):
                output = self._wait_for_oldest()
            if output is not None:
                events += self.scheduler.update(batch, output, self._clock())
                continue
            self.scheduler.revert(batch)
            if len(batch.rows) > 1:
                events += self._execute_again(batch.rows)
            else:
                error = InternalError("the request failed in a step")
                events += self.scheduler.fail(batch.rows[0].key, error)
        return events

    def _launch(self, batch: Batch) -> bool:
        """Begin a step. False: it raised, and nothing of it runs."""
        in_flight = [launched.batch for launched in self._in_flight]
        self._before_step([*in_flight, batch])
        began = self._clock()
        step = self._or_none(lambda: self.runner.launch(batch))
        if step is None:
            return False
        if not self._in_flight:  # else it begins when the one before it ends
            self._busy_since = began
        self._in_flight.append(_InFlight(batch, step))
        return True

    def _wait_for_oldest(self) -> StepOutput | None:
        """The output of the oldest step in flight, which is in flight no more. None: it raised."""
        output = self._or_none(self._in_flight[0].step.wait)
        del self._in_flight[0]
        return output

    def _or_none(self, call: Callable[[], T]) -> T | None:
        """What this call of the runner returns. None: it raised, but the device can go on."""
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
        """Make a step. If the loop itself fails, which is our bug, end every open request and
        replace the scheduler, which may be inconsistent."""
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
        """Sleep until a message comes. After ``IDLE_CHECK_S`` check the integrity once, in slices:
        a message ends the check, and other threads run in the pauses."""
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
        """Sleep until a message, a resource or stop() comes. False: none came in time."""
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


def _runs_draft_model(batch: Batch) -> bool:
    """Whether the step asks a draft model for proposals."""
    return any(row.propose for row in batch.rows)
