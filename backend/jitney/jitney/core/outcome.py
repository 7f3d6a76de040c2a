"""What a step's output does to the live requests: new tokens, ends, full blocks, forks.

The second half of the scheduler: ``Scheduler.update`` makes an :class:`Outcome` of each step,
:func:`final_event` is also called by the engine's journal.
"""

from dataclasses import dataclass
from itertools import takewhile

import msgspec

from jitney.core.live import LiveRequests
from jitney.core.request import Request, Sequence
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


@dataclass(slots=True)
class Outcome:
    """Applies the outputs of one step's rows, in order, and collects the events."""

    live: LiveRequests
    counts: StepStats
    caching: bool
    """Whether full blocks are offered to the prefix cache."""
    now: float
    events: list[Event]

    def apply(self, sequence: Sequence, row: Row, result: RowOutput) -> None:
        """Advance a row's sequence by what was computed."""
        if sequence.output:
            self._apply_decode(sequence, row, result)
        else:
            self._apply_prompt(sequence, row, result)
        request = sequence.request
        if not request.live:
            self.events.append(self.live.finish(request, self.now))

    def _apply_decode(self, sequence: Sequence, row: Row, result: RowOutput) -> None:
        """Of a sequence with output: a decode, or a part of a recomputation."""
        known = len(row.token_ids) - row.drafts
        accepted = 0
        reason: FinishReason | None = None
        if row.sample:
            sampled = result.token_ids
            # The runner may leave out what was sampled behind a wrong draft.
            drafts = row.token_ids[known : known + len(sampled) - 1]
            event, accepted = _append(sequence, sampled, result.logprobs, drafts)
            reason = event.finish_reason
            self.events.append(event)
            self._count_tokens(event, accepted)
            if row.drafts:
                self._count_drafts(row, accepted)
            if row.propose:
                sequence.num_read = row.start + known + accepted + 1 - result.unread
            # The proposal stands behind samples: where a grammar forced other tokens, it means
            # nothing.
            follows = event.ids == sampled[: 1 + accepted]
            sequence.proposed = result.proposal if follows else []
        # Drafts count as computed as far as they are what was sampled. The others were never there:
        # their slots are written again before anybody reads them.
        sequence.num_computed += known + accepted
        sequence.num_planned -= row.drafts - accepted
        if self.caching:
            _cache_full_blocks(self.live, sequence)
        if reason is not None:
            self.live.end(sequence)
        elif row.drafts or row.propose:
            self.live.give_back(sequence)

    def _apply_prompt(self, sequence: Sequence, row: Row, result: RowOutput) -> None:
        """Of a sequence without output: a part of its prompt, and the first tokens with the last
        part."""
        request = sequence.request
        count = len(row.token_ids)
        sequence.num_computed += count
        request.computed_prompt_tokens += count
        if self.caching:
            _cache_full_blocks(self.live, sequence)
        if row.params.prompt_logprobs is not None:
            _collect_prompt_logprobs(request, row, result)
            if row.sample:
                self.events.append(PromptLogprobs(row.key, request.prompt_logprobs))
        if row.sample:
            self._append_first_tokens(sequence, result)

    def _append_first_tokens(self, leader: Sequence, result: RowOutput) -> None:
        """The prompt is computed: make the other n − 1 sequences and append each one's first
        token."""
        request = leader.request
        request.first_token = self.now
        for index in range(1, request.message.params.n):
            request.sequences.append(Sequence(request, index))
        alive: list[Sequence] = []
        ended: list[Sequence] = []
        for position, sequence in enumerate(request.sequences):
            logprobs = None
            if result.logprobs is not None:
                logprobs = result.logprobs[position : position + 1]
            sampled = result.token_ids[position : position + 1]
            event, _ = _append(sequence, sampled, logprobs, drafts=[])
            self.events.append(event)
            self._count_tokens(event, accepted=0)
            if event.finish_reason is None:
                alive.append(sequence)
            else:
                ended.append(sequence)
        # Before any of them frees its blocks: the leader's are those that are shared.
        _fork(self.live, leader, alive, self.now)
        for sequence in ended:
            self.live.end(sequence)

    def _count_drafts(self, row: Row, accepted: int) -> None:
        self.counts.draft_rows += 1
        self.counts.draft_tokens += row.drafts
        self.counts.accepted_tokens += accepted

    def _count_tokens(self, event: Tokens, accepted: int) -> None:
        made = len(event.ids)
        self.counts.generated_tokens += made
        # One is sampled, and one behind each accepted draft.
        self.counts.forced_tokens += made - 1 - accepted


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
    known = request.prompt_logprobs
    entries = result.prompt_logprobs or []
    last = min(row.end, len(row.prompt) - 1)
    assert len(entries) == max(last - row.start, 0), "prompt logprobs are missing"
    repeated = len(known) - (row.start + 1)  # a recomputed chunk gives them again
    assert repeated >= 0, "prompt logprobs have a gap"
    known += entries[repeated:]


