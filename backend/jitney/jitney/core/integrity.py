"""Checks of the live requests: each is in exactly one state, and queues, steps in flight and blocks
agree. Called through the scheduler: by the engine when it is idle, by tests after each step.
"""

from collections import Counter
from collections.abc import Iterator

from jitney.core.kv_cache import KvCache
from jitney.core.live import LiveRequests
from jitney.core.request import Request, Sequence, SequenceState, order


def integrity_checks(live: LiveRequests, num_held: int) -> Iterator[None]:
    """Assert every invariant. The blocks, of which there may be many, are checked in slices, each
    of which ends in a yield. ``num_held``: queued requests that are not live yet."""
    for key, request in live.requests.items():
        assert request.message.key == key
        _check_request(request, live.kv)
    _check_running(live)
    _check_waiting(live, num_held)
    _check_deadlines(live)
    _check_sequences_in_flight(live)
    _check_copies_in_flight(live)
    _check_slots(live)
    tables = [(sequence.table, sequence.num_computed) for sequence in live.running]
    for step in live.in_flight:
        tables += [(deferred.table, deferred.num_computed) for deferred in step.deferred]
    yield from live.kv.integrity_checks(tables)


def _check_request(request: Request, kv: KvCache) -> None:
    states = [sequence.state for sequence in request.sequences]
    num_forks_due = request.num_forks_due
    not_ended = len(states) - states.count(SequenceState.ENDED)
    key = request.message.key
    assert request.num_live == num_forks_due + not_ended
    assert request.num_live > 0, f"request {key} has ended but is still here"
    assert num_forks_due == 0 or request.first_token_at is None, f"request {key} did not fork"
    assert request.num_running == states.count(SequenceState.RUNNING)
    for sequence in request.sequences:
        _check_sequence(sequence, kv)


def _check_sequence(sequence: Sequence, kv: KvCache) -> None:
    assert sequence.num_tokens == len(sequence.prompt) + len(sequence.output)
    if sequence.counts is not None:
        counted = dict(zip(sequence.counts.output_ids, sequence.counts.output_counts, strict=True))
        assert counted == Counter(sequence.output), "the tokens of an output are miscounted"
    if sequence.state is SequenceState.RUNNING:
        planned = sequence.num_planned
        capacity = len(sequence.table) * kv.block_size
        assert sequence.num_computed < sequence.num_tokens, "nothing is left to compute"
        assert planned <= sequence.max_computed, "more is planned than is ever computed"
        assert planned <= capacity, "tokens were planned into no block"
        assert sequence.num_offered_blocks <= sequence.num_computed // kv.block_size
    else:
        assert not sequence.table, "a sequence that does not run holds blocks"
        assert sequence.slot is None, "a sequence that does not run holds a slot"
    if sequence.state is SequenceState.WAITING:
        nothing_computed = sequence.num_computed == sequence.num_planned == 0
        assert nothing_computed, "a sequence without blocks has nothing computed"


def _in_state(live: LiveRequests, state: SequenceState) -> list[Sequence]:
    """All sequences in a state, in order."""
    found = []
    for request in live.requests.values():
        found += [sequence for sequence in request.sequences if sequence.state is state]
    return sorted(found, key=order)


def _check_running(live: LiveRequests) -> None:
    running = _in_state(live, SequenceState.RUNNING)
    assert running == live.running, "running is out of order or incomplete"
    counts = live.admission.running_counts
    assert len(running) <= counts.max_running, "more sequences run than may"
    counts.check(running)
    by_tier = Counter(sequence.request.tier for sequence in running)
    for sequence in running:
        request = sequence.request
        assert by_tier[request.tier] <= request.most_running, "too many sequences of a tier run"
    reserved = sum(sequence.reserved_blocks for sequence in running)
    for request in live.requests.values():
        if request.num_running:
            reserved += request.reserved_blocks
    assert reserved == live.reserved_blocks, "reserved blocks are miscounted"
    assert reserved <= live.kv.num_blocks, "too much is reserved"


