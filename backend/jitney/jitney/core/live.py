"""All live requests and the only ways in which a sequence changes its state.

        add            seat              end
    ──────► WAITING ─────────► RUNNING ───────► ENDED
               ▲                  │
               └──────────────────┘
                     preempt           (a waiting sequence may end, too)

Owned by the scheduler. Whoever plans a step or takes in its result moves sequences through these
methods, so that queues, block tables and counters cannot part ways.
"""

from bisect import bisect_left, insort

from jitney.core.kv_cache import KvCache
from jitney.core.queue import LazyHeap
from jitney.core.sequence import Request, Sequence, State
from jitney.request import Finished


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
        sequence.num_computed = num_computed
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
        and output, less what is still cached by then."""
        if sequence.state is State.RUNNING:
            self._leave_running(sequence)
        self.kv.release(sequence.table)
        sequence.table = []
        sequence.num_computed = sequence.num_published = 0
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
        self.kv.release(sequence.table)
        sequence.table = []
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

    # ------------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Assert that each request is in exactly one state, and every invariant of queues and
        blocks. Its cost is that of all requests and blocks."""
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
        self.kv.check_integrity((one.table, one.num_computed) for one in self.running)

    def _check_sequence(self, sequence: Sequence) -> None:
        size, capacity = sequence.num_tokens, len(sequence.table) * self.kv.block_size
        assert size == len(sequence.prompt) + len(sequence.output)
        assert (sequence in self.waiting) == (sequence.state is State.WAITING)
        if sequence.state is State.RUNNING:
            assert sequence.num_computed < size, "nothing is left to compute"
            assert sequence.num_computed <= capacity, "tokens were computed into no block"
            assert len(sequence.table) <= self.kv.blocks_for(size), "a block is not needed"
            assert sequence.num_published <= sequence.num_computed // self.kv.block_size
        else:
            assert not sequence.table, "a sequence that does not run holds blocks"
        if sequence.state is State.WAITING:
            assert sequence.num_computed == 0, "a sequence without blocks has nothing computed"
