"""The engine: sole owner of scheduler and runner, and the loop that makes the steps.

A front sends messages from any thread (:meth:`Engine.send`); one thread makes the steps, by
:meth:`Engine.run` or by calling :meth:`Engine.step` itself. What comes of them leaves as one
:class:`StepReport` per step. Nothing else is shared, so the engine may as well live in a process of
its own.

With a runner that can (``info.overlap``, and the option ``overlap``), a step is planned and
launched while the one before it still runs, and that one is taken in afterwards: *landed*. So one
step is in flight from the end of :meth:`Engine.step` to the next call.

Failures, from the small to the large: a row that could not be served fails its request; a step that
raises is run again in halves, with nothing else in flight, until the request at fault stands alone;
a fault of the loop itself (our bug) ends every open request with Failed and goes on with a fresh
scheduler.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, cast

from jitney.config import EngineConfig
from jitney.core.scheduler import Scheduler
from jitney.errors import DeviceLostError, InternalError, JitneyError, UnavailableError
from jitney.request import (
    TERMINAL,
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
    Submit,
)

log = logging.getLogger(__name__)

IDLE_CHECK_S = 0.25
"""Idle for so long, the engine checks its integrity: not between two requests of a busy client."""


class Runner(Protocol):
    """What makes a batch's tokens: the model's runner, or a fake one in tests."""

    @property
    def info(self) -> ModelInfo:
        """What is known of the loaded model."""

    def execute(self, batch: Batch) -> StepOutput:
        """Make the copies, compute the rows, sample. May raise anything: the step counts as not
        made, and its rows are executed again, with the same slots."""


class Pending(Protocol):
    """A step on its way."""

    def wait(self) -> StepOutput:
        """Wait until the step is over and give its output. May raise anything: the step counts as
        not made. In either case nothing of it still runs afterwards. Called once, and once more if
        that call was interrupted (KeyboardInterrupt)."""


class OverlappingRunner(Runner, Protocol):
    """A runner with ``info.overlap``: a step can be launched while the one before it still runs."""

    def launch(self, batch: Batch) -> Pending:
        """Begin a step and return without waiting for its end. Steps run in the order in which
        they are launched; at most two are under way. ``batch`` and the lists of its rows may change
        once this returns. May raise anything: then nothing of the step is under way. After a
        failure of any step, the engine waits for the other one, and calls :meth:`execute` next."""


class Outbox(Protocol):
    """Where reports go: a queue, or a front's responder."""

    def put(self, item: StepReport, /) -> object:
        """Take a report. Called from the engine's thread: must neither block nor raise."""


