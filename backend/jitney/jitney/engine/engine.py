"""The engine: sole owner of scheduler and runner, and the loop that makes the steps.

A front sends messages from any thread (:meth:`Engine.send`); one thread makes the steps, by
:meth:`Engine.run` or by calling :meth:`Engine.step` itself. Each step gives one
:class:`StepReport`. Nothing else is shared, so the engine may as well live in a process of its own.

A call of :meth:`Engine.step` takes what has come (:mod:`~jitney.engine.inbox`), makes a step of the
batch (:mod:`~jitney.engine.steps`) and reports. A request that needs a grammar or an adapter waits
for it in :mod:`~jitney.engine.pending`.

Failures, from the small to the large:

- a row whose output is an error fails its request;
- a step that raises is executed again in halves, to find the request that makes it raise;
- a fault of the loop itself (our bug) ends every open request with Failed, and the loop goes on
  with a fresh scheduler.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from jitney.batch import Adapter
from jitney.config import EngineConfig
from jitney.core.scheduler import Scheduler
from jitney.engine.grammars import Compile, Grammars, refuse
from jitney.engine.inbox import UNLOADED, Inbox
from jitney.engine.make_way import note_changes_and_find_who_makes_way, take_back
from jitney.engine.making import NoteMaking, ignore_making
from jitney.engine.pending import Held, Pending, Resources
from jitney.engine.source import Source
from jitney.engine.steps import BeforeStep, Steps, ignore_step
from jitney.errors import (
    DeviceLostError,
    InternalError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
)
from jitney.execution.protocols import Runner
from jitney.messages import (
    TERMINAL,
    Cancel,
    Event,
    Failed,
    Finish,
    FrontMessage,
    ModelInfo,
    StepReport,
    Submit,
)

_log = logging.getLogger(__name__)

IDLE_CHECK_S = 0.25
"""Once idle for so long, the engine checks its integrity. Long enough to leave out the moments
between two requests of a busy client."""
_CHECK_PAUSE_S = 0.001
"""Pause between two slices of the integrity check. A slice takes about as long."""
SIGN_OF_LIFE_S = 0.5
"""While every open request waits for a resource, the engine sends a report after so many seconds.
Without reports, the front would take it for hung."""
_MOST_READS = 2
"""A step reads the inbox at most so many times. The second time, it finds the messages that came
while the first ones were applied: they join this step. There is no third time, so that a flood of
messages cannot keep the step from being made."""


class Outbox(Protocol):
    """Where reports go: a queue, or a front's responder."""

    def put(self, item: StepReport, /) -> object:
        """Take a report. Called from the engine's thread. While too many reports wait, it may hold
        the engine back for a bounded time. An error that it raises ends :meth:`Engine.run`: it may
        raise only if nobody takes reports any more."""


