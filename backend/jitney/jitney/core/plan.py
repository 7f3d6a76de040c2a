"""The plan of one step: which sequence computes which tokens in it. Called by the scheduler alone.

There are no phases: a sequence has ``num_tokens`` tokens of which ``num_planned`` are in the cache
or about to be, and a step computes some more of them under one token budget. It takes, in this
order,

1. running sequences with one token to compute, and those that a grammar forced (decodes),
2. running sequences with a prompt or a recomputation to compute, in chunks,
3. waiting sequences, as far as ``max_num_seqs``, blocks and budget allow,

each by *rank*: ``priority * aging_s + arrival``, lower first, and tiers as ``live`` says. Where
decodes would take nearly the whole budget, they leave an eighth of it to the chunks.

A prompt of n > 1 counts as n sequences. It is admitted as soon as one may run; the forks that find
no place are those of one request, and wait by its rank. With ``eviction: never`` all that can ever
run at once must find one, because forks that wait share no blocks for certain.

A plan *ahead* is made while a step is in flight. It is the same but for four things. A token that
this step is still sampling is *carried*: the row has its index among the samples instead of the
token. A sequence whose pending token is its last by length gets no row. Nor does one whose request
reads its own output, or that has drafts in flight or in prospect: it gets its row in the next plan,
in which that token is known. And nothing is preempted: :meth:`Planner.can_plan_ahead` has checked
that there is a block for each decode. What a grammar forced, and finds no place there, is left to
the next step.
"""

import math
from collections import Counter
from dataclasses import dataclass

from jitney.config import EngineConfig
from jitney.core.drafts import Speculation
from jitney.core.live import LiveRequests
from jitney.core.request import Request, Sequence, State
from jitney.core.step_in_flight import StepInFlight
from jitney.core.tiers import Pace
from jitney.messages import Batch, Row, StepStats

# A sequence that plans ahead leave out has a row in every second step. That pays for the batch as
# long as such sequences are few: they lose half of their tokens, the others gain the host's time.
_ONE_LEFT_OUT_IN = 4


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    step: StepInFlight
    now: float
    counts: StepStats
    tokens_left: int
    kept_for_prefill: int
    """Of the tokens that are left, those that no decode may take."""
    kept_from_drafts: int
    """The same of drafts."""
    reads_left: int
    """Tokens that a draft model may still read."""
    ahead: bool
    num_samples: int = 0


