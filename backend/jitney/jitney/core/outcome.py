"""What a step's result does to the live requests: new tokens, ends, full blocks, forks.

The second half of the scheduler: :func:`take_in` is called by ``Scheduler.update`` alone.
"""

from collections.abc import Sequence as Seq

from jitney.core.live import LiveRequests
from jitney.core.sequence import Request, Sequence
from jitney.request import (
    Event,
    FinishReason,
    PromptLogprobs,
    Row,
    RowOutput,
    Tokens,
)


def take_in(
    live: LiveRequests,
    sequence: Sequence,
    row: Row,
    result: RowOutput,
    now: float,
    caching: bool,
) -> list[Event]:
    """Advance a row's sequence by what was computed and say what came of it, in order."""
    request = sequence.request
    count = len(row.token_ids)
    sequence.num_computed += count
    if caching:
        _publish(live, sequence)
    events: list[Event] = []
    if not sequence.output:
        request.computed_prompt_tokens += count
        if row.params.prompt_logprobs is not None:
            _collect_prompt_logprobs(request, row, result)
            if row.sample:
                events.append(PromptLogprobs(row.key, request.prompt_logprobs))
        if row.sample:
            _take_first_tokens(live, sequence, result, now, events)
    elif row.sample:
        event = _append(sequence, result, 0)
        events.append(event)
        if event.finish_reason is not None:
            live.end(sequence)
    if not request.live:
        events.append(live.finish(request, now))
    return events


def last_word(sequence: Sequence, reason: FinishReason) -> Tokens:
    """The end of a sequence for a reason from outside: no token comes with it."""
    wanted = sequence.request.message.params.logprobs is not None
    return Tokens(
        key=sequence.request.message.key,
        index=sequence.index,
        ids=[],
        logprobs=[] if wanted else None,
        cumulative_logprob=sequence.cumulative_logprob if wanted else None,
        finish_reason=reason,
    )


def _publish(live: LiveRequests, sequence: Sequence) -> None:
    """Offer the blocks that this step filled to the prefix cache."""
    block_size = live.kv.block_size
    full = sequence.num_computed // block_size
    if full == sequence.num_published:
        return
    hashes = sequence.hash_blocks(full, block_size)
    for position in range(sequence.num_published, full):
        live.kv.publish(sequence.table[position], hashes[position])
    sequence.num_published = full


def _collect_prompt_logprobs(request: Request, row: Row, result: RowOutput) -> None:
    """Append what a chunk told of the prompt positions after it began."""
    known, entries = request.prompt_logprobs, result.prompt_logprobs or []
    last = min(row.end, len(row.prompt) - 1)
    assert len(entries) == max(last - row.start, 0), "prompt logprobs are missing"
    repeated = len(known) - (row.start + 1)  # a recomputed chunk says what was said before
    assert repeated >= 0, "prompt logprobs have a gap"
    known += entries[repeated:]


def _take_first_tokens(
    live: LiveRequests, leader: Sequence, result: RowOutput, now: float, events: list[Event]
) -> None:
    """The prompt is computed: make the other n − 1 sequences and append each one's first token."""
    request = leader.request
    request.first_token = now
    for index in range(1, request.message.params.n):
        request.sequences.append(Sequence(request, index))
    alive: list[Sequence] = []
    ended: list[Sequence] = []
    for position, sequence in enumerate(request.sequences):
        event = _append(sequence, result, position)
        events.append(event)
        (alive if event.finish_reason is None else ended).append(sequence)
    _fork(live, leader, alive, now)
    for sequence in ended:
        live.end(sequence)


def _fork(live: LiveRequests, leader: Sequence, alive: Seq[Sequence], now: float) -> None:
    """Give the sequences that go on a table over the prompt's blocks: full blocks are shared, a
    partial last one is copied. Who finds no block for its copy waits, and recomputes."""
    num_computed = leader.num_computed
    hashes = leader.hashes[: num_computed // live.kv.block_size]
    for sequence in alive:
        if sequence is leader:
            continue
        sequence.hashes = hashes.copy()
        table = live.kv.fork(leader.table, num_computed)
        if table is None:
            live.preempt(sequence)
        else:
            live.seat(sequence, table, num_computed, now)


def _append(sequence: Sequence, result: RowOutput, position: int) -> Tokens:
    """Append the token sampled at ``position`` of the row's sample and say whether it ends."""
    request = sequence.request
    message = request.message
    token = result.token_ids[position]
    sequence.output.append(token)
    sequence.num_tokens += 1
    num_output = len(sequence.output)
    reason: FinishReason | None = None
    stop_id = None
    if token in message.stop_ids and num_output > message.params.min_tokens:
        reason, stop_id = "stop", token
    elif num_output >= request.max_output:
        reason = "length"
    logprobs = cumulative = None
    if message.params.logprobs is not None:
        assert result.logprobs is not None, "logprobs are missing"
        candidates = result.logprobs[position]
        sequence.cumulative_logprob += candidates[0].logprob
        logprobs, cumulative = [candidates], sequence.cumulative_logprob
    return Tokens(
        key=message.key,
        index=sequence.index,
        ids=[token],
        logprobs=logprobs,
        cumulative_logprob=cumulative,
        finish_reason=reason,
        stop_id=stop_id,
    )