class Engine:
    """Takes messages, makes steps, gives reports.

    There are four ways to end its work:

    - :meth:`stop`: no more messages are taken. :meth:`run` fails the open requests and returns.
    - :meth:`abandon`: the steps in flight are waited for, and their outputs dropped. Requests stay
      open.
    - :meth:`reset`: the same, and requests, messages and events are forgotten.
    - ``_fail_open``: the same as :meth:`abandon`, and every open request ends with Failed. Messages
      stay.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        before_step: BeforeStep = ignore_step,
        compile_grammar: Compile = refuse,
        adapters: Source[Adapter] | None = None,
        note_making: NoteMaking = ignore_making,
    ) -> None:
        """``compile_grammar`` is called in a thread of its own. Without ``adapters``, no request
        names one."""
        self.config = config
        self.runner = runner
        self._clock = clock
        self._before_step = before_step
        self.inbox = Inbox()
        grammars = Grammars(compile_grammar, config.grammar_cache)
        self.pending = Pending(
            grammars, adapters, post=self.inbox.put_result, note_making=note_making
        )
        self._open: set[int] = set()  # keys that still need a terminal event
        # Events of the next report. If a step raises, its events stay here, so that none is lost.
        self._events: list[Event] = []
        self._begin_anew()

    @property
    def info(self) -> ModelInfo:
        """What is known of the loaded model."""
        return self.runner.info

    # ------------------------------------------------------------------ any thread

    def send(self, message: FrontMessage) -> None:
        """Put a message into the inbox and wake the loop.

        After :meth:`stop`, and once :meth:`run` has ended, raises UnavailableError for a Submit and
        drops the others.
        """
        self.inbox.put(message)

    def stop(self) -> None:
        """Make :meth:`run` return after the current step. Requests that are open then fail."""
        self.inbox.stop()

    # ------------------------------------------------------------------ the engine's thread

    @property
    def has_work(self) -> bool:
        """Whether a step would find anything to do."""
        if self.inbox.has_items or self.pending or self._events:
            return True
        return self.scheduler.has_work or self._steps.num_in_flight > 0

    def is_running(self, key: int) -> bool:
        """Whether a request has been admitted, and has not ended."""
        return self.scheduler.is_running(key)

    def step(self) -> StepReport | None:
        """Make one step. None: there was nothing to do, and nothing is in flight. If every open
        request waits for a grammar or an adapter, it sleeps until something comes or a deadline is
        reached, but not for long; then the report is empty.

        With overlap the events are those of the step before, so the first step has none.
        ``step_seconds`` is the time of this call, from when it has read the inbox. In steady state
        it equals the time of one step on the device, because each call waits for one step to end.
        """
        self.scheduler.reset_counts()
        self._steps.reset_counts()
        self._take_inbox()
        now = self._clock()
        self._let_make_way(now)
        self._events += self.scheduler.expire(now)
        if self._events or self.scheduler.has_work or self._steps.num_in_flight:
            # If there are only events, _make_step() does nothing, and the events are reported.
            self._make_step(now)
        elif self.pending:
            # Only held requests are open: `scheduler.has_work` leaves them out. The next call
            # applies what comes.
            self._wait_for_resource(now)
        else:
            return None
        self._note_ended(_ended_by(self._events), now)
        stats = self.scheduler.stats(self._clock() - now, self._steps.out_of_memory)
        stats.steps_in_flight = self._steps.num_in_flight
        self.pending.report(stats)
        return StepReport(self._take_events(), stats)

    def run(self, outbox: Outbox) -> None:
        """Make steps until :meth:`stop`, putting each report into ``outbox``; sleep while there is
        nothing to do. On return every submitted request has had its terminal event.

        Raises DeviceLostError, and any error that ``outbox`` raises. The open requests stay open
        then, and the caller ends them or resumes them in another engine.
        """
        try:
            while not self.inbox.stopped:
                report = self._step_or_recover()
                if report is not None:
                    outbox.put(report)
                else:
                    self._sleep_while_idle()
        finally:
            self.stop()
            self.abandon()
            # What was sent just before stop() has never been looked at, but must end too.
            self._note_open(self.inbox.take_messages())
        # Not after an exception: the caller ends or resumes the open requests then.
        if self._open or self._events:
            outbox.put(self._fail_open(UnavailableError(UNLOADED)))

    def abandon(self) -> None:
        """Wait until no step is in flight. The outputs are dropped."""
        self._steps.abandon()

    def reset(self) -> None:
        """Forget every request and message, without an event: the caller keeps track of them."""
        self.abandon()
        # Results of the threads stay in the inbox. The requests that waited for them are gone, but
        # later ones can use what was made.
        self.inbox.take_messages()
        self._take_events()
        self._note_ended(self._open.copy(), self._clock())
        self._begin_anew()

    # ------------------------------------------------------------------ messages

    def _take_inbox(self) -> None:
        """Apply all messages that have come, in order, and begin the requests whose resources are
        there by now."""
        for _ in range(_MOST_READS):
            anything_came = self._read_inbox()
            if not anything_came:
                break

    def _read_inbox(self) -> bool:
        """Read the inbox once. Returns whether anything came."""
        messages = self.inbox.take_messages()
        # The clock is read after they were taken: no request arrived later than that.
        now = self._clock()
        # The new requests are noted first. So each gets its terminal event, even if anything below
        # raises.
        self._note_open(messages)
        has_received = self._receive_results(now)
        # Resources that take too long are given up now: after the results were received, because
        # some of them may have come; and before the messages are applied, because a new request for
        # the same resource has not waited yet.
        self.pending.give_up(self.config.load_watchdog_s, now)
        self.pending.retry(now)
        for message in messages:
            self._apply(message, now)
        for held in self.pending.take_ready():
            self._events += self._submit_or_fail(held, now)
        # What is made next depends on who is first, and one of these messages may be a request of
        # the first tier. So it is chosen only now, when all of them are known. (There is one
        # exception: if a message ended a request, ``Pending.release`` has begun something already.)
        self.pending.start_making(now)
        return has_received or bool(messages)

    def _receive_results(self, now: float) -> bool:
        """Hand the results to the requests that wait for them. Returns whether there was any."""
        has_received = False
        while True:
            # One at a time: if pending raises, the others are still there.
            made = self.inbox.take_result()
            if made is None:
                return has_received
            self.pending.receive(made, now)
            has_received = True

    def _apply(self, message: FrontMessage, now: float) -> None:
        if isinstance(message, Submit):
            self._events += self._accept(message, now)
        elif isinstance(message, Finish):
            self._finish(message, now)
        else:
            assert isinstance(message, Cancel)
            self._end(self.scheduler.cancel(message.key), now)

    def _finish(self, message: Finish, now: float) -> None:
        """Apply a Finish. If the request is held, the message is kept with it. If all of its
        sequences are finished then, the request ends now: it does not wait for its resources."""
        held = self.pending.held(message.key)
        if held is None:
            self._events += self.scheduler.stop_sequence(message.key, message.index, now)
            return
        held.later.append(message)
        if held.is_finished:
            # Only a live request can finish. So it is submitted, which makes it live. The messages
            # that were kept end it at once. It never runs, so it needs no resources.
            self._end(self._submit(held, Resources(None, None), now), now)

    def _end(self, events: list[Event], now: float) -> None:
        """Report these events. If one of them ends a held request, ``pending`` forgets the request
        now. If it did so only at the end of the step, and the resource has come, take_ready() would
        begin a request that has ended."""
        self._events += events
        self._note_ended(_ended_by(events), now)

    def _accept(self, message: Submit, now: float) -> list[Event]:
        """Submit a request, or hold it if it needs a resource. In both cases the scheduler may
        refuse it; then the terminal event is returned."""
        if not self.pending.is_needed_by(message):
            return self.scheduler.submit(message)
        # The scheduler counts it as queued; its resources are made meanwhile.
        refusal = self.scheduler.hold(message)
        if not refusal:
            self.pending.hold(message, self.scheduler.rank_of(message), now)
        return refusal

    def _let_make_way(self, now: float) -> None:
        """If a request waits because all adapters are in use, take back the requests that make way
        for it. They wait then, and go on as after a preemption.

        To go on, a request that made way needs the same adapter again. There are three cases:

        - Its files have changed already: the request is not taken back.
        - They change while it waits: it fails, because they are another adapter.
        - The load fails for any other reason: that is tried again for some time
          (``Pending.hold_for_retry``)."""
        if not self.pending.may_be_blocked:
            return
        # First, so that requests that have just ended release their adapters.
        self._note_ended(_ended_by(self._events), now)
        if not note_changes_and_find_who_makes_way(self.scheduler, self.pending, now):
            return
        # Before requests are taken back, the steps in flight must be completed. That may end users
        # of the adapter. So who makes way is asked again.
        try:
            self._steps.complete_all()
        finally:
            self._events += self._steps.take_events()
        self._note_ended(_ended_by(self._events), now)
        found = note_changes_and_find_who_makes_way(self.scheduler, self.pending, now)
        if found:
            take_back(found, self.scheduler, self.pending, now)

    def _submit_or_fail(self, held: Held, now: float) -> list[Event]:
        """Submit a request whose resources are there. If one could not be made, fail the request,
        or hold it until that is tried again."""
        try:
            resources = self.pending.resources_of(held)
        except JitneyError as error:
            return self._fail_or_retry(held, error, now)
        return self._submit(held, resources, now)

    def _fail_or_retry(self, held: Held, error: JitneyError, now: float) -> list[Event]:
        """A resource of this request could not be made, because of ``error``. A request that made
        way for another one does not fail for that at once, unless its files are at fault."""
        key = held.message.key
        if not held.made_way or isinstance(error, InvalidArgumentError):
            return self.scheduler.fail(key, error)
        try:
            self.pending.hold_for_retry(held, error, self.config.load_watchdog_s, now)
        except JitneyError as last_error:
            return self.scheduler.fail(key, last_error)
        return []

    def _submit(self, held: Held, resources: Resources, now: float) -> list[Event]:
        """Submit a request, and apply what came for it while it was held."""
        message = held.message
        # If the request is resumed, its grammar accepts its output again. That is noted, because
        # the grammar is native code, which may end the process.
        with self.pending.noted("grammar", [message.key]):
            events = self.scheduler.submit(message, resources.grammar, resources.adapter)
        for finish in held.later:
            events += self.scheduler.stop_sequence(finish.key, finish.index, now)
        return events

    # ------------------------------------------------------------------ events and open requests

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    def _note_open(self, messages: Iterable[FrontMessage]) -> None:
        """Each Submit among these opens a request, which now needs a terminal event."""
        self._open.update(message.key for message in messages if isinstance(message, Submit))

    def _note_ended(self, keys: set[int], now: float) -> None:
        """These requests have had their terminal event, or need none. ``pending`` forgets them, and
        releases their resources."""
        if keys:
            self._open -= keys
            self.pending.release(keys, now)

    def _fail_open(self, error: JitneyError) -> StepReport:
        """End every open request and begin with an empty scheduler. The report begins with the
        events that a step has left when it raised."""
        self.abandon()
        now = self._clock()
        self._note_ended(_ended_by(self._events), now)
        failed = [Failed(key, error.code, str(error)) for key in sorted(self._open)]
        self._note_ended(self._open.copy(), now)
        self._begin_anew()
        return StepReport([*self._take_events(), *failed], self.scheduler.stats())

    # ------------------------------------------------------------------ parts of the loop

    def _make_step(self, now: float) -> None:
        try:
            self._steps.make(now)
        finally:
            # Also if it raises: a step that it completed before has given these.
            self._events += self._steps.take_events()

    def _step_or_recover(self) -> StepReport | None:
        """Make a step. If the loop itself fails, which is our bug, end every open request and
        replace the scheduler, which may be inconsistent."""
        try:
            return self.step()
        except DeviceLostError:
            raise
        except Exception:
            _log.exception("the engine's loop failed; %d requests end", len(self._open))
            return self._fail_open(InternalError("the engine failed"))

    def _begin_anew(self) -> None:
        """Begin with an empty scheduler. Nothing is in flight."""
        info = self.runner.info
        self.scheduler = Scheduler(
            self.config,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
            num_slots=info.num_slots,
            num_snapshots=info.num_snapshots,
            chunking=info.chunking,
            # Transformers' own cache objects share nothing.
            forks_share_blocks=info.cache != "opaque",
        )
        self._steps = Steps(
            self.scheduler,
            self.runner,
            overlap=self.config.overlap and info.overlap,
            clock=self._clock,
            before_step=self._before_step,
        )

    def _sleep_while_idle(self) -> None:
        """Sleep until something comes. After ``IDLE_CHECK_S`` check the integrity once."""
        if self.inbox.wait(IDLE_CHECK_S):
            return
        try:
            # In slices: something that comes ends the check, and other threads run in the pauses.
            for _ in self.scheduler.integrity_checks():
                if self.inbox.wait(_CHECK_PAUSE_S):
                    return
        except AssertionError:
            _log.exception(
                "blocks or queues are inconsistent while idle; the scheduler is replaced"
            )
            self._begin_anew()
        self.inbox.wait(None)

    def _wait_for_resource(self, now: float) -> None:
        """Sleep until something comes, or until a request that waits reaches its deadline, but for
        ``SIGN_OF_LIFE_S`` at most."""
        deadline = self.scheduler.next_deadline
        seconds = SIGN_OF_LIFE_S
        if deadline is not None:
            seconds = min(seconds, max(0.0, deadline - now))
        self.inbox.wait(seconds)


def _ended_by(events: Iterable[Event]) -> set[int]:
    """Keys of the requests that these events end."""
    return {event.key for event in events if isinstance(event, TERMINAL)}
