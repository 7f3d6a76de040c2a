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
from collections.abc import Callable
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple, Protocol

from jitney.config import SpeculationConfig
from jitney.core.cost import StepCost, StepShape
from jitney.core.request import Drafting, Sequence
from jitney.messages import Batch

_MEMORY, _MEMORY_OF_ALL = 20, 16  # comparisons that averages go back to
_PRIOR = 8.0  # comparisons that the average of all sequences counts for in that of one
_SURE = 0.98  # no sequence's acceptance is more than that
_LEAST_BAR, _UNMEASURED_BAR = 0.05, 0.5
_REFUSED = 16  # steps
_RESTS_EVERY = 64  # steps: one is without drafts, to know what that takes
_TRIED = 4  # tokens, in a try
_TRIES = 0.03  # share of the time for tries of a draft model that does not pay
# Drafts gain so much more than they cost, or are left out: the best of many averages are chosen,
# and steps are not as linear as what is learned of them.
_MARGIN = 1.4
_INDEXED_AT_ONCE = 1024  # tokens: a millisecond

_unread = attrgetter("unread")


class Drafter(Protocol):
    """Where proposals come from: a search of the text so far, a model, heads of the target."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """At most so many tokens that may follow the known ones of ``sequence``."""


class NgramDrafter:
    """Proposes what has followed the last tokens before, in prompt or output ("prompt lookup")."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """What followed the latest of the longest matches. Nothing while a long prompt is still
        being indexed, some tokens in each call."""
        drafting, size, longest = sequence.drafting, sequence.num_tokens, self._lengths[0]
        assert drafting is not None
        begin = max(drafting.indexed - longest, 0)
        until = min(size - 1, drafting.indexed + _INDEXED_AT_ONCE)
        tokens = sequence.tokens(begin, until)
        for end in range(drafting.indexed - begin + 1, until - begin + 1):
            for n in self._lengths:
                if n <= end:
                    drafting.places[hash(tuple(tokens[end - n : end]))] = begin + end
        drafting.indexed = max(until, drafting.indexed)
        if until < size - 1:
            return []
        last = sequence.tokens(max(size - longest, 0), size)
        for n in self._lengths:
            place = drafting.places.get(hash(tuple(last[-n:])))
            if place is not None:
                found = sequence.tokens(place, min(place + most, size))
                while len(found) < most:  # the text repeats itself: it goes on as it has begun
                    found.append(found[place - size])
                return found
        return []


class ModelDrafter:
    """Proposes what the runner's draft model or head did, in the step that made the last token."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Nothing unless the row asked for it."""
        return sequence.proposed[:most]


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


