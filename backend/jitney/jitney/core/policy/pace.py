"""Latency tiers, as far as steps go: how much of a step the lower tiers get.

The most urgent tier that decodes and has a target for the gap between its tokens limits the seconds
of a step. They go to the decodes of that tier and of those above it first, then, by rank, to what
the lower tiers and prompts have to compute, as far as it fits by the learned cost: a chunk is cut,
a decode is left out (*held back*). But each tier keeps its ``share`` of those seconds, or what is
least: a decode, or a block of a prompt.

While nobody decodes who has such a target, lower tiers may take a third of the least target for a
first token: who arrives waits for the step that runs, with overlap for the one behind it too, and
then for its own.

An estimate is not always met, and the engine has work beside the device. So a step is planned for a
part of the target, the *aim*: it shrinks with each gap that exceeds the target and grows slowly
with all others, such that they balance if one in a hundred does.
"""

from dataclasses import dataclass

from jitney.config import TierConfig
from jitney.core.policy.cost import StepCost, StepShape
from jitney.core.policy.seam import DraftChoice
from jitney.core.policy.tiers import TierCounts
from jitney.core.request import Sequence

# The aim after a gap that exceeded its target, and after one that did not: 0.95 * 1.0005 ** 99 is
# about 1, so it stays where one gap in a hundred exceeds the target.
_EXCEEDED = 0.95
_MET = 1.0005
_LEAST_AIM = 0.5
_STEPS_TO_FIRST = 3  # the step that runs, with overlap the one behind it, and its own
_LEAST_READ = 16  # tokens: to read no more than a sequence grows by would never come to an end
_NO_LIMIT = float("inf")


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The limit of one step."""

    seconds: float = _NO_LIMIT
    """That it may take by the learned cost."""
    target: float | None = None
    """Seconds: the target for the gap between tokens that it is planned for, if it is one."""
    top: int = 0
    """The tier whose target it is. Those below are limited."""

    @property
    def shared(self) -> float:
        """Seconds that shares are of: the target itself where the limit is a part of it."""
        return self.target or self.seconds


def budget_of(tiers: tuple[TierConfig, ...], decoding: set[int], aim: float) -> StepBudget:
    """The limit of a step in which these tiers decode."""
    budget = StepBudget(top=len(tiers))
    for index, tier in enumerate(tiers):
        if index in decoding and tier.gap_ms is not None:
            target = tier.gap_ms / 1e3
            if target * aim < budget.seconds:
                budget = StepBudget(seconds=target * aim, target=target, top=index)
            # The targets of the tiers below are not for its step.
            return budget
        if tier.ttft_ms is not None:
            seconds = tier.ttft_ms / 1e3 / _STEPS_TO_FIRST
            if seconds < budget.seconds:
                budget = StepBudget(seconds=seconds, top=min(budget.top, index))
    return budget


class Pace:
    """The limits of the step that is being planned, and what of it is taken. A ``StepLimits``."""

    is_active = True

    def __init__(
        self,
        tiers: tuple[TierConfig, ...],
        cost: StepCost,
        block_size: int,
        counts: TierCounts,
    ) -> None:
        self._tiers = tiers
        self._cost = cost
        self._block_size = block_size
        self._counts = counts
        self.aim = 1.0
        # When the last step was complete, and its target.
        self._last_at = 0.0
        self._last_target: float | None = None

    def begin(self, running: list[Sequence]) -> None:
        decodes = [one for one in running if not one.prefill_left]
        if self._cost.weights is None:  # nothing is known of steps yet
            self._budget = StepBudget(top=len(self._tiers))
            self._weights = StepShape(steps=0.0)
        else:
            decoding = {one.request.tier for one in decodes}
            self._budget = budget_of(self._tiers, decoding, self.aim)
            self._weights = self._cost.weights
        self._chunked = False  # whether any row has more than one token
        self._passes = 0  # of a draft model
        self._spent = [0.0] * len(self._tiers)
        self._taken = self._weights.steps
        for sequence in decodes:
            if not self.is_limited(sequence):
                self._taken += self._of_decode(sequence)
        self._reserve_for_prompts(running)
        self._reserve_for_lower_tiers(running)

    def _reserve_for_prompts(self, running: list[Sequence]) -> None:
        """Keep what the prompts of the tiers that set the pace take from the others."""
        tokens = sum(one.prefill_left for one in running if one.request.tier <= self._budget.top)
        self._reserved = 0.0
        if tokens:
            self._reserved = self._weights.chunked + self._weights.tokens * tokens

    def _reserve_for_lower_tiers(self, running: list[Sequence]) -> None:
        """Of each lower tier, the first sequence by rank goes on in any case."""
        self._lower: dict[int, Sequence] = {}
        for sequence in running:
            if self.is_limited(sequence):
                self._lower.setdefault(sequence.request.tier, sequence)
        self._kept: dict[Sequence, float] = {}  # until its chunk is planned
        for tier, sequence in self._lower.items():
            # A block of its prompt comes before decodes that rank behind it.
            if sequence.prefill_left:
                fixed, each = self._of_chunk(sequence)
                seconds = fixed + each * min(sequence.prefill_left, self._block_size)
                self._kept[sequence] = seconds
                self._take(tier, seconds)

    # ------------------------------------------------------------------ questions

    @property
    def target(self) -> float | None:
        """None also if no lower tier has any part in the step: it cannot be shorter."""
        return self._budget.target if any(self._spent) else None

    def is_limited(self, sequence: Sequence) -> bool:
        return sequence.request.tier > self._budget.top

    def may_decode(self, sequence: Sequence) -> bool:
        if not self.is_limited(sequence):
            return True
        tier = sequence.request.tier
        # A tier that took nothing of the step yet has one row in it, whatever that costs.
        if not self._spent[tier]:
            return True
        if self._left(tier, self._reserved) >= self._of_decode(sequence):
            return True
        self._counts.held_back[tier] += 1
        return False

    def count_decode(self, sequence: Sequence) -> None:
        if self.is_limited(sequence):
            self._take(sequence.request.tier, self._of_decode(sequence))

    def limit_chunk(self, sequence: Sequence, most: int) -> int:
        tier = sequence.request.tier
        self._take(tier, -self._kept.pop(sequence, 0.0))
        count = self._chunk_that_fits(sequence, most)
        if count < most:
            self._counts.held_back[tier] += 1
        if count:
            fixed, each = self._of_chunk(sequence)
            self._take(tier, fixed + each * count)
            self._chunked = True
            if tier <= self._budget.top:
                self._reserved = max(self._reserved - each * count, 0.0)
        return count

    def _chunk_that_fits(self, sequence: Sequence, most: int) -> int:
        """Tokens of a chunk that the step has room for."""
        tier = sequence.request.tier
        top = self._budget.top
        if tier < top or (tier == top and self._budget.target is None):
            return most  # the limit is not for its own prompts
        kept = self._reserved
        if tier == top:
            kept = self._shares_left()
        fixed, each = self._of_chunk(sequence)
        left = self._left(tier, kept) - fixed
        if left >= each * most or not each:
            return most
        least = 0
        if not self._spent[tier]:
            least = min(most, self._block_size)
        return max(int(left / each), least)

    def limit_drafts(self, choice: DraftChoice) -> None:
        weights = self._weights
        count = self._fit(len(choice.drafts), weights.drafts, weights.drafted)
        del choice.drafts[count:]
        if count:
            self._taken += weights.drafted + weights.drafts * count
        self._limit_proposals(choice)

    def _limit_proposals(self, choice: DraftChoice) -> None:
        """Take the seconds of a draft model's passes, of which all rows that ask share each, and of
        what it reads before."""
        if not choice.propose:
            return
        weights = self._weights
        further = max(choice.propose - self._passes, 0)
        passes = self._fit(further, weights.passes, 0.0)
        propose = choice.propose - (further - passes)
        fixed = weights.asked + weights.passes * passes
        read = self._fit(choice.read, weights.read, fixed)
        if propose <= 0 or read < min(choice.read, _LEAST_READ):
            choice.ask_nothing()
            return
        self._passes = max(self._passes, propose)
        self._taken += fixed + weights.read * read
        choice.propose = propose
        choice.read = read

    def note_step(self, target: float | None, now: float) -> None:
        """Learn from the time since the last step, if both were limited."""
        gap = now - self._last_at
        both_limited = target is not None and self._last_target is not None
        self._last_at = now
        self._last_target = target
        if target is None or not both_limited:
            return
        if gap > target:
            self.aim = max(self.aim * _EXCEEDED, _LEAST_AIM)
        else:
            self.aim = min(self.aim * _MET, 1.0)

    # ------------------------------------------------------------------ seconds

    def _fit(self, most: int, each: float, fixed: float) -> int:
        """How many of ``most`` the step has room for, beside the shares of lower tiers."""
        left = self._budget.seconds - self._taken - self._shares_left() - fixed
        if left < 0.0:
            return 0
        if not each or left >= each * most:
            return most
        return int(left / each)

    def _left(self, tier: int, kept: float) -> float:
        """Seconds of the step that a tier may still take: what is left but for what is kept for
        others, or what is left of its share."""
        return max(self._budget.seconds - self._taken - kept, self._share_left(tier))

    def _share_left(self, tier: int) -> float:
        """Seconds of its share that a tier has not taken."""
        share = self._tiers[tier].share * self._budget.shared
        return max(share - self._spent[tier], 0.0)

    def _shares_left(self) -> float:
        """The same of all lower tiers that have work."""
        return sum(map(self._share_left, self._lower))

    def _take(self, tier: int, seconds: float) -> None:
        self._taken += seconds
        self._spent[tier] += seconds

    def _of_decode(self, sequence: Sequence) -> float:
        """Seconds that its row adds to the step."""
        weights = self._weights
        start = sequence.num_planned
        count = max(sequence.num_tokens - start, 1)
        return weights.samples + weights.tokens * count + weights.context * (start + count)

    def _of_chunk(self, sequence: Sequence) -> tuple[float, float]:
        """Seconds that a chunk adds to the step, whatever its size, and for each token."""
        weights = self._weights
        fixed = weights.samples + weights.context * sequence.num_planned
        if not self._chunked:
            fixed += weights.chunked
        return fixed, weights.tokens + weights.context
