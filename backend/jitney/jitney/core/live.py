"""All live requests and the only ways in which a sequence changes its state.

        add            admit             end
    ──────► WAITING ─────────► RUNNING ───────► ENDED
               ▲                  │
               └──────────────────┘
                     preempt           (a waiting sequence may end, too)

Owned by the scheduler. Whoever plans a step or applies its output moves sequences through these
methods, so that queues, block tables and counters always agree. Steps in flight are noted here too,
because blocks that a step still uses are freed only when it is complete.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from itertools import accumulate
from operator import attrgetter

from jitney.config import TierConfig
from jitney.core.deadlines import Deadlines
from jitney.core.kv_cache import KvCache
from jitney.core.request import Request, Sequence, State
from jitney.core.step_in_flight import StepInFlight
from jitney.messages import Batch, Finished, Row

_rank = attrgetter("rank")


class LiveRequests:
    """Requests by key, their sequences by state, and the blocks these hold."""

    def __init__(self, kv: KvCache, max_running: int, tiers: tuple[TierConfig, ...] = ()) -> None:
        self.kv = kv
        self.max_running = max_running
        """Most sequences that may run."""
        self.caps = [min(one.max_running or max_running, max_running) for one in tiers]
        self.caps = self.caps or [max_running]
        """The same by tier."""
        self.aging = [0.0, *accumulate(one.aging_s for one in tiers[1:])]
        """Seconds by which a tier's requests rank later."""
        self._now = 0.0
        self._shares = [one.share for one in tiers] or [1.0]
        self.requests: dict[int, Request] = {}
        self.running: list[Sequence] = []
        """By rank."""
        self.queues: list[list[Sequence]] = [[] for _ in self.caps]
        """Waiting sequences by tier, by rank."""
        self.deadlines = Deadlines()
        self.num_queued = [0] * len(self.caps)
        """By tier: requests of which nothing was ever admitted."""
        self.reserved_blocks = 0
        """Blocks reserved for the requests of which something runs (``eviction: never``)."""
        self.preemptions = 0
        """Ever."""
        self.overdue = [0] * len(self.caps)
        """By tier: requests that were not admitted within ``aging``, since the scheduler's counts
        were reset."""
        self._to_judge: list[deque[tuple[float, int]]] = [deque() for _ in self.caps]
        """By tier: arrival and key of those that came within ``aging``."""
        self.in_flight: list[StepInFlight] = []
        """Steps in flight, the oldest first: one, or two from a plan ahead to the next update."""

    def admitted(self) -> list[int]:
        """By tier: sequences that run, and the forks that are due of those."""
        admitted = [0] * len(self.caps)
        for one in self.running:
            admitted[one.request.tier] += 1 + one.request.forks_due
        return admitted

    def places_beside(self, admitted: list[int]) -> int:
        """Places that so many of each tier leave. This may be below 0, by the forks of one request:
        these will wait. Those beyond a tier's cap take none."""
        caps, most = self.caps, self.max_running
        taken = [
            min(each, caps[tier]) if caps[tier] < most else each
            for tier, each in enumerate(admitted)
        ]
        return most - sum(taken)

    @property
    def num_places(self) -> int:
        """How many more sequences may be admitted, see :meth:`places_beside`."""
        return self.places_beside(self.admitted())

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return sum(map(len, self.queues))

    def places(self, tier: int) -> int:
        """How many more sequences of a tier may be admitted. Below 0 as :meth:`places_beside`."""
        admitted, cap = self.admitted(), self.caps[tier]
        places = self.places_beside(admitted)
        return min(places, cap - admitted[tier]) if cap < self.max_running else places

    def is_full(self, tier: int) -> bool:
        """Whether no sequence of a tier may run beside those that do."""
        of_tier = sum(one.request.tier == tier for one in self.running)
        return len(self.running) >= self.max_running or of_tier >= self.caps[tier]

    # ------------------------------------------------------------------ order

    def sort(self, now: float) -> None:
        """Sort what runs. The first of a lower tier that have aged by now, within its share of
        places and of blocks, or one, rank with the first tier; the others behind all tiers above.
        """
        self._now = now
        count, blocks = [0] * len(self.caps), [0] * len(self.caps)
        for one in self.running:
            tier = one.request.tier
            count[tier] += 1
            blocks[tier] += len(one.table)
            one.rank = self._rank_with(one, count[tier], blocks[tier])
        self.running.sort(key=_rank)

    def rank_of_waiting(self, sequence: Sequence) -> tuple[int, float, int, int]:
        """The rank that a waiting sequence would have had in the last :meth:`sort` if it ran."""
        tables = [len(one.table) for one in self.running if one.request.tier == sequence.rank[0]]
        blocks = sum(tables) + self.kv.blocks_for(sequence.num_tokens)
        return self._rank_with(sequence, len(tables) + 1, blocks)

    def _rank_with(
        self, sequence: Sequence, count: int, blocks: int
    ) -> tuple[int, float, int, int]:
        """Its rank as the last of so many of its tier, which have so many blocks."""
        tier, (_, aged, key, index) = sequence.request.tier, sequence.rank
        share = self._shares[tier]
        within = count <= share * self.max_running and blocks <= share * self.kv.num_blocks
        return (0 if aged <= self._now and (within or count == 1) else tier, aged, key, index)

    # ------------------------------------------------------------------ requests and sequences

    def add(self, request: Request) -> None:
        """A new request: its first sequence waits; those of a resumed one that have not ended."""
        message = request.message
        assert message.key not in self.requests, "a key was used twice"
        self.requests[message.key] = request
        self.num_queued[request.tier] += 1
        self.deadlines.add(message)
        for sequence in request.sequences:
            if sequence.state is State.WAITING:
                self.wait(sequence, message.arrival)
        if request.tier:
            self._to_judge[request.tier].append((message.arrival, message.key))

    def count_overdue(self, now: float) -> None:
        """Count the requests that become overdue."""
        for tier, came in enumerate(self._to_judge):
            while came and now - came[0][0] > self.aging[tier]:
                request = self.requests.get(came.popleft()[1])
                self.overdue[tier] += request is not None and request.first_scheduled is None

    def admit(self, sequence: Sequence, table: list[int], num_computed: int, now: float) -> None:
        """Run ``sequence`` on ``table``, whose first ``num_computed`` tokens are written and whose
        full blocks among these have been offered to the prefix cache."""
        assert sequence.state is State.WAITING
        _remove(self.queues[sequence.request.tier], sequence)
        sequence.table = table
        sequence.num_computed = sequence.num_planned = num_computed
        sequence.num_cached_blocks = num_computed // self.kv.block_size
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=_rank)
        self.reserved_blocks += sequence.reserved_blocks
        request = sequence.request
        if not request.running:
            self.reserved_blocks += request.reserved_blocks
        request.running += 1
        if request.first_scheduled is None:
            request.first_scheduled = now
            self.num_queued[request.tier] -= 1

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Back to the queue because no block is free. It will recompute prompt and output, except
        for what is still cached then. Never called for a sequence in flight."""
        assert sequence.num_planned == sequence.num_computed, "a step in flight computes it"
        if sequence.state is State.RUNNING:
            self._leave_running(sequence)
        self._give_up_table(sequence)
        sequence.num_computed = sequence.num_planned = sequence.num_cached_blocks = 0
        if sequence.drafting is not None:
            sequence.drafting.read = 0
        sequence.request.preempted.append(now)
        self.preemptions += 1
        self.wait(sequence, now)

    def wait(self, sequence: Sequence, since: float) -> None:
        """Put a sequence without blocks into the queue: its state until it is admitted."""
        sequence.state, sequence.waiting_since = State.WAITING, since
        sequence.rank = (sequence.request.tier, *sequence.rank[1:])
        insort(self.queues[sequence.request.tier], sequence, key=_rank)

    def end(self, sequence: Sequence) -> None:
        """A live sequence leaves its queue and frees its blocks."""
        assert sequence.state is not State.ENDED
        if sequence.state is State.RUNNING:
            self._leave_running(sequence)
        else:
            _remove(self.queues[sequence.request.tier], sequence)
        self._give_up_table(sequence)
        sequence.state = State.ENDED
        sequence.grammar = None
        sequence.request.live -= 1

    def close(self, request: Request) -> None:
        """End the live sequences of a request and forget it."""
        for sequence in request.sequences:
            if sequence.state is not State.ENDED:
                self.end(sequence)
        del self.requests[request.message.key]
        self.deadlines.remove(request.message)
        if request.first_scheduled is None:
            self.num_queued[request.tier] -= 1

    def finish(self, request: Request, now: float) -> Finished:
        """Close a request whose sequences have all ended."""
        assert request.live == 0
        self.close(request)
        return Finished(request.message.key, request.timing(now))

    def give_back(self, sequence: Sequence) -> None:
        """Free the lookahead blocks of a running sequence whose row with drafts is over."""
        kept = self.kv.blocks_for(max(sequence.num_planned, sequence.num_tokens))
        self.kv.release(sequence.table[kept:])
        del sequence.table[kept:]

    def _leave_running(self, sequence: Sequence) -> None:
        found = _remove(self.running, sequence)
        assert found, "a running sequence is not where its rank says"
        request = sequence.request
        request.running -= 1
        if not request.running:
            self.reserved_blocks -= request.reserved_blocks
        self.reserved_blocks -= sequence.reserved_blocks

    def _give_up_table(self, sequence: Sequence) -> None:
        """Free the blocks; if a step in flight uses them, only once it is complete (*deferred
        free*). A copy may be made for a sequence that is not itself in the step."""
        table = sequence.table
        sequence.table = []
        latest = self.in_flight[-1] if self.in_flight else None
        in_use = sequence.num_planned > sequence.num_computed
        if latest is not None and (in_use or latest.batch.copies):
            latest.deferred.append((table, sequence.num_computed))
        else:
            self.kv.release(table)

    # ------------------------------------------------------------------ steps in flight

    def sequence_of(self, row: Row) -> Sequence | None:
        """Whose step this row is. None if the sequence has ended meanwhile: the row is surplus.

        A sequence has blocks while it runs, and one in flight is never preempted: so the blocks
        that it has are still those of the row.
        """
        request = self.requests.get(row.key)
        if request is None:
            return None
        sequence = request.sequences[row.index]
        return sequence if sequence.table else None

    def complete(self, batch: Batch) -> StepInFlight:
        """The oldest step in flight is over: its copies are made, the deferred frees are due."""
        assert self.in_flight, "no step is in flight"
        step = self.in_flight.pop(0)
        assert step.batch is batch, "this step is not the oldest in flight"
        self.kv.complete_copies(batch.copies)
        for table, _ in step.deferred:
            self.kv.release(table)
        return step

    def revert(self, batch: Batch) -> None:
        """The latest step in flight counts as not made, and nothing of it runs any more. Its copies
        are still pending."""
        assert self.in_flight, "no step is in flight"
        step = self.in_flight.pop()
        assert step.batch is batch, "this step is not the latest in flight"
        for row in batch.rows:
            sequence = self.sequence_of(row)
            if sequence is not None:
                sequence.num_planned -= len(row.token_ids)
                if row.drafts or row.propose:
                    self.give_back(sequence)
        if self.in_flight:  # which may use the same tables
            self.in_flight[-1].deferred += step.deferred
            return
        for table, _ in step.deferred:
            self.kv.release(table)

    # ------------------------------------------------------------------ integrity

    def integrity_checks(self) -> Iterator[None]:
        """Assert that each request is in exactly one state, and every invariant of queues, steps in
        flight and blocks. The blocks, of which there may be many, are checked in slices."""
        admitted: list[Sequence] = []
        queued = [0] * len(self.caps)
        reserved, waiting = 0, list[Sequence]()
        for key, request in self.requests.items():
            assert request.message.key == key
            states = [sequence.state for sequence in request.sequences]
            due = request.forks_due
            assert request.live == due + sum(state is not State.ENDED for state in states)
            assert request.live > 0, f"request {key} has ended but is still here"
            assert due == 0 or request.first_token is None, f"request {key} did not fork"
            queued[request.tier] += request.first_scheduled is None
            assert request.running == states.count(State.RUNNING)
            reserved += request.reserved_blocks if request.running else 0
            for sequence in request.sequences:
                self._check_sequence(sequence)
            admitted += [one for one in request.sequences if one.state is State.RUNNING]
            waiting += [one for one in request.sequences if one.state is State.WAITING]
        reserved += sum(one.reserved_blocks for one in admitted)
        assert sorted(admitted, key=_rank) == self.running, "running is out of order or incomplete"
        assert len(self.running) <= self.max_running, "more sequences run than may"
        by_tier = Counter(one.request.tier for one in self.running)
        assert all(by_tier[tier] <= cap for tier, cap in enumerate(self.caps)), (
            "a tier has too many"
        )
        for tier, queue in enumerate(self.queues):
            own = [one for one in waiting if one.request.tier == tier]
            assert sorted(own, key=_rank) == queue, "a queue is out of order or incomplete"
        assert queued == self.num_queued
        assert reserved == self.reserved_blocks <= self.kv.num_blocks, "too much is reserved"
        messages = [request.message for request in self.requests.values()]
        timed = [(one.deadline, one.key) for one in messages if one.deadline is not None]
        assert sorted(timed) == self.deadlines.entries, "a deadline is missing, or of nobody"
        self._check_steps_in_flight()
        tables = [(one.table, one.num_computed) for one in self.running]
        yield from self.kv.integrity_checks(
            tables + [one for each in self.in_flight for one in each.deferred]
        )

    def _check_steps_in_flight(self) -> None:
        """What is planned beyond the computed tokens is what the steps in flight compute."""
        tokens: Counter[tuple[int, int]] = Counter()
        samples: Counter[tuple[int, int]] = Counter()
        lookahead: Counter[tuple[int, int]] = Counter()
        for step in self.in_flight:
            for row in step.batch.rows:
                sequence = self.sequence_of(row)
                if sequence is not None:
                    assert row.block_table == sequence.table, "a row in flight has another table"
                    tokens[row.key, row.index] += len(row.token_ids)
                    samples[row.key, row.index] += bool(row.sample) + row.drafts
                    lookahead[row.key, row.index] = row.propose
        for sequence in self.running:
            key = (sequence.request.message.key, sequence.index)
            ahead = sequence.num_planned - sequence.num_computed
            assert ahead == tokens[key], f"{ahead} tokens are planned, {tokens[key]} in flight"
            end = max(sequence.num_planned + lookahead[key], sequence.num_tokens)
            assert len(sequence.table) <= self.kv.blocks_for(end), "a block is not needed"
            pending = max(sequence.num_planned + 1 - sequence.num_tokens, 0)
            assert pending == samples[key], f"{pending} samples pending, {samples[key]} in flight"
        copies = set(self.kv.pending_copies())
        for step in self.in_flight:
            assert copies.issuperset(step.batch.copies), "a copy in flight is not pending any more"
            copies.difference_update(step.batch.copies)
        assert not self.in_flight or not copies, "no step in flight makes a pending copy"

    def _check_sequence(self, sequence: Sequence) -> None:
        size, capacity = sequence.num_tokens, len(sequence.table) * self.kv.block_size
        assert size == len(sequence.prompt) + len(sequence.output)
        if sequence.state is State.RUNNING:
            planned = sequence.num_planned
            assert sequence.num_computed < size, "nothing is left to compute"
            assert planned <= sequence.limit, "more is planned than is ever computed"
            assert planned <= capacity, "tokens were planned into no block"
            assert sequence.num_cached_blocks <= sequence.num_computed // self.kv.block_size
        else:
            assert not sequence.table, "a sequence that does not run holds blocks"
        if sequence.state is State.WAITING:
            assert sequence.num_computed == sequence.num_planned == 0, (
                "a sequence without blocks has nothing computed"
            )


def _remove(ranked: list[Sequence], sequence: Sequence) -> bool:
    """Take a sequence out of a list by rank, if it is there: a new fork is in no queue."""
    position = bisect_left(ranked, sequence.rank, key=_rank)
    found = ranked[position : position + 1] == [sequence]
    del ranked[position : position + found]
    return found
