"""All live requests and the only ways in which a sequence changes its state.

        add            seat              end
    ──────► WAITING ─────────► RUNNING ───────► ENDED
               ▲                  │
               └──────────────────┘
                     preempt           (a waiting sequence may end, too)

Owned by the scheduler. Whoever plans a step or takes in its result moves sequences through these
methods, so that queues, block tables and counters cannot part ways. Steps in flight are noted here
too, because blocks that these still use are given back only when they are over.
"""

from bisect import bisect_left, insort
from collections import Counter

from jitney.core.flight import Flight
from jitney.core.kv_cache import KvCache
from jitney.core.queue import LazyHeap
from jitney.core.sequence import Request, Sequence, State
from jitney.request import Batch, Finished, Row


def _rank(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.rank


class LiveRequests:
    """Requests by key, their sequences by state, and the blocks these hold."""

    def __init__(self, kv: KvCache) -> None:
        self.kv = kv
        self.requests: dict[int, Request] = {}
        self.running: list[Sequence] = []
        """By rank."""
        self.waiting: LazyHeap[Sequence] = LazyHeap()
        self.deadlines: LazyHeap[int] = LazyHeap()
        """Keys, by (deadline, key)."""
        self.num_queued = 0
        """Requests that were never seated."""
        self.promised = 0
        """Blocks set aside for the seated requests (``eviction: never``)."""
        self.preemptions = 0
        """Ever."""
        self.flights: list[Flight] = []
        """Steps in flight, the oldest first: one, or two from a plan ahead to the next update."""

    # ------------------------------------------------------------------ requests and sequences

    def add(self, request: Request) -> None:
        """A new request: its first sequence waits."""
        message, first = request.message, request.sequences[0]
        assert message.key not in self.requests, "a key was used twice"
        self.requests[message.key] = request
        self.num_queued += 1
        if message.deadline is not None:
            self.deadlines.push((message.deadline, message.key), message.key)
        self.waiting.push(first.rank, first)

    def seat(self, sequence: Sequence, table: list[int], num_computed: int, now: float) -> None:
        """Run ``sequence`` on ``table``, whose first ``num_computed`` tokens are written and whose
        full blocks among these are published already, as far as they ever will be."""
        assert sequence.state is State.WAITING
        self.waiting.discard(sequence)
        sequence.table = table
        sequence.num_computed = sequence.num_planned = num_computed
        sequence.num_published = num_computed // self.kv.block_size
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=_rank)
        request = sequence.request
        if request.first_scheduled is None:
            request.first_scheduled = now
            self.num_queued -= 1
            self.promised += request.promised

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue without blocks (a new fork: for want of them). It will recompute prompt
        and output, less what is still cached by then. Never happens to a sequence in flight."""
        assert sequence.num_planned == sequence.num_computed, "a step in flight computes it"
        if sequence.state is State.RUNNING:
            self._leave_running(sequence)
        self._give_up_table(sequence)
        sequence.num_computed = sequence.num_planned = sequence.num_published = 0
        sequence.request.preemptions += 1
        self.preemptions += 1
        sequence.state = State.WAITING
        self.waiting.push(sequence.rank, sequence)

    def end(self, sequence: Sequence) -> None:
        """A live sequence leaves its queue and gives back its blocks."""
        assert sequence.state is not State.ENDED
        if sequence.state is State.RUNNING:
            self._leave_running(sequence)
        else:
            self.waiting.discard(sequence)
        self._give_up_table(sequence)
        sequence.state = State.ENDED
        sequence.request.live -= 1

    def close(self, request: Request) -> None:
        """End what lives of a request and forget it."""
        for sequence in request.sequences:
            if sequence.state is not State.ENDED:
                self.end(sequence)
        key = request.message.key
        del self.requests[key]
        self.deadlines.discard(key)
        if request.first_scheduled is None:
            self.num_queued -= 1
        else:
            self.promised -= request.promised

    def finish(self, request: Request, now: float) -> Finished:
        """Close a request whose sequences have all ended."""
        assert request.live == 0
        self.close(request)
        return Finished(request.message.key, request.timing(now))

    def _leave_running(self, sequence: Sequence) -> None:
        position = bisect_left(self.running, sequence.rank, key=_rank)
        assert self.running.pop(position) is sequence

    def _give_up_table(self, sequence: Sequence) -> None:
        """Give the blocks back: behind the fence, if a step in flight uses them. A copy may be made
        for a sequence that is not itself in the step."""
        table = sequence.table
        sequence.table = []
        latest = self.flights[-1] if self.flights else None
        in_use = sequence.num_planned > sequence.num_computed
        if latest is not None and (in_use or latest.batch.copies):
            latest.fenced.append((table, sequence.num_computed))
        else:
            self.kv.release(table)

    # ------------------------------------------------------------------ steps in flight

    def sequence_of(self, row: Row) -> Sequence | None:
        """Whose step this row is. None if the sequence has ended meanwhile: the row is surplus."""
        request = self.requests.get(row.key)
        if request is None:
            return None
        sequence = request.sequences[row.index]
        return sequence if sequence.table is row.block_table else None

    def land(self, batch: Batch) -> None:
        """The oldest step in flight is over: its copies are made, its fence falls."""
        assert self.flights, "no step is in flight"
        flight = self.flights.pop(0)
        assert flight.batch is batch, "this step is not the oldest in flight"
        self.kv.settle(batch.copies)
        for table, _ in flight.fenced:
            self.kv.release(table)

    def revert(self, batch: Batch) -> None:
        """The latest step in flight counts as not made, and nothing of it runs any more. Its copies
        are still owed."""
        assert self.flights, "no step is in flight"
        flight = self.flights.pop()
        assert flight.batch is batch, "this step is not the latest in flight"
        for row in batch.rows:
            sequence = self.sequence_of(row)
            if sequence is not None:
                sequence.num_planned -= len(row.token_ids)
        if self.flights:  # which may use the same tables
            self.flights[-1].fenced += flight.fenced
            return
        for table, _ in flight.fenced:
            self.kv.release(table)

    # ------------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Assert that each request is in exactly one state, and every invariant of queues, steps in
        flight and blocks. Its cost is that of all requests and blocks."""
        seated: list[Sequence] = []
        queued = promised = waiting = 0
        for key, request in self.requests.items():
            assert request.message.key == key
            states = [sequence.state for sequence in request.sequences]
            unmade = request.message.params.n - len(states)
            assert request.live == unmade + sum(state is not State.ENDED for state in states)
            assert request.live > 0, f"request {key} has ended but is still here"
            assert unmade == 0 or request.first_token is None, f"request {key} did not fork"
            waiting += states.count(State.WAITING)
            queued += request.first_scheduled is None
            promised += 0 if request.first_scheduled is None else request.promised
            for sequence in request.sequences:
                self._check_sequence(sequence)
            seated += [one for one in request.sequences if one.state is State.RUNNING]
        assert sorted(seated, key=_rank) == self.running, "running is out of order or incomplete"
        assert waiting == len(self.waiting), "a sequence waits that is not live"
        assert queued == self.num_queued
        assert promised == self.promised <= self.kv.num_blocks, "more is promised than there is"
        with_deadline = sum(one.message.deadline is not None for one in self.requests.values())
        assert with_deadline == len(self.deadlines)
        assert all(key in self.requests for key in self.deadlines.members())
        self.waiting.check_integrity()
        self.deadlines.check_integrity()
        self._check_flights()
        tables = [(one.table, one.num_computed) for one in self.running]
        self.kv.check_integrity(tables + [one for each in self.flights for one in each.fenced])

    def _check_flights(self) -> None:
        """What is planned beyond the computed tokens is what the steps in flight compute."""
        tokens: Counter[tuple[int, int]] = Counter()
        samples: Counter[tuple[int, int]] = Counter()
        for flight in self.flights:
            for row in flight.batch.rows:
                if self.sequence_of(row) is not None:
                    tokens[row.key, row.index] += len(row.token_ids)
                    samples[row.key, row.index] += bool(row.sample)
        for sequence in self.running:
            key = (sequence.request.message.key, sequence.index)
            ahead = sequence.num_planned - sequence.num_computed
            assert ahead == tokens[key], f"{ahead} tokens are planned, {tokens[key]} in flight"
            pending = max(sequence.num_planned + 1 - sequence.num_tokens, 0)
            assert pending == samples[key], f"{pending} samples pend, {samples[key]} are in flight"
        owed = set(self.kv.owed_copies())
        for flight in self.flights:
            assert owed.issuperset(flight.batch.copies), "a copy in flight is not owed any more"
            owed.difference_update(flight.batch.copies)
        assert not self.flights or not owed, "a copy is owed, and no step in flight makes it"

    def _check_sequence(self, sequence: Sequence) -> None:
        size, capacity = sequence.num_tokens, len(sequence.table) * self.kv.block_size
        assert size == len(sequence.prompt) + len(sequence.output)
        assert (sequence in self.waiting) == (sequence.state is State.WAITING)
        if sequence.state is State.RUNNING:
            planned = sequence.num_planned
            assert sequence.num_computed < size, "nothing is left to compute"
            assert planned <= sequence.limit, "more is planned than can come of it"
            assert planned <= capacity, "tokens were planned into no block"
            assert len(sequence.table) <= self.kv.blocks_for(max(size, planned)), (
                "a block is not needed"
            )
            assert sequence.num_published <= sequence.num_computed // self.kv.block_size
        else:
            assert not sequence.table, "a sequence that does not run holds blocks"
        if sequence.state is State.WAITING:
            assert sequence.num_computed == sequence.num_planned == 0, (
                "a sequence without blocks has nothing computed"
            )