class Engine:
    """Takes messages, makes steps, gives reports."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.runner = runner
        self._clock = clock
        overlaps = config.overlap and runner.info.overlap
        self._launcher = cast(OverlappingRunner, runner) if overlaps else None
        self._in_flight: list[tuple[Batch, Pending]] = []  # the oldest first: two for a moment
        self.scheduler = self._make_scheduler()
        self._open: set[int] = set()  # keys whose terminal event has not been reported
        self._woken = threading.Condition()
        self._inbox: list[Message] = []  # this and the two below: under _woken
        self._stopping = False
        self._closed = False

    # ------------------------------------------------------------------ any thread

    def send(self, message: Message) -> None:
        """Put a message into the inbox and wake the loop.

        Raises UnavailableError for a Submit once :meth:`run` has ended; a Finish or a Cancel has
        no meaning then and is dropped.
        """
        with self._woken:
            if self._closed:
                if isinstance(message, Submit):
                    raise UnavailableError("the model is being unloaded")
                return
            self._inbox.append(message)
            self._woken.notify()

    def stop(self) -> None:
        """Make :meth:`run` return after the step under way. What is open then, fails."""
        with self._woken:
            self._stopping = True
            self._woken.notify()

    # ------------------------------------------------------------------ the engine's thread

    @property
    def has_work(self) -> bool:
        """Whether a step would find anything to do. The engine's thread asks."""
        return self.scheduler.has_work or bool(self._in_flight or self._inbox)

    def step(self) -> StepReport | None:
        """Make one step: inbox, deadlines, schedule, execute, update. None: nothing to do, and
        nothing is in flight.

        With overlap the update is that of the step before, and nothing may come of the first one.
        ``step_seconds`` is the time of this call: in steady state what a step on the device takes,
        because the call waits for the end of one.
        """
        started = self._clock()
        self.scheduler.reset_counts()
        events = self._read_inbox(started)
        events += self.scheduler.expire(started)
        flew = bool(self._in_flight)
        if flew and not self.scheduler.can_plan_ahead:
            events += self._land()
        batch = self.scheduler.schedule(started)
        if batch.rows:
            events += self._launch(batch) if self._launcher else self._execute(batch)
        elif self._in_flight:
            events += self._land()
        elif not events and not flew:
            return None
        stats = self.scheduler.stats(step_seconds=self._clock() - started)
        return self._report(StepReport(events, stats))

    def abandon(self) -> None:
        """Wait until nothing is in flight, and drop what comes of it: for whoever gives up this
        engine, or its scheduler, but not the runner."""
        for _, pending in self._in_flight:
            try:
                pending.wait()
            except Exception:
                log.warning("a step that is dropped raised", exc_info=True)
        self._in_flight.clear()

    def run(self, outbox: Outbox) -> None:
        """Make steps until :meth:`stop`, putting each report into ``outbox``; sleep while there is
        nothing to do. On return every submitted request has had its terminal event.

        Raises DeviceLostError, likewise after the last terminal event.
        """
        end: JitneyError = UnavailableError("the model is being unloaded")
        try:
            while not self._stopping:
                report = self._step_or_recover()
                if report is not None:
                    outbox.put(report)
                else:
                    self._wait()
        except BaseException:
            end = InternalError("the engine has stopped")
            raise
        finally:
            self.abandon()
            with self._woken:
                self._closed = True
                left = [one.key for one in self._inbox if isinstance(one, Submit)]
                self._inbox.clear()
            self._open.update(left)
            if self._open:
                outbox.put(self._fail_open(end))

    # ------------------------------------------------------------------ parts of a step

    def _read_inbox(self, now: float) -> list[Event]:
        """Take all messages that have come, in order."""
        with self._woken:
            messages, self._inbox = self._inbox, []
        self._open.update(one.key for one in messages if isinstance(one, Submit))
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Submit):
                events += self.scheduler.submit(message, now)
            elif isinstance(message, Finish):
                events += self.scheduler.finish(message.key, message.index, now)
            else:
                assert isinstance(message, Cancel)
                events += self.scheduler.cancel(message.key)
        return events

    def _execute(self, batch: Batch) -> list[Event]:
        """Execute and update. If it raises, find the request at fault and run the others again."""
        try:
            output = self.runner.execute(batch)
        except DeviceLostError:
            raise
        except Exception:
            log.exception("a step of %d rows raised", len(batch.rows))
            self.scheduler.revert(batch)
        else:
            return self.scheduler.update(batch, output, self._clock())
        rows = batch.rows
        if len(rows) == 1:
            return self.scheduler.fail(rows[0].key, InternalError("the request failed in a step"))
        return self._execute_again(rows)

    def _execute_again(self, rows: list[Row]) -> list[Event]:
        """Execute the rows of a reverted step in halves. A single one gets its second chance."""
        events: list[Event] = []
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            part = self.scheduler.retry(half)
            if part.rows:
                events += self._execute(part)
        return events

    def _launch(self, batch: Batch) -> list[Event]:
        """Launch a step, then land the one before it, which ran while this one was planned."""
        assert self._launcher is not None
        try:
            pending = self._launcher.launch(batch)
        except DeviceLostError:
            raise
        except Exception:
            log.exception("the launch of a step of %d rows raised", len(batch.rows))
            self.scheduler.revert(batch)
            events = self._land() if self._in_flight else []
            return events + self._execute_again(batch.rows)
        self._in_flight.append((batch, pending))
        return self._land() if len(self._in_flight) == 2 else []

    def _land(self) -> list[Event]:
        """Wait for the oldest step in flight and update. If it failed, the later one, which took
        its tokens, is dropped: the scheduler will plan that anew."""
        batch, pending = self._in_flight[0]
        try:
            output = pending.wait()
        except DeviceLostError:
            raise
        except Exception:
            log.exception("a step of %d rows raised in flight", len(batch.rows))
            dropped = [later for later, _ in self._in_flight[1:]]
            del self._in_flight[0]
            self.abandon()
            for later in reversed(dropped):
                self.scheduler.revert(later)
            self.scheduler.revert(batch)
            return self._execute_again(batch.rows)
        del self._in_flight[0]
        return self.scheduler.update(batch, output, self._clock())

    def _report(self, report: StepReport) -> StepReport:
        """Note which requests end with this report."""
        for event in report.events:
            if isinstance(event, TERMINAL):
                self._open.discard(event.key)
        return report

    # ------------------------------------------------------------------ parts of the loop

    def _step_or_recover(self) -> StepReport | None:
        """A step. If its own machinery fails, which is our bug, every open request ends; blocks and
        queues cannot be trusted any more and are made anew."""
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
        return self._report(StepReport(events, self.scheduler.stats()))

    def _wait(self) -> None:
        """Sleep until a message comes. Having been idle for a while, check the integrity once."""
        if self._wait_for_message(IDLE_CHECK_S):
            return
        try:
            self.scheduler.check_integrity()
        except AssertionError:
            log.exception("blocks or queues are inconsistent while idle; they are made anew")
            self.scheduler = self._make_scheduler()
        self._wait_for_message(None)

    def _wait_for_message(self, timeout: float | None) -> bool:
        with self._woken:
            return self._woken.wait_for(lambda: bool(self._inbox) or self._stopping, timeout)

    def _make_scheduler(self) -> Scheduler:
        info = self.runner.info
        return Scheduler(
            self.config,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
        )
