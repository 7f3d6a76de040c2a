"""The steps of an engine: each is scheduled, launched and completed here, and executed again if it
fails.

A step is three calls: schedule, execute, update. Execute is a launch and the wait for its end. With
overlap, step n + 1 is scheduled and launched before the engine waits for step n and updates. So one
step is in flight between two calls of :meth:`Steps.make`. Without overlap none is.

A step that raises is reverted and executed again in halves, with nothing else in flight, and so is
each half that raises. A request is failed only if a step with this request alone raises.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jitney.batch import Batch, Row, StepOutput
from jitney.core.scheduler import Scheduler
from jitney.engine.wire import RowOwner
from jitney.errors import DeviceLostError, InternalError
from jitney.execution.protocols import LaunchedStep, Runner
from jitney.messages import Event

_log = logging.getLogger(__name__)


BeforeStep = Callable[[Iterable[RowOwner], Iterable[RowOwner]], None]
"""Called before each launch, with the sequences of the steps in flight and those of the new step.
So a front knows for which requests the device computed if it fails, or if the process dies.

Also called before a schedule that asks grammars which drafts they allow. They are native code, from
which the process may die, too: the second argument has the sequences whose grammars may be asked.
"""


def ignore_step(in_flight: Iterable[RowOwner], new: Iterable[RowOwner]) -> None:
    """The :data:`BeforeStep` of a front that need not know."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight. The scheduler keeps the same steps, as they were planned, in
    ``LiveRequests.in_flight``."""

    batch: Batch
    step: LaunchedStep


class Steps:
    """Makes the steps of one scheduler. Used by the engine's thread alone."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        overlap: bool,
        clock: Callable[[], float] = time.monotonic,
        before_step: BeforeStep = ignore_step,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._before_step = before_step
        # Once so many steps are in flight, the oldest is completed before another is launched.
        self._most_in_flight = 2 if overlap else 1
        self._in_flight: list[_Launched] = []  # the oldest first
        # When the device began the oldest step: at its launch, or when the step before it ended.
        self._busy_since = 0.0
        self._events: list[Event] = []  # until take_events()
        self.out_of_memory = 0
        """Steps that raised MemoryError since :meth:`reset_counts`."""

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not completed yet."""
        return len(self._in_flight)

    def reset_counts(self) -> None:
        """Begin to count anew."""
        self.out_of_memory = 0

    def make(self, now: float) -> None:
        """Schedule and launch a step, then complete the oldest in flight: this step, or with
        overlap the one before it, which ran meanwhile. :meth:`take_events` has the events of what
        was completed, also if this raises.

        Raises DeviceLostError.
        """
        if not self._scheduler.has_work and not self._in_flight:
            return
        batch = self._schedule(now)
        if not batch.rows:
            # Nothing can be computed now. What is left depends on the step in flight, if any.
            self._complete_oldest_if_any()
            return
        is_launched = self._launch(batch)
        if not is_launched:
            self._scheduler.revert(batch)
            # To execute it again, nothing else may be in flight.
            self._complete_oldest_if_any()
            self._execute_again(batch.rows)
            return
        is_full = len(self._in_flight) == self._most_in_flight
        # A step that runs a draft model overlaps with no other; _schedule() says why.
        if is_full or _runs_draft_model(batch):
            self._complete_oldest()

    def take_events(self) -> list[Event]:
        """Take the events of the steps that were completed since the last call."""
        events = self._events
        self._events = []
        return events

    def complete_all(self) -> None:
        """Complete the steps in flight. :meth:`take_events` has their events, also if this raises.

        Raises DeviceLostError.
        """
        while self._in_flight:
            self._complete_oldest()

    def abandon(self) -> None:
        """Wait until nothing is in flight. The outputs are dropped."""
        for launched in self._in_flight:
            try:
                launched.step.wait()
            except Exception:
                _log.warning("a step that is dropped raised", exc_info=True)
        self._in_flight.clear()

    # ------------------------------------------------------------------ parts of a step

    def _schedule(self, now: float) -> Batch:
        """The next batch. If it cannot overlap with the step in flight, that one is completed
        first."""
        if self._in_flight and not self._scheduler.can_plan_ahead:
            # What to schedule depends on what the step in flight samples.
            self._complete_oldest()
        self._note_grammars_to_ask()
        batch = self._scheduler.schedule(now)
        if self._in_flight and _runs_draft_model(batch):
            # A step that runs a draft model overlaps with no other, for two reasons. Its launch
            # returns only at the end of the step, so an overlap would gain nothing. And the step in
            # flight would be completed only then, so the seconds of both would be wrong. Whether a
            # batch runs a draft model is known only once it is scheduled. So it is reverted, and
            # scheduled again after the step in flight.
            self._scheduler.revert(batch)
            self._complete_oldest()
            batch = self._scheduler.schedule(now)
        return batch

    def _note_grammars_to_ask(self) -> None:
        """Tell the front whose grammars the next schedule may ask about drafts."""
        if self._scheduler.config.speculation is None:
            return
        asked = [each for each in self._scheduler.live.running if each.grammar is not None]
        if asked:
            owners = (RowOwner(each.request.message.key, each.index) for each in asked)
            self._before_step(self._owners_in_flight(), owners)

    def _owners_in_flight(self) -> Iterator[RowOwner]:
        """Whose rows are in flight."""
        for launched in self._in_flight:
            yield from _owners(launched.batch)

    def _launch(self, batch: Batch) -> bool:
        """Begin a step. False: it raised, and nothing of it runs."""
        self._before_step(self._owners_in_flight(), _owners(batch))
        began = self._clock()
        try:
            step = self._runner.launch(batch)
        except DeviceLostError:
            raise  # no step can succeed any more
        except Exception as error:
            self._note_failure(error)
            return False
        if not self._in_flight:  # else the device begins it when the step before it ends
            self._busy_since = began
        self._in_flight.append(_Launched(batch, step))
        return True

    def _complete_oldest_if_any(self) -> None:
        """Complete the step that the call before left in flight, if it left one."""
        if self._in_flight:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        """Wait for the oldest step in flight and update. If it failed, execute it again."""
        batch = self._in_flight[0].batch
        output = self._wait_for_oldest()
        if output is not None:
            began = self._busy_since
            ended = self._clock()
            # From now on the device is busy with the next step, if there is one.
            self._busy_since = ended
            self._events += self._scheduler.update(batch, output, now=ended, seconds=ended - began)
            return
        # A later step in flight began with tokens that this one has not sampled. So it computes
        # nothing of use. Drop it; the scheduler schedules its rows again.
        later = [launched.batch for launched in self._in_flight]
        self.abandon()
        # Each revert undoes the newest schedule that is left, so the later step comes first.
        for later_batch in reversed(later):
            self._scheduler.revert(later_batch)
        self._scheduler.revert(batch)
        self._execute_again(batch.rows)

    def _wait_for_oldest(self) -> StepOutput | None:
        """The output of the oldest step in flight, which is in flight no more. None: it raised."""
        output = None
        try:
            output = self._in_flight[0].step.wait()
        except DeviceLostError:
            # The step has ended, too: abandon() must not wait for it again.
            del self._in_flight[0]
            raise
        except Exception as error:
            self._note_failure(error)
        # After a KeyboardInterrupt the step stays in flight, so that abandon() waits for it.
        del self._in_flight[0]
        return output

    def _execute_again(self, rows: list[Row]) -> None:
        """Execute the rows of a reverted step in halves, and each half that raises in halves again.
        A row that raises alone fails its request. Nothing else is in flight."""
        parts = _halves(rows)
        while parts:
            part = parts.pop(0)
            # A request may have ended since, in another part: its rows are left out. So are rows
            # that are complete.
            batch = self._scheduler.retry(part, self._clock())
            if not batch.rows:
                continue
            # Its sequences may have begun anew. Then they need further steps.
            parts.insert(0, part)
            output = None
            if self._launch(batch):
                output = self._wait_for_oldest()
            if output is not None:
                # Without its seconds: a part of a step does not show what a step costs.
                self._events += self._scheduler.update(batch, output, self._clock())
                continue
            self._scheduler.revert(batch)
            if len(batch.rows) > 1:
                parts = _halves(batch.rows) + parts
            else:
                error = InternalError("the request failed in a step")
                self._events += self._scheduler.fail(batch.rows[0].key, error)

    def _note_failure(self, error: Exception) -> None:
        """Log the error of a step, which is no DeviceLostError. Called in the error's handler."""
        if isinstance(error, MemoryError):
            self.out_of_memory += 1
        _log.exception("a step raised")


def _owners(batch: Batch) -> Iterator[RowOwner]:
    for row in batch.rows:
        yield RowOwner(row.key, row.index)


def _halves(rows: list[Row]) -> list[list[Row]]:
    """The rows in two parts; a single row in one."""
    if len(rows) == 1:
        return [rows]
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]]


def _runs_draft_model(batch: Batch) -> bool:
    """Whether the step asks a draft model for proposals."""
    return any(row.propose for row in batch.rows)
