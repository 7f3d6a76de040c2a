"""All live requests and the only ways in which a sequence changes its state.

        add            admit             end
    ──────► WAITING ─────────► RUNNING ───────► ENDED
               ▲                  │
               └──────────────────┘
                     preempt           (a waiting sequence may end, too)

Owned by the scheduler. ``plan`` and ``outcome`` move sequences through these methods, so that
queues, block tables, slots and counters always agree. Steps in flight are noted here too, because
blocks that a step still uses are freed only when it is complete. ``integrity`` checks all of it.
"""

from bisect import insort

from jitney.batch import Batch, Row
from jitney.core.deadlines import Deadlines
from jitney.core.kv_cache import KvCache
from jitney.core.planned_step import BegunSnapshot, DeferredFree, PlannedStep
from jitney.core.policy.seam import Admission
from jitney.core.request import Request, Sequence, SequenceState, order, remove_ordered
from jitney.core.slots import Slots
from jitney.messages import Finished

_ENDED = SequenceState.ENDED  # a name of its own saves time: it is read for each row of each step


class LiveRequests:
    """Requests by key, their sequences by state, and the blocks and slots that these hold."""

    def __init__(
        self,
        kv: KvCache,
        admission: Admission,
        slots: Slots | None = None,
        *,
        forks_share_blocks: bool = True,
    ) -> None:
        """Without ``slots`` no sequence holds one. ``forks_share_blocks``: whether a fork reads the
        full blocks of its leader; else it gets copies of them."""
        self.kv = kv
        self.slots = slots or Slots(0)
        self.forks_share_blocks = forks_share_blocks
        self.admission = admission
        """Holds the waiting sequences."""
        self.requests: dict[int, Request] = {}
        self.running: list[Sequence] = []
        """In order: see ``request.order``."""
        self.deadlines = Deadlines()
        self.reserved_blocks = 0
        """Blocks reserved for requests with running sequences, and for such sequences themselves
        (``eviction: never``)."""
        self.num_running_requests = 0
        """Requests with running sequences."""
        self.preemptions = 0
        """All preemptions since the start."""
        self.in_flight: list[PlannedStep] = []
        """Steps in flight, the oldest first. At most one, or two between a plan ahead and the next
        update."""
        self.to_restart: list[Sequence] = []
        """Sequences of reverted steps. Their slots may hold the past of more tokens than are
        computed, so :meth:`restart_reverted` begins them anew."""

    @property
    def num_waiting_requests(self) -> int:
        """Requests of which no sequence runs."""
        return len(self.requests) - self.num_running_requests

    # ------------------------------------------------------------------ requests and sequences

    def add(self, request: Request) -> None:
        """Take a new request, which was counted as queued before. Its sequences wait: one, or all
        that have not ended if the request is resumed."""
        message = request.message
        assert message.key not in self.requests, "a key was used twice"
        self.requests[message.key] = request
        self.deadlines.add(message)
        for sequence in request.sequences:
            if sequence.state is SequenceState.WAITING:
                self.wait(sequence, message.arrival)

    def wait(self, sequence: Sequence, since: float) -> None:
        """Put a sequence without blocks into the queue, where it stays until it is admitted or
        ends."""
        sequence.state = SequenceState.WAITING
        sequence.waiting_since = since
        self.admission.add(sequence)

    def admit(self, sequence: Sequence, table: list[int], num_computed: int, now: float) -> None:
        """Run ``sequence`` on ``table``, and on its slot if it has one. Its first ``num_computed``
        tokens are written, and the blocks that these fill have been offered to the prefix cache."""
        assert sequence.state is SequenceState.WAITING
        self.admission.remove(sequence)  # ignored for a fork that runs as soon as it is made
        sequence.table = table
        sequence.num_computed = num_computed
        sequence.num_planned = num_computed
        sequence.num_offered_blocks = num_computed // self.kv.block_size
        sequence.snapshot_at = num_computed
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=order)
        self.admission.note_admitted(sequence)
        self.reserved_blocks += sequence.reserved_blocks
        request = sequence.request
        if not request.num_running:
            self.reserved_blocks += request.reserved_blocks
            self.num_running_requests += 1
        request.num_running += 1
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
        if request.is_queued:
            request.is_queued = False
            self.admission.count_dequeued(request.message)

    def make_forks(self, request: Request) -> None:
        """A running request has computed its prompt: make the other n − 1 sequences. Each of them
        is then admitted, or waits, or ends."""
        num_forks = request.num_forks_due
        self.admission.running_counts.note_forked(request, num_forks)
        for index in range(1, 1 + num_forks):
            request.sequences.append(Sequence(request, index))

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Put a sequence back into the queue because blocks are short. It will recompute prompt and
        output, except for what is still cached then. Never called for a sequence that a step in
        flight computes."""
        assert sequence.num_planned == sequence.num_computed, "a step in flight computes it"
        # A new fork is preempted before it runs, if no block is free for its copy.
        if sequence.state is SequenceState.RUNNING:
            self._leave_running(sequence)
        self._give_up_table(sequence)
        sequence.num_computed = 0
        sequence.num_planned = 0
        sequence.num_offered_blocks = 0
        sequence.num_read = 0
        sequence.request.preempted_at.append(now)
        self.preemptions += 1
        self.wait(sequence, now)

    def restart_reverted(self, now: float) -> None:
        """Preempt the sequences of reverted steps that hold slots: they begin anew, from token 0 or
        a snapshot. A step that fails may have computed some of its rows, and what a slot holds
        cannot be taken back by a token. No step may be in flight."""
        assert not self.in_flight
        for sequence in self.to_restart:
            # It may have ended meanwhile, or stand in the list twice.
            if sequence.state is SequenceState.RUNNING:
                self.preempt(sequence, now)
        self.to_restart.clear()

    def end_sequence(self, sequence: Sequence) -> None:
        """A live sequence leaves its queue and frees its blocks and its slot."""
        assert sequence.state is not SequenceState.ENDED
        if sequence.state is SequenceState.RUNNING:
            self._leave_running(sequence)
        else:
            self.admission.remove(sequence)  # ignored for a fork that ends as soon as it is made
        self._give_up_table(sequence)
        sequence.state = SequenceState.ENDED
        sequence.grammar = None
        sequence.request.num_live -= 1

    def remove_request(self, request: Request) -> None:
        """End the live sequences of a request and forget it."""
        for sequence in request.sequences:
            if sequence.state is not SequenceState.ENDED:
                self.end_sequence(sequence)
        message = request.message
        del self.requests[message.key]
        self.deadlines.remove(message)
        if request.is_queued:
            self.admission.count_dequeued(message)

    def finish_request(self, request: Request, now: float) -> Finished:
        """Remove a request whose sequences have all ended."""
        assert request.num_live == 0
        self.remove_request(request)
        return Finished(request.message.key, request.timing(now))

    def free_lookahead(self, sequence: Sequence) -> None:
        """A row of a running sequence is over: free the blocks that were allocated for its drafts
        and proposals, if no token needs them."""
        kept = self.kv.blocks_for(max(sequence.num_planned, sequence.num_tokens))
        self.kv.release(sequence.table[kept:])
        del sequence.table[kept:]

    def keep_snapshots(self, snapshots: list[BegunSnapshot]) -> None:
        """The output of the step that made these snapshots is applied: from now on they are found.
        Those of sequences that the step has not advanced, because they had ended or their row has
        failed, come to nothing."""
        for sequence, end, slot in snapshots:
            if sequence.num_computed < end:
                self.slots.drop_snapshot(slot)
                continue
            count = end // self.kv.block_size
            key = sequence.hash_blocks(count, self.kv.block_size)[-1]
            self.slots.keep_snapshot(slot, key)

    def _leave_running(self, sequence: Sequence) -> None:
        found = remove_ordered(self.running, sequence)
        assert found, "a running sequence is not where its rank says"
        self.admission.note_left(sequence)
        request = sequence.request
        request.num_running -= 1
        if not request.num_running:
            self.reserved_blocks -= request.reserved_blocks
            self.num_running_requests -= 1
        self.reserved_blocks -= sequence.reserved_blocks

    def _give_up_table(self, sequence: Sequence) -> None:
        """Free the blocks and the slot of a sequence. If a step in flight may use them, they are
        freed when it is complete (*deferred free*)."""
        table = sequence.table
        sequence.table = []
        slot = sequence.slot
        sequence.slot = None
        step = self._step_that_may_use(sequence)
        if step is None:
            self.kv.release(table)
            self.slots.release(slot)
        else:
            step.deferred.append(DeferredFree(table, sequence.num_computed, slot))

    def _step_that_may_use(self, sequence: Sequence) -> PlannedStep | None:
        """The step in flight that may use the blocks of a sequence which gives up its table."""
        if not self.in_flight:
            return None
        # Even with overlap, at most one step is in flight when a table is given up. There are three
        # ways to get here:
        # - a message, which the engine passes on only while at most one step is in flight;
        # - update(), which has taken its own step out by then;
        # - preemption, which happens only while no step is in flight.
        assert len(self.in_flight) == 1, "a table is given up while two steps are in flight"
        step = self.in_flight[0]
        if sequence.num_planned > sequence.num_computed:
            return step  # it computes the sequence
        # A step may also copy blocks and slots of sequences that it does not compute. Copies are
        # rare. So the tables are not searched: if the step makes any copy, it may use them.
        if step.batch.copies or step.batch.slot_copies:
            return step
        return None

    # ------------------------------------------------------------------ steps in flight

    def sequence_of(self, row: Row) -> Sequence | None:
        """The sequence of a row in flight. None if it has ended meanwhile: the row is surplus. (It
        cannot wait: while a step in flight computes it, it is not preempted.)"""
        request = self.requests.get(row.key)
        if request is None:
            return None
        sequence = request.sequences[row.index]
        return None if sequence.state is _ENDED else sequence

    def complete(self, batch: Batch) -> PlannedStep:
        """The oldest step in flight is complete, and so are its copies. Do its deferred frees."""
        assert self.in_flight, "no step is in flight"
        step = self.in_flight.pop(0)
        assert step.batch is batch, "this step is not the oldest in flight"
        self.kv.complete_copies(batch.copies)
        self.slots.complete_copies(batch.slot_copies)
        self._release(step)
        return step

    def revert(self, batch: Batch) -> None:
        """Undo the plan of the latest step in flight. The device must be done with it. Its copies
        are still pending. Sequences with slots begin anew, once no step is in flight."""
        assert self.in_flight, "no step is in flight"
        step = self.in_flight.pop()
        assert step.batch is batch, "this step is not the latest in flight"
        for row in batch.rows:
            sequence = self.sequence_of(row)
            if sequence is not None:
                sequence.num_planned -= len(row.token_ids)
                if row.drafts or row.propose:
                    self.free_lookahead(sequence)
                if sequence.slot is not None:
                    self.to_restart.append(sequence)
        if batch.slot_copies:
            # A copy may have been made from a slot that this step has changed, or not at all.
            copied = {destination for _, destination in batch.slot_copies}
            self.to_restart += [each for each in self.running if each.slot in copied]
        for snapshot in step.snapshots:
            self.slots.drop_snapshot(snapshot.slot)
        if self.in_flight:  # the step before this one may still use the same tables
            self.in_flight[-1].deferred += step.deferred
        else:
            self._release(step)

    def _release(self, step: PlannedStep) -> None:
        """Do the deferred frees of a step."""
        for deferred in step.deferred:
            self.kv.release(deferred.table)
            self.slots.release(deferred.slot)
