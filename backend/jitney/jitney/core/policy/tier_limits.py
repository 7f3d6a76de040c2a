"""Latency tiers, as far as steps go: how many seconds of a step the lower tiers get.

A tier may have a target for its inter-token latency (``gap_ms``). The most urgent tier that decodes
and has one is the *top* tier of the step: its target limits the seconds of the step. First come the
decodes of the top tier and of those above it, which are always in the step. The seconds that are
left go, by rank, to the lower tiers and to prompts, as far as these fit by the learned cost: a
chunk is cut, a decode is left out (*held back*). But in each step, each lower tier has at least its
``share`` of the target, and at least one decode, or one block of a prompt.

A tier may also have a target for its first token (``ttft_ms``). While no tier with a target for the
inter-token latency decodes, the first tier with a target for first tokens is the top one: only the
tiers below it are limited. The step may take a third of the smallest such target, because a new
request may have to wait for three steps: the one that runs, with overlap the one behind it, and its
own. If a tier with a target for the inter-token latency does decode, the targets for first tokens
of the tiers above it limit the step in this way, too, if that is less.

An estimate is not always met, and the engine has work beside the device. So a step is planned for a
part of the target, the *aim*. It shrinks with each step that exceeds the target, and grows slowly
with each step that does not. Both balance if one step in a hundred exceeds the target.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jitney.config import TierConfig
from jitney.core.policy.cost import StepCost, StepShape
from jitney.core.policy.seam import DraftChoice
from jitney.core.policy.tiers import TierCounts
from jitney.core.request import Sequence

# What the aim is multiplied by after a step that exceeded the target, and after one that did not.
# 0.95 * 1.0005 ** 99 is about 1: so the aim stays if one step in a hundred exceeds the target.
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
    """What the step may take by the learned cost."""
    target: float | None = None
    """The target for the inter-token latency in seconds, if that is what limits the step."""
    top: int = 0
    """The tier whose target it is. The tiers below it are limited. If nothing limits the step, this
    is the number of tiers: none is below."""

    @property
    def shared(self) -> float:
        """The seconds of which each lower tier has its share: all of the target, although the step
        is planned for ``seconds``, a part of it. Without a target, ``seconds``."""
        return self.target or self.seconds


class ChunkCost(NamedTuple):
    """Seconds that a chunk adds to a step."""

    fixed: float
    """However many tokens it has."""
    per_token: float


def budget_of(tiers: tuple[TierConfig, ...], decoding: set[int], aim: float) -> StepBudget:
    """The limit of a step in which these tiers decode."""
    # Of the tiers so far: the limit that the smallest target for first tokens sets.
    budget = StepBudget(top=len(tiers))
    for index, tier in enumerate(tiers):
        if index in decoding and tier.gap_ms is not None:
            # The most urgent inter-token latency. It limits all tiers below this one, so the
            # targets of those do not count, and the search ends. It counts itself unless the limit
            # for first tokens of tiers above is smaller.
            target = tier.gap_ms / 1e3
            seconds = target * aim
            if seconds < budget.seconds:
                budget = StepBudget(seconds=seconds, target=target, top=index)
            return budget
        if tier.ttft_ms is not None:
            seconds = tier.ttft_ms / 1e3 / _STEPS_TO_FIRST
            if seconds < budget.seconds:
                # The top tier is the first with a target for first tokens, even if the smaller
                # target of this tier sets the seconds.
                top = min(budget.top, index)
                budget = StepBudget(seconds=seconds, top=top)
    return budget


class TierLimits:
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
        # All that follows is of the step that is being planned. begin() sets it anew.
        self._budget = StepBudget(top=len(tiers))
        self._weights = _NO_WEIGHTS
        self._chunked = False  # whether any row has more than one token
        self._passes = 0  # of a draft model
        # Seconds that are taken: by the step itself, by the decodes that are not limited (all of
        # them from the beginning), and by each other row once it is planned.
        self._taken = 0.0
        # By tier: the part of the taken seconds that its chunks and its limited decodes took.
        self._taken_by_tier = [0.0] * len(tiers)
        # Seconds for the prompts of the tiers that are not limited. Lower tiers do not take them.
        self._kept_for_prompts = 0.0
        # The first running sequence of each lower tier.
        self._first_of_tier: dict[int, Sequence] = {}
        # Those of them that have a prompt to compute: the seconds that are taken for a block of it,
        # until its chunk is planned.
        self._taken_for_first: dict[Sequence, float] = {}

    def begin(self, running: list[Sequence]) -> None:
        decodes = [sequence for sequence in running if not sequence.prefill_left]
        if self._cost.weights is None:  # no step was measured yet: nothing is limited
            self._budget = StepBudget(top=len(self._tiers))
            self._weights = _NO_WEIGHTS
        else:
            decoding = {sequence.request.tier for sequence in decodes}
            self._budget = budget_of(self._tiers, decoding, self.aim)
            self._weights = self._cost.weights
        self._chunked = False
        self._passes = 0
        self._taken_by_tier = [0.0] * len(self._tiers)
        self._taken = self._weights.steps
        for sequence in decodes:
            if not self.is_limited(sequence):
                self._taken += self._of_decode(sequence)
        self._keep_for_prompts(running)
        self._take_for_first_of_lower_tiers(running)

    def _keep_for_prompts(self, running: list[Sequence]) -> None:
        """Keep seconds for the prompts of the tiers that are not limited."""
        top = self._budget.top
        prompts = [sequence for sequence in running if sequence.request.tier <= top]
        tokens = sum(sequence.prefill_left for sequence in prompts)
        self._kept_for_prompts = 0.0
        if tokens:
            self._kept_for_prompts = self._weights.chunked + self._weights.tokens * tokens

    def _take_for_first_of_lower_tiers(self, running: list[Sequence]) -> None:
        """The first sequence of each lower tier, by rank, has a row in any case. Decodes are
        planned before chunks. So if its row is a chunk, the seconds for it are taken now, before
        decodes that rank behind it take them."""
        self._first_of_tier = {}
        for sequence in running:
            if self.is_limited(sequence):
                self._first_of_tier.setdefault(sequence.request.tier, sequence)
        self._taken_for_first = {}
        for tier, sequence in self._first_of_tier.items():
            if sequence.prefill_left:
                cost = self._of_chunk(sequence)
                count = min(sequence.prefill_left, self._block_size)
                seconds = cost.fixed + cost.per_token * count
                self._taken_for_first[sequence] = seconds
                self._take(tier, seconds)

    # ------------------------------------------------------------------ questions

    @property
    def target(self) -> float | None:
        """The target of the step. None also if the step has nothing that could have been left out:
        then its time tells nothing about the aim."""
        return self._budget.target if any(self._taken_by_tier) else None

    def is_limited(self, sequence: Sequence) -> bool:
        return sequence.request.tier > self._budget.top

    def may_decode(self, sequence: Sequence) -> bool:
        if not self.is_limited(sequence):
            return True
        tier = sequence.request.tier
        # Each tier has at least one row in the step, whatever that costs.
        if not self._taken_by_tier[tier]:
            return True
        if self._left(tier, self._kept_for_prompts) >= self._of_decode(sequence):
            return True
        self._counts.held_back[tier] += 1
        return False

    def count_decode(self, sequence: Sequence) -> None:
        if self.is_limited(sequence):  # begin() has counted all others
            self._take(sequence.request.tier, self._of_decode(sequence))

    def limit_chunk(self, sequence: Sequence, most: int) -> int:
        tier = sequence.request.tier
        # What begin() took for this chunk is replaced by what the chunk takes.
        self._take(tier, -self._taken_for_first.pop(sequence, 0.0))
        count = self._chunk_that_fits(sequence, most)
        if count < most:
            self._counts.held_back[tier] += 1
        if count:
            cost = self._of_chunk(sequence)
            self._take(tier, cost.fixed + cost.per_token * count)
            self._chunked = True
            if not self.is_limited(sequence):
                kept = self._kept_for_prompts - cost.per_token * count
                self._kept_for_prompts = max(kept, 0.0)
        return count

    def _chunk_that_fits(self, sequence: Sequence, most: int) -> int:
        """How many tokens of a chunk the step has seconds left for."""
        tier = sequence.request.tier
        budget = self._budget
        # Tiers above the top one are never limited.
        if tier < budget.top:
            return most
        if tier == budget.top:
            # A target for first tokens does not limit the prompts of its own tier.
            if budget.target is None:
                return most
            # A target for the inter-token latency does. The prompts leave lower tiers their shares.
            kept = self._shares_left()
        else:
            kept = self._kept_for_prompts
        cost = self._of_chunk(sequence)
        left = self._left(tier, kept) - cost.fixed
        if left >= cost.per_token * most or not cost.per_token:
            return most
        # A tier without any row in the step has at least a block of its prompt computed.
        least = 0
        if not self._taken_by_tier[tier]:
            least = min(most, self._block_size)
        return max(int(left / cost.per_token), least)

    def limit_drafts(self, choice: DraftChoice) -> None:
        weights = self._weights
        most = len(choice.drafts)
        count = self._how_many_fit(most, seconds_each=weights.drafts, fixed=weights.drafted)
        del choice.drafts[count:]
        if count:
            self._taken += weights.drafted + weights.drafts * count
        self._limit_proposal(choice)

    def _limit_proposal(self, choice: DraftChoice) -> None:
        """Cut down what a draft model is asked for, and take the seconds of its passes and of what
        it reads. One pass proposes a token for every row that asks. So only passes beyond those of
        the rows so far cost anything."""
        if not choice.propose:
            return
        weights = self._weights
        further_passes = max(choice.propose - self._passes, 0)
        passes_that_fit = self._how_many_fit(further_passes, seconds_each=weights.passes, fixed=0.0)
        propose = min(choice.propose, self._passes + passes_that_fit)
        fixed = weights.asked + weights.passes * passes_that_fit
        most_read = choice.most_read
        read = self._how_many_fit(most_read, seconds_each=weights.read, fixed=fixed)
        if propose <= 0 or read < min(most_read, _LEAST_READ):
            choice.ask_nothing()
            return
        self._passes = max(self._passes, propose)
        self._taken += fixed + weights.read * read
        choice.propose = propose
        choice.most_read = read

    def note_step(self, target: float | None, now: float) -> None:
        """Learn from the seconds since the step before was complete. If only one of the two steps
        has a target, these may be no inter-token latency of the top tier: it may not have decoded
        in the other step. Then nothing is learned."""
        seconds = now - self._last_at
        last_target = self._last_target
        self._last_at = now
        self._last_target = target
        if target is None or last_target is None:
            return
        if seconds > target:
            self.aim = max(self.aim * _EXCEEDED, _LEAST_AIM)
        else:
            self.aim = min(self.aim * _MET, 1.0)

    # ------------------------------------------------------------------ seconds

    def _how_many_fit(self, most: int, *, seconds_each: float, fixed: float) -> int:
        """How many of ``most`` drafts, passes or tokens the step has seconds left for, if lower
        tiers keep their shares. They take ``seconds_each``, and ``fixed`` seconds beside."""
        left = self._budget.seconds - self._taken - self._shares_left() - fixed
        if left < 0.0:
            return 0
        if not seconds_each or left >= seconds_each * most:
            return most
        return int(left / seconds_each)

    def _left(self, tier: int, kept: float) -> float:
        """Seconds of the step that a tier may still take: those that nobody has taken and that are
        not ``kept`` for others, or the rest of its share if that is more."""
        return max(self._budget.seconds - self._taken - kept, self._share_left(tier))

    def _share_left(self, tier: int) -> float:
        """Seconds of its share that a tier has not taken."""
        share = self._tiers[tier].share * self._budget.shared
        return max(share - self._taken_by_tier[tier], 0.0)

    def _shares_left(self) -> float:
        """Seconds of their shares that the lower tiers with running sequences have not taken."""
        return sum(map(self._share_left, self._first_of_tier))

    def _take(self, tier: int, seconds: float) -> None:
        self._taken += seconds
        self._taken_by_tier[tier] += seconds

    def _of_decode(self, sequence: Sequence) -> float:
        """Seconds that the row of a decode adds to the step."""
        weights = self._weights
        start = sequence.num_planned
        count = max(sequence.num_tokens - start, 1)
        return weights.samples + weights.tokens * count + weights.context * (start + count)

    def _of_chunk(self, sequence: Sequence) -> ChunkCost:
        """Seconds that a chunk adds to the step."""
        weights = self._weights
        fixed = weights.samples + weights.context * sequence.num_planned
        if not self._chunked:
            fixed += weights.chunked
        return ChunkCost(fixed, per_token=weights.tokens + weights.context)
