"""The plan of one step: which sequence computes which tokens in it. Called by the scheduler alone.

There are no phases: a sequence has ``num_tokens`` tokens of which ``num_planned`` are in the cache
or about to be, and a step computes some more of them under one token budget. It takes, in this
order,

1. *decodes*: running sequences with one token to compute, or with several that a grammar forced,
2. *chunks*: running sequences with a prompt or a recomputation to compute, some of it in each step,
3. waiting sequences, as far as running sequences, blocks and budget allow,

each in order of rank. If decodes would take nearly the whole budget, they leave an eighth of it to
chunks.

A request of n > 1 counts as n running sequences while its prompt is computed. With ``eviction:
preempt`` it is admitted as soon as one more sequence may run. Then some of its forks may have to
wait in the queue. With ``eviction: never`` it is admitted only when as many of its sequences may
run as can ever run at once. If it were admitted earlier, its waiting forks would have to compute
the prompt again later, in blocks that are not reserved for them.

A plan *ahead* is made while a step is in flight. It differs in five things:

- A token that the step in flight is still sampling is *carried*: the row has its index among the
  samples instead of the token.
- A sequence gets no row if its pending token is the last that it may have.
- A sequence gets no row either if its next row depends on the value of its pending token: because
  its request reads its own output, or because it has drafts in flight or is about to have some. It
  gets its row in the next plan.
- Nothing is preempted: :attr:`Planner.can_plan_ahead` has checked that there is a block for each
  decode. Tokens that a grammar forces and that do not fit are computed in the next step.
- It copies no blocks. Of slots it copies only snapshots, for sequences that it admits.

Models whose prompts may not be cut (``Chunking``) take other steps: a prompt has one of its own,
whatever the budget is, and each later row of its sequence has one token. Steps with a prompt and
steps of decodes take turns, so that neither waits for long.

What may shape a step beside rank and budget is asked of ``policy``.
"""

from jitney.config import EngineConfig
from jitney.core.admit import Admitter
from jitney.core.borders import Borders
from jitney.core.live import LiveRequests
from jitney.core.planned_step import PlannedStep
from jitney.core.policy.draft_budget import DraftBudget
from jitney.core.policy.seam import Policies
from jitney.core.request import Sequence, SequenceState
from jitney.core.step_plan import StepPlan
from jitney.messages import Chunking, StepStats