def _fork(live: LiveRequests, leader: Sequence, alive: list[Sequence], now: float) -> None:
    """Give the live sequences a table over the prompt's blocks: full blocks are shared, a partial
    last one is copied."""
    num_computed = leader.num_computed
    hashes = leader.hashes[: num_computed // live.kv.block_size]
    for sequence in alive:
        if sequence is leader:
            continue
        sequence.hashes = hashes.copy()
        # One more than may run waits, and recomputes.
        if live.admission.is_full(sequence.request, live.running):
            live.wait(sequence, now)
            continue
        table = live.kv.fork(leader.table, num_computed)
        if table is None:  # no block is free for its copy
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
    message = sequence.request.message
    ids: list[int] = []
    forced: list[int] = []
    accepted = 0
    follows = True  # whether sampled[accepted] stands behind all that is output by now
    while follows or forced:
        is_forced = bool(forced)
        token = forced.pop(0) if is_forced else sampled[accepted]
        ids.append(token)
        reason, stop_id = _add_token(sequence, token)
        if reason is not None:
            break
        if sequence.grammar is not None and not is_forced:
            forced = _forced_tokens(sequence)
        # The next sample stands behind this token if the next draft is this token.
        if follows and accepted < len(drafts) and drafts[accepted] == token:
            accepted += 1
        else:
            follows = False
    event = Tokens(
        key=message.key,
        index=sequence.index,
        ids=ids,
        finish_reason=reason,
        stop_id=stop_id,
    )
    if message.params.logprobs is not None:
        assert logprobs is not None, "logprobs are missing"
        event = _with_logprobs(event, sequence, logprobs[: len(ids)])
    return event, accepted


def _with_logprobs(event: Tokens, sequence: Sequence, logprobs: list[list[Logprob]]) -> Tokens:
    """The event with the candidates at each of its tokens, of which the first was chosen."""
    for candidates in logprobs:
        sequence.cumulative_logprob += candidates[0].logprob
    return msgspec.structs.replace(
        event, logprobs=logprobs, cumulative_logprob=sequence.cumulative_logprob
    )


def _forced_tokens(sequence: Sequence) -> list[int]:
    """What a grammar forces after a sampled token. Ends are left to the sampler."""
    grammar = sequence.grammar
    request = sequence.request
    if grammar is None or not request.takes_forced:
        return []
    stop_ids = request.message.stop_ids
    return list(takewhile(lambda token: token not in stop_ids, grammar.forced()))


def _add_token(sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
    """Append one token. Why the sequence ends by it, if it does, and the stop id if it is one."""
    request = sequence.request
    message = request.message
    sequence.output.append(token)
    sequence.num_tokens += 1
    num_output = len(sequence.output)
    if token in message.stop_ids and num_output > message.params.min_tokens:
        return "stop", token
    if sequence.grammar is not None:
        sequence.grammar.accept([token])
        if sequence.grammar.ended:  # nothing may follow it
            return "stop", None
    if num_output >= request.max_output:
        return "length", None
    return None, None
