"""The scheduler: which sequence computes which tokens in the next step, and what follows.

Owns all requests from submission to their terminal event, and the KV manager. The engine's thread
alone calls it. How a step is filled is in ``plan``, what its result does in ``outcome``, and what
options such as tiers and drafts change of that in ``policy``.

Steps take sequences by *rank*: ``priority * aging_s + arrival``, lower first. Waiting ``aging_s``
seconds weighs as much as one level of priority, so an old request overtakes younger ones without
its rank ever changing. Preemption takes the running sequence of the highest rank, and it goes
back to the queue with the rank it has. So the sequence of the lowest rank is never preempted, and
every sequence becomes that one in time: none starves.

Without overlap, every :meth:`Scheduler.schedule` is followed by :meth:`Scheduler.update` or
:meth:`Scheduler.revert`. With overlap, a second step may be planned before the first is updated, if
:attr:`Scheduler.can_plan_ahead`. Messages may come while one step is in flight, not while two are.
Whatever ends a sequence then, its rows in flight are *surplus*: their results are dropped.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from jitney.config import EngineConfig
from jitney.core.admission import Needs, needs_of
from jitney.core.held import HeldRequests
from jitney.core.integrity import integrity_checks
from jitney.core.kv_cache import KvCache
from jitney.core.live import LiveRequests
from jitney.core.outcome import Outcome, final_event
from jitney.core.plan import Planner
from jitney.core.policy.choose import choose_policies
from jitney.core.policy.seam import Terms
from jitney.core.request import Request, Sequence, State
from jitney.core.step_in_flight import StepInFlight
from jitney.errors import DeadlineExceededError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.messages import (
    Adapter,
    Batch,
    Cancelled,
    Event,
    Failed,
    FinishReason,
    Grammar,
    Row,
    StepOutput,
    StepStats,
    Submit,
    Tokens,
)


class Scheduler:
    """Queues and token budget -> Batch; Batch and its output -> events."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = KvCache(num_blocks, config.block_size)
        self._preempts = config.eviction == "preempt"
        watermark = 0
        if self._preempts:
            watermark = math.ceil(config.watermark * num_blocks)
        self.policies = choose_policies(
            config,
            self.kv,
            # With a token for each in every step, so that none of them holds up the others.
            max_running=min(config.max_num_seqs, max_num_batched_tokens),
            watermark=watermark,
        )
        self._admission = self.policies.admission
        self.live = LiveRequests(self.kv, self._admission)
        self._held = HeldRequests()
        self._planner = Planner(
            config,
            self.live,
            self.policies,
            max_num_batched_tokens=max_num_batched_tokens,
            watermark=watermark,
        )
        self.reset_counts()

    # ------------------------------------------------------------------ queries

    @property
    def has_work(self) -> bool:
        """Whether any request that is not held has yet to end."""
        return bool(self.live.requests)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of an open request, held ones included: :meth:`expire` ends it."""
        earliest = [self.live.deadlines.earliest, self._held.deadlines.earliest]
        return min((each for each in earliest if each is not None), default=None)

    @property
    def can_plan_ahead(self) -> bool:
        """Whether :meth:`schedule` may be called while a step is in flight: not if the next step
        depends on the value of a token that this one samples, nor if blocks are short."""
        return self._planner.can_plan_ahead

    def stats(self, step_seconds: float = 0.0, out_of_memory: int = 0) -> StepStats:
        """Gauges as of now, and the counts since :meth:`reset_counts`."""
        return msgspec.structs.replace(
            self._counts,
            waiting=self.live.num_waiting + len(self._held),
            running=len(self.live.running),
            queued=self._admission.num_queued,
            blocks_total=self.kv.num_blocks,
            blocks_used=self.kv.num_used,
            blocks_cached=self.kv.num_cached,
            step_seconds=step_seconds,
            preemptions=self.live.preemptions - self._preemptions_before,
            out_of_memory=out_of_memory,
            tiers=self._admission.stats(self.live.running),
        )

    def reset_counts(self) -> None:
        """Count from zero: the engine does so at the beginning of its step."""
        self._counts = StepStats()
        self._preemptions_before = self.live.preemptions
        self._admission.reset_counts()

    def check_integrity(self) -> None:
        """Assert every invariant of requests, queues, steps in flight and blocks. Call it while at
        most one step is in flight."""
        for _ in self.integrity_checks():
            pass

    def integrity_checks(self) -> Iterator[None]:
        """:meth:`check_integrity` in slices of well below a millisecond or two. Once the scheduler
        has been called in between, what is left must be dropped."""
        return integrity_checks(self.live, num_held=len(self._held))

    # ------------------------------------------------------------------ messages

    def hold(self, message: Submit) -> list[Event]:
        """Accept a request that must wait for a resource, or refuse it as :meth:`submit` does. It
        counts as queued until it is submitted, or ends: by :meth:`cancel`, :meth:`fail` or
        :meth:`expire`."""
        try:
            self._accept(message, self._admission.terms_of(message))
        except (InvalidArgumentError, UnavailableError) as refusal:
            return [Failed(message.key, refusal.code, str(refusal))]
        self._held.add(message)
        return []

    def submit(
        self,
        message: Submit,
        grammar: Grammar | None = None,
        adapter: Adapter | None = None,
    ) -> list[Event]:
        """Accept a request, or refuse it at once: Failed INVALID_ARGUMENT if an empty cache
        could not hold it, Failed UNAVAILABLE if the queue is full. A held request, or one that is
        resumed, was accepted before: the queue may be full. The sequences of a resumed request go
        on like preempted ones."""
        assert message.prompt, "a prompt without tokens was not refused in front"
        terms = self._admission.terms_of(message)
        try:
            needs = self._accept(message, terms)
        except (InvalidArgumentError, UnavailableError) as refusal:
            return [Failed(message.key, refusal.code, str(refusal))]
        if message.key in self._held:
            self._held.remove(message.key)
        request = Request(
            message,
            max_output=needs.max_output,
            reserved_blocks=0 if self._preempts else needs.request_blocks,
            aged_arrival=self._aged_arrival(message, terms),
            grammar=grammar,
            adapter=adapter,
            tier=terms.tier,
            most_running=terms.most_running,
        )
        if message.first_token is not None and not self._preempts:
            # Each computes the prompt on its own, so each reserves all of its blocks.
            request.reserved_blocks = 0
            for sequence in request.sequences:
                sequence.reserved_blocks = needs.sequence_blocks
        self.live.add(request)
        return []

    def finish(self, key: int, index: int, now: float) -> list[Event]:
        """The front saw a stop string end sequence ``index``. Ignored if it has ended already or
        has no token yet."""
        request = self.live.requests.get(key)
        if request is None or not 0 <= index < len(request.sequences):
            return []
        sequence = request.sequences[index]
        if sequence.state is State.ENDED or not sequence.output:
            return []
        events: list[Event] = [self._end(sequence, "stop")]
        if not request.live:
            events.append(self.live.finish(request, now))
        return events

    def cancel(self, key: int) -> list[Event]:
        """End a request because its client asked. An unknown or ended key is ignored."""
        return self._close(key, Cancelled(key))

    def fail(self, key: int, error: JitneyError) -> list[Event]:
        """End one request by an error. An unknown or ended key is ignored."""
        return self._close(key, Failed(key, error.code, str(error)))

    def expire(self, now: float) -> list[Event]:
        """End the requests whose deadline is reached: with what they have, or, if that is nothing,
        with Failed DEADLINE_EXCEEDED."""
        events: list[Event] = []
        for key in self._held.deadlines.reached(now):
            message = self._held.get(key)
            if message.first_token is None:
                self._release_held(key)
                events.append(_nothing_made(message, "in the queue"))
            else:  # a resumed request: it ends below with what it has, and needs no resource
                events += self.submit(message)
        for key in self.live.deadlines.reached(now):
            request = self.live.requests[key]
            if request.first_token is None:
                queued = request.first_scheduled is None
                self.live.close(request)
                where = "in the queue" if queued else "at work on its prompt"
                events.append(_nothing_made(request.message, where))
                continue
            for sequence in request.sequences:
                if sequence.state is not State.ENDED:
                    events.append(self._end(sequence, "deadline"))
            events.append(self.live.finish(request, now))
        return events

    # ------------------------------------------------------------------ schedule

    def schedule(self, now: float) -> Batch:
        """Plan the next step. The batch has no rows only if there is no request at all, or if a
        step is in flight, and there is nothing to do before it is updated."""
        live = self.live
        assert len(live.in_flight) < 2, "two steps are neither updated nor reverted"
        step = self._planner.make(now, self._counts)
        rows = step.batch.rows
        assert rows or live.in_flight or not live.requests, "work waits, and the step is empty"
        if rows:
            live.in_flight.append(step)
        return step.batch

    # ------------------------------------------------------------------ update

    def update(
        self, batch: Batch, output: StepOutput, now: float, seconds: float = 0.0
    ) -> list[Event]:
        """Complete the oldest step in flight and apply its output: new tokens, ends, full blocks,
        forks. ``seconds`` is how long the device took; 0 if that was not measured."""
        step = self.live.complete(batch)
        self.policies.note_step(step, output, seconds=seconds, now=now)
        outcome = Outcome(
            self.live, self._counts, caching=self.config.prefix_caching, now=now, events=[]
        )
        for row, result in zip(batch.rows, output.rows, strict=True):
            sequence = self.live.sequence_of(row)
            self._count_prefill(row, sequence)
            if sequence is None:
                continue  # surplus
            if result.error is not None:
                outcome.events += self.fail(row.key, _error_of(sequence, result.error))
            else:
                outcome.apply(sequence, row, result)
        self._counts.batch_sequences += len(batch.rows)
        return outcome.events

    def revert(self, batch: Batch) -> None:
        """The latest step in flight failed or is dropped: it counts as not made, and its copies are
        still pending. Nothing of it may still run. What it has written is written again, into the
        same slots, before anybody reads it."""
        self.live.revert(batch)

    def retry(self, rows: list[Row]) -> Batch:
        """With nothing in flight, after :meth:`revert` or the update of another part: a step of
        those of the reverted ``rows`` whose sequences still live, with every pending copy."""
        live = self.live
        assert not live.in_flight
        self.policies.drafts.note_rows(rows)
        again: list[Row] = []
        for row in rows:
            sequence = live.sequence_of(row)
            if sequence is not None:
                row = _plain_row(row, sequence)
                sequence.num_planned = row.end
                again.append(row)
        batch = Batch(again, self.kv.pending_copies())
        if again:
            live.in_flight.append(StepInFlight(batch))
        return batch

    # ------------------------------------------------------------------ parts

    def _accept(self, message: Submit, terms: Terms) -> Needs:
        """Count a request as queued. Raises InvalidArgumentError if an empty cache could not hold
        it, UnavailableError if the queue is full."""
        needs = needs_of(
            message,
            self.config,
            num_blocks=self.kv.num_blocks,
            max_model_len=self.max_model_len,
            max_running=terms.most_running,
        )
        if message.key in self._held:  # it was accepted when it came
            return needs
        if not message.emitted:  # else it was accepted by an engine that has ended
            self._admission.check_queue(message, self.live.running)
        self._admission.count_queued(message)
        return needs

    def _aged_arrival(self, message: Submit, terms: Terms) -> float:
        """What the sequences of a request are ranked by, in seconds."""
        aged = message.params.priority * self.config.aging_s + message.arrival
        return aged + terms.delay_s

    def _end(self, sequence: Sequence, reason: FinishReason) -> Tokens:
        """End a sequence for a reason other than a token of its own."""
        self.live.end(sequence)
        message = sequence.request.message
        return final_event(message, sequence.index, sequence.cumulative_logprob, reason)

    def _close(self, key: int, event: Cancelled | Failed) -> list[Event]:
        """End a request by this event, unless it is unknown or has ended."""
        if key in self._held:
            self._release_held(key)
            return [event]
        request = self.live.requests.get(key)
        if request is None:
            return []
        self.live.close(request)
        return [event]

    def _release_held(self, key: int) -> None:
        """A held request ends."""
        message = self._held.remove(key)
        self._admission.count_dequeued(message)

    def _count_prefill(self, row: Row, sequence: Sequence | None) -> None:
        """Count the tokens of a row as prefill, if they are part of one."""
        prefill_end = len(row.prompt) if sequence is None else sequence.prefill_end
        if row.start < prefill_end:
            self._counts.prefill_tokens += len(row.token_ids)


def _plain_row(row: Row, sequence: Sequence) -> Row:
    """A reverted row as it is executed again: with nothing in flight and without drafts."""
    assert sequence.num_planned == row.start, "a row does not follow what is computed"
    if row.carried is not None:  # by now the token is known
        return replace(row, token_ids=[sequence.output[-1]], carried=None)
    if row.drafts or row.propose:
        tokens = row.token_ids[: len(row.token_ids) - row.drafts]
        return replace(row, token_ids=tokens, drafts=0, propose=0)
    return row


def _error_of(sequence: Sequence, error: JitneyError) -> JitneyError:
    """Why a row failed: its grammar knows better than the runner, which found nothing allowed."""
    grammar = sequence.grammar
    if grammar is not None and grammar.error is not None:
        return InvalidArgumentError(f"structured_outputs: {grammar.error}")
    return error


def _nothing_made(message: Submit, where: str) -> Failed:
    """The end of a request that has no token at its deadline."""
    assert message.deadline is not None
    state = f"the request was still {where}"
    error = DeadlineExceededError.of_request(message.arrival, message.deadline, state)
    return Failed(message.key, error.code, str(error))
