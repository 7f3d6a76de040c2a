"""The budget of drafts: the tokens and blocks that a step has left for them, and for the tokens
that a draft model proposes after them.

The draft policy says which drafts it would like. Here they are cut down to what the rest of the
step does not need: each running sequence keeps one token of the budget, prompts keep all that they
need, and blocks that others will need stay free. Blocks that are allocated for them are called
*lookahead*; after the step ``LiveRequests.free_lookahead`` frees those that no token needs. Called
by the planner.
"""

from jitney.core.kv_cache import KvCache
from jitney.core.policy.seam import DraftChoice, Policies
from jitney.core.request import Sequence


class DraftBudget:
    """What the step that is being planned has left for drafts."""

    def __init__(self, kv: KvCache, policies: Policies) -> None:
        self._kv = kv
        self._admission = policies.admission
        self._limits = policies.limits
        self._drafts = policies.drafts
        self._running: list[Sequence] = []
        self._prompt_tokens_due = 0  # tokens of the budget that are left to prompts
        self._reads_left = 0  # tokens that a draft model may read in this step

    def begin(self, running: list[Sequence], max_tokens: int) -> None:
        """A step of these sequences is to be planned. A draft model may read as many tokens as the
        step may compute: ``max_tokens``. ``running`` is the scheduler's own list: it shrinks if a
        sequence is preempted while the step is planned."""
        self._running = running
        self._prompt_tokens_due = self._count_prompt_tokens()
        self._reads_left = max_tokens

    def _count_prompt_tokens(self) -> int:
        """Tokens that the prompts of running sequences still need, and those of the first waiting
        sequence if it may run."""
        running = self._running
        tokens = sum(sequence.num_to_prefill for sequence in running)
        if self._admission.num_free_slots(running) > 0:
            first = self._admission.first(running)
            if first is not None:
                tokens += first.num_tokens
        return tokens

    def choose(self, sequence: Sequence, *, tokens_left: int, after: list[Sequence]) -> DraftChoice:
        """Choose what a decode computes after its token, and allocate slots for all of it.
        ``tokens_left``: of the budget, the decode's own token included. ``after``: the running
        sequences that are planned after this one."""
        # Its own token, the prompts, and one token for each sequence after it come first.
        spare_tokens = tokens_left - 1 - self._prompt_tokens_due - len(after)
        choice = self._drafts.choice_of(
            sequence, most=max(spare_tokens, 0), most_read=self._reads_left
        )
        if choice.is_empty:
            return choice
        # Both calls cut `choice` down in place.
        self._limits.take_drafts(choice)
        self._allocate_slots(sequence, choice, after)
        if choice.is_empty:
            self._drafts.note_refused(sequence)
        self._reads_left -= choice.most_read
        return choice

    def _allocate_slots(
        self, sequence: Sequence, choice: DraftChoice, after: list[Sequence]
    ) -> None:
        """Allocate blocks for a choice, as far as they can be spared, and cut the choice down to
        the slots that there are."""
        kv = self._kv
        table = sequence.table
        start = sequence.num_planned + 1  # position of the first draft
        # To propose k tokens, the draft model writes the k positions behind the drafts: that of the
        # row's sample first. (It does not write the last token that it proposes.)
        end = start + len(choice.drafts) + choice.propose
        while len(table) * kv.block_size < end and self._can_spare_block(after):
            grown = kv.grow(table)
            assert grown, "a block to spare is not free"
        slots = len(table) * kv.block_size - start
        del choice.drafts[slots:]
        choice.propose = min(choice.propose, slots - len(choice.drafts))
        if not choice.propose:
            choice.ask_nothing()

    def _can_spare_block(self, after: list[Sequence]) -> bool:
        """Whether drafts may take a free block: if no sequence waits, and the sequences ``after``
        this one find enough blocks without it."""
        if self._admission.num_waiting:
            return False
        return self._kv.num_available > self._blocks_due(after)

    def _blocks_due(self, after: list[Sequence]) -> int:
        """Blocks that others may need in this step. A fork that is due needs one. Each sequence
        ``after`` this one needs one for the token that it samples, or more if its known tokens lack
        more."""
        due = self._admission.num_forks_due(self._running)
        for sequence in after:
            missing = self._kv.blocks_for(sequence.num_tokens) - len(sequence.table)
            due += max(1, missing)
        return due
