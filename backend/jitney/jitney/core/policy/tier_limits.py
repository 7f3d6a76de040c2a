"""Latency tiers, as far as steps go: how much of a step the lower tiers get.

The most urgent tier that decodes and has a target for the gap between its tokens limits the seconds
of a step. They go to the decodes of that tier and of those above it first. What is left goes, by
rank, to the lower tiers and to prompts, as far as it fits by the learned cost: a chunk is cut, a
decode is left out (*held back*). But each lower tier has at least its ``share`` of those seconds,
and at least one decode, or one block of a prompt, in each step.

While no tier with such a target decodes, lower tiers may take a third of the least target for a
first token. For a new request may have to wait for three steps: the one that runs, with overlap
the one behind it, and its own.

An estimate is not always met, and the engine has work beside the device. So a step is planned for a
part of the target, the *aim*. It shrinks with each gap that exceeds the target, and grows slowly
with each gap that does not, so that both balance if one gap in a hundred exceeds it.
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
# Tokens. If a draft model read fewer of a sequence in a step than the sequence grows by, it would
# never have read all of it.
_LEAST_READ = 16
_NO_LIMIT = float("inf")
_NO_WEIGHTS = StepShape(steps=0.0)  # by which a step takes no time


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The limit of one step."""

    seconds: float = _NO_LIMIT
    """That it may take by the learned cost."""
    target: float | None = None
    """If the limit is for a gap between tokens: the target for that gap, in seconds."""
    top: int = 0
    """The tier whose target it is. The tiers below it are limited."""

    @property
    def shared(self) -> float:
        """The seconds of which each tier has its share: the target if there is one, of which the
        limit is a part only; else the limit."""
        return self.target or self.seconds


def budget_of(tiers: tuple[TierConfig, ...], decoding: set[int], aim: float) -> StepBudget:
    """The limit of a step in which these tiers decode."""
    budget = StepBudget(top=len(tiers))
    for index, tier in enumerate(tiers):
        if index in decoding and tier.gap_ms is not None:
            target = tier.gap_ms / 1e3
            if target * aim < budget.seconds:
                budget = StepBudget(seconds=target * aim, target=target, top=index)
            # All tiers below are limited by this one, so their targets do not count.
            return budget
        if tier.ttft_ms is not None:
            seconds = tier.ttft_ms / 1e3 / _STEPS_TO_FIRST
            if seconds < budget.seconds:
                budget = StepBudget(seconds=seconds, top=min(budget.top, index))
    return budget


