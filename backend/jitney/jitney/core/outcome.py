"""What a step's output does to the live requests: new tokens, ends, full blocks, forks.

The second half of the scheduler: :func:`apply_output` is called by ``Scheduler.update`` alone,
:func:`final_event` also by the engine's journal.
"""

from itertools import takewhile

from jitney.core.live import LiveRequests
from jitney.core.request import Request, Sequence, State
from jitney.messages import (
    Event,
    FinishReason,
    Logprob,
    PromptLogprobs,
    Row,
    RowOutput,
    StepStats,
    Submit,
    Tokens,
)


def apply_output(
    live: LiveRequests,
    sequence: Sequence,
    row: Row,
    result: RowOutput,
    now: float,
    caching: bool,
    counts: StepStats,
) -> list[Event]:
    """Advance a row's sequence by what was computed. Returns the events, in order.

    Drafts count as computed as far as they are what was sampled. The others were never there: their
    slots are written again before anybody reads them, and blocks beyond the next token are freed.
    """
    request = sequence.request
    events: list[Event] = []
    event, accepted = None, 0
    decodes = bool(sequence.output)
    if decodes and row.sample:
        known = len(row.token_ids) - row.drafts
        drafts = row.token_ids[known : known + len(result.token_ids) - 1]
        event, accepted = _append(sequence, result.token_ids, result.logprobs, drafts)
        events.append(event)
        # It stands behind samples: where a grammar forced other tokens, it means nothing.
        follows = event.ids == result.token_ids[: 1 + accepted]
        sequence.proposed = result.proposal if follows else []
        if row.propose and sequence.drafting is not None:
            sequence.drafting.read = row.end - row.drafts + accepted + 1 - result.unread
        counts.draft_rows += row.drafts > 0
        counts.draft_tokens += row.drafts
        counts.accepted_tokens += accepted
    count = len(row.token_ids) - row.drafts + accepted
    sequence.num_computed += count
    sequence.num_planned -= row.drafts - accepted
    if caching:
        _cache_full_blocks(live, sequence)
    if not decodes:
        request.computed_prompt_tokens += count
        if row.params.prompt_logprobs is not None:
            _collect_prompt_logprobs(request, row, result)
            if row.sample:
                events.append(PromptLogprobs(row.key, request.prompt_logprobs))
        if row.sample:
            _take_first_tokens(live, sequence, result, now, events)
    if event is not None and event.finish_reason is not None:
        live.end(sequence)
    elif sequence.state is State.RUNNING and (row.drafts or row.propose):
        live.give_back(sequence)
    made = [len(one.ids) for one in events if isinstance(one, Tokens)]
    counts.generated_tokens += sum(made)
    counts.forced_tokens += sum(made) - len(made) - accepted
    if not request.live:
        events.append(live.finish(request, now))
    return events


def final_event(of: Submit, index: int, cumulative: float, reason: FinishReason) -> Tokens:
    """The end of a sequence for a reason other than a token: none comes with it. ``cumulative`` is
    the logprob of what it has."""
    asked = of.params.logprobs is not None
    return Tokens(
        key=of.key,
        index=index,
        ids=[],
        logprobs=[] if asked else None,
        cumulative_logprob=cumulative if asked else None,
        finish_reason=reason,
    )


def _cache_full_blocks(live: LiveRequests, sequence: Sequence) -> None:
    """Offer the blocks that this step filled to the prefix cache."""
    block_size = live.kv.block_size
    full = sequence.num_computed // block_size
    if full == sequence.num_cached_blocks:
        return
    hashes = sequence.hash_blocks(full, block_size)
    for position in range(sequence.num_cached_blocks, full):
        live.kv.cache_block(sequence.table[position], hashes[position])
    sequence.num_cached_blocks = full


def _collect_prompt_logprobs(request: Request, row: Row, result: RowOutput) -> None:
    """Append the logprobs of the prompt positions that a chunk gave."""
    known, entries = request.prompt_logprobs, result.prompt_logprobs or []
    last = min(row.end, len(row.prompt) - 1)
    assert len(entries) == max(last - row.start, 0), "prompt logprobs are missing"
    repeated = len(known) - (row.start + 1)  # a recomputed chunk gives them again
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
        logprobs = None if result.logprobs is None else result.logprobs[position:]
        event, _ = _append(sequence, result.token_ids[position:], logprobs, [])
        events.append(event)
        (alive if event.finish_reason is None else ended).append(sequence)
    _fork(live, leader, alive, now)
    for sequence in ended:
        live.end(sequence)


def _fork(live: LiveRequests, leader: Sequence, alive: list[Sequence], now: float) -> None:
    """Give the live sequences a table over the prompt's blocks: full blocks are shared, a partial
    last one is copied. A sequence for whose copy no block is free, or which would be one more than
    may run, waits and recomputes."""
    num_computed = leader.num_computed
    hashes = leader.hashes[: num_computed // live.kv.block_size]
    for sequence in alive:
        if sequence is leader:
            continue
        sequence.hashes = hashes.copy()
        if live.is_full(sequence.request.tier):
            live.wait(sequence, now)
            continue
        table = live.kv.fork(leader.table, num_computed)
        if table is None:
            live.preempt(sequence, now)
        else:
            live.admit(sequence, table, num_computed, now)


def _append(
    sequence: Sequence,
    sampled: list[int],
    logprobs: list[list[Logprob]] | None,
    drafts: list[int],
) -> tuple[Tokens, int]:
    """Append the first of ``sampled``, those behind each draft that is right, and the tokens that a
    grammar forces after one: these are not sampled, but a draft of one is as good as any. Returns
    their event, with the finish reason if the sequence ends, and how many drafts are accepted."""
    message, grammar = sequence.request.message, sequence.grammar
    ids: list[int] = []
    due: list[int] = []
    accepted, goes_on = 0, True  # sampled[accepted] follows what is output by now
    while goes_on or due:
        is_sampled = not due
        token = sampled[accepted] if is_sampled else due.pop(0)
        ids.append(token)
        reason, stop_id = _add_token(sequence, token)
        if reason is not None:
            break
        if is_sampled and grammar is not None and sequence.request.takes_forced:
            # What ends the sequence is left to the sampler.
            due = list(takewhile(lambda id: id not in message.stop_ids, grammar.forced()))
        goes_on = goes_on and drafts[accepted : accepted + 1] == [token]
        accepted += goes_on
    cumulative = None
    kept: list[list[Logprob]] | None = None
    if message.params.logprobs is not None:
        assert logprobs is not None, "logprobs are missing"
        kept = logprobs[: len(ids)]
        for candidates in kept:
            sequence.cumulative_logprob += candidates[0].logprob
        cumulative = sequence.cumulative_logprob
    event = Tokens(
        key=message.key,
        index=sequence.index,
        ids=ids,
        logprobs=kept,
        cumulative_logprob=cumulative,
        finish_reason=reason,
        stop_id=stop_id,
    )
    return event, accepted


def _add_token(sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
    """Append one token. Why the sequence ends by it, if it does, and the stop id if it is one."""
    request, message = sequence.request, sequence.request.message
    sequence.output.append(token)
    sequence.num_tokens += 1
    num_output = len(sequence.output)
    if token in message.stop_ids and num_output > message.params.min_tokens:
        return "stop", token
    if sequence.grammar is not None:
        sequence.grammar.accept([token])
        if sequence.grammar.ended:  # nothing may follow it
            return "stop", None
    return ("length" if num_output >= request.max_output else None), None
