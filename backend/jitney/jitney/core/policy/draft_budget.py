"""The budget of drafts: the tokens and blocks that a step has left for them, and for the tokens
that a draft model proposes after them.

The draft policy says which drafts it would like. Here they are cut down to what the rest of the
step does not need: each running sequence keeps one token of the budget, prompts keep all that they
need, and blocks that others will need stay free. Blocks that are allocated for them are called
*lookahead*; after the step ``LiveRequests.free_lookahead`` frees those that no token needs. Called
by the planner.
"""

from itertools import accumulate

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
        # All that follows is of the step that is being planned. begin() sets it anew.
        self._running: list[Sequence] = []
        # Tokens of the budget that are left to prompts. Counted when they are first asked for: in
        # most steps no sequence has drafts to choose.
        self._prompt_tokens_due: int | None = None
        self._reads_left = 0  # tokens that a draft model may read in this step
        # By index: how many blocks the running sequences before that index may need. Counted when
        # it is first asked for: most steps have a slot for each draft.
        self._blocks_before: list[int] = []

    def begin(self, running: list[Sequence], max_tokens: int) -> None:
        """A step of these sequences is to be planned. A draft model may read as many tokens as the
        step may compute: ``max_tokens``. ``running`` is the scheduler's own list: if a sequence is
        preempted while the step is planned, it becomes shorter at its end."""
        self._running = running
        self._prompt_tokens_due = None
        self._reads_left = max_tokens
        self._blocks_before = []

    def _count_prompt_tokens(self) -> int:
        """Tokens that the prompts of running sequences still need, and those of the first waiting
        sequence if it may run."""
        tokens = sum(sequence.num_to_prefill for sequence in self._running)
        if self._admission.running_counts.num_admissible > 0:
            first = self._admission.first()
            if first is not None:
                tokens += first.num_tokens
        return tokens

    def choose(self, sequence: Sequence, *, tokens_left: int, next_index: int) -> DraftChoice:
        """Choose what a decode computes after its token, and allocate slots for all of it.
        ``tokens_left``: of the budget, the decode's own token included. ``next_index``: the running
        sequences from there on are planned after this one."""
        if self._prompt_tokens_due is None:
            self._prompt_tokens_due = self._count_prompt_tokens()
        num_after = len(self._running) - next_index
        # Its own token, the prompts, and one token for each sequence after it come first.
        spare_tokens = tokens_left - 1 - self._prompt_tokens_due - num_after
        choice = self._drafts.choice_of(
            sequence, most=max(spare_tokens, 0), most_read=self._reads_left
        )
        if choice.is_empty:
            return choice
        # Both calls cut `choice` down in place. Slots come first, because only tokens that have
        # slots take seconds.
        self._cut_to_slots(sequence, choice, next_index)
        self._limits.take_drafts(choice)
        if choice.is_empty:
            self._drafts.note_refused(sequence)
        else:
            self._allocate_slots(sequence, choice)
        self._reads_left -= choice.most_read
        return choice

    def _cut_to_slots(self, sequence: Sequence, choice: DraftChoice, next_index: int) -> None:
        """Cut a choice down to the slots that the sequence has, or could get from blocks that can
        be spared."""
        num_blocks = len(sequence.table)
        if num_blocks < self._blocks_for(sequence, choice):
            num_blocks += self._num_spare_blocks(next_index)
        slots = num_blocks * self._kv.block_size - _first_position(sequence)
        del choice.drafts[slots:]
        choice.propose = min(choice.propose, slots - len(choice.drafts))
        if not choice.propose:
            choice.ask_nothing()

    def _allocate_slots(self, sequence: Sequence, choice: DraftChoice) -> None:
        """Allocate the blocks for a choice, which can be spared."""
        size = self._blocks_for(sequence, choice)
        while len(sequence.table) < size:
            grown = self._kv.grow(sequence.table)
            assert grown, "a block to spare is not free"

    def _blocks_for(self, sequence: Sequence, choice: DraftChoice) -> int:
        """Blocks of the sequence with a slot for each token of the choice. To propose k tokens, the
        draft model writes the k positions behind the drafts: that of the row's sample first. (It
        does not write the last token that it proposes.)"""
        end = _first_position(sequence) + len(choice.drafts) + choice.propose
        return self._kv.blocks_for(end)

    def _num_spare_blocks(self, next_index: int) -> int:
        """How many free blocks drafts may take: none if a sequence waits; else those that the
        sequences from ``next_index`` on do not need."""
        if self._admission.num_waiting:
            return 0
        return max(self._kv.num_available - self._blocks_due(next_index), 0)

    def _blocks_due(self, next_index: int) -> int:
        """Blocks that others may need in this step: the forks that are due, and the sequences from
        ``next_index`` on."""
        if not self._blocks_before:
            of_each = map(self._blocks_needed_by, self._running)
            self._blocks_before = list(accumulate(of_each, initial=0))
        before = self._blocks_before
        # The counts may be older than this call, but they hold for the sequences from `next_index`
        # on that still run. These are not planned yet, so they need what was counted for them. And
        # their indices are the same: since the count, only the last sequences were preempted.
        of_sequences = before[len(self._running)] - before[next_index]
        # A fork that is due needs one block.
        return self._admission.running_counts.num_forks_due + of_sequences

    def _blocks_needed_by(self, sequence: Sequence) -> int:
        """Blocks that a sequence may need: those that its known tokens lack, and at least one, for
        the token that it samples."""
        missing = self._kv.blocks_for(sequence.num_tokens) - len(sequence.table)
        return max(1, missing)


def _first_position(sequence: Sequence) -> int:
    """Of what a decode computes after its token."""
    return sequence.num_planned + 1
