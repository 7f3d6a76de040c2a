"""What a step's output does to the live requests: new tokens, ends, full blocks, forks.

``Scheduler.update`` makes an :class:`OutputApplier` for each step. The engine's journal also calls
:func:`final_event`.
"""

from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from jitney.batch import Row, RowOutput
from jitney.core.live import LiveRequests
from jitney.core.request import Request, Sequence
from jitney.errors import InvalidArgumentError, JitneyError
from jitney.messages import Event, FinishReason, Logprob, PromptLogprobs, StepStats, Submit, Tokens


@dataclass(slots=True)
class OutputApplier:
    """Applies the outputs of one step's rows, in order, and collects the events."""

    live: LiveRequests
    counts: StepStats
    caching: bool
    """Whether full blocks are offered to the prefix cache."""
    now: float
    events: list[Event] = field(default_factory=list)

    def apply(self, sequence: Sequence, row: Row, result: RowOutput) -> None:
        """Advance a row's sequence by what was computed."""
        if sequence.output:
            self._apply_decode(sequence, row, result)
        else:
            self._apply_prompt(sequence, row, result)
        request = sequence.request
        if not request.num_live:
            self.events.append(self.live.finish_request(request, self.now))

    def _apply_decode(self, sequence: Sequence, row: Row, result: RowOutput) -> None:
        """Apply the row of a sequence that has output: a decode, or a part of a recomputation."""
        # The row's tokens are known ones first, then drafts.
        num_known = len(row.token_ids) - row.drafts
        accepted = 0
        reason: FinishReason | None = None
        if row.sample:
            # `sampled[0]` comes after the known tokens, `sampled[i + 1]` after draft i. The runner
            # may stop at the first sample that differs from its draft. The drafts from there on
            # have no sample after them, and are left out here. Otherwise one of them could be
            # accepted, because a grammar forces the same token, and the sample after it would be
            # missing.
            sampled = result.token_ids
            drafts = row.token_ids[num_known:]
            drafts_with_sample = drafts[: len(sampled) - 1]
            event, accepted = self._append(
                sequence,
                sampled=sampled,
                logprobs=result.logprobs,
                drafts=drafts_with_sample,
            )
            reason = event.finish_reason
            self.events.append(event)
            if row.drafts:
                self._count_drafts(row, accepted)
            sequence.runner_proposal = []
            if row.propose:
                _note_proposal(sequence, row, result, new_ids=event.ids, accepted=accepted)
        # Accepted drafts count as computed. The slots of the others are written again before they
        # are read.
        sequence.num_computed += num_known + accepted
        sequence.num_planned -= row.drafts - accepted
        if self.caching:
            _cache_full_blocks(self.live, sequence)
        if reason is not None:
            self.live.end_sequence(sequence)
        elif row.drafts or row.propose:
            self.live.free_lookahead(sequence)

    def _apply_prompt(self, sequence: Sequence, row: Row, result: RowOutput) -> None:
        """Apply the row of a sequence without output: a part of its prompt. The last part samples
        the first tokens."""
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
        """The prompt is computed: make the other n − 1 sequences, and append its first token to
        each of the n."""
        request = leader.request
        request.first_token_at = self.now
        self.live.make_forks(request)
        alive: list[Sequence] = []
        ended: list[Sequence] = []
        for index, sequence in enumerate(request.sequences):
            sampled = [result.token_ids[index]]
            logprobs = None
            if result.logprobs is not None:
                logprobs = [result.logprobs[index]]
            event, _ = self._append(sequence, sampled=sampled, logprobs=logprobs, drafts=[])
            self.events.append(event)
            if event.finish_reason is None:
                alive.append(sequence)
            else:
                ended.append(sequence)
        # The forks share the leader's blocks. So they fork before the leader ends, which frees
        # its blocks.
        _fork(self.live, leader, alive, self.now)
        for sequence in ended:
            self.live.end_sequence(sequence)

    def _append(
        self,
        sequence: Sequence,
        *,
        sampled: list[int],
        logprobs: list[list[Logprob]] | None,
        drafts: list[int],
    ) -> tuple[Tokens, int]:
        """Append the tokens that a row gave one sequence. Returns their event, with the finish
        reason if the sequence ends, and the number of *accepted* drafts.

        ``sampled`` has the sample after the row's known tokens, and the sample after each draft.
        The first one is always appended. What a grammar forces after a sample is appended next,
        without being sampled. After each of these tokens there are two cases:

        - The token is the row's draft for this position. The draft is accepted, whether the token
          was sampled or forced, and the row has a sample for the next position, too.
        - There is no draft for this position, or it is another token. The row has no samples of use
          any more. Only forced tokens may still follow.
        """
        ids: list[int] = []
        num_drafts = len(drafts)
        accepted = 0  # drafts, so far
        # Whether the row has a sample for the next position: as long as each token so far was the
        # draft for its position. That sample is `sampled[accepted]`.
        has_sample = True
        forced: list[int] = []  # tokens that the grammar forces at the next positions
        num_forced = 0
        while forced or has_sample:
            if forced:  # a forced token comes in place of a sample for the same position
                token = forced.pop(0)
                num_forced += 1
                is_sampled = False
            else:
                token = sampled[accepted]
                is_sampled = True
            ids.append(token)
            reason, stop_id = _add_token(sequence, token)
            if reason is not None:
                break
            if is_sampled and sequence.grammar is not None:
                forced = _forced_tokens(sequence)  # all that it forces after this sample
            is_draft = has_sample and accepted < num_drafts and drafts[accepted] == token
            if is_draft:
                accepted += 1
            else:
                has_sample = False
        self.counts.generated_tokens += len(ids)
        self.counts.forced_tokens += num_forced
        message = sequence.request.message
        event = Tokens(
            key=message.key,
            index=sequence.index,
            ids=ids,
            finish_reason=reason,
            stop_id=stop_id,
        )
        if message.params.logprobs is not None:
            assert logprobs is not None, "logprobs are missing"
            kept = logprobs[: len(ids)]  # not those of drafts that are wrong
            _add_logprobs(sequence, kept)
            event = msgspec.structs.replace(
                event, logprobs=kept, cumulative_logprob=sequence.cumulative_logprob
            )
        return event, accepted

    def _count_drafts(self, row: Row, accepted: int) -> None:
        self.counts.draft_rows += 1
        self.counts.draft_tokens += row.drafts
        self.counts.accepted_tokens += accepted


