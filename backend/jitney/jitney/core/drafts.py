"""Speculative decoding: which tokens are drafted, and how many of them a step computes.

A drafter proposes tokens that may follow a sequence. A row may compute some of them, its *drafts*,
behind the token that is due; the step samples behind each. The token at a position is drawn by
(seed, sequence index, position), so the samples behind right drafts are the very tokens that steps
without drafts would have made: ``outcome`` keeps them as far as the drafts are right.

A draft is taken if the probability that it is accepted, times the value of a token, exceeds what it
adds to the step. The value of a token is the time of a step without drafts, by row; seconds are
``cost``'s. The probability is the sequence's own: proposals are compared with what was sampled,
those too that no step computed. So a full batch takes none, and with n-grams finds out at no cost
when that changes.

A draft model is asked for as many tokens as would be taken, if what they gain until the sequence
ends exceeds what the model has to read of it before. While little is known, one sequence alone asks
it; and where none gains by it, one of them every so many steps.
"""

from itertools import takewhile
from typing import NamedTuple, Protocol

from jitney.config import SpeculationConfig
from jitney.core.cost import StepCost, StepShape
from jitney.core.request import Drafting, Sequence

_OLD, _OLD_OF_ALL = 0.9, 0.99  # shares of the averages that a further comparison leaves
_SURE = 0.98  # no sequence's acceptance is more than that
_LEAST_BAR, _UNMEASURED_BAR = 0.05, 0.5
_TRIED_EVERY = 64  # steps
_LITTLE_KNOWN = 16  # comparisons
# Drafts gain so much more than they cost, or are left out: acceptances are averages of few, the
# best of which are chosen, and steps are not as linear as what is learned of them.
_MARGIN = 2.0
_INDEXED_AT_ONCE = 1024  # tokens: a millisecond


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
    least: float = 0.0
    """That any row has drafts: all of a step together must gain as much."""
    of_pass: float = 0.0
    """A pass of the draft model."""
    of_proposed: float = 0.0
    """Each token that the pass proposes."""
    of_caught: float = 0.0
    """A token that it reads before."""
    of_asking: float = 0.0
    """That it is asked at all in a step."""