def _check_waiting(live: LiveRequests, num_held: int) -> None:
    waiting = sorted(live.admission.waiting(), key=order)
    assert waiting == _in_state(live, SequenceState.WAITING), "a queue is incomplete"
    requests = live.requests.values()
    num_queued = sum(request.is_queued for request in requests)
    assert live.admission.num_queued == num_queued + num_held
    with_running = [request for request in requests if request.num_running]
    assert live.num_running_requests == len(with_running), "running requests are miscounted"


def _check_deadlines(live: LiveRequests) -> None:
    expected = []
    for request in live.requests.values():
        message = request.message
        if message.deadline is not None:
            expected.append((message.deadline, message.key))
    assert sorted(expected) == live.deadlines.entries, "a deadline is missing, or of nobody"


def _check_sequences_in_flight(live: LiveRequests) -> None:
    """What is planned beyond the computed tokens is what the steps in flight compute."""
    tokens: Counter[tuple[int, int]] = Counter()
    samples: Counter[tuple[int, int]] = Counter()
    lookahead: Counter[tuple[int, int]] = Counter()
    for step in live.in_flight:
        for row in step.batch.rows:
            sequence = live.sequence_of(row)
            if sequence is None:
                continue
            assert row.block_table == sequence.table, "a row in flight has another table"
            key = (row.key, row.index)
            tokens[key] += len(row.token_ids)
            # A row samples once after each draft, and once after the last known token. The row that
            # ends a prompt samples for each of the request's n sequences, but only once for this
            # one.
            samples[key] += row.drafts
            if row.sample:
                samples[key] += 1
            # The slots for proposed tokens come after the tokens of their row. A later row of the
            # same sequence takes these slots. So this is set, not added: the latest row counts.
            lookahead[key] = row.propose
    for sequence in live.running:
        key = (sequence.request.message.key, sequence.index)
        ahead = sequence.num_planned - sequence.num_computed
        assert ahead == tokens[key], f"{ahead} tokens are planned, {tokens[key]} in flight"
        # The table has no blocks beyond those for known tokens and lookahead.
        end = max(sequence.num_planned + lookahead[key], sequence.num_tokens)
        assert len(sequence.table) <= live.kv.blocks_for(end), "a block is not needed"
        # Tokens at [num_tokens, num_planned + 1): sampled by steps in flight, not known yet (see
        # Sequence).
        pending = max(sequence.num_planned + 1 - sequence.num_tokens, 0)
        assert pending == samples[key], f"{pending} samples pending, {samples[key]} in flight"


def _check_slots(live: LiveRequests) -> None:
    """Each running sequence holds a slot of its own, if the model has any."""
    slots = [sequence.slot for sequence in live.running]
    for slot in slots:
        assert (slot is not None) == live.slots.is_used, "a sequence runs without a slot"
    begun = []
    for step in live.in_flight:
        slots += [deferred.slot for deferred in step.deferred]
        begun += [snapshot.slot for snapshot in step.snapshots]
        for row in step.batch.rows:
            sequence = live.sequence_of(row)
            assert sequence is None or row.slot == sequence.slot, "a row in flight has another slot"
    held = [slot for slot in slots if slot is not None]
    live.slots.check_integrity(held, begun)


def _check_copies_in_flight(live: LiveRequests) -> None:
    """If steps are in flight, each pending copy is made by exactly one of them."""
    steps = [step.batch for step in live.in_flight]
    if steps:
        _check_copies(live.kv.pending_copies(), [batch.copies for batch in steps])
        _check_copies(live.slots.pending_copies(), [batch.slot_copies for batch in steps])


def _check_copies(pending: list[tuple[int, int]], of_steps: list[list[tuple[int, int]]]) -> None:
    """``of_steps``: the copies that each of the steps in flight makes."""
    not_found = set(pending)
    for copies in of_steps:
        assert not_found.issuperset(copies), "a copy in flight is not pending any more"
        not_found.difference_update(copies)
    assert not not_found, "no step in flight makes a pending copy"
