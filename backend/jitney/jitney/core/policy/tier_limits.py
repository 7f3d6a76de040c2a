"""Latency tiers, as far as steps go: how many seconds of a step the lower tiers get.

The targets of the tiers limit the seconds of a step, and one tier is the *top* tier of the step:
``seconds_limit`` works out both. First come the decodes of the top tier and of those above it,
which are always in the step. The seconds that are left go, by rank, to the lower tiers and to
prompts, as far as these fit by the learned cost: a chunk is cut, a decode is left out (*held
back*). But in each step, each lower tier has at least its ``share`` of the seconds, and at least
one decode, or one token of a prompt.

A prediction is not always met, and the engine has work beside the device. So where a target for the
inter-token latency limits the step, the step is planned for a part of that target, the *aim*. The
aim shrinks with each step that exceeds the target, and grows slowly with each step that does not.
Both balance if one step in 146 exceeds the target.
"""

from typing import NamedTuple

from jitney.config import TierConfig
from jitney.core.policy.cost import StepCost, Weights
from jitney.core.policy.seam import DraftChoice
from jitney.core.policy.seconds_limit import NO_LIMIT, limit_of, no_limit
from jitney.core.request import Sequence

# What the aim is multiplied by after a step that exceeded the target, and after one that did not.
# 0.93 * 1.0005 ** 145 is about 1: so the aim stays if one step in 146 exceeds the target.
_EXCEEDED = 0.93
_MET = 1.0005
_LEAST_AIM = 0.5
# Tokens. If a draft model read fewer of a sequence in a step than the sequence grows by, it would
# never have read all of it.
_LEAST_READ = 16
_NO_WEIGHTS = Weights()  # by which a step takes no time


class ChunkCost(NamedTuple):
    """What a chunk adds to a step, in seconds."""

    fixed: float
    """For the chunk, however many tokens it has."""
    per_token: float
    """For each of its tokens, in addition."""

    def seconds(self, count: int) -> float:
        """What a chunk of ``count`` tokens adds."""
        return self.fixed + self.per_token * count