class Speculation:
    """Chooses the drafts of each step. Part of the planner."""

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.asks = config.drafter != "ngram"
        """Whether the runner proposes, where a row asks for it."""
        ngrams = NgramDrafter(config.ngram_min, config.ngram_max)
        self.drafter: Drafter = ModelDrafter() if self.asks else ngrams
        self._most = config.max_drafts
        self._cost = cost
        self._acceptance = 0.5  # of all sequences: what new ones begin with
        self._compared = 0
        self._steps_without = 0  # since the runner was asked

    def choose(self, running: list[Sequence]) -> None:
        """Decide how many drafts each of these sequences may take."""
        some = [one for one in running if one.output and one.num_planned < one.limit]
        prices = self._prices(some)
        gain, followed = 0.0, list[tuple[Sequence, Drafting]]()
        for sequence in some:
            drafting = sequence.drafting = sequence.drafting or Drafting(self._acceptance)
            drafting.taken = drafting.wanted = 0
            if prices.bar >= 1.0:
                continue
            if drafting.made_at != sequence.num_tokens:
                self._follow(sequence, drafting)
            followed.append((sequence, drafting))
            found = _worth(drafting.acceptance, prices.bar, len(drafting.proposal))
            drafting.taken, gain = found[0], gain + found[1]
        if gain < prices.least:
            for _, drafting in followed:
                drafting.taken = 0
        can_ask = [
            (sequence, drafting)
            for sequence, drafting in followed
            if sequence.num_planned >= sequence.prefill_end
            and sequence.limit > sequence.num_tokens + 1
        ]
        if self.asks and can_ask:
            self._ask(can_ask, prices)

    def _ask(self, some: list[tuple[Sequence, Drafting]], prices: Prices) -> None:
        """Decide how many tokens a draft model is to propose for each."""
        bar = prices.bar + prices.of_proposed
        for sequence, drafting in some:
            left, unread = sequence.limit - sequence.num_tokens, sequence.num_tokens - drafting.read
            wanted, gain = _worth(drafting.acceptance, bar, self._most)
            if gain * left / (1 + wanted) >= prices.of_caught * unread:
                drafting.wanted = wanted
        passes, total = 0, -prices.least - prices.of_asking
        while chances := [each.acceptance for _, each in some if each.wanted > passes]:
            gain = sum(chance ** (passes + 1) - bar for chance in chances) - prices.of_pass
            if gain < 0.0:
                break
            passes, total = passes + 1, total + gain
        passes = passes if total >= 0.0 else 0
        for _, drafting in some:
            drafting.wanted = min(drafting.wanted, passes)
        self._steps_without = 0 if passes else self._steps_without + 1
        tries = self._steps_without >= _TRIED_EVERY
        if tries or (passes and self._compared < _LITTLE_KNOWN):
            _, one = min(some, key=lambda each: each[0].num_tokens - each[1].read)
            for _, drafting in some:
                drafting.wanted = max(passes, 1) if drafting is one else 0

    def note_asked(self) -> None:
        """A row of the step asks the runner: it is not tried again for a while."""
        self._steps_without = 0

    def drafts_of(self, sequence: Sequence) -> tuple[list[int], int]:
        """What the sequence may compute behind its next token, the last one known: nothing from the
        first token on that ends it, or that its grammar forbids or is complete by; nothing beyond
        its last token. And how many tokens a draft model is to propose."""
        drafting = sequence.drafting
        if drafting is None:
            return [], 0
        most = min(drafting.taken, sequence.limit - sequence.num_tokens)
        stop_ids = sequence.request.message.stop_ids
        drafts = list(takewhile(lambda id: id not in stop_ids, drafting.proposal[:most]))
        if drafts and sequence.grammar is not None:
            drafts = drafts[: sequence.grammar.num_allowed(drafts)]
            while drafts and sequence.grammar.after(drafts).ended:
                del drafts[-1]
        return drafts, drafting.wanted

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence whose next token is still being sampled is to wait for it, because its
        drafts are worth more than a step."""
        drafting = sequence.drafting
        return drafting is not None and (drafting.taken > 1 or drafting.wanted > 0)

    def _prices(self, some: list[Sequence]) -> Prices:
        rows, weights = len(some), self._cost.weights
        context = sum(one.num_planned for one in some)
        seconds = self._cost.seconds(StepShape(1.0, 0.0, rows, rows, context))
        if weights is None or seconds <= 0.0 or not some:
            return Prices(_UNMEASURED_BAR)
        value = seconds / rows / _MARGIN
        return Prices(
            max((weights.tokens + weights.samples) / value, _LEAST_BAR),
            weights.chunked / value,
            max(weights.passes, 0.0) / value,
            max(weights.proposed, 0.0) / value,
            max(weights.caught, 0.0) / value,
            max(weights.asked, 0.0) / value,
        )

    def _follow(self, sequence: Sequence, drafting: Drafting) -> None:
        """Compare the last proposal with what was sampled since, and propose again."""
        made = sequence.output[drafting.made_at - len(sequence.prompt) :]
        for drafted, token in zip(drafting.proposal, made, strict=False):
            hit = float(drafted == token)
            average = _OLD * drafting.acceptance + (1 - _OLD) * hit
            drafting.acceptance = min(average, _SURE)
            self._compared += 1
            share = max(1 / (1 + self._compared), 1 - _OLD_OF_ALL)
            self._acceptance += share * (hit - self._acceptance)
            if not hit:
                break
        drafting.proposal = self.drafter.propose(sequence, self._most)
        drafting.made_at = sequence.num_tokens
        if self.asks and drafting.proposal:
            drafting.read = sequence.num_tokens


def _worth(acceptance: float, bar: float, most: int) -> tuple[int, float]:
    """How many drafts in a row are right with more than this probability, and by how much more."""
    count, gain, chance = 0, 0.0, acceptance
    while count < most and chance > bar:
        count, gain, chance = count + 1, gain + chance - bar, chance * acceptance
    return count, gain