# A plan ahead saves sequences the wait for the host. But a sequence that it leaves out has a row
# only in every second step. So a plan ahead is made only if it leaves out at most this part of the
# running sequences.
_MOST_LEFT_OUT = 1 / 4
# The part of the token budget that decodes leave to chunks, if there are any.
_PREFILL_SHARE = 1 / 8


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
        chunking: Chunking = "any",
    ) -> None:
        """Admissions leave ``watermark`` blocks free."""
        self._live = live
        self._borders = Borders(live)
        self._kv = live.kv
        self._admitter = Admitter(config, live, watermark)
        self._admission = policies.admission
        self._limits = policies.limits
        self._drafts = policies.drafts
        self._draft_budget = DraftBudget(live.kv, policies)
        self._block_size = config.block_size
        self._preempts = config.eviction == "preempt"
        self._cuts_prompts = chunking == "any"
        self._is_turn_of_prompts = True
        """If prompts are not cut: whether the next step has a prompt, if there is one."""
        self._max_tokens = max_num_batched_tokens
        self._prefill_share = int(max_num_batched_tokens * _PREFILL_SHARE)

    @property
    def can_plan_ahead(self) -> bool:
        """Whether a step may be planned now. While one is in flight, a block must be free for every
        decode that needs one, and few sequences may depend on the value of a pending token."""
        live = self._live
        if not live.in_flight:
            return True
        if live.to_restart:
            return False
        # An urgent sequence is admitted before the running ones are planned. If others must be
        # preempted for it, no step is planned ahead, because a plan ahead preempts nobody.
        urgent = self._admission.urgent(live.running)
        if urgent is not None and self._to_preempt(urgent, self._admitter.hits(urgent)):
            return False
        step = live.in_flight[-1]
        if step.must_complete_first:  # forks begin with its samples, or it is a retry
            return False
        # A plan ahead leaves out the sequences whose next row depends on the value of a sample.
        if step.host_reads_samples and self._leaves_out_many():
            return False
        free = self._kv.num_available
        # A decode needs one block at most. So these are enough, whichever decodes need one.
        if free >= len(live.running):
            return True
        return free >= sum(map(self._needs_block, live.running))

    def make(self, now: float, counts: StepStats) -> PlannedStep:
        """Plan a step. Its lookups in the prefix cache are added to ``counts``."""
        live = self._live
        plan = StepPlan(
            now=now,
            counts=counts,
            ahead=bool(live.in_flight),
            tokens_left=self._max_tokens,
        )
        preemptions_before = live.preemptions
        self._admission.begin_step(live.running, now)
        self._admit_urgent(plan)
        if self._cuts_prompts:
            # No further sequence is admitted until the chunks of all running ones are planned. So
            # it can be counted now how many tokens decodes and drafts must leave to prompts.
            plan.min_prefill_tokens = self._min_prefill_tokens()
        if self._drafts.is_active:
            self._draft_budget.begin(live.running, self._max_tokens)
        self._limits.begin(live.running)
        self._drafts.begin(live.running, self._limits)
        if self._cuts_prompts:
            self._plan_chunked(plan, preemptions_before)
        else:
            self._plan_uncut(plan, preemptions_before)
        self._admission.note_planned(now)
        self._add_copies(plan)
        plan.step.target = self._limits.target
        return plan.step

    def make_restarted(
        self, sequences: list[Sequence], now: float, counts: StepStats
    ) -> PlannedStep:
        """Plan a step of some of these sequences alone: live ones, which were restarted. They are
        admitted if they wait and there is room."""
        plan = StepPlan(now=now, counts=counts, ahead=False, tokens_left=self._max_tokens)
        for sequence in sequences:
            if not plan.tokens_left:
                break
            if sequence.state is SequenceState.WAITING:
                hits = self._admitter.hits(sequence)
                if not self._admitter.admit(plan, sequence, hits):
                    continue
            count = sequence.num_tokens - sequence.num_planned
            if self._cuts_prompts:
                self._plan_known(plan, sequence, min(count, plan.tokens_left))
            elif sequence.num_planned:
                self._plan_known(plan, sequence, 1)
            elif not plan.step.batch.rows:
                self._plan_whole_prompt(plan, sequence)
                break
        self._add_copies(plan)
        plan.step.must_complete_first = True
        return plan.step

    def _plan_chunked(self, plan: StepPlan, preemptions_before: int) -> None:
        """Plan rows of decodes, chunks and newly admitted sequences."""
        prefills = self._plan_decodes(plan)
        for sequence in prefills:  # all of them still run: `_plan_decodes` says why
            self._plan_chunk(plan, sequence, plan.tokens_left)
        if self._may_admit(preemptions_before):
            self._admit_waiting(plan)

    def _may_admit(self, preemptions_before: int) -> bool:
        """Whether waiting sequences may be admitted, once the running ones are planned. Not in a
        step that preempts, because blocks are short.

        There is one exception, in which the step would be empty otherwise. A fork runs alone, and a
        grammar has forced more tokens than its blocks have slots for: it preempts itself. Its
        leader has ended, but a pending copy to the fork has held a block of the leader. This block
        is free now. So there is room to admit the fork again."""
        has_preempted = self._live.preemptions > preemptions_before
        return not has_preempted or not self._live.running

    def _add_copies(self, plan: StepPlan) -> None:
        """Complete a plan: it makes the pending copies, and snapshots. A plan ahead makes only the
        copies of snapshots for sequences that it has admitted: the step in flight makes all others
        that are pending, and forks are made when it is complete."""
        assert plan.tokens_left >= 0, "the step is over its budget"
        batch = plan.step.batch
        slots = self._live.slots
        self._borders.begin_snapshots(plan.step)
        batch.slot_copies = slots.pending_copies()
        if plan.ahead:
            made = self._live.in_flight[-1].batch.slot_copies
            batch.slot_copies = [copy for copy in batch.slot_copies if copy not in made]
            return
        batch.copies = self._kv.pending_copies()
        batch.released_slots = slots.take_released()

    # ------------------------------------------------------------------ what can be planned ahead

    def _leaves_out_many(self) -> bool:
        """Whether a plan ahead would leave out so many sequences that it does not pay."""
        running = self._live.running
        left_out = 0
        for sequence in running:
            if sequence.request.reads_output or sequence.has_drafts_in_flight:
                left_out += 1
        return left_out > len(running) * _MOST_LEFT_OUT

    def _needs_block(self, sequence: Sequence) -> bool:
        """Whether the next decode of a sequence needs a block that it does not have."""
        if sequence.num_planned >= sequence.max_computed:
            return False
        end = max(sequence.num_planned + 1, sequence.num_tokens)
        return len(sequence.table) * self._block_size < end

    # ------------------------------------------------------------------ running sequences

    def _min_prefill_tokens(self) -> int:
        """Tokens of the step that decodes leave to running sequences with chunks."""
        running = self._live.running
        share = self._prefill_share
        # A decode takes one token. If the budget has so many beside the share, nothing needs to be
        # kept. Two kinds of decodes take more tokens. Those with drafts leave prompts what they
        # need (`policy.draft_budget`). Those of forced tokens may take a part of the share, which
        # is accepted.
        if len(running) <= self._max_tokens - share:
            return 0
        return min(share, sum(sequence.num_to_prefill for sequence in running))

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Plan a row for every running sequence that decodes. While no block is free for it, other
        sequences are preempted. Returns the running sequences that do not decode yet, in order."""
        running = self._live.running
        block_size = self._block_size
        limits = self._limits
        prefills = []
        index = 0
        # `running` may shrink while it is read: a decode that needs a block preempts the last
        # sequence. That one comes after the decode, or is the decode. So it has no row yet, it is
        # not in `prefills`, and no sequence before it changes its index.
        while index < len(running):
            sequence = running[index]
            index += 1
            start = sequence.num_planned
            if start < sequence.decodes_from:  # it has a prompt or a recomputation to compute
                prefills.append(sequence)
                continue
            # If all known tokens are planned, the step in flight still samples the one that comes
            # next. (`start` is even greater than `num_tokens` if that step also computes drafts.)
            next_is_pending = start >= sequence.num_tokens
            # Four reasons to give it no row. First: its next row depends on the value of the
            # pending token.
            if next_is_pending and self._waits_for_sample(sequence):
                continue
            # Second: the rest of the budget is for chunks.
            if plan.tokens_left <= plan.min_prefill_tokens:
                continue
            # Third: all that is ever computed is planned, and its last token is pending.
            if start >= sequence.max_computed:
                continue
            # Fourth: the step has no seconds left for it.
            seconds = None
            if limits.is_active and limits.is_limited(sequence):
                seconds = limits.seconds_for_decode(sequence)
                if seconds is None:
                    limits.note_held_back(sequence)
                    continue
            # A pending token takes a slot, too.
            count = 1 if next_is_pending else sequence.num_tokens - start
            end = start + count
            if len(sequence.table) * block_size < end and not self._grow_table(plan, sequence, end):
                continue  # it was preempted
            if seconds is not None:  # it is limited
                limits.count_decode(sequence, seconds)
            if next_is_pending:
                # The token is carried: the device replaces this 0 by the pending token.
                carried = sequence.sample_index
                plan.add_row(sequence, [0], (sequence.index,), carried=carried)
            elif count == 1:
                self._plan_decode(plan, sequence, index)
            else:
                self._plan_forced(plan, sequence, index)
        return prefills

    def _waits_for_sample(self, sequence: Sequence) -> bool:
        """Whether a plan ahead leaves out a sequence whose next token is pending."""
        if sequence.has_drafts_in_flight or sequence.request.reads_output:
            return True
        return self._drafts.is_active and self._drafts.waits_for_sample(sequence)

    def _plan_decode(self, plan: StepPlan, sequence: Sequence, next_index: int) -> None:
        """Plan a decode of one token, and its drafts. The running sequences from ``next_index`` on
        come after it."""
        tokens = [sequence.output[-1]]
        choice = None
        if self._drafts.has_choice(sequence):
            choice = self._draft_budget.choose(
                sequence, tokens_left=plan.tokens_left, next_index=next_index
            )
            tokens += choice.drafts
        plan.add_row(sequence, tokens, (sequence.index,), choice=choice)

    def _plan_forced(self, plan: StepPlan, sequence: Sequence, next_index: int) -> None:
        """Plan a decode of several known tokens, which a grammar forced: at most as many as it has
        slots for, and so few that one token is left for each running sequence from ``next_index``
        on."""
        num_after = len(self._live.running) - next_index
        budget = max(plan.tokens_left - plan.min_prefill_tokens - num_after, 1)
        if not self._cuts_prompts:
            budget = 1
        slots = len(sequence.table) * self._block_size - sequence.num_planned
        num_known = sequence.num_tokens - sequence.num_planned
        self._plan_known(plan, sequence, min(num_known, budget, slots))

    def _grow_table(self, plan: StepPlan, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for the positions below ``end`` of ``sequence``; in a plan ahead, one
        block at most. While no block is free, the last running sequence is preempted. False if
        that was ``sequence`` itself."""
        size = self._kv.blocks_for(end)
        if plan.ahead:
            # can_plan_ahead has checked for one block, which is enough for one token. More tokens
            # than there are slots for are computed in the next step.
            size = len(sequence.table) + 1
        while len(sequence.table) < size:
            if self._kv.grow(sequence.table):
                continue
            assert self._preempts, "a reserved block is not free"
            assert not plan.ahead, "blocks are short, and a step is in flight"
            victim = self._live.running[-1]
            self._live.preempt(victim, plan.now)
            if victim is sequence:
                return False
        return True

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, most: int) -> None:
        """Plan at most ``most`` tokens of a prompt or a recomputation. Their blocks were allocated
        when the sequence was admitted."""
        start = sequence.num_planned
        count = min(sequence.num_tokens - start, most)
        # It ends early where a snapshot is to be made.
        count = self._borders.end_of_chunk(sequence, start + count) - start
        # A sequence that was just admitted may have only its last token left to compute: that is a
        # decode.
        if start < sequence.decodes_from:
            count = self._limits.take_chunk(sequence, count)
        if count:
            self._plan_known(plan, sequence, count)

    def _plan_known(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        """Plan the next ``count`` tokens of a sequence: all of them are known, and have slots."""
        start = sequence.num_planned
        sample: tuple[int, ...] = ()
        if start + count == sequence.num_tokens:
            if sequence.output:
                sample = (sequence.index,)
            else:  # the end of the prompt: the first tokens of all forks come from its logits
                sample = tuple(range(sequence.request.message.params.n))
        tokens = sequence.tokens(start, start + count)
        plan.add_row(sequence, tokens, sample)

    # ------------------------------------------------------------------ prompts that are not cut

    def _plan_uncut(self, plan: StepPlan, preemptions_before: int) -> None:
        """Plan either one prompt, or the rows of one token. ``preemptions_before``: how many there
        had been before this plan."""
        if self._is_turn_of_prompts and self._plan_a_prompt(plan, preemptions_before):
            self._is_turn_of_prompts = False
            return
        for sequence in self._plan_decodes(plan):
            # Behind its prompt, a recomputation goes on by single tokens.
            if sequence.num_planned and plan.tokens_left:
                self._plan_known(plan, sequence, 1)
        self._is_turn_of_prompts = True
        if not plan.step.batch.rows and self._plan_a_prompt(plan, preemptions_before):
            self._is_turn_of_prompts = False

    def _plan_a_prompt(self, plan: StepPlan, preemptions_before: int) -> bool:
        """Plan the first prompt, by order, of those that are not computed. Its sequence may be
        admitted for it. False: there is none, or no room for it."""
        for sequence in self._live.running:
            if not sequence.num_planned:
                self._plan_whole_prompt(plan, sequence)
                return True
        first = self._admission.first()
        if first is None or not self._may_admit(preemptions_before):
            return False
        if first.request.least_admissible > self._admission.running_counts.num_admissible:
            return False
        if not self._admitter.admit(plan, first, hits=[]):
            return False
        self._plan_whole_prompt(plan, first)
        return True

    def _plan_whole_prompt(self, plan: StepPlan, sequence: Sequence) -> None:
        """Plan a prompt in a step that has no other row. The step takes as many tokens as it
        needs."""
        size = len(sequence.prompt)  # not ``num_tokens``: it may have output already
        plan.tokens_left = max(plan.tokens_left, size)
        self._plan_known(plan, sequence, size)

    # ------------------------------------------------------------------ waiting sequences

    def _admit_urgent(self, plan: StepPlan) -> None:
        """Admit the sequences that come before running ones, and preempt others for them."""
        live = self._live
        counts = self._admission.running_counts
        # A plan ahead preempts nobody. So each admission must leave a block free for the decode of
        # each sequence that runs now. Those that are admitted here need none: they get blocks for
        # all of their tokens.
        spare = len(live.running) if plan.ahead else 0
        while True:
            sequence = self._admission.urgent(live.running)
            if sequence is None:
                return
            hits = self._admitter.hits(sequence)
            if not plan.ahead:
                for victim in self._to_preempt(sequence, hits):
                    live.preempt(victim, plan.now)
            if sequence.request.least_admissible > counts.num_admissible:
                return
            # Nothing was allocated since `hits` were found. So they are still cached.
            if not self._admitter.admit(plan, sequence, hits, spare):
                return

    def _to_preempt(self, urgent: Sequence, hits: list[int]) -> list[Sequence]:
        """Running sequences to preempt for an urgent one, which would begin with ``hits``."""
        if not self._preempts:
            return []
        return self._admission.to_preempt(urgent, hits, self._live.running)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit waiting sequences in order until one does not fit. It is not passed over: small
        requests would starve a large one."""
        admission = self._admission
        counts = admission.running_counts
        while admission.num_waiting and plan.tokens_left:
            admissible = counts.num_admissible
            if admissible <= 0:
                return
            sequence = admission.first()
            if sequence is None or sequence.request.least_admissible > admissible:
                return
            if not self._admitter.admit(plan, sequence, self._admitter.hits(sequence)):
                return
            self._plan_chunk(plan, sequence, plan.tokens_left)
