"""The scheduler: which sequence computes which tokens in the next step, and what follows.

Owns all requests from submission to their terminal event, the KV manager and the slots. The
engine's thread alone calls it. ``plan`` fills a step, ``outcome`` applies its output, and
``policy`` has what the options ``tiers`` and ``speculation`` change in both.

Steps take sequences by *rank*: ``priority * aging_s + arrival``, lower first. Waiting ``aging_s``
seconds weighs as much as one unit of priority, so an old request overtakes younger ones without its
rank ever changing. (With the option ``tiers``, rank decides only within a level: see
``Sequence.level``.) Preemption takes the running sequence of the highest rank, which goes back to
the queue and keeps its rank. So the sequence of the lowest rank makes way for no other, and every
sequence becomes that one in time: none starves.

Without overlap, every :meth:`Scheduler.schedule` is followed by :meth:`Scheduler.update` or
:meth:`Scheduler.revert`. With overlap, a second step may be planned before the first is updated, if
:attr:`Scheduler.can_plan_ahead`. The engine passes messages on only while at most one step is in
flight. If a message ends a sequence that is in that step, its row is *surplus*: its output is
dropped.
"""

import math
from collections.abc import Iterable, Iterator

import msgspec

from jitney.batch import Adapter, Batch, Grammar, Row, StepOutput
from jitney.config import EngineConfig
from jitney.core.deadlines import failed_by_deadline
from jitney.core.held import HeldRequests
from jitney.core.integrity import integrity_checks
from jitney.core.kv_cache import KvCache
from jitney.core.live import LiveRequests
from jitney.core.needs import RequestNeeds, needs_of
from jitney.core.outcome import OutputApplier, error_of, final_event
from jitney.core.plan import Planner
from jitney.core.planned_step import PlannedStep
from jitney.core.policy.choose import choose_policies
from jitney.core.policy.seam import TierTerms
from jitney.core.request import Request, Sequence, SequenceState
from jitney.core.slots import Slots
from jitney.core.step_plan import plain_row
from jitney.core.taking_back import (
    Ranked,
    TakenBack,
    resumable,
    users_that_make_way,
    waiting_users_behind,
)
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError
from jitney.messages import (
    Cancelled,
    Chunking,
    Event,
    Failed,
    FinishReason,
    StepStats,
    Submit,
    Tokens,
)
from jitney.rank import Blocked, Order, Rank


