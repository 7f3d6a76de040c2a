"""The plan of one step: which sequence computes which tokens in it. Called by the scheduler alone.

There are no phases: a sequence has ``num_tokens`` tokens of which ``num_planned`` are in the cache
or about to be, and a step computes some more of them under one token budget. It takes, in this
order,

1. running sequences with one token to compute, and those that a grammar forced (decodes),
2. running sequences with a prompt or a recomputation to compute, in chunks,
3. waiting sequences, as far as places, blocks and budget allow,

each by rank. Where decodes would take nearly the whole budget, they leave an eighth of it to the
chunks.

A prompt of n > 1 counts as n sequences. It is admitted as soon as one may run; the forks that find
no place are those of one request, and wait by its rank. With ``eviction: never`` all that can ever
run at once must find one, because forks that wait share no blocks for certain.

A plan *ahead* is made while a step is in flight. It differs in four things:

- A token that this step is still sampling is *carried*: the row has its index among the samples
  instead of the token.
- A sequence gets no row if its pending token is its last by length.
- Nor does a sequence that must know its pending token first: its request reads its own output, or
  it has drafts in flight or in prospect. It gets its row in the next plan.
- Nothing is preempted: :attr:`Planner.can_plan_ahead` has checked that there is a block for each
  decode. Tokens that a grammar forces and that do not fit are computed in the next step.

What may shape a step beside rank and budget is asked of ``policy``.
"""

from dataclasses import dataclass, field

from jitney.config import EngineConfig
from jitney.core.live import LiveRequests
from jitney.core.lookahead import Lookahead
from jitney.core.policy.choose import Policies
from jitney.core.policy.seam import DraftChoice
from jitney.core.request import Request, Sequence, State
from jitney.core.step_in_flight import StepInFlight
from jitney.messages import Batch, Row, StepStats

# A sequence that plans ahead leave out has a row in every second step. That pays for the batch as
# long as such sequences are few: they lose half of their tokens, the others gain the host's time.
_ONE_LEFT_OUT_IN = 4
# Of the token budget, the part that decodes leave to chunks.
_PREFILL_SHARE = 8
_NO_DRAFTS = DraftChoice()


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    now: float
    counts: StepStats
    ahead: bool
    tokens_left: int
    kept_for_prefill: int
    """Of the tokens that are left, those that no decode may take."""
    num_samples: int = 0
    step: StepInFlight = field(default_factory=lambda: StepInFlight(Batch([])))