def final_event(
    message: Submit, index: int, cumulative_logprob: float, reason: FinishReason
) -> Tokens:
    """The event that ends a sequence for a reason other than a new token, and so has no tokens.
    ``cumulative_logprob`` is the sum over the tokens that the sequence has."""
    asked = message.params.logprobs is not None
    return Tokens(
        key=message.key,
        index=index,
        ids=[],
        logprobs=[] if asked else None,
        cumulative_logprob=cumulative_logprob if asked else None,
        finish_reason=reason,
    )


def _note_proposal(
    sequence: Sequence, row: Row, result: RowOutput, *, new_ids: list[int], accepted: int
) -> None:
    """Note what a draft model has read and proposed. ``new_ids``: the tokens that were appended;
    ``accepted``: how many drafts were."""
    # The draft model could read all tokens up to the last accepted draft, and the sample after it.
    # The last `result.unread` of these it has not read yet.
    num_known = len(row.token_ids) - row.drafts
    num_readable = row.start + num_known + accepted + 1
    sequence.num_read = num_readable - result.unread
    # The runner proposes what may follow its own samples: the first one, and the one after each
    # accepted draft. If a grammar forced any other token, the output does not end with these
    # samples, and the proposal is of no use.
    used_samples = result.token_ids[: 1 + accepted]
    if new_ids == used_samples:
        sequence.runner_proposal = result.proposal