class Scheduler:
    """Plans steps as batches, and turns their outputs into events."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_slots: int = 0,
        num_snapshots: int = 0,
        chunking: Chunking = "any",
        forks_share_blocks: bool = True,
    ) -> None:
        """The last four are of models with slots. ``num_snapshots``: slots beside ``num_slots``;
        0: none are kept. ``forks_share_blocks``: whether a fork reads the blocks of its leader, or
        gets copies of all of them."""
        # The budget of a step has a token for each running sequence.
        max_running = min(config.max_num_seqs, max_num_batched_tokens)
        if num_slots:
            max_running = min(max_running, num_slots)
            # What a slot holds is the past of all tokens. So without snapshots a sequence cannot
            # begin with cached blocks, and a wrong draft could not be taken back.
            if not num_snapshots:
                config = msgspec.structs.replace(config, prefix_caching=False)
            config = msgspec.structs.replace(config, speculation=None)
        if not config.prefix_caching:
            num_snapshots = 0
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
            max_running=max_running,
            watermark=watermark,
        )
        self._admission = self.policies.admission
        self.live = LiveRequests(
            self.kv,
            self._admission,
            Slots(num_slots, num_snapshots),
            forks_share_blocks=forks_share_blocks,
        )
        self._held = HeldRequests()
        # Requests that were taken back and are held, as they were then. By key.
        self._taken_back: dict[int, Request] = {}
        self._planner = Planner(
            config,
            self.live,
            self.policies,
            max_num_batched_tokens=max_num_batched_tokens,
            watermark=watermark,
            chunking=chunking,
        )
        self.reset_counts()

    # ------------------------------------------------------------------ queries

    @property
    def has_work(self) -> bool:
        """Whether any request is open that is not held."""
        return bool(self.live.requests)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of the open requests, held ones included. :meth:`expire` is due
        then."""
        of_live = self.live.deadlines.earliest
        of_held = self._held.deadlines.earliest
        if of_live is None:
            return of_held
        if of_held is None:
            return of_live
        return min(of_live, of_held)

    @property
    def can_plan_ahead(self) -> bool:
        """Whether :meth:`schedule` may be called now. While a step is in flight, it may not if much
        of the next step depends on tokens that are still being sampled, or if blocks are short."""
        return self._planner.can_plan_ahead

    def stats(self, step_seconds: float = 0.0, out_of_memory: int = 0) -> StepStats:
        """Gauges as of now, and the counts since :meth:`reset_counts`."""
        return msgspec.structs.replace(
            self._counts,
            waiting=self.live.num_waiting_requests + len(self._held),
            running=len(self.live.running),
            queued=self._admission.num_queued,
            blocks_total=self.kv.num_blocks,
            blocks_used=self.kv.num_used,
            blocks_cached=self.kv.num_cached,
            step_seconds=step_seconds,
            preemptions=self.live.preemptions - self._preemptions_before,
            out_of_memory=out_of_memory,
            tiers=self.policies.tier_stats(self.live.running),
        )

    def rank_of(self, message: Submit) -> Rank:
        """Where a request stands among those that wait."""
        terms = self._admission.tier_terms_of(message)
        return Rank(terms.tier, self._rank_s(message, terms), message.key)

    @property
    def may_preempt_users(self) -> bool:
        """Whether running requests may make way for one that needs their resource."""
        return self._preempts and self.policies.making_way.is_possible

    def who_makes_way(self, blocked: Blocked) -> list[int]:
        """Keys of the requests to :meth:`take_back` so that a blocked one has room for its
        resource. Empty: nobody makes way.

        If the options say so, running requests make way. Else those do that wait to run."""
        users = [[self._ranked(order) for order in orders] for orders in blocked.users]
        urgent = self._ranked(blocked.first)
        found: Iterable[Ranked] = ()
        if self.may_preempt_users:
            found = users_that_make_way(urgent, users, self.policies.making_way)
        if not found:
            found = waiting_users_behind(urgent, users, self.config.aging_s)
        return [user.order.key for user in found]

    def _ranked(self, order: Order) -> Ranked:
        """An open request."""
        key = order.key
        if key in self._held:
            message = self._held.get(key)
            return Ranked(order, self.rank_of(message), message, is_running=False)
        request = self.live.requests[key]
        message = request.message
        is_running = request.num_running > 0
        return Ranked(order, self.rank_of(message), message, is_running)

    def is_running(self, key: int) -> bool:
        """Whether a sequence of the request has been admitted, and has not ended."""
        request = self.live.requests.get(key)
        return request is not None and request.num_running > 0

    def reset_counts(self) -> None:
        """Count from zero: the engine does so at the beginning of its step."""
        self._counts = StepStats()
        self._preemptions_before = self.live.preemptions
        self.policies.reset_counts()

    def check_integrity(self) -> None:
        """Assert every invariant of requests, queues, steps in flight and blocks. Call it while at
        most one step is in flight."""
        for _ in self.integrity_checks():
            pass

    def integrity_checks(self) -> Iterator[None]:
        """:meth:`check_integrity` in slices, with a yield after each. While no request is live, a
        slice takes at most a millisecond or two. If the scheduler is called between two slices, the
        rest must be dropped."""
        return integrity_checks(self.live, num_held=len(self._held))

    # ------------------------------------------------------------------ messages

    def hold(self, message: Submit) -> list[Event]:
        """Accept a request that must wait for a resource, or refuse it as :meth:`submit` does. The
        request is held, and counts as queued, until :meth:`submit` is called with it, or until
        :meth:`cancel`, :meth:`fail` or :meth:`expire` ends it."""
        try:
            self._accept(message, self._admission.tier_terms_of(message))
        except (InvalidArgumentError, UnavailableError) as refusal:
            return [Failed(message.key, refusal.code, str(refusal))]
        self._held.add(message)
        return []

    def take_back(self, key: int, now: float) -> TakenBack:
        """An open request makes way for one that needs its resource: hold it, with what it has
        emitted. To resume it, call :meth:`submit` with the message that this returns. No step may
        be in flight."""
        assert not self.live.in_flight
        # It may have the resource already, and be held because it waits for another one.
        if key in self._held:
            return TakenBack(self._held.get(key))
        request = self.live.requests[key]
        message = resumable(request)
        states = [sequence.state for sequence in request.sequences]
        num_running = states.count(SequenceState.RUNNING)
        request.preempted_at += [now] * num_running
        self._taken_back[key] = request
        self.live.preemptions += num_running
        self.live.remove_request(request)
        refusal = self.hold(message)
        assert not refusal, "a request that ran is refused"
        taken = TakenBack(message, request.grammar, request.adapter)
        # The old request stays in `_taken_back`. It must not keep the adapter in memory.
        request.adapter = None
        return taken

    def submit(
        self,
        message: Submit,
        grammar: Grammar | None = None,
        adapter: Adapter | None = None,
    ) -> list[Event]:
        """Accept a request, or refuse it at once: Failed INVALID_ARGUMENT if an empty cache
        could not hold it, Failed UNAVAILABLE if the queue is full.

        Two kinds of requests were accepted before, and are not refused by a full queue: held ones,
        and those of an engine that has ended. If such a request has output, it is *resumed*: its
        sequences go on like preempted ones."""
        assert message.prompt, "a prompt without tokens was not refused in front"
        terms = self._admission.tier_terms_of(message)
        try:
            needs = self._accept(message, terms)
        except (InvalidArgumentError, UnavailableError) as refusal:
            return [Failed(message.key, refusal.code, str(refusal))]
        taken_back = None  # the same request before it was taken back, if it was
        if message.key in self._held:
            self._held.remove(message.key)
            taken_back = self._taken_back.pop(message.key, None)
        request = Request(
            message,
            max_output=needs.max_output,
            reserved_blocks=0 if self._preempts else needs.request_blocks,
            waits_for_all_forks=not self._preempts,
            rank_s=self._rank_s(message, terms),
            grammar=grammar,
            adapter=adapter,
            tier=terms.tier,
            most_running=terms.most_running,
        )
        if taken_back is not None:
            request.take_over(taken_back)
        if message.first_token is not None and not self._preempts:
            # A resumed request does not fork: each sequence computes the prompt on its own, and
            # reserves all of its blocks. Nothing is left to reserve for the request as a whole.
            request.reserved_blocks = 0
            for sequence in request.sequences:
                sequence.reserved_blocks = needs.sequence_blocks
        self.live.add(request)
        return []

    def stop_sequence(self, key: int, index: int, now: float) -> list[Event]:
        """The front saw a stop string end sequence ``index``. Ignored if it has ended already or
        has no token yet."""
        request = self.live.requests.get(key)
        if request is None or not 0 <= index < len(request.sequences):
            return []
        sequence = request.sequences[index]
        if sequence.state is SequenceState.ENDED or not sequence.output:
            return []
        events: list[Event] = [self._end_with(sequence, "stop")]
        if not request.num_live:
            events.append(self.live.finish_request(request, now))
        return events

    def cancel(self, key: int) -> list[Event]:
        """End a request because its client asked. An unknown or ended key is ignored."""
        return self._end_request_with(key, Cancelled(key))

    def fail(self, key: int, error: JitneyError) -> list[Event]:
        """End one request by an error. An unknown or ended key is ignored."""
        return self._end_request_with(key, Failed(key, error.code, str(error)))

    def expire(self, now: float) -> list[Event]:
        """End the requests whose deadline is reached: with what they have, or, if that is nothing,
        with Failed DEADLINE_EXCEEDED."""
        events = self._expire_held(now)
        for key in self.live.deadlines.reached(now):
            request = self.live.requests[key]
            if request.first_token_at is None:
                self.live.remove_request(request)
                where = "in the queue" if request.is_queued else "at work on its prompt"
                events.append(failed_by_deadline(request.message, where))
                continue
            for sequence in request.sequences:
                if sequence.state is not SequenceState.ENDED:
                    events.append(self._end_with(sequence, "deadline"))
            events.append(self.live.finish_request(request, now))
        return events

    def _expire_held(self, now: float) -> list[Event]:
        """End the held requests whose deadline is reached and that have no token. Those that have
        output become live."""
        events: list[Event] = []
        for key in self._held.deadlines.reached(now):
            message = self._held.get(key)
            if message.first_token is None:
                self._release_held(key)
                events.append(failed_by_deadline(message, "in the queue"))
            else:
                # Only a live request has sequences, which end with their output. So the caller ends
                # it beside the other live ones. It does not run, so it needs no resource.
                events += self.submit(message)
        return events

    # ------------------------------------------------------------------ schedule

    def schedule(self, now: float) -> Batch:
        """Plan the next step. The batch is empty if there is no request. It may also be empty while
        a step is in flight: then nothing can be computed before that step is updated."""
        live = self.live
        assert len(live.in_flight) < 2, "two steps are neither updated nor reverted"
        if live.to_restart:
            live.restart_reverted(now)
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
        self.policies.note_step(batch, output, target=step.target, seconds=seconds, now=now)
        applier = OutputApplier(
            self.live, self._counts, caching=self.config.prefix_caching, now=now
        )
        for row, result in zip(batch.rows, output.rows, strict=True):
            sequence = self.live.sequence_of(row)
            self._count_prompt_tokens(row)
            if sequence is None:
                continue  # surplus
            if result.error is not None:
                applier.events += self.fail(row.key, error_of(sequence, result.error))
            else:
                applier.apply(sequence, row, result)
        self.live.keep_snapshots(step.snapshots)
        self._counts.batch_sequences += len(batch.rows)
        return applier.events

    def revert(self, batch: Batch) -> None:
        """Undo the plan of the latest step in flight, which failed or is dropped: its tokens count
        as not planned, and its copies are still pending. The device must be done with the step.
        What the step has written into blocks is harmless: it is written again before it is read.
        What it has left behind in slots (see ``slots``) is not: their sequences begin anew."""
        self.live.revert(batch)

    def retry(self, rows: list[Row], now: float) -> Batch:
        """Plan ``rows`` again, which are all rows of a reverted step, or some of them. Rows that
        are complete, or whose sequences have ended, are left out, and every pending copy is made.
        Sequences that began anew may need several steps until these rows are complete: call this
        until the batch is empty. No step may be in flight. None is planned ahead before this one is
        complete, because ``sample_index`` of the sequences still holds the indices of the reverted
        step."""
        live = self.live
        live.restart_reverted(now)
        again: list[tuple[Row, Sequence]] = []
        for row in rows:
            sequence = live.sequence_of(row)
            if sequence is not None and sequence.num_computed < row.end - row.drafts:
                again.append((row, sequence))
        # The policy of drafts must know which rows have asked the draft model. It learns that from
        # update(), which is never called for the reverted step. The rows that are planned here do
        # not ask again.
        self.policies.drafts.note_rows([row for row, _ in again])
        if live.slots.is_used:
            sequences = [sequence for _, sequence in again]
            step = self._planner.make_restarted(sequences, now, self._counts)
        else:
            step = self._plan_plain(again)
        if step.batch.rows:
            live.in_flight.append(step)
        return step.batch

    def _plan_plain(self, rows: list[tuple[Row, Sequence]]) -> PlannedStep:
        """A step of these reverted rows."""
        plain_rows: list[Row] = []
        for row, sequence in rows:
            plain = plain_row(row, sequence)
            sequence.num_planned = plain.end
            plain_rows.append(plain)
        batch = Batch(plain_rows, self.kv.pending_copies())
        return PlannedStep(batch, must_complete_first=True)

    # ------------------------------------------------------------------ parts

    def _accept(self, message: Submit, terms: TierTerms) -> RequestNeeds:
        """Work out what a request needs, and count it as queued. A held request is counted already.
        Raises InvalidArgumentError if an empty cache could not hold the request, UnavailableError
        if the queue is full."""
        needs = needs_of(
            message,
            self.config,
            num_blocks=self.kv.num_blocks,
            max_model_len=self.max_model_len,
            max_running=terms.most_running,
            has_slots=self.live.slots.is_used,
        )
        if message.key in self._held:
            return needs
        # A request with entries in ``emitted`` was accepted by an engine that has ended.
        if not message.emitted:
            self._admission.check_queue(message)
        self._admission.count_queued(message)
        return needs

    def _rank_s(self, message: Submit, terms: TierTerms) -> float:
        """What the sequences of a request are ranked by, in seconds."""
        added_by_priority = message.params.priority * self.config.aging_s
        return message.arrival + added_by_priority + terms.delay_s

    def _end_with(self, sequence: Sequence, reason: FinishReason) -> Tokens:
        """End a sequence for a reason other than a token of its own."""
        self.live.end_sequence(sequence)
        message = sequence.request.message
        return final_event(message, sequence.index, sequence.cumulative_logprob, reason)

    def _end_request_with(self, key: int, event: Cancelled | Failed) -> list[Event]:
        """End a request by this event. An unknown or ended key is ignored."""
        if key in self._held:
            self._release_held(key)
            return [event]
        request = self.live.requests.get(key)
        if request is None:
            return []
        self.live.remove_request(request)
        return [event]

    def _release_held(self, key: int) -> None:
        """A held request ends: it is queued no longer."""
        message = self._held.remove(key)
        self._taken_back.pop(key, None)
        self._admission.count_dequeued(message)

    def _count_prompt_tokens(self, row: Row) -> None:
        """Count the tokens of the prompt that a row has computed. A recomputation may go on over
        the output, which does not count."""
        prompt_size = len(row.prompt)
        if row.start < prompt_size:
            self._counts.prefill_tokens += min(row.end, prompt_size) - row.start
