"""Speculative decoding: which tokens are drafted, and how many of them a step computes.

A drafter proposes tokens that may follow a sequence. A row may compute some of them, its *drafts*,
behind the token that is due; the step samples behind each. The token at a position is drawn by
(seed, sequence index, position), so the samples behind right drafts are the very tokens that steps
without drafts would have made: ``outcome`` keeps them as far as the drafts are right.

A draft is taken if the probability that it is accepted, times the value of a token, exceeds what it
adds to the step. The value of a token is the time of a step without drafts, by row; seconds are
``cost``'s. The probability is the sequence's own, as far as it is known, and that of all sequences
where it is not: proposals are compared with what was sampled, those too that no step computed. So a
full batch takes none, and with n-grams finds out at no cost when that changes.

A draft model is asked for as many tokens as would be taken, if what they gain until the sequence
ends exceeds what the model has to read of it before. Of sequences that it has not read at all, one
a step is: so little is read before it shows whether drafts are right. Where asking gains nothing,
one sequence asks for a few tokens now and then, for at most a small share of the time.
"""

import math
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from jitney.config import SpeculationConfig
from jitney.core.policy.cost import StepCost, StepShape
from jitney.core.policy.drafters import make_drafter
from jitney.core.policy.seam import DraftChoice, StepLimits
from jitney.core.request import Drafting, Sequence
from jitney.messages import Row

_MEMORY = 20  # comparisons that the average of a sequence goes back to
_MEMORY_OF_ALL = 16  # the same of the average of all
_PRIOR = 8.0  # comparisons that the average of all sequences counts for in that of one
_SURE = 0.98  # no sequence's acceptance is more than that
_LEAST_BAR = 0.05
_UNMEASURED_BAR = 0.5
_REFUSED = 16  # steps
_RESTS_EVERY = 64  # steps: one is without drafts, to know what that takes
_TRIED = 4  # tokens, in a try
_TRIES = 0.03  # share of the time for tries of a draft model that does not pay
# Drafts gain so much more than they cost, or are left out: the best of many averages are chosen,
# and steps are not as linear as what is learned of them.
_MARGIN = 1.4

_unread = attrgetter("unread")


class Prices(NamedTuple):
    """What drafts cost, in tokens: as the share of a token's value."""

    bar: float
    """A draft. As no draft is worth more than its probability, that must exceed it."""
    of_row: float = 0.0
    """That a row has drafts."""
    of_asking: float = 0.0
    """That a row asks a draft model."""
    of_pass: float = 0.0
    """A pass of it, for all rows that ask."""
    of_read: float = 0.0
    """A token that it reads before."""


NO_DRAFTS = Prices(1.0, of_row=math.inf, of_asking=math.inf)


class _Asking(NamedTuple):
    """A sequence that may ask the draft model in this step."""

    drafting: Drafting
    chance: float
    """Of a draft to be right if those before it are."""
    left: int
    """Tokens that it may still make."""
    unread: int
    """Tokens that the draft model has not read."""
    is_new: bool
    """Whether the draft model has read none of it."""

    @classmethod
    def of(cls, sequence: Sequence, drafting: Drafting, chance: float) -> "_Asking":
        """A sequence whose drafts are right with probability ``chance``."""
        return cls(
            drafting=drafting,
            chance=chance,
            left=sequence.limit - sequence.num_tokens,
            unread=sequence.num_tokens - sequence.num_read,
            is_new=not sequence.num_read,
        )