class Pace:
    """The seconds of the step that is being planned, and how many are taken. A ``StepLimits``."""

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
        # The rest is of the step that is being planned. begin() sets it anew.
        self._budget = StepBudget(top=len(tiers))
        self._weights = _NO_WEIGHTS
        self._chunked = False  # whether any row has more than one token
        self._passes = 0  # of a draft model
        self._taken = 0.0  # seconds of all rows so far
        self._spent = [0.0] * len(tiers)  # of these, what chunks and limited decodes took, by tier
        self._kept_for_prompts = 0.0  # seconds that lower tiers leave to prompts of other tiers
        self._lower: dict[int, Sequence] = {}  # the first running sequence of each lower tier
        # Of these, those with a prompt: seconds that are taken for a block of it, until its chunk
        # is planned.
        self._kept_for_first: dict[Sequence, float] = {}

    def begin(self, running: list[Sequence]) -> None:
        decodes = [one for one in running if not one.prefill_left]
        if self._cost.weights is None:  # no step was measured yet: nothing is limited
            self._budget = StepBudget(top=len(self._tiers))
            self._weights = _NO_WEIGHTS
        else:
            decoding = {one.request.tier for one in decodes}
            self._budget = budget_of(self._tiers, decoding, self.aim)
            self._weights = self._cost.weights
        self._chunked = False
        self._passes = 0
        self._spent = [0.0] * len(self._tiers)
        self._taken = self._weights.steps
        for sequence in decodes:
            if not self.is_limited(sequence):
                self._taken += self._of_decode(sequence)
        self._reserve_for_prompts(running)
        self._reserve_for_lower_tiers(running)

    def _reserve_for_prompts(self, running: list[Sequence]) -> None:
        """Keep the seconds of the prompts of those tiers that are not limited."""
        tokens = sum(one.prefill_left for one in running if one.request.tier <= self._budget.top)
        self._kept_for_prompts = 0.0
        if tokens:
            self._kept_for_prompts = self._weights.chunked + self._weights.tokens * tokens

    def _reserve_for_lower_tiers(self, running: list[Sequence]) -> None:
        """The first sequence of each lower tier, by rank, has a row in any case. If that is a
        chunk, its seconds are taken now, before decodes that rank behind it are planned."""
        self._lower = {}
        for sequence in running:
            if self.is_limited(sequence):
                self._lower.setdefault(sequence.request.tier, sequence)
        self._kept_for_first = {}
        for tier, sequence in self._lower.items():
            if sequence.prefill_left:
                fixed, each = self._of_chunk(sequence)
                seconds = fixed + each * min(sequence.prefill_left, self._block_size)
                self._kept_for_first[sequence] = seconds
                self._take(tier, seconds)

    # ------------------------------------------------------------------ questions

    @property
    def target(self) -> float | None:
        """The target of the step. None also if the step has nothing that could have been left out:
        then its time tells nothing about the aim."""
        return self._budget.target if any(self._spent) else None

    def is_limited(self, sequence: Sequence) -> bool:
        return sequence.request.tier > self._budget.top

    def may_decode(self, sequence: Sequence) -> bool:
        if not self.is_limited(sequence):
            return True
        tier = sequence.request.tier
        # Each tier has at least one row in the step, whatever that costs.
        if not self._spent[tier]:
            return True
        if self._left(tier, self._kept_for_prompts) >= self._of_decode(sequence):
            return True
        self._counts.held_back[tier] += 1
        return False

    def count_decode(self, sequence: Sequence) -> None:
        if self.is_limited(sequence):
            self._take(sequence.request.tier, self._of_decode(sequence))

    def limit_chunk(self, sequence: Sequence, most: int) -> int:
        tier = sequence.request.tier
        # What begin() took for this chunk is replaced by what the chunk takes.
        self._take(tier, -self._kept_for_first.pop(sequence, 0.0))
        count = self._chunk_that_fits(sequence, most)
        if count < most:
            self._counts.held_back[tier] += 1
        if count:
            fixed, each = self._of_chunk(sequence)
            self._take(tier, fixed + each * count)
            self._chunked = True
            if tier <= self._budget.top:
                self._kept_for_prompts = max(self._kept_for_prompts - each * count, 0.0)
        return count

    def _chunk_that_fits(self, sequence: Sequence, most: int) -> int:
        """How many tokens of a chunk the step has seconds left for."""
        tier = sequence.request.tier
        top = self._budget.top
        if tier < top or (tier == top and self._budget.target is None):
            return most  # a limit is for lower tiers; only a gap target limits its own prompts
        # A lower tier leaves seconds to the prompts above it, the top tier to the lower tiers.
        kept = self._kept_for_prompts
        if tier == top:
            kept = self._shares_left()
        fixed, each = self._of_chunk(sequence)
        left = self._left(tier, kept) - fixed
        if left >= each * most or not each:
            return most
        # A tier without any row in the step has at least a block of its prompt computed.
        least = 0
        if not self._spent[tier]:
            least = min(most, self._block_size)
        return max(int(left / each), least)

    def limit_drafts(self, choice: DraftChoice) -> None:
        weights = self._weights
        count = self._how_many(len(choice.drafts), weights.drafts, weights.drafted)
        del choice.drafts[count:]
        if count:
            self._taken += weights.drafted + weights.drafts * count
        self._limit_proposals(choice)

    def _limit_proposals(self, choice: DraftChoice) -> None:
        """Cut down what a draft model is asked for, and take the seconds of its passes and of what
        it reads. One pass proposes a token for every row that asks, so only passes beyond those of
        other rows cost anything."""
        if not choice.propose:
            return
        weights = self._weights
        wanted = max(choice.propose - self._passes, 0)  # further passes
        passes = self._how_many(wanted, weights.passes, 0.0)
        propose = choice.propose - (wanted - passes)
        fixed = weights.asked + weights.passes * passes
        read = self._how_many(choice.read, weights.read, fixed)
        if propose <= 0 or read < min(choice.read, _LEAST_READ):
            choice.ask_nothing()
            return
        self._passes = max(self._passes, propose)
        self._taken += fixed + weights.read * read
        choice.propose = propose
        choice.read = read

    def note_step(self, target: float | None, now: float) -> None:
        """Learn from the gap since the last step was complete, if both steps have a target."""
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

    def _how_many(self, most: int, each: float, fixed: float) -> int:
        """How many of ``most`` things the step has seconds left for, beside the shares of lower
        tiers: ``each`` takes so many seconds, and all together ``fixed`` ones."""
        left = self._budget.seconds - self._taken - self._shares_left() - fixed
        if left < 0.0:
            return 0
        if not each or left >= each * most:
            return most
        return int(left / each)

    def _left(self, tier: int, kept: float) -> float:
        """Seconds of the step that a tier may still take: those that nobody has taken and that are
        not ``kept`` for others, or the rest of its share if that is more."""
        return max(self._budget.seconds - self._taken - kept, self._share_left(tier))

    def _share_left(self, tier: int) -> float:
        """Seconds of its share that a tier has not taken."""
        share = self._tiers[tier].share * self._budget.shared
        return max(share - self._spent[tier], 0.0)

    def _shares_left(self) -> float:
        """Seconds of their shares that all running lower tiers have not taken."""
        return sum(map(self._share_left, self._lower))

    def _take(self, tier: int, seconds: float) -> None:
        self._taken += seconds
        self._spent[tier] += seconds

    def _of_decode(self, sequence: Sequence) -> float:
        """Seconds that the row of a decode adds to the step."""
        weights = self._weights
        start = sequence.num_planned
        count = max(sequence.num_tokens - start, 1)
        return weights.samples + weights.tokens * count + weights.context * (start + count)

    def _of_chunk(self, sequence: Sequence) -> tuple[float, float]:
        """Seconds that a chunk adds to the step: those of any chunk, and those of each token."""
        weights = self._weights
        fixed = weights.samples + weights.context * sequence.num_planned
        if not self._chunked:
            fixed += weights.chunked
        return fixed, weights.tokens + weights.context
