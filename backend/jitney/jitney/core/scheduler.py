"""The scheduler: which sequence computes which tokens in the next step, and what came of it.

Owns all requests from submission to their terminal event, and the KV manager. The engine's thread
alone calls it; between :meth:`Scheduler.schedule` and :meth:`Scheduler.update` or
:meth:`Scheduler.revert` it may not be called otherwise.

There are no phases: a sequence has ``num_tokens`` tokens of which ``num_computed`` are in the
cache, and a step computes some more of them under one token budget. A step takes, in this order,

1. running sequences with one token to compute (decodes),
2. running sequences with more (chunks of a prompt, or of a recomputation),
3. waiting sequences, as far as seats, blocks and budget go,

each by *rank*: ``priority * aging_s + arrival``, lower first. Waiting ``aging_s`` seconds weighs as
much as one level of priority, so an old request overtakes younger ones without its rank ever being
touched. Preemption takes the running sequence of the highest rank, and it goes back to the queue
with the rank it has. So the sequence of the lowest rank is never preempted, and every sequence
comes to be that one: none starves.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jitney.config import EngineConfig
from jitney.core.admission import check_fits, needs_of
from jitney.core.kv_cache import KvCache
from jitney.core.live import LiveRequests
from jitney.core.outcome import last_word, take_in
from jitney.core.sequence import Request, Sequence, State
from jitney.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
)
from jitney.request import (
    Batch,
    Cancelled,
    Event,
    Failed,
    Row,
    StepOutput,
    StepStats,
    Submit,
)


@dataclass(slots=True)
class _Plan:
    """A step in the making, and what is counted in it."""

    tokens_left: int
    rows_left: int
    preemptions_before: int
    rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0


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
        self.live = LiveRequests(self.kv)
        self._preempts = config.eviction == "preempt"
        self._watermark = math.ceil(config.watermark * num_blocks) if self._preempts else 0
        self._left_waiting = False  # by the last step, for want of seats, blocks or budget
        self._in_flight: Batch | None = None
        self._plan = _Plan(0, 0, 0)

    # ------------------------------------------------------------------ queries

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end."""
        return bool(self.live.requests)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of any live request."""
        rank = self.live.deadlines.first_rank()
        return None if rank is None else rank[0]

    def stats(self, step_seconds: float = 0.0) -> StepStats:
        """Gauges as of now, and the counts of the last planned step."""
        plan = self._plan
        return StepStats(
            waiting=len(self.live.waiting),
            running=len(self.live.running),
            blocks_total=self.kv.num_blocks,
            blocks_used=self.kv.num_used,
            blocks_cached=self.kv.num_cached,
            step_seconds=step_seconds,
            batch_sequences=len(plan.rows),
            batch_tokens=plan.num_tokens,
            prefill_tokens=plan.prefill_tokens,
            generated_tokens=plan.generated_tokens,
            prefix_hit_tokens=plan.hit_tokens,
            prefix_query_tokens=plan.query_tokens,
            preemptions=self.live.preemptions - plan.preemptions_before,
        )

    def check_integrity(self) -> None:
        """Assert every invariant of requests, queues and blocks. Call it between steps."""
        assert self._in_flight is None
        assert self._plan.num_tokens <= self.max_num_batched_tokens, "the step was over its budget"
        assert len(self._plan.rows) <= self.config.max_num_seqs, "the step had too many rows"
        self.live.check_integrity()

    # ------------------------------------------------------------------ messages

    def submit(self, message: Submit, now: float) -> list[Event]:
        """Accept a request, or refuse it at the door: Failed INVALID_ARGUMENT if an empty cache
        could not hold it, Failed UNAVAILABLE if the queue is full."""
        assert self._in_flight is None
        assert message.prompt, "a prompt without tokens was not refused in front"
        needs = needs_of(message, self.config.block_size, self.max_model_len)
        try:
            check_fits(
                message,
                needs,
                self.config,
                num_blocks=self.kv.num_blocks,
                max_model_len=self.max_model_len,
            )
            self._check_queue()
        except (InvalidArgumentError, UnavailableError) as refusal:
            return [Failed(message.key, refusal.code, str(refusal))]
        promised = 0 if self._preempts else needs.request_blocks
        aged = message.params.priority * self.config.aging_s + message.arrival
        self.live.add(Request(message, needs.max_output, promised, aged))
        return []

    def finish(self, key: int, index: int, now: float) -> list[Event]:
        """The front saw a stop string end sequence ``index``. Ignored if it has ended already or
        has no token yet."""
        assert self._in_flight is None
        request = self.live.requests.get(key)
        if request is None or not 0 <= index < len(request.sequences):
            return []
        sequence = request.sequences[index]
        if sequence.state is State.ENDED or not sequence.output:
            return []
        self.live.end(sequence)
        events: list[Event] = [last_word(sequence, "stop")]
        if not request.live:
            events.append(self.live.finish(request, now))
        return events

    def cancel(self, key: int) -> list[Event]:
        """End a request at its client's wish. An unknown or ended key is ignored."""
        assert self._in_flight is None
        request = self.live.requests.get(key)
        if request is None:
            return []
        self.live.close(request)
        return [Cancelled(key)]

    def fail(self, key: int, error: JitneyError) -> list[Event]:
        """End one request by an error. An unknown or ended key is ignored."""
        assert self._in_flight is None
        request = self.live.requests.get(key)
        if request is None:
            return []
        self.live.close(request)
        return [Failed(key, error.code, str(error))]

    def expire(self, now: float) -> list[Event]:
        """End the requests whose deadline is reached: with what they have, or, if that is nothing,
        with Failed DEADLINE_EXCEEDED."""
        assert self._in_flight is None
        events: list[Event] = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            key = self.live.deadlines.first()
            assert key is not None
            request = self.live.requests[key]
            if request.first_token is None:
                events += self.fail(key, _nothing_made(request, deadline))
                continue
            for sequence in request.sequences:
                if sequence.state is not State.ENDED:
                    self.live.end(sequence)
                    events.append(last_word(sequence, "deadline"))
            events.append(self.live.finish(request, now))
        return events

    # ------------------------------------------------------------------ schedule

    def schedule(self, now: float) -> Batch:
        """Plan the next step. The batch has no rows only if there is no request at all."""
        assert self._in_flight is None, "the last step was neither updated nor reverted"
        live = self.live
        plan = self._plan = _Plan(
            self.max_num_batched_tokens, self.config.max_num_seqs, live.preemptions
        )
        for sequence in self._plan_decodes(plan):
            if sequence.state is State.RUNNING:  # a decode may have preempted it meanwhile
                self._plan_chunk(plan, sequence)
        if live.preemptions == plan.preemptions_before:  # else blocks are short as it is
            self._admit(plan, now)
        self._left_waiting = bool(live.waiting)
        assert plan.rows or not live.requests, "work waits, and the step does none of it"
        batch = Batch(plan.rows, self.kv.owed_copies())
        self._in_flight = batch if batch.rows else None
        return batch

    def _plan_decodes(self, plan: _Plan) -> list[Sequence]:
        """Plan every running sequence that has one token to compute, making room by preemption.
        Returns the other running sequences, by rank."""
        running, block_size = self.live.running, self.config.block_size
        others = []
        position = 0
        # Victims leave from the end of `running`. Being of a higher rank than the sequence in hand,
        # none of them has a row yet, and no sequence changes its position.
        while position < len(running):
            sequence = running[position]
            position += 1
            num_computed = sequence.num_computed
            if sequence.num_tokens - num_computed > 1 or not sequence.output:
                others.append(sequence)
            elif plan.tokens_left and plan.rows_left:
                full = num_computed == len(sequence.table) * block_size
                if not full or self._make_room(sequence):
                    self._add_row(plan, sequence, [sequence.output[-1]], (sequence.index,))
        return others

    def _make_room(self, sequence: Sequence) -> bool:
        """Give ``sequence`` one more block, preempting from the end of ``running`` if need be.
        False if that came to ``sequence`` itself."""
        while not self.kv.grow(sequence.table):
            assert self._preempts, "a promised block is not there"
            victim = self.live.running[-1]
            self.live.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_chunk(self, plan: _Plan, sequence: Sequence) -> None:
        """Plan as many tokens of a prompt or recomputation as the budget allows. Its blocks were
        all allocated at admission."""
        start, end = sequence.num_computed, sequence.num_tokens
        count = min(end - start, plan.tokens_left)
        if not count or not plan.rows_left:
            return
        sample: tuple[int, ...] = ()
        if start + count == end:
            n = sequence.request.message.params.n
            sample = (sequence.index,) if sequence.output else tuple(range(n))
        plan.prefill_tokens += count
        self._add_row(plan, sequence, sequence.tokens(start, start + count), sample)

    def _add_row(
        self, plan: _Plan, sequence: Sequence, token_ids: list[int], sample: tuple[int, ...]
    ) -> None:
        message = sequence.request.message
        plan.tokens_left -= len(token_ids)
        plan.num_tokens += len(token_ids)
        plan.rows_left -= 1
        plan.rows.append(
            Row(
                message.key,
                sequence.index,
                token_ids,
                sequence.num_computed,
                sequence.table,
                sample,
                message.params,
                sequence.prompt,
                sequence.output,
                message.stop_ids,
                message.bad_words_ids,
            )
        )

    def _admit(self, plan: _Plan, now: float) -> None:
        """Seat waiting sequences by rank until one does not fit. None is passed over: a large
        request would starve behind small ones."""
        live, most = self.live, self.config.max_num_seqs
        while plan.tokens_left and plan.rows_left and len(live.running) < most:
            sequence = live.waiting.first()
            if sequence is None or not self._seat(plan, sequence, now):
                return
            self._plan_chunk(plan, sequence)

    def _seat(self, plan: _Plan, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence the blocks of all its tokens, cached ones where there are any.
        False, and nothing changed, if there are not enough."""
        request, kv = sequence.request, self.kv
        fresh = request.first_scheduled is None
        if fresh and self.live.promised + request.promised > kv.num_blocks:
            return False
        hits: list[int] = []
        reads = self.config.prefix_caching and request.reads_cache
        if reads:  # at least one token must be computed, to have logits to sample from
            usable = (sequence.num_tokens - 1) // kv.block_size
            hits = kv.find(sequence.hash_blocks(usable, kv.block_size))
        num_new = kv.blocks_for(sequence.num_tokens) - len(hits)
        # With nothing running there is nobody to leave room for, and waiting would never end.
        table = kv.open(hits, num_new, spare=self._watermark if self.live.running else 0)
        if table is None:
            assert self._preempts, "a promised block is not there"
            return False
        num_cached = len(hits) * kv.block_size
        self.live.seat(sequence, table, num_cached, now)
        if not sequence.output:
            request.cached_prompt_tokens, request.computed_prompt_tokens = num_cached, 0
        if reads:
            plan.query_tokens += sequence.num_tokens
            plan.hit_tokens += num_cached
        return True

    # ------------------------------------------------------------------ update

    def update(self, batch: Batch, output: StepOutput, now: float) -> list[Event]:
        """Take in what the step computed: new tokens, ends, full blocks, forks."""
        assert batch is self._in_flight, "this step is not the one in flight"
        self._in_flight = None
        self.kv.settle(batch.copies)
        live, caching = self.live, self.config.prefix_caching
        events: list[Event] = []
        for row, result in zip(batch.rows, output.rows, strict=True):
            if row.key not in live.requests:
                continue  # another row of this step made the request fail
            if result.error is not None:
                events += self.fail(row.key, result.error)
                continue
            events += take_in(live, row, result, now, caching)
            self._plan.generated_tokens += len(row.sample)
        return events

    def revert(self, batch: Batch) -> None:
        """The step raised: nothing it was to compute counts, and its copies are still owed. What it
        may have written is written again, over the same slots, before anybody reads it."""
        assert batch is self._in_flight, "this step is not the one in flight"
        self._in_flight = None

    def retry(self, rows: Seq[Row]) -> Batch:
        """After :meth:`revert`, or the update of another part: a step of those of the reverted
        ``rows`` whose requests still live, with every copy that is owed."""
        assert self._in_flight is None
        batch = Batch([row for row in rows if row.key in self.live.requests], self.kv.owed_copies())
        self._in_flight = batch if batch.rows else None
        return batch

    def _check_queue(self) -> None:
        """Raise UnavailableError if the queue is full. Requests that will find a seat in the next
        steps do not count as waiting; none will while the last step left some behind."""
        held_up = self._left_waiting and self.live.waiting
        seats = 0 if held_up else max(self.config.max_num_seqs - len(self.live.running), 0)
        waiting = self.live.num_queued - seats
        if waiting >= self.config.max_queued:
            raise UnavailableError(
                f"the queue is full: {waiting:,} requests wait, and at most "
                f"{self.config.max_queued:,} may (max_queued)"
            )


def _nothing_made(request: Request, deadline: float) -> DeadlineExceededError:
    where = "in the queue" if request.first_scheduled is None else "at work on its prompt"
    return DeadlineExceededError(
        f"the deadline, {deadline - request.message.arrival:.3f} s after arrival, passed before "
        f"the first token: the request was still {where}"
    )