class Planner:
    """Fills steps from the live requests. Changes their tables, and who runs and who waits."""

    def __init__(
        self,
        config: EngineConfig,
        live: LiveRequests,
        max_num_batched_tokens: int,
        speculation: Speculation | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._live = live
        self._pace = pace
        self._awaited = [one.ttft_ms is not None for one in config.tiers]
        self._speculation = speculation
        self._kv = live.kv
        self._block_size = config.block_size
        self._caching = config.prefix_caching
        self._preempts = config.eviction == "preempt"
        self._watermark = math.ceil(config.watermark * live.kv.num_blocks) if self._preempts else 0
        self._max_tokens = max_num_batched_tokens
        self._prefill_share = max_num_batched_tokens // 8

    @property
    def can_plan_ahead(self) -> bool:
        """Whether a step may be planned now, even if one is in flight: few sequences or none depend
        on the value of a pending token, and there is a block for every decode that needs one."""
        live, size = self._live, self._block_size
        if not live.in_flight:
            return True
        first = None if self._pace is None else self._first_waiting()
        if first is not None and self._in_the_way(first):
            return False
        step = live.in_flight[-1]
        if step.completes_first:
            return False
        if step.leaves_out:
            left_out = sum(
                one.request.reads_output or one.num_planned > one.num_tokens for one in live.running
            )
            if left_out * _ONE_LEFT_OUT_IN > len(live.running):
                return False
        free = self._kv.num_free
        return free >= len(live.running) or free >= sum(
            one.num_planned < one.limit
            and len(one.table) * size < max(one.num_planned + 1, one.num_tokens)
            for one in live.running
        )

    def make(self, now: float, counts: StepStats) -> StepInFlight:
        """Plan a step. What it looks up in the prefix cache is added to ``counts``."""
        live = self._live
        kept = self._keep_for_prefill()
        of_drafts = 0 if self._speculation is None else self._keep_from_drafts()
        step, ahead = StepInFlight(Batch([])), bool(live.in_flight)
        most = self._max_tokens
        plan = _Plan(step, now, counts, most, kept, of_drafts, most, ahead)
        preemptions = live.preemptions
        if self._pace is not None:
            live.sort(now)
            self._admit_urgent(plan)
            self._pace.begin(live.running)
        if self._speculation is not None:
            limits = () if self._pace is None else (self._pace.limits,)
            self._speculation.choose(live.running, *limits)
        for sequence in self._plan_decodes(plan):
            if sequence.state is State.RUNNING:  # a decode may have preempted it meanwhile
                self._plan_chunk(plan, sequence, plan.tokens_left)
        # Where blocks are short as it is nobody is admitted, unless it was the only one that ran.
        if live.preemptions == preemptions or not live.running:
            self._admit_waiting(plan)
        assert plan.tokens_left >= 0, "the step is over its budget"
        if not ahead:  # nor are forks made then: this step makes all copies pending now
            step.batch.copies = self._kv.pending_copies()
        step.gap = None if self._pace is None else self._pace.gap
        return step

    # ------------------------------------------------------------------ running sequences

    def _keep_for_prefill(self) -> int:
        """Tokens of the step that decodes leave to running sequences with chunks."""
        running, most = self._live.running, self._prefill_share
        if len(running) <= self._max_tokens - most:  # decodes cannot take them
            return 0
        return min(most, sum(one.prefill_left for one in running))

    def _keep_from_drafts(self) -> int:
        """Tokens that the prompts of running sequences need, and the first waiting sequence if it
        may run."""
        live = self._live
        first = self._first_waiting() if live.num_places > 0 else None
        wanted = sum(one.prefill_left for one in live.running)
        return wanted if first is None else wanted + first.num_tokens

    def _plan_decodes(self, plan: _Plan) -> list[Sequence]:
        """Plan every running sequence that decodes, making room by preemption. Returns the other
        running sequences, by rank."""
        running, block_size = self._live.running, self._block_size
        others = []
        position = 0
        # Victims leave from the end of `running`. Being of a higher rank than the sequence in hand,
        # none of them has a row yet, and no sequence changes its position.
        while position < len(running):
            sequence = running[position]
            position += 1
            start = sequence.num_planned
            left = sequence.num_tokens - start
            if start < sequence.prefill_end:
                others.append(sequence)
            elif plan.ahead and left <= 0 and self._waits(sequence):
                continue
            elif plan.tokens_left > plan.kept_for_prefill and start < sequence.limit:
                if self._pace is not None and not self._pace.may_decode(sequence):
                    continue
                end = start + (left or 1)
                full = len(sequence.table) * block_size < end
                if full and not self._make_room(plan, sequence, end):
                    continue
                if self._pace is not None:
                    self._pace.decode(sequence)
                if left > 1:  # with a token left for each that comes after it
                    after = plan.kept_for_prefill + len(running) - position
                    most = max(plan.tokens_left - after, 1)
                    room = len(sequence.table) * block_size - start
                    self._plan_chunk(plan, sequence, min(most, room))
                elif left == 1:
                    drafts, *asked = self._take_drafts(plan, sequence, position)
                    tokens, sample = [sequence.output[-1], *drafts], (sequence.index,)
                    self._add_row(plan, sequence, tokens, sample, None, len(drafts), *asked)
                else:  # that token is pending
                    self._add_row(plan, sequence, [0], (sequence.index,), sequence.sample_index)
        return others

    def _waits(self, sequence: Sequence) -> bool:
        """Whether a plan ahead leaves out a sequence of which a sample is pending: drafts of it are
        in flight, or what it does next depends on the sample."""
        if sequence.num_planned > sequence.num_tokens or sequence.request.reads_output:
            return True
        return self._speculation is not None and self._speculation.waits(sequence)

    def _take_drafts(
        self, plan: _Plan, sequence: Sequence, position: int
    ) -> tuple[list[int], int, int]:
        """The drafts of a decode, how many more a model is to propose, and how many tokens it may
        read before, as far as they find room: a token of the budget is left to every running
        sequence from ``position`` on, and prompts keep theirs; a block is left to every fork that
        is due and to each of those sequences, and what else its known tokens need. While any
        sequence waits, they take no blocks."""
        if self._speculation is None:
            return [], 0, 0
        drafts, propose, read = self._speculation.drafts_of(sequence)
        if not drafts and not propose:
            return [], 0, 0
        after = self._live.running[position:]
        del drafts[max(plan.tokens_left - 1 - plan.kept_from_drafts - len(after), 0) :]
        kv, live, table = self._kv, self._live, sequence.table
        start = sequence.num_planned + 1
        propose = min(propose, sequence.limit - start - len(drafts))
        read = min(read, plan.reads_left) if propose else 0
        if self._pace is not None:
            count, propose, read = self._pace.drafts(len(drafts), propose, read)
            del drafts[count:]
        propose = propose if read else 0
        while (room := len(table) * self._block_size - start) < len(drafts) + propose:
            spare = live.max_running - live.num_places - len(live.running)
            spare += sum(max(1, kv.blocks_for(one.num_tokens) - len(one.table)) for one in after)
            if live.num_waiting or kv.num_free <= spare or not kv.grow(table):
                del drafts[room:]
                propose = min(propose, room - len(drafts))
        if not drafts and not propose:
            self._speculation.note_refused(sequence)
        if not propose:
            return drafts, 0, 0
        plan.reads_left -= read
        return drafts, propose, read

    def _make_room(self, plan: _Plan, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for the positions below ``end`` of ``sequence``, one at most in a plan
        ahead, preempting from the end of ``running`` if none is free. False if ``sequence`` itself
        was preempted."""
        wanted = len(sequence.table) + 1 if plan.ahead else self._kv.blocks_for(end)
        while len(sequence.table) < wanted:
            if self._kv.grow(sequence.table):
                continue
            assert self._preempts, "a reserved block is not free"
            assert not plan.ahead, "blocks are short, and a step is in flight"
            victim = self._live.running[-1]
            self._live.preempt(victim, plan.now)
            if victim is sequence:
                return False
        return True

    def _plan_chunk(self, plan: _Plan, sequence: Sequence, most: int) -> None:
        """Plan at most so many of the known tokens of a sequence. Their blocks are allocated, at
        admission for a prompt or recomputation."""
        start, end = sequence.num_planned, sequence.num_tokens
        count = min(end - start, most)
        if self._pace is not None and start < sequence.prefill_end:
            count = self._pace.chunk(sequence, count)
        if not count:
            return
        sample: tuple[int, ...] = ()
        if start + count == end:
            n = sequence.request.message.params.n
            sample = (sequence.index,) if sequence.output else tuple(range(n))
        self._add_row(plan, sequence, sequence.tokens(start, start + count), sample, None)

    def _add_row(
        self,
        plan: _Plan,
        sequence: Sequence,
        token_ids: list[int],
        sample: tuple[int, ...],
        carried: int | None,
        drafts: int = 0,
        propose: int = 0,
        most_read: int = 0,
    ) -> None:
        request = sequence.request
        message = request.message
        count = len(token_ids)
        plan.tokens_left -= count
        plan.step.batch.rows.append(
            Row(
                message.key,
                sequence.index,
                token_ids,
                sequence.num_planned,
                sequence.table,
                sample,
                message.params,
                sequence.prompt,
                sequence.output,
                message.stop_ids,
                message.bad_words_ids,
                carried,
                sequence.grammar,
                drafts,
                propose,
                most_read,
                request.adapter,
            )
        )
        sequence.num_planned += count
        if sample:
            sequence.sample_index = plan.num_samples
            plan.num_samples += len(sample) + drafts
            reads = request.reads_output or drafts + propose > 0
            if (len(sample) > 1 or reads) and sequence.num_planned - drafts < sequence.limit:
                plan.step.completes_first |= len(sample) > 1
                plan.step.leaves_out |= reads

    # ------------------------------------------------------------------ waiting sequences

    def _first_waiting(self) -> Sequence | None:
        """The one to admit next: the first by rank, of those tiers that have a place for theirs."""
        heads = [queue[0] if queue else None for queue in self._live.queues]
        if self._pace is None:
            return heads[0]
        some = [one for one in heads if one is not None and self._finds_place(one)]
        ranked = [(self._live.rank_of_waiting(one), one) for one in some]
        return min(ranked, default=(None, None))[1]

    def _finds_place(self, sequence: Sequence) -> bool:
        """Whether the cap of its tier, if it has one, has the places of a waiting sequence."""
        live, tier = self._live, sequence.request.tier
        return live.caps[tier] == live.max_running or live.places(tier) >= self._size(sequence)

    def _size(self, sequence: Sequence) -> int:
        """Places that a waiting sequence needs to be admitted: with ``eviction: never`` those of
        all of its forks that can ever run at once."""
        request = sequence.request
        return 1 if self._preempts else min(1 + request.forks_due, self._live.caps[request.tier])

    def _in_the_way(self, first: Sequence) -> list[Sequence]:
        """Running sequences of lower tiers, the last by rank, to preempt for the first waiting one,
        if its tier has a target for the first token. None if it can do without, or cannot anyway.
        """
        live, kv = self._live, self._kv
        if not self._preempts or not self._awaited[first.request.tier]:
            return []
        hits = set(self._hits(first))
        needed = kv.blocks_for(first.num_tokens) - len(hits)
        free = kv.num_free_but(hits)
        given_up, victims = Counter[int](), list[Sequence]()
        admitted = live.admitted()

        def fits() -> bool:
            spare = self._watermark if len(victims) < len(live.running) else 0
            return live.places_beside(admitted) > 0 and free >= needed + spare

        for one in reversed(live.running):
            if fits() or one.rank < first.rank:
                break
            if one.request.tier > first.request.tier:
                victims.append(one)
                admitted[one.request.tier] -= 1 + one.request.forks_due
                free += sum(block not in hits for block in kv.freed_by(one.table, given_up))
        return victims if fits() else []

    def _admit_urgent(self, plan: _Plan) -> None:
        """Admit the waiting sequences that rank before running ones of lower tiers: their prompts
        come first, and what is in the way is preempted."""
        live = self._live
        decodes = len(live.running) if plan.ahead else 0  # a block for each, as can_plan_ahead saw
        while (first := self._first_waiting()) is not None:
            victims = [] if plan.ahead else self._in_the_way(first)
            for one in victims:
                live.preempt(one, plan.now)
            tier, rank = first.request.tier, first.rank
            passes = any(one.request.tier > tier and one.rank > rank for one in live.running)
            if not (passes or victims) or self._size(first) > live.num_places:
                return
            if not self._admit(plan, first, decodes):
                return

    def _admit_waiting(self, plan: _Plan) -> None:
        """Admit waiting sequences by rank until one does not fit. None is passed over, unless its
        tier is full: small requests would starve a large one."""
        live = self._live
        if not live.num_waiting or len(live.running) >= live.max_running:
            return
        places = live.num_places
        while plan.tokens_left and places > 0:
            sequence = self._first_waiting()
            if sequence is None or self._size(sequence) > places:
                return
            if not self._admit(plan, sequence):
                return
            places -= 1 + sequence.request.forks_due
            self._plan_chunk(plan, sequence, plan.tokens_left)

    def _admit(self, plan: _Plan, sequence: Sequence, others: int = 0) -> bool:
        """Allocate the blocks of all tokens of a waiting sequence, cached ones where there are any,
        and run it. False, and nothing changed, if there are not enough: ``others`` stay free."""
        request, kv = sequence.request, self._kv
        fresh = request.first_scheduled is None
        reserve = sequence.reserved_blocks + (0 if request.running else request.reserved_blocks)
        if self._live.reserved_blocks + reserve > kv.num_blocks:
            return False
        hits = self._hits(sequence)
        num_new = kv.blocks_for(sequence.num_tokens) - len(hits)
        # With nothing running no blocks need stay free, and waiting would never end.
        spare = max(self._watermark, others) if self._live.running else 0
        table = kv.allocate(hits, num_new, spare=spare)
        if table is None:
            assert self._preempts or plan.ahead, "a reserved block is not free"
            return False
        num_cached = len(hits) * kv.block_size
        sequence.prefill_end = sequence.num_tokens - bool(sequence.output)
        self._live.admit(sequence, table, num_cached, plan.now)
        if not sequence.output:
            request.cached_prompt_tokens, request.computed_prompt_tokens = num_cached, 0
        elif fresh:  # resumed
            size = len(sequence.prompt)
            request.cached_prompt_tokens = min(num_cached, size)
            request.computed_prompt_tokens = size - request.cached_prompt_tokens
        if self._reads_cache(request):
            plan.counts.prefix_query_tokens += sequence.num_tokens
            plan.counts.prefix_hit_tokens += num_cached
        return True

    def _reads_cache(self, request: Request) -> bool:
        return self._caching and request.reads_cache

    def _hits(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a waiting sequence would begin with."""
        if not self._reads_cache(sequence.request):
            return []
        # At least one token must be computed, to have logits to sample from.
        usable = (sequence.num_tokens - 1) // self._block_size
        return self._kv.find(sequence.hash_blocks(usable, self._block_size))
