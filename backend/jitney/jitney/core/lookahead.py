"""Lookahead: the room of a step for drafts, and for what a draft model proposes behind them.

Which drafts there are, the draft policy says. They get what others leave: every running sequence
keeps a token of the budget, prompts keep theirs, and blocks that others will need stay free. The
planner's, which makes the rows.
"""

from jitney.core.live import LiveRequests
from jitney.core.policy.choose import Policies
from jitney.core.policy.seam import DraftChoice
from jitney.core.request import Sequence


class Lookahead:
    """The room of the step that is being planned."""

    def __init__(self, live: LiveRequests, policies: Policies) -> None:
        self._live = live
        self._kv = live.kv
        self._admission = policies.admission
        self._limits = policies.limits
        self._drafts = policies.drafts
        self._kept_for_prompts = 0
        self._reads_left = 0

    def begin(self, max_tokens: int) -> None:
        """A step is to be planned. A draft model may read as many tokens as the step computes."""
        self._kept_for_prompts = self._tokens_of_prompts()
        self._reads_left = max_tokens

    def _tokens_of_prompts(self) -> int:
        """Tokens that the prompts of running sequences need, and the first waiting sequence if it
        may run."""
        running = self._live.running
        tokens = sum(one.prefill_left for one in running)
        if self._admission.places(running) > 0:
            first = self._admission.first(running)
            if first is not None:
                tokens += first.num_tokens
        return tokens

    def choice_of(self, sequence: Sequence, *, tokens_left: int, position: int) -> DraftChoice:
        """What a decode computes behind its token, with slots for all of it. Of ``tokens_left`` it
        takes one for that token; running sequences from ``position`` on come after it."""
        after = self._live.running[position:]
        spare_tokens = tokens_left - 1 - self._kept_for_prompts - len(after)
        choice = self._drafts.choice_of(
            sequence, most=max(spare_tokens, 0), most_read=self._reads_left
        )
        if choice.is_empty:
            return choice
        self._limits.limit_drafts(choice)
        self._take_slots(sequence, choice, after)
        if choice.is_empty:
            self._drafts.note_refused(sequence)
        self._reads_left -= choice.read
        return choice

    def _take_slots(self, sequence: Sequence, choice: DraftChoice, after: list[Sequence]) -> None:
        """Allocate blocks for a choice, and cut it down to the slots there are. While any sequence
        waits, drafts take no blocks."""
        kv = self._kv
        table = sequence.table
        start = sequence.num_planned + 1
        while True:
            slots = len(table) * kv.block_size - start
            if slots >= len(choice.drafts) + choice.propose:
                return
            if self._live.num_waiting or kv.num_free <= self._blocks_due(after):
                break
            if not kv.grow(table):
                break
        del choice.drafts[slots:]
        choice.propose = min(choice.propose, slots - len(choice.drafts))
        if not choice.propose:
            choice.ask_nothing()

    def _blocks_due(self, after: list[Sequence]) -> int:
        """Blocks for every fork that is due, and for the known tokens of these sequences."""
        running = self._live.running
        forks = self._admission.max_running - self._admission.places(running) - len(running)
        due = forks
        for sequence in after:
            missing = self._kv.blocks_for(sequence.num_tokens) - len(sequence.table)
            due += max(1, missing)
        return due