class Speculation:
    """Chooses the drafts of each step. Part of the planner."""

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.asks = config.drafter != "ngram"
        """Whether the runner proposes, where a row asks for it."""
        ngrams = NgramDrafter(config.ngram_min, config.ngram_max)
        self.drafter: Drafter = ModelDrafter() if self.asks else ngrams
        self._most = config.max_drafts
        self._cost = cost
        self._acceptance = 0.5  # of all sequences
        self._compared = 0
        self._for_tries = 0.0  # tokens that a try may cost
        self._steps = 0

    def choose(
        self, running: list[Sequence], limited: Callable[[Sequence], bool] = lambda one: False
    ) -> None:
        """Decide how many drafts each of these sequences may take; those that are ``limited`` have
        none."""
        some = [one for one in running if one.output and one.num_planned < one.limit]
        prices = self._prices(some)
        some_ask: list[_Asking] = []
        for sequence in some:
            drafting = sequence.drafting = sequence.drafting or Drafting()
            drafting.taken = drafting.wanted = 0
            drafting.refused = max(drafting.refused - 1, 0)
            if limited(sequence):
                continue
            if drafting.made_at != sequence.num_tokens:
                self._follow(sequence, drafting)
            chance = self._chance(drafting)
            count, gain = _worth(chance, prices.bar, len(drafting.proposal))
            drafting.taken = count if gain >= prices.of_row else 0
            left = sequence.limit - sequence.num_tokens
            decodes = sequence.num_planned >= max(sequence.prefill_end, sequence.num_tokens - 1)
            if self.asks and left > 1 and decodes:
                some_ask.append(
                    _Asking(drafting, chance, left, sequence.num_tokens - drafting.read)
                )
        if some_ask:
            self._ask(some_ask, prices)

    def _ask(self, some: list[_Asking], prices: Prices) -> None:
        """Decide how many tokens a draft model is to propose for each."""
        of_row, of_rows = prices.of_row + prices.of_asking, 0.0
        for one in some:
            wanted, gain = _worth(one.chance, prices.bar, self._most)
            if wanted and (gain - of_row) * one.left / (1 + wanted) >= prices.of_read * one.unread:
                one.drafting.wanted, of_rows = wanted, of_rows + of_row
        passes, total = 0, -of_rows
        while chances := [one.chance for one in some if one.drafting.wanted > passes]:
            gain = sum(each ** (passes + 1) - prices.bar for each in chances) - prices.of_pass
            if gain < 0.0:
                break
            passes, total = passes + 1, total + gain
        passes = passes if total >= 0.0 else 0
        new = [one for one in some if one.drafting.wanted and not one.drafting.read]
        for one in sorted(new, key=_unread)[1:]:
            one.drafting.wanted = 0
        for one in some:
            one.drafting.wanted = min(one.drafting.wanted, passes)
        if passes:
            return
        least = min(some, key=_unread)
        cost = of_row + prices.of_read * least.unread + _TRIED * (prices.of_pass + prices.bar)
        self._for_tries += _TRIES * len(some) ** 0.5
        if cost <= self._for_tries:
            least.drafting.wanted = min(_TRIED, self._most)

    def note_step(self, batch: Batch) -> None:
        """A step is complete. If any row of it asked, what was saved for a try is spent."""
        if any(row.propose for row in batch.rows):
            self._for_tries = 0.0

    def drafts_of(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """What the sequence may compute behind its next token, the last one known: nothing from the
        first token on that ends it, or that its grammar forbids or is complete by; nothing beyond
        its last token. How many tokens a draft model is to propose; and how many it may have to
        read before."""
        drafting = sequence.drafting
        if drafting is None:
            return [], 0, 0
        most = min(drafting.taken, sequence.limit - sequence.num_tokens)
        stop_ids = sequence.request.message.stop_ids
        drafts = list(takewhile(lambda id: id not in stop_ids, drafting.proposal[:most]))
        if drafts and sequence.grammar is not None:
            drafts = drafts[: sequence.grammar.num_allowed(drafts)]
            while drafts and sequence.grammar.after(drafts).ended:
                del drafts[-1]
        # The sampled one, and two that may be read again: where a block begins, and with a grammar.
        unread = sequence.num_tokens + len(drafts) + 3 - drafting.read
        return drafts, drafting.wanted, unread

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence whose next token is still being sampled is to wait for it, because its
        drafts are worth more than a step."""
        drafting = sequence.drafting
        if drafting is None or drafting.refused:
            return False
        return drafting.taken > 1 or drafting.wanted > 0

    def note_refused(self, sequence: Sequence) -> None:
        """A step had no room for what was chosen: for a while it does not wait for such a step."""
        if sequence.drafting is not None and self.waits(sequence):
            sequence.drafting.refused = _REFUSED

    def _prices(self, some: list[Sequence]) -> Prices:
        rows, weights = len(some), self._cost.weights
        context = sum(one.num_planned for one in some)
        seconds = self._cost.seconds(StepShape(1.0, 0.0, rows, rows, context))
        if weights is None or seconds <= 0.0 or not some:
            return Prices(_UNMEASURED_BAR)
        self._steps += 1
        phase = self._steps % _RESTS_EVERY
        if phase == 1:
            return NO_DRAFTS
        of_row, of_asking = max(weights.drafted, 0.0), max(weights.asked, 0.0)
        of_asking = of_asking if phase else math.inf  # the next step is to be without drafts
        of_pass, of_read = max(weights.passes, 0.0), max(weights.read, 0.0)
        value = seconds / rows / _MARGIN
        others = (each / value for each in (of_row, of_asking, of_pass, of_read))
        return Prices(max(weights.drafts / value, _LEAST_BAR), *others)

    def _chance(self, drafting: Drafting) -> float:
        """The probability that a draft of a sequence is right if those before it are."""
        known = drafting.right + _PRIOR * self._acceptance
        return min(known / (drafting.compared + _PRIOR), _SURE)

    def _follow(self, sequence: Sequence, drafting: Drafting) -> None:
        """Compare the last proposal with what was sampled since, and propose again."""
        made = sequence.output[drafting.made_at - len(sequence.prompt) :]
        for drafted, token in zip(drafting.proposal, made, strict=False):
            hit, kept = float(drafted == token), 1 - 1 / _MEMORY
            drafting.right = kept * drafting.right + hit
            drafting.compared = kept * drafting.compared + 1.0
            self._compared = min(self._compared + 1, _MEMORY_OF_ALL)
            self._acceptance += (hit - self._acceptance) / (1 + self._compared)
            if not hit:
                break
        drafting.proposal = self.drafter.propose(sequence, self._most)
        drafting.made_at = sequence.num_tokens


def _worth(chance: float, bar: float, most: int) -> tuple[int, float]:
    """How many drafts in a row are right with more than this probability, and by how much more:
    each is right with probability ``chance`` if those before it are."""
    count, gain, right = 0, 0.0, chance
    while count < most and right > bar:
        count, gain, right = count + 1, gain + right - bar, right * chance
    return count, gain