def _cache_full_blocks(live: LiveRequests, sequence: Sequence) -> None:
    """Offer the blocks that this step filled to the prefix cache."""
    block_size = live.kv.block_size
    full = sequence.num_computed // block_size
    if full == sequence.num_offered_blocks:
        return
    hashes = sequence.hash_blocks(full, block_size)
    for index in range(sequence.num_offered_blocks, full):
        live.kv.cache_block(sequence.table[index], hashes[index])
    sequence.num_offered_blocks = full


def _collect_prompt_logprobs(request: Request, row: Row, result: RowOutput) -> None:
    """Collect the logprobs of prompt positions from a chunk. Each token of the chunk predicts the
    next one. So the entries begin one position after the chunk's first token."""
    entries = result.prompt_logprobs or []
    first_position = row.start + 1
    end_position = min(row.end + 1, len(row.prompt))
    expected = max(end_position - first_position, 0)
    assert len(entries) == expected, "prompt logprobs are missing"
    # `collected[q]` is the entry of position q: it begins with a None for position 0. So its length
    # is the next position to collect.
    collected = request.prompt_logprobs
    next_position = len(collected)
    assert next_position >= first_position, "prompt logprobs have a gap"
    # After a preemption a chunk is computed again: its first entries may be collected already.
    num_repeated = next_position - first_position
    collected += entries[num_repeated:]


def _fork(live: LiveRequests, leader: Sequence, alive: list[Sequence], now: float) -> None:
    """Give every sequence in ``alive`` a table over the prompt's blocks, and a copy of the leader's
    slot if it has one. Full blocks are shared if forks may share any; the others are copied."""
    num_computed = leader.num_computed
    hashes = leader.hashes[: num_computed // live.kv.block_size]
    for sequence in alive:
        if sequence is leader:
            continue
        sequence.hashes = hashes.copy()
        # If no further sequence may run, the fork waits. When it is admitted, it computes the
        # prompt again, except for what is still cached then.
        if live.admission.running_counts.is_full(sequence.request.tier):
            live.wait(sequence, now)
            continue
        table = None
        if not live.slots.is_short:
            table = live.kv.fork(leader.table, num_computed, share=live.forks_share_blocks)
        if table is None:  # no slot is free, or no block for a copy
            live.preempt(sequence, now)
        else:
            sequence.slot = live.slots.fork(leader.slot)
            live.admit(sequence, table, num_computed, now)


def _add_logprobs(sequence: Sequence, logprobs: list[list[Logprob]]) -> None:
    """Add the logprobs of new tokens to the sequence's sum. The first candidate of each is the
    token itself."""
    for candidates in logprobs:
        sequence.cumulative_logprob += candidates[0].logprob


def _forced_tokens(sequence: Sequence) -> list[int]:
    """The tokens that a grammar forces after a sample. They end before a stop id, because a stop
    id is always sampled."""
    grammar = sequence.grammar
    request = sequence.request
    if grammar is None or not request.takes_forced:
        return []
    stop_ids = request.message.stop_ids
    return list(takewhile(lambda token: token not in stop_ids, grammar.forced()))


def _add_token(sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
    """Append one token. Returns the finish reason if the sequence ends with it, and the token if it
    is a stop id that ends it."""
    request = sequence.request
    message = request.message
    sequence.output.append(token)
    sequence.num_tokens += 1
    if sequence.counts is not None:
        sequence.counts.add((token,))
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


def error_of(sequence: Sequence, error: JitneyError) -> JitneyError:
    """Why a row failed. If its grammar could not go on, the grammar knows the reason. The runner
    saw only that no token was allowed."""
    grammar = sequence.grammar
    if grammar is not None and grammar.error is not None:
        return InvalidArgumentError(f"structured_outputs: {grammar.error}")
    return error
