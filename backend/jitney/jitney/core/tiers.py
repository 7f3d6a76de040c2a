"""Latency tiers: how much of a step the lower tiers get. Part of the planner.

The most urgent tier that decodes and has a target for the gap between its tokens limits the seconds
of a step. They go to the decodes of that tier and of those above it first, then, by rank, to what
the lower tiers and prompts have to compute, as far as it fits by the learned cost: a chunk is cut,
a decode is left out (*held back*). But each tier keeps its ``share`` of those seconds, or what is
least, a decode or a block of a prompt. While nobody decodes who has such a target, lower tiers may
take a third of the least target for a first token: who arrives waits for the step that runs, with
overlap for the one behind it too, and then for its own.

An estimate is not always met, and the engine has work beside the device. So a step is planned for a
part of the target, the *aim*: it shrinks with each gap that exceeds the target and grows slowly
with all others, such that they balance if one in a hundred does.
"""

from jitney.config import TierConfig
from jitney.core.cost import StepCost, StepShape
from jitney.core.request import Sequence

_EXCEEDED, _MET, _LEAST_AIM = 0.95, 1.0005, 0.5
_STEPS_TO_FIRST = 3
_LEAST_READ = 16  # tokens: to read no more than a sequence grows by would never come to an end


class Pace:
    """The limits of the step that is being planned, and what of it is taken."""

    def __init__(self, tiers: tuple[TierConfig, ...], cost: StepCost, block_size: int) -> None:
        self._tiers = tiers
        self._cost = cost
        self._block_size = block_size
        self._aim = 1.0
        self._last: tuple[float, float | None] = (0.0, None)
        self.held_back = [0] * len(tiers)
        """By tier: decodes left out and chunks cut, since the scheduler's counts were reset."""

    def begin(self, running: list[Sequence]) -> None:
        """Plan a further step of these sequences: set its limit."""
        decodes = [one for one in running if not one.prefill_left]
        decoding = {one.request.tier for one in decodes}
        weights = self._cost.weights
        self._weights = StepShape(*(max(each, 0.0) for each in weights or StepShape(0.0)))
        self._limit, self._gap, self._top = float("inf"), None, len(self._tiers)
        for index, tier in enumerate(self._tiers if weights is not None else ()):
            gap = tier.gap_ms if index in decoding else None
            target = tier.ttft_ms if gap is None else gap
            part = 1 / _STEPS_TO_FIRST if gap is None else self._aim
            if target is not None and target / 1e3 * part < self._limit:
                self._limit = target / 1e3 * part
                self._top = min(self._top, index) if gap is None else index
                self._gap = None if gap is None else gap / 1e3
            if gap is not None:  # the targets of those below are not for its step
                break
        self._chunked = False
        self._spent = [0.0] * len(self._tiers)
        self._lower: dict[int, Sequence] = {}  # the first by rank
        for one in running:
            if self.limits(one):
                self._lower.setdefault(one.request.tier, one)
        prompts = sum(one.prefill_left for one in running if one.request.tier <= self._top)
        self._reserved = self._weights.tokens * prompts + self._weights.chunked * bool(prompts)
        self._passes = 0
        self._taken = self._weights.steps
        self._taken += sum(self._of_decode(one) for one in decodes if not self.limits(one))
        self._kept: dict[Sequence, float] = {}  # until its chunk is planned
        for lower, one in self._lower.items():
            if one.prefill_left:  # a block of it comes before decodes that rank behind it
                fixed, each = self._of_chunk(one)
                self._kept[one] = fixed + each * min(one.prefill_left, self._block_size)
                self._take(lower, self._kept[one])

    @property
    def gap(self) -> float | None:
        """Seconds: the target that limits the step. None if none does, or no lower tier has any
        part in the step."""
        return self._gap if any(self._spent) else None

    def limits(self, sequence: Sequence) -> bool:
        """Whether its decodes are limited. They have no drafts then."""
        return sequence.request.tier > self._top

    def may_decode(self, sequence: Sequence) -> bool:
        """Whether the step has a row for this decode. If not, it is held back."""
        if not self.limits(sequence):
            return True
        tier, seconds = sequence.request.tier, self._of_decode(sequence)
        if self._spent[tier] and self._left(tier, self._reserved) < seconds:
            self.held_back[tier] += 1
            return False
        return True

    def decode(self, sequence: Sequence) -> None:
        """Its row is planned. A tier that took something of the step has a row in it."""
        if self.limits(sequence):
            self._take(sequence.request.tier, self._of_decode(sequence))

    def drafts(self, count: int, propose: int, read: int) -> tuple[int, int, int]:
        """Take the seconds of so many drafts of a decode, of a draft model's passes that propose
        for it, and of what it reads before. Returns how many of each the step has room for, beside
        the shares of lower tiers."""
        weights = self._weights
        count = self._fit(count, weights.drafts, weights.drafted)
        self._taken += weights.drafts * count + weights.drafted * (count > 0)
        further = max(propose - self._passes, 0)
        passes = self._fit(further, weights.passes, 0.0)
        fixed = weights.passes * passes + weights.asked
        fits = self._fit(read, weights.read, fixed)
        if propose == further - passes or fits < min(read, _LEAST_READ):
            return count, 0, 0
        propose -= further - passes
        self._passes = max(self._passes, propose)
        self._taken += weights.read * fits + fixed
        return count, propose, fits

    def _fit(self, most: int, each: float, fixed: float) -> int:
        """How many of ``most`` the step has room for, beside the shares of lower tiers."""
        left = self._limit - self._taken - sum(map(self._share, self._lower)) - fixed
        if left < 0.0:
            return 0
        return int(left / each) if each and left < each * most else most

    def chunk(self, sequence: Sequence, most: int) -> int:
        """Plan a chunk of ``most`` tokens, or of as many as the step has room for."""
        tier = sequence.request.tier
        self._take(tier, -self._kept.pop(sequence, 0.0))
        count = self._room(sequence, most)
        self.held_back[tier] += count < most
        if count:
            fixed, each = self._of_chunk(sequence)
            self._take(tier, fixed + each * count)
            self._chunked = True
            if tier <= self._top:
                self._reserved = max(self._reserved - each * count, 0.0)
        return count

    def complete(self, gap: float | None, now: float) -> None:
        """A step with this :attr:`gap` is complete: learn from the time since the last one."""
        (before, last_gap), self._last = self._last, (now, gap)
        if gap is None or last_gap is None:
            return
        if now - before > gap:
            self._aim = max(self._aim * _EXCEEDED, _LEAST_AIM)
        else:
            self._aim = min(self._aim * _MET, 1.0)

    def _room(self, sequence: Sequence, most: int) -> int:
        """Tokens of a chunk that the step has room for. All, where no limit is its own."""
        tier = sequence.request.tier
        if tier < self._top or (tier == self._top and self._gap is None):
            return most
        fixed, each = self._of_chunk(sequence)
        kept = sum(map(self._share, self._lower)) if tier == self._top else self._reserved
        left = self._left(tier, kept) - fixed
        if left >= each * most or not each:
            return most
        least = 0 if self._spent[tier] else min(most, self._block_size)
        return max(int(left / each), least)

    def _left(self, tier: int, kept: float) -> float:
        """Seconds of the step that a tier may still take: what is left but for what is kept for
        others, or what is left of its share."""
        return max(self._limit - self._taken - kept, self._share(tier))

    def _share(self, tier: int) -> float:
        """Seconds of its share that a tier has not taken."""
        share = self._tiers[tier].share * (self._gap or self._limit)
        return max(share - self._spent[tier], 0.0)

    def _take(self, tier: int, seconds: float) -> None:
        self._taken += seconds
        self._spent[tier] += seconds

    def _of_decode(self, sequence: Sequence) -> float:
        """Seconds that its row adds to the step."""
        weights, start = self._weights, sequence.num_planned
        count = max(sequence.num_tokens - start, 1)
        return weights.samples + weights.tokens * count + weights.context * (start + count)

    def _of_chunk(self, sequence: Sequence) -> tuple[float, float]:
        """Seconds that a chunk adds to the step, whatever its size, and for each token."""
        weights = self._weights
        fixed = weights.samples + weights.context * sequence.num_planned
        fixed += 0.0 if self._chunked else weights.chunked
        return fixed, weights.tokens + weights.context