class Speculation:
    """Chooses the drafts of each step. A ``DraftPolicy``."""

    is_active = True

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.asks = config.drafter != "ngram"
        """Whether the runner proposes, where a row asks for it."""
        self.drafter = make_drafter(config)
        self._most = config.max_drafts
        self._cost = cost
        self._acceptance = 0.5  # of all sequences
        self._compared = 0
        self._for_tries = 0.0  # tokens that a try may cost
        self._steps = 0

    # ------------------------------------------------------------------ what to take

    def begin(self, running: list[Sequence], limits: StepLimits) -> None:
        """Decide how many drafts each of these sequences may take, and what it asks for."""
        decoding = [one for one in running if one.output and one.num_planned < one.limit]
        prices = self._prices(decoding)
        asking: list[_Asking] = []
        for sequence in decoding:
            drafting = _begin_step(sequence)
            if limits.is_limited(sequence):
                continue
            # Its output has grown since it was proposed for.
            if drafting.made_at != sequence.num_tokens:
                self._follow(sequence, drafting)
            chance = self._chance(drafting)
            count, gain = _worth(chance, prices.bar, len(drafting.proposal))
            if gain >= prices.of_row:
                drafting.taken = count
            if self.asks and _may_ask(sequence):
                asking.append(_Asking.of(sequence, drafting, chance))
        if asking:
            self._ask(asking, prices)

    def choice_of(self, sequence: Sequence, most: int, most_read: int) -> DraftChoice:
        drafting = sequence.drafting
        if drafting is None or not (drafting.taken or drafting.wanted):
            return DraftChoice()
        drafts = self._good_drafts(sequence, drafting)
        chosen = bool(drafts or drafting.wanted)
        del drafts[most:]
        # What is sampled last is not computed, so nothing is proposed behind it.
        left = sequence.limit - sequence.num_planned - 1 - len(drafts)
        choice = DraftChoice(drafts, propose=min(drafting.wanted, left))
        if choice.propose:
            # The sampled token, and two that may be read again: where a block begins, and with a
            # grammar.
            unread = sequence.num_tokens + len(drafts) + 3 - sequence.num_read
            choice.read = min(unread, most_read)
        if not choice.read:
            choice.ask_nothing()
        if chosen and choice.is_empty:
            self.note_refused(sequence)
        return choice

    def _good_drafts(self, sequence: Sequence, drafting: Drafting) -> list[int]:
        """What the sequence may compute of its proposal: nothing from the first token on that ends
        it, or that its grammar forbids or is complete by; nothing beyond its last token."""
        most = min(drafting.taken, sequence.limit - sequence.num_tokens)
        stop_ids = sequence.request.message.stop_ids
        drafts = list(takewhile(lambda id: id not in stop_ids, drafting.proposal[:most]))
        grammar = sequence.grammar
        if drafts and grammar is not None:
            del drafts[grammar.num_allowed(drafts) :]
            while drafts and grammar.after(drafts).ended:
                del drafts[-1]
        return drafts

    def waits_for_sample(self, sequence: Sequence) -> bool:
        drafting = sequence.drafting
        if drafting is None or drafting.refused:
            return False
        return drafting.taken > 1 or drafting.wanted > 0

    def note_refused(self, sequence: Sequence) -> None:
        """For a while it does not wait for such a step."""
        drafting = sequence.drafting
        if drafting is not None and self.waits_for_sample(sequence):
            drafting.refused = _REFUSED

    def note_rows(self, rows: list[Row]) -> None:
        """If any of them asked, what was saved for a try is spent."""
        if any(row.propose for row in rows):
            self._for_tries = 0.0

    # ------------------------------------------------------------------ whom to ask

    def _ask(self, asking: list[_Asking], prices: Prices) -> None:
        """Decide how many tokens a draft model is to propose for each."""
        self._want_what_pays(asking, prices)
        passes = _passes_that_pay(asking, prices)
        # Of those that the model has not read at all, only the shortest one is read in this step.
        new = [one for one in asking if one.drafting.wanted and one.is_new]
        for one in sorted(new, key=_unread)[1:]:
            one.drafting.wanted = 0
        for one in asking:
            one.drafting.wanted = min(one.drafting.wanted, passes)
        if not passes:
            self._try(asking, prices)

    def _want_what_pays(self, asking: list[_Asking], prices: Prices) -> None:
        """Of each alone: the tokens that would be taken, if they gain more than the model has to
        read before."""
        of_row = prices.of_row + prices.of_asking
        for one in asking:
            wanted, gain = _worth(one.chance, prices.bar, self._most)
            if not wanted:
                continue
            steps_left = one.left / (1 + wanted)
            if (gain - of_row) * steps_left >= prices.of_read * one.unread:
                one.drafting.wanted = wanted

    def _try(self, asking: list[_Asking], prices: Prices) -> None:
        """Asking gains nothing: ask for one sequence now and then, the one of which the model has
        the least to read, once enough was saved for it."""
        least = min(asking, key=_unread)
        cost = prices.of_row + prices.of_asking
        cost += prices.of_read * least.unread
        cost += _TRIED * (prices.of_pass + prices.bar)
        self._for_tries += _TRIES * len(asking) ** 0.5
        if cost <= self._for_tries:
            least.drafting.wanted = min(_TRIED, self._most)

    # ------------------------------------------------------------------ what is known

    def _prices(self, decoding: list[Sequence]) -> Prices:
        rows = len(decoding)
        weights = self._cost.weights
        context = sum(one.num_planned for one in decoding)
        plain = StepShape(tokens=rows, samples=rows, context=context)
        seconds = self._cost.seconds(plain)
        if weights is None or seconds <= 0.0 or not rows:
            return Prices(_UNMEASURED_BAR)
        self._steps += 1
        phase = self._steps % _RESTS_EVERY
        if phase == 1:  # this step rests
            return NO_DRAFTS
        value = seconds / rows / _MARGIN
        of_asking = weights.asked / value
        if phase == 0:  # the next step rests, and would waste what is proposed now
            of_asking = math.inf
        return Prices(
            bar=max(weights.drafts / value, _LEAST_BAR),
            of_row=weights.drafted / value,
            of_asking=of_asking,
            of_pass=weights.passes / value,
            of_read=weights.read / value,
        )

    def _chance(self, drafting: Drafting) -> float:
        """The probability that a draft of a sequence is right if those before it are."""
        known = drafting.right + _PRIOR * self._acceptance
        return min(known / (drafting.compared + _PRIOR), _SURE)

    def _follow(self, sequence: Sequence, drafting: Drafting) -> None:
        """Compare the last proposal with what was sampled since, and propose again."""
        made = sequence.output[drafting.made_at - len(sequence.prompt) :]
        for drafted, token in zip(drafting.proposal, made, strict=False):
            right = drafted == token
            self._note_comparison(drafting, 1.0 if right else 0.0)
            if not right:
                break
        drafting.proposal = self.drafter.propose(sequence, self._most)
        drafting.made_at = sequence.num_tokens

    def _note_comparison(self, drafting: Drafting, hit: float) -> None:
        kept = 1 - 1 / _MEMORY
        drafting.right = kept * drafting.right + hit
        drafting.compared = kept * drafting.compared + 1.0
        self._compared = min(self._compared + 1, _MEMORY_OF_ALL)
        self._acceptance += (hit - self._acceptance) / (1 + self._compared)