class TierLimits:
    """The seconds of the step that is being planned, and how many are taken. A ``StepLimits``."""

    is_active = True

    def __init__(
        self,
        tiers: tuple[TierConfig, ...],
        cost: StepCost,
        block_size: int,
    ) -> None:
        self._tiers = tiers
        self._cost = cost
        self._block_size = block_size
        # By tier: decodes left out and chunks cut, of the latest plan since reset_counts().
        self.held_back = [0] * len(tiers)
        self.aim = 1.0
        # When the last step was complete, and its target.
        self._last_at = 0.0
        self._last_target: float | None = None
        # All that follows is of the step that is being planned. begin() sets it anew.
        self._limit = no_limit(tiers)
        self._weights = _NO_WEIGHTS
        # Whether the step has or will have a chunk. If so, _taken has the seconds that a step takes
        # for having any chunk at all (`Weights.any_chunk`).
        self._any_chunk = False
        self._any_uncut_chunk = False  # whether any chunk is of a tier above first_cut
        self._passes = 0  # of a draft model
        # Seconds that are taken. From the beginning: by the step itself, and by all decodes that
        # are not limited. Then by each other row, once it is planned.
        self._taken = 0.0
        # By tier: the part of the taken seconds that its chunks and its limited decodes took, and
        # how many of these rows there are.
        self._taken_by_tier = [0.0] * len(tiers)
        self._rows_by_tier = [0] * len(tiers)
        # Seconds for the prompts of the tiers that are not limited. Lower tiers do not take them.
        self._prompt_seconds_due = 0.0
        # By lower tier: its first running sequence.
        self._first_of_tier: dict[int, Sequence] = {}
        # Those of `_first_of_tier` that have a prompt or a recomputation to compute -> the seconds
        # that are reserved for their next chunk. Until that chunk is planned, the seconds count as
        # taken, and the chunk as a row.
        self._reserved: dict[Sequence, float] = {}

    def begin(self, running: list[Sequence]) -> None:
        prefills: list[Sequence] = []
        decodes: list[Sequence] = []
        for sequence in running:
            if sequence.num_planned < sequence.decodes_from:
                prefills.append(sequence)
            else:
                decodes.append(sequence)
        if self._cost.weights is None:  # no step was measured yet: nothing is limited
            self._limit = no_limit(self._tiers)
            self._weights = _NO_WEIGHTS
        else:
            decoding = {sequence.request.tier for sequence in decodes}
            self._limit = limit_of(self._tiers, decoding, self.aim)
            self._weights = self._cost.weights
        self.reset_counts()  # a step that was reverted and is planned again counts once
        self._any_chunk = False
        self._any_uncut_chunk = False
        self._passes = 0
        self._taken_by_tier = [0.0] * len(self._tiers)
        self._rows_by_tier = [0] * len(self._tiers)
        self._taken = self._weights.step + self._seconds_of_unlimited(decodes)
        self._keep_for_prompts(prefills)
        self._find_first_of_lower_tiers(running)
        self._reserve_for_first_of_lower_tiers()

    def _seconds_of_unlimited(self, decodes: list[Sequence]) -> float:
        """What the decodes that are not limited add to the step."""
        top = self._limit.top
        rows = 0
        tokens = 0
        context = 0
        for sequence in decodes:
            if sequence.request.tier <= top:
                start = sequence.num_planned
                count = max(sequence.num_tokens - start, 1)
                rows += 1
                tokens += count
                context += start + count
        weights = self._weights
        return weights.sample * rows + weights.token * tokens + weights.context_token * context

    def _keep_for_prompts(self, prefills: list[Sequence]) -> None:
        """Keep seconds for the prompts of the tiers that are not limited."""
        tokens = 0
        for sequence in prefills:
            if not self.is_limited(sequence):
                tokens += sequence.num_to_prefill
        self._prompt_seconds_due = self._weights.token * tokens
        if tokens:
            self._expect_chunk()

    def _find_first_of_lower_tiers(self, running: list[Sequence]) -> None:
        top = self._limit.top
        num_lower = len(self._tiers) - 1 - top
        self._first_of_tier = {}
        for sequence in running:
            if len(self._first_of_tier) >= num_lower:  # all are found
                return
            tier = sequence.request.tier
            if tier > top and tier not in self._first_of_tier:
                self._first_of_tier[tier] = sequence

    def _reserve_for_first_of_lower_tiers(self) -> None:
        """Reserve seconds for the chunks of first sequences. The first sequence of each lower tier
        has a row in any case. If that row is a chunk, it is planned after all decodes, which would
        leave no seconds for it. So the seconds for a chunk of one block, or for as much of it as
        fits, are reserved now."""
        self._reserved = {}
        for tier, sequence in self._first_of_tier.items():
            if not sequence.num_to_prefill:
                continue
            # If this is the first chunk of the step, its tier also takes what any chunk costs.
            self._taken_by_tier[tier] += self._expect_chunk()
            cost = self._chunk_cost(sequence)
            most = min(sequence.num_to_prefill, self._block_size)
            seconds = cost.seconds(self._chunk_that_fits(tier, cost, most))
            self._reserved[sequence] = seconds
            self._take(tier, seconds)

    def _expect_chunk(self) -> float:
        """The step will have a chunk. If it is the first one, the step takes the seconds that any
        chunk costs it, however many there are. Returns the seconds that were taken."""
        if self._any_chunk:
            return 0.0
        self._any_chunk = True
        self._taken += self._weights.any_chunk
        return self._weights.any_chunk

    # ------------------------------------------------------------------ questions

    @property
    def target(self) -> float | None:
        """The target of the step. None also if the time of the step tells nothing about the aim:
        if it has a chunk that is never cut, or nothing that could have been left out."""
        if self._any_uncut_chunk or not any(self._rows_by_tier):
            return None
        return self._limit.gap_target

    def is_limited(self, sequence: Sequence) -> bool:
        return sequence.request.tier > self._limit.top

    def seconds_for_decode(self, sequence: Sequence) -> float | None:
        tier = sequence.request.tier
        seconds = self._seconds_of_decode(sequence)
        # Each tier has at least one row in the step, whatever that costs.
        if not self._rows_by_tier[tier]:
            return seconds
        if self._seconds_for(tier) >= seconds:
            return seconds
        return None

    def _seconds_for(self, tier: int) -> float:
        """Seconds that a row of a tier may take, if it can be left out or cut. A tier may always
        take the rest of its own share, if that is more than what is left of the step."""
        limit = self._limit
        if tier < limit.first_cut:
            return NO_LIMIT
        # A lower tier leaves the prompts of the other tiers their seconds. The chunks of any other
        # tier leave the lower tiers their shares.
        kept_free = self._prompt_seconds_due
        if tier <= limit.top:
            kept_free = self._sum_of_rests()
        left_of_step = limit.seconds - self._taken - kept_free
        return max(left_of_step, self._rest_of_share(tier))

    # ------------------------------------------------------------------ taking seconds

    def note_held_back(self, sequence: Sequence) -> None:
        self.held_back[sequence.request.tier] += 1

    def reset_counts(self) -> None:
        self.held_back = [0] * len(self.held_back)

    def count_decode(self, sequence: Sequence, seconds: float) -> None:
        # begin() has counted those that are not limited.
        self._take(sequence.request.tier, seconds)

    def take_chunk(self, sequence: Sequence, most: int) -> int:
        tier = sequence.request.tier
        self._give_back_reserved(sequence)
        cost = self._chunk_cost(sequence)
        count = self._chunk_that_fits(tier, cost, most)
        if count < most:
            self.note_held_back(sequence)
        if count:
            self._take(tier, cost.seconds(count))
            self._any_chunk = True
            if tier < self._limit.first_cut:
                self._any_uncut_chunk = True
            if not self.is_limited(sequence):
                due = self._prompt_seconds_due - cost.per_token * count
                self._prompt_seconds_due = max(due, 0.0)
        return count

    def _give_back_reserved(self, sequence: Sequence) -> None:
        """The chunk of this sequence is planned now: what it takes replaces what was reserved."""
        reserved = self._reserved.pop(sequence, None)
        if reserved is not None:
            tier = sequence.request.tier
            self._taken -= reserved
            self._taken_by_tier[tier] -= reserved
            self._rows_by_tier[tier] -= 1

    def _chunk_that_fits(self, tier: int, cost: ChunkCost, most: int) -> int:
        """How many tokens of a chunk the step has seconds left for."""
        left = self._seconds_for(tier) - cost.fixed
        if left >= cost.per_token * most:
            return most
        # A tier without any row in the step has one token of its prompt computed, even if no
        # seconds are left for it. One token, and not a block: on a slow device a block would make
        # each step exceed its target.
        least = 0
        if not self._rows_by_tier[tier]:
            least = min(most, 1)
        if left < 0.0:  # not even the fixed seconds are left
            return least
        # If per_token were 0, all tokens would have fitted above.
        return max(int(left / cost.per_token), least)

    def take_drafts(self, choice: DraftChoice) -> None:
        weights = self._weights
        most = len(choice.drafts)
        fixed = weights.drafting_row
        count = self._how_many_fit(most, seconds_each=weights.draft, fixed=fixed)
        del choice.drafts[count:]
        if count:
            self._taken += fixed + weights.draft * count
        if choice.propose:
            self._take_proposal(choice)

    def _take_proposal(self, choice: DraftChoice) -> None:
        """Cut down what a draft model is asked for, and take the seconds of its passes and of what
        it reads."""
        weights = self._weights
        # One pass proposes a token for every row that asks. So the passes that other rows have
        # asked for cost nothing more.
        wanted = max(choice.propose - self._passes, 0)
        further = self._how_many_fit(wanted, seconds_each=weights.model_pass, fixed=0.0)
        propose = min(choice.propose, self._passes + further)
        if propose <= 0:
            choice.ask_nothing()
            return
        # Before it proposes, the model reads what it has not read of the sequence.
        fixed = weights.asking_row + weights.model_pass * further
        most_read = choice.most_read
        read = self._how_many_fit(most_read, seconds_each=weights.read_token, fixed=fixed)
        if read < min(most_read, _LEAST_READ):
            choice.ask_nothing()
            return
        self._passes = max(self._passes, propose)
        self._taken += fixed + weights.read_token * read
        choice.propose = propose
        choice.most_read = read

    def note_step(self, target: float | None, now: float) -> None:
        """Learn from the seconds since the step before was complete. Unless both steps have a
        target, the top tier may have skipped one of them. Then the time between is not its
        inter-token latency, and nothing is learned."""
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
        left = self._limit.seconds - self._taken - self._sum_of_rests() - fixed
        if left < 0.0:
            return 0
        if not seconds_each or left >= seconds_each * most:
            return most
        return int(left / seconds_each)

    def _rest_of_share(self, tier: int) -> float:
        """Seconds of its share that a tier has not taken."""
        share = self._tiers[tier].share * self._limit.shared
        return max(share - self._taken_by_tier[tier], 0.0)

    def _sum_of_rests(self) -> float:
        """Seconds of their shares that the lower tiers with running sequences have not taken."""
        return sum(self._rest_of_share(tier) for tier in self._first_of_tier)

    def _take(self, tier: int, seconds: float) -> None:
        """A row of a tier takes seconds."""
        self._taken += seconds
        self._taken_by_tier[tier] += seconds
        self._rows_by_tier[tier] += 1

    def _seconds_of_decode(self, sequence: Sequence) -> float:
        """What the row of a decode adds to the step."""
        weights = self._weights
        start = sequence.num_planned
        count = max(sequence.num_tokens - start, 1)
        return weights.sample + weights.token * count + weights.context_token * (start + count)

    def _chunk_cost(self, sequence: Sequence) -> ChunkCost:
        """What a chunk adds to the step."""
        weights = self._weights
        fixed = weights.sample + weights.context_token * sequence.num_planned
        if not self._any_chunk:
            fixed += weights.any_chunk
        return ChunkCost(fixed, per_token=weights.token + weights.context_token)