class Planner:
    """Fills steps from the live requests. Changes their tables, and who runs and who waits."""

    def __init__(
        self,
        config: EngineConfig,
        live: LiveRequests,
        policies: Policies,
        *,
        max_num_batched_tokens: int,
        watermark: int,
    ) -> None:
        """Admissions leave ``watermark`` blocks free."""
        self._live = live
        self._kv = live.kv
        self._admission = policies.admission
        self._limits = policies.limits
        self._drafts = policies.drafts
        self._lookahead = Lookahead(live, policies)
        self._block_size = config.block_size
        self._caching = config.prefix_caching
        self._preempts = config.eviction == "preempt"
        self._watermark = watermark
        self._max_tokens = max_num_batched_tokens
        self._prefill_share = max_num_batched_tokens // _PREFILL_SHARE

    @property
    def can_plan_ahead(self) -> bool:
        """Whether a step may be planned now, even if one is in flight: few sequences or none depend
        on the value of a pending token, and there is a block for every decode that needs one."""
        live = self._live
        if not live.in_flight:
            return True
        # Who makes way is preempted, which a plan ahead cannot do.
        urgent = self._admission.urgent(live.running)
        if urgent is not None and self._in_the_way(urgent):
            return False
        step = live.in_flight[-1]
        if step.completes_first:
            return False
        if step.leaves_out and self._leaves_out_many():
            return False
        free = self._kv.num_free
        if free >= len(live.running):  # enough for any decodes, without counting them
            return True
        return free >= sum(map(self._needs_block, live.running))

    def make(self, now: float, counts: StepStats) -> StepInFlight:
        """Plan a step. What it looks up in the prefix cache is added to ``counts``."""
        live = self._live
        plan = _Plan(
            now=now,
            counts=counts,
            ahead=bool(live.in_flight),
            tokens_left=self._max_tokens,
            kept_for_prefill=self._keep_for_prefill(),
        )
        if self._drafts.is_active:
            self._lookahead.begin(self._max_tokens)
        preemptions = live.preemptions
        self._admission.sort(live.running, now)
        self._admit_urgent(plan)
        self._limits.begin(live.running)
        self._drafts.begin(live.running, self._limits)
        for sequence in self._plan_decodes(plan):
            # A decode that needed a block may have preempted it meanwhile.
            if sequence.state is State.RUNNING:
                self._plan_chunk(plan, sequence, plan.tokens_left)
        # Where blocks are short nobody is admitted, unless nothing runs any more: the only
        # sequence that ran may have made way for itself.
        if live.preemptions == preemptions or not live.running:
            self._admit_waiting(plan)
        self._admission.note_planned(now)
        assert plan.tokens_left >= 0, "the step is over its budget"
        # A plan ahead makes no copies: the step in flight makes all that are pending, and forks
        # are made when it is complete.
        if not plan.ahead:
            plan.step.batch.copies = self._kv.pending_copies()
        plan.step.target = self._limits.target
        return plan.step

    # ------------------------------------------------------------------ what can be planned ahead

    def _leaves_out_many(self) -> bool:
        """Whether a plan ahead would leave out so many sequences that it does not pay."""
        running = self._live.running
        left_out = 0
        for sequence in running:
            drafts_in_flight = sequence.num_planned > sequence.num_tokens
            if sequence.request.reads_output or drafts_in_flight:
                left_out += 1
        return left_out * _ONE_LEFT_OUT_IN > len(running)

    def _needs_block(self, sequence: Sequence) -> bool:
        """Whether the next decode of a sequence needs a block that it does not have."""
        if sequence.num_planned >= sequence.limit:
            return False
        end = max(sequence.num_planned + 1, sequence.num_tokens)
        return len(sequence.table) * self._block_size < end

    # ------------------------------------------------------------------ running sequences

    def _keep_for_prefill(self) -> int:
        """Tokens of the step that decodes leave to running sequences with chunks."""
        running = self._live.running
        share = self._prefill_share
        if len(running) <= self._max_tokens - share:  # decodes cannot take them
            return 0
        return min(share, sum(one.prefill_left for one in running))

    def _plan_decodes(self, plan: _Plan) -> list[Sequence]:
        """Plan every running sequence that decodes, making room by preemption. Returns the other
        running sequences, by rank."""
        running = self._live.running
        block_size = self._block_size
        limited = self._limits.is_active
        others = []
        position = 0
        # Victims leave from the end of `running`. Being of a higher rank than the sequence in hand,
        # none of them has a row yet, and no sequence changes its position.
        while position < len(running):
            sequence = running[position]
            position += 1
            start = sequence.num_planned
            if start < sequence.prefill_end:  # it has a prompt to compute
                others.append(sequence)
                continue
            known = sequence.num_tokens - start
            # Its next token is still being sampled, and the sequence depends on its value.
            if plan.ahead and known <= 0 and self._waits_for_sample(sequence):
                continue
            # The budget is spent, or its last token is pending.
            if plan.tokens_left <= plan.kept_for_prefill or start >= sequence.limit:
                continue
            if limited and not self._limits.may_decode(sequence):
                continue
            end = start + (known or 1)
            if len(sequence.table) * block_size < end and not self._make_room(plan, sequence, end):
                continue
            if limited:
                self._limits.count_decode(sequence)
            if known > 1:
                self._plan_forced(plan, sequence, position)
            elif known == 1:
                self._plan_decode(plan, sequence, position)
            else:  # that token is pending
                self._add_row(plan, sequence, [0], (sequence.index,), sequence.sample_index)
        return others

    def _waits_for_sample(self, sequence: Sequence) -> bool:
        """Whether a plan ahead leaves out a sequence of which a sample is pending."""
        drafts_in_flight = sequence.num_planned > sequence.num_tokens
        if drafts_in_flight or sequence.request.reads_output:
            return True
        return self._drafts.is_active and self._drafts.waits_for_sample(sequence)

    def _plan_forced(self, plan: _Plan, sequence: Sequence, position: int) -> None:
        """Plan a decode of several known tokens, which a grammar forced: as many as have slots.
        Each sequence from ``position`` on keeps a token of the budget."""
        after = plan.kept_for_prefill + len(self._live.running) - position
        budget = max(plan.tokens_left - after, 1)
        slots = len(sequence.table) * self._block_size - sequence.num_planned
        self._plan_chunk(plan, sequence, min(budget, slots))

    def _plan_decode(self, plan: _Plan, sequence: Sequence, position: int) -> None:
        """Plan a decode of one token, and its drafts."""
        choice = _NO_DRAFTS
        if self._drafts.is_active:
            choice = self._lookahead.choice_of(
                sequence, tokens_left=plan.tokens_left, position=position
            )
        tokens = [sequence.output[-1], *choice.drafts]
        self._add_row(plan, sequence, tokens, (sequence.index,), choice=choice)

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

    # ------------------------------------------------------------------ rows

    def _plan_chunk(self, plan: _Plan, sequence: Sequence, most: int) -> None:
        """Plan at most so many of the known tokens of a sequence. Their blocks are allocated, at
        admission for a prompt or recomputation."""
        start = sequence.num_planned
        count = min(sequence.num_tokens - start, most)
        if start < sequence.prefill_end:
            count = self._limits.limit_chunk(sequence, count)
        if not count:
            return
        sample: tuple[int, ...] = ()
        if start + count == sequence.num_tokens:
            if sequence.output:
                sample = (sequence.index,)
            else:  # the prompt is done: its forks are sampled from the same logits
                sample = tuple(range(sequence.request.message.params.n))
        tokens = sequence.tokens(start, start + count)
        self._add_row(plan, sequence, tokens, sample)

    def _add_row(
        self,
        plan: _Plan,
        sequence: Sequence,
        token_ids: list[int],
        sample: tuple[int, ...],
        carried: int | None = None,
        choice: DraftChoice = _NO_DRAFTS,
    ) -> None:
        """Add a row to the step, and count its tokens as planned."""
        request = sequence.request
        message = request.message
        row = Row(
            key=message.key,
            index=sequence.index,
            token_ids=token_ids,
            start=sequence.num_planned,
            block_table=sequence.table,
            sample=sample,
            params=message.params,
            prompt=sequence.prompt,
            output=sequence.output,
            stop_ids=message.stop_ids,
            bad_words_ids=message.bad_words_ids,
        )
        # Fields with a default are not in the call, which takes time for each name in it.
        row.carried = carried
        row.grammar = sequence.grammar
        row.adapter = request.adapter
        if choice is not _NO_DRAFTS:
            row.drafts = len(choice.drafts)
            row.propose = choice.propose
            row.most_read = choice.read
        plan.step.batch.rows.append(row)
        plan.tokens_left -= len(token_ids)
        sequence.num_planned += len(token_ids)
        if not sample:
            return
        sequence.sample_index = plan.num_samples
        plan.num_samples += len(sample) + row.drafts
        forks = len(sample) > 1
        reads = request.reads_output or row.drafts > 0 or row.propose > 0
        # Unless its sample is the last token by length, which nothing follows.
        if (forks or reads) and sequence.num_planned - row.drafts < sequence.limit:
            plan.step.completes_first = plan.step.completes_first or forks
            plan.step.leaves_out = plan.step.leaves_out or reads

    # ------------------------------------------------------------------ waiting sequences

    def _admit_urgent(self, plan: _Plan) -> None:
        """Admit the sequences that come before running ones, and preempt those in their way."""
        live = self._live
        # A plan ahead preempts nobody, and each decode keeps the block that can_plan_ahead saw.
        spare = len(live.running) if plan.ahead else 0
        while True:
            sequence = self._admission.urgent(live.running)
            if sequence is None:
                return
            if not plan.ahead:
                for victim in self._in_the_way(sequence):
                    live.preempt(victim, plan.now)
            if sequence.request.places_needed > self._admission.places(live.running):
                return
            if not self._admit(plan, sequence, spare):
                return

    def _in_the_way(self, first: Sequence) -> list[Sequence]:
        """Running sequences that make way for an urgent one."""
        if not self._preempts:
            return []
        return self._admission.in_the_way(first, self._hits(first), self._live.running)

    def _admit_waiting(self, plan: _Plan) -> None:
        """Admit waiting sequences by rank until one does not fit. It is not passed over: small
        requests would starve a large one."""
        live = self._live
        admission = self._admission
        if not admission.num_waiting or len(live.running) >= admission.max_running:
            return
        places = admission.places(live.running)
        while plan.tokens_left and places > 0:
            sequence = admission.first(live.running)
            if sequence is None or sequence.request.places_needed > places:
                return
            if not self._admit(plan, sequence):
                return
            places -= 1 + sequence.request.forks_due
            self._plan_chunk(plan, sequence, plan.tokens_left)

    def _admit(self, plan: _Plan, sequence: Sequence, spare: int = 0) -> bool:
        """Allocate the blocks of all tokens of a waiting sequence, cached ones where there are any,
        and run it. False, and nothing changed, if there are not enough: ``spare`` stay free."""
        request = sequence.request
        kv = self._kv
        reserve = sequence.reserved_blocks
        if not request.running:
            reserve += request.reserved_blocks
        if self._live.reserved_blocks + reserve > kv.num_blocks:
            return False
        hits = self._hits(sequence)
        num_new = kv.blocks_for(sequence.num_tokens) - len(hits)
        # With nothing running no blocks need stay free, and waiting would never end.
        spare = max(self._watermark, spare) if self._live.running else 0
        table = kv.allocate(hits, num_new, spare=spare)
        if table is None:
            assert self._preempts or plan.ahead, "a reserved block is not free"
            return False
        num_cached = len(hits) * kv.block_size
        request.count_prefill(sequence, num_cached)
        sequence.prefill_end = sequence.num_tokens
        if sequence.output:  # it decodes its last token
            sequence.prefill_end -= 1
        self._live.admit(sequence, table, num_cached, plan.now)
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