def _begin_step(sequence: Sequence) -> Drafting:
    """What is known of a sequence, with nothing chosen for this step."""
    if sequence.drafting is None:
        sequence.drafting = Drafting()
    drafting = sequence.drafting
    drafting.taken = 0
    drafting.wanted = 0
    if drafting.refused:
        drafting.refused -= 1
    return drafting


def _may_ask(sequence: Sequence) -> bool:
    """Whether a sequence has one token to compute, and more than one to make."""
    if sequence.limit - sequence.num_tokens <= 1:
        return False
    return sequence.num_planned >= max(sequence.prefill_end, sequence.num_tokens - 1)


def _worth(chance: float, bar: float, most: int) -> tuple[int, float]:
    """How many drafts in a row are right with more than this probability, and by how much more:
    each is right with probability ``chance`` if those before it are."""
    count = 0
    gain = 0.0
    right = chance
    while count < most and right > bar:
        count += 1
        gain += right - bar
        right *= chance
    return count, gain


def _passes_that_pay(asking: list[_Asking], prices: Prices) -> int:
    """How many passes of the draft model gain more than they cost, for all rows together. 0 if even
    these do not make up for asking at all."""
    passes = 0
    wanting = [one for one in asking if one.drafting.wanted]
    if not wanting:
        return 0
    total = -(prices.of_row + prices.of_asking) * len(wanting)
    while wanting:
        gain = -prices.of_pass
        for one in wanting:
            gain += one.chance ** (passes + 1) - prices.bar
        if gain < 0.0:
            break
        passes += 1
        total += gain
        wanting = [one for one in wanting if one.drafting.wanted > passes]
    return passes if total >= 0.0 else 0
