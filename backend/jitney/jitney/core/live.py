"""All live requests and the only ways in which a sequence changes its state.

        add            admit             end
    ──────► WAITING ─────────► RUNNING ───────► ENDED
               ▲                  │
               └──────────────────┘
                     preempt           (a waiting sequence may end, too)

Owned by the scheduler. Whoever plans a step or applies its output moves sequences through these
methods, so that queues, block tables and counters always agree. Steps in flight are noted here too,
because blocks that a step still uses are freed only when it is complete. ``integrity`` checks it.
"""

from bisect import insort

from jitney.core.deadlines import Deadlines
from jitney.core.kv_cache import KvCache
from jitney.core.policy.seam import Admission
from jitney.core.request import Request, Sequence, State, by_rank, remove_ranked
from jitney.core.step_in_flight import StepInFlight
from jitney.messages import Batch, Finished, Row


class LiveRequests:
    """Requests by key, their sequences by state, and the blocks these hold."""

    def __init__(self, kv: KvCache, admission: Admission) -> None:
        self.kv = kv
        self.admission = admission
        """Holds the waiting sequences."""
        self.requests: dict[int, Request] = {}
        self.running: list[Sequence] = []
        """By rank."""
        self.deadlines = Deadlines()
        self.reserved_blocks = 0
        """Blocks reserved for the requests of which something runs (``eviction: never``)."""
        self.preemptions = 0
        """Ever."""
        self.in_flight: list[StepInFlight] = []
        """Steps in flight, the oldest first: one, or two from a plan ahead to the next update."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return self.admission.num_waiting

    # ------------------------------------------------------------------ requests and sequences

    def add(self, request: Request) -> None:
        """A new request, which counts as queued already: its first sequence waits, or those of a
        resumed one that have not ended."""
        message = request.message
        assert message.key not in self.requests, "a key was used twice"
        self.requests[message.key] = request
        self.deadlines.add(message)
        for sequence in request.sequences:
            if sequence.state is State.WAITING:
                self.wait(sequence, message.arrival)

    def wait(self, sequence: Sequence, since: float) -> None:
        """Put a sequence without blocks into the queue: its state until it is admitted."""
        sequence.state = State.WAITING
        sequence.waiting_since = since
        self.admission.add(sequence)

    def admit(self, sequence: Sequence, table: list[int], num_computed: int, now: float) -> None:
        """Run ``sequence`` on ``table``, whose first ``num_computed`` tokens are written and whose
        full blocks among these have been offered to the prefix cache."""
        assert sequence.state is State.WAITING
        self.admission.remove(sequence)
        sequence.table = table
        sequence.num_computed = num_computed
        sequence.num_planned = num_computed
        sequence.num_cached_blocks = num_computed // self.kv.block_size
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=by_rank)
        self.reserved_blocks += sequence.reserved_blocks
        request = sequence.request
        if not request.running:
            self.reserved_blocks += request.reserved_blocks
        request.running += 1
        if request.first_scheduled is None:
            request.first_scheduled = now
            self.admission.count_dequeued(request.message)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Back to the queue because no block is free. It will recompute prompt and output, except
        for what is still cached then. Never called for a sequence in flight."""
        assert sequence.num_planned == sequence.num_computed, "a step in flight computes it"
        if sequence.state is State.RUNNING:  # a new fork that finds no block does not run yet
            self._leave_running(sequence)
        self._give_up_table(sequence)
        sequence.num_computed = 0
        sequence.num_planned = 0
        sequence.num_cached_blocks = 0
        sequence.num_read = 0
        sequence.request.preempted.append(now)
        self.preemptions += 1
        self.wait(sequence, now)

    def end(self, sequence: Sequence) -> None:
        """A live sequence leaves its queue and frees its blocks."""
        assert sequence.state is not State.ENDED
        if sequence.state is State.RUNNING:
            self._leave_running(sequence)
        else:
            self.admission.remove(sequence)
        self._give_up_table(sequence)
        sequence.state = State.ENDED
        sequence.grammar = None
        sequence.request.live -= 1

    def close(self, request: Request) -> None:
        """End the live sequences of a request and forget it."""
        for sequence in request.sequences:
            if sequence.state is not State.ENDED:
                self.end(sequence)
        message = request.message
        del self.requests[message.key]
        self.deadlines.remove(message)
        if request.first_scheduled is None:
            self.admission.count_dequeued(message)

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
        found = remove_ranked(self.running, sequence)
        assert found, "a running sequence is not where its rank says"
        request = sequence.request
        request.running -= 1
        if not request.running:
            self.reserved_blocks -= request.reserved_blocks
        self.reserved_blocks -= sequence.reserved_blocks

    def _give_up_table(self, sequence: Sequence) -> None:
        """Free the blocks; if a step in flight uses them, only once it is complete (*deferred
        free*)."""
        table = sequence.table
        sequence.table = []
        if not self.in_flight:
            self.kv.release(table)
            return
        latest = self.in_flight[-1]
        computed_in_flight = sequence.num_planned > sequence.num_computed
        # A copy may be made for a sequence that is not itself in the step.
        if computed_in_flight or latest.batch.copies:
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
        self._release(step)
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
        if self.in_flight:  # it may use the same tables
            self.in_flight[-1].deferred += step.deferred
        else:
            self._release(step)

    def _release(self, step: StepInFlight) -> None:
        """No step in flight uses the tables that were given up."""
        for table, _ in step.deferred:
            self.kv.release(table)
