"""Speculative decoding: which tokens are drafted, and how many of them a step computes.

A drafter proposes tokens that may follow a sequence. A row may compute some of them, its *drafts*,
after the token that is due; the step samples after each. Sampling is keyed by (seed, sequence
index, position). So the samples after right drafts are the very tokens that steps without drafts
would have made, and ``outcome`` keeps them as far as the drafts are right.

A draft is taken if the probability that it is accepted, times the value of a token, exceeds the
seconds that it adds to the step. The value of a token is the time of a step without drafts, divided
by its rows. ``cost`` predicts both times. In a full batch a token is worth so little that no draft
is taken.

The probability is an average over comparisons of proposals with the output: over those of the
sequence itself, and, while these are few, over those of all sequences. Proposals of n-grams are
compared even if no step computes them, which costs nothing. So if drafts did not pay for a while,
it is noticed when they would pay again.

A draft model proposes only what it is asked for: ``asking`` decides which sequences ask.
"""

import enum
import math
from itertools import takewhile

from jitney.batch import Row
from jitney.config import SpeculationConfig
from jitney.core.drafting import Drafting
from jitney.core.policy.asking import Asking, Candidate, may_ask
from jitney.core.policy.cost import StepCost, StepShape
from jitney.core.policy.drafters import make_drafter
from jitney.core.policy.prices import NO_DRAFTS, Prices, worth
from jitney.core.policy.seam import DraftChoice, StepLimits
from jitney.core.request import Sequence

_MEMORY = 20  # comparisons that the average of one sequence covers, roughly
_MEMORY_OF_ALL = 16  # comparisons that the average of all sequences covers, roughly
# A sequence begins with the average of all sequences, which weighs as much as so many comparisons
# of its own.
_PRIOR = 8.0
_SURE = 0.98  # highest probability that is assumed for a draft
_LEAST_PRICE = 0.05  # lowest price of a draft, however cheap steps with drafts seem to be
_UNMEASURED_PRICE = 0.5  # price of a draft before any step was measured
_NO_WAIT_STEPS = 16  # steps in which a sequence does not wait for a pending token, once refused
_REST_EVERY = 64  # steps, of which one has no drafts, to measure what such a step takes
# Most tokens that a draft model reads beside those that are unread when the step is planned. There
# are three kinds, one token of each at most:
# - The token that the step samples.
# - The newest token so far, if it is the first of a block. The draft model has read it, but the
#   model has not computed it yet. When the model begins to fill a block, all that the draft model
#   has in that block counts as unread (see `execution.draft`).
# - The last sample, if the sequence has a grammar: a forced token may have replaced it.
_MOST_READ_BESIDE = 3
# Drafts must gain so many times what they cost, for two reasons. Sequences with a high average are
# chosen, and an average may be high by chance. And the learned cost is linear, while that of real
# steps is not quite.
_MARGIN = 1.4


class _Phase(enum.Enum):
    """Whether a step or the next one *rests*: has no drafts, to measure what such a step takes."""

    NORMAL = enum.auto()
    BEFORE_REST = enum.auto()
    REST = enum.auto()


class Speculation:
    """Chooses the drafts of each step. A ``DraftPolicy``."""

    is_active = True

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.asks = config.drafter != "ngram"
        """Whether the runner makes the proposals, for the rows that ask for one."""
        self.drafter = make_drafter(config)
        self._asking = Asking(config.max_drafts)
        self._most = config.max_drafts
        self._cost = cost
        self._acceptance = 0.5  # part of the compared proposals that were right, of all sequences
        self._compared = 0  # comparisons that are in it
        self._steps = 0  # with known prices

    # ------------------------------------------------------------------ what to take

    def begin(self, running: list[Sequence], limits: StepLimits) -> None:
        """Decide how many drafts each of these sequences may take, and what it asks for."""
        self.drafter.begin_step()
        # Sequences with output and with something left to plan, recomputations included.
        decoding = [
            sequence
            for sequence in running
            if sequence.output and sequence.num_planned < sequence.max_computed
        ]
        prices = self._prices(decoding)
        asking: list[Candidate] = []
        for sequence in decoding:
            drafting = _begin_step(sequence)
            if limits.is_limited(sequence):
                continue
            # The output has grown since the proposal was made.
            if drafting.made_at != sequence.num_tokens:
                self._renew_proposal(sequence, drafting)
            size = len(drafting.proposal)
            if not size and not self.asks:  # as a rule, where n-grams do not repeat
                continue
            chance = self._chance(drafting)
            count, gain = worth(chance, prices.draft, size)
            if gain >= prices.drafting_row:
                drafting.num_drafts = count
            if self.asks and may_ask(sequence):
                asking.append(Candidate.of(sequence, drafting, chance))
        if asking:
            self._asking.choose(asking, prices)

    def has_choice(self, sequence: Sequence) -> bool:
        drafting = sequence.drafting
        if drafting is None:
            return False
        return drafting.num_drafts > 0 or drafting.propose > 0

    def choice_of(self, sequence: Sequence, most: int, most_read: int) -> DraftChoice:
        drafting = sequence.drafting
        if drafting is None or not self.has_choice(sequence):
            return DraftChoice()
        drafts = self._good_drafts(sequence, drafting)
        any_chosen = bool(drafts or drafting.propose)
        del drafts[most:]
        # To propose k tokens, the draft model writes the k positions from `end_of_row` on: that of
        # the row's sample first. The sequence has positions only up to `max_computed`.
        end_of_row = sequence.num_planned + 1 + len(drafts)
        left = sequence.max_computed - end_of_row
        choice = DraftChoice(drafts, propose=min(drafting.propose, left))
        if choice.propose:
            unread = sequence.num_tokens + len(drafts) - sequence.num_read
            choice.most_read = min(unread + _MOST_READ_BESIDE, most_read)
        if not choice.most_read:
            choice.ask_nothing()
        if any_chosen and choice.is_empty:
            self.note_refused(sequence)
        return choice

    def _good_drafts(self, sequence: Sequence, drafting: Drafting) -> list[int]:
        """The first ``num_drafts`` tokens of the proposal, cut before the first token that cannot
        be a draft: one that would be the sequence's last token or come after it, that would end it,
        that its grammar forbids, or that would complete its grammar."""
        most = min(drafting.num_drafts, sequence.max_computed - sequence.num_tokens)
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
        if drafting is None or drafting.no_wait_steps:
            return False
        # To wait costs the sequence a row, and so one token. A single draft gains no more than one.
        if drafting.num_drafts > 1:
            return True
        # A draft model is asked only for rows whose token the host knows.
        return drafting.propose > 0

    def note_refused(self, sequence: Sequence) -> None:
        """For some steps the sequence does not wait for its samples: it would wait in vain."""
        drafting = sequence.drafting
        if drafting is not None and self.waits_for_sample(sequence):
            drafting.no_wait_steps = _NO_WAIT_STEPS

    def note_rows(self, rows: list[Row]) -> None:
        self._asking.note_rows(rows)

    # ------------------------------------------------------------------ what is known

    def _prices(self, decoding: list[Sequence]) -> Prices:
        """What drafts cost in this step, by the learned cost of steps."""
        rows = len(decoding)
        weights = self._cost.weights
        context = sum(sequence.num_planned for sequence in decoding)
        plain = StepShape(tokens=rows, samples=rows, context=context)
        seconds = self._cost.seconds(plain)
        if weights is None or seconds <= 0.0 or not rows:
            return Prices(draft=_UNMEASURED_PRICE)
        phase = self._next_phase()
        if phase is _Phase.REST:
            return NO_DRAFTS
        value_of_token = seconds / rows
        scale = _MARGIN / value_of_token
        asking_row = scale * weights.asking_row
        if phase is _Phase.BEFORE_REST:  # the next step could not use a proposal of this one
            asking_row = math.inf
        return Prices(
            draft=max(scale * weights.draft, _LEAST_PRICE),
            drafting_row=scale * weights.drafting_row,
            asking_row=asking_row,
            model_pass=scale * weights.model_pass,
            read_token=scale * weights.read_token,
        )

    def _next_phase(self) -> _Phase:
        """Count a step with known prices. One of every _REST_EVERY rests."""
        self._steps += 1
        if self._steps % _REST_EVERY == 1:
            return _Phase.REST
        if self._steps % _REST_EVERY == 0:
            return _Phase.BEFORE_REST
        return _Phase.NORMAL

    def _chance(self, drafting: Drafting) -> float:
        """The probability that a draft of a sequence is right if those before it are."""
        right = drafting.right + _PRIOR * self._acceptance
        return min(right / (drafting.compared + _PRIOR), _SURE)

    def _renew_proposal(self, sequence: Sequence, drafting: Drafting) -> None:
        """Compare the last proposal with the output since then, and propose again."""
        if drafting.proposal:
            self._compare(sequence, drafting)
        drafting.proposal = self.drafter.propose(sequence, self._most)
        drafting.made_at = sequence.num_tokens

    def _compare(self, sequence: Sequence, drafting: Drafting) -> None:
        """Compare a proposal with the output since it was made, up to the first wrong token."""
        output_since = sequence.output[drafting.made_at - len(sequence.prompt) :]
        for proposed, token in zip(drafting.proposal, output_since, strict=False):
            is_right = proposed == token
            self._note_comparison(drafting, is_right)
            if not is_right:
                break

    def _note_comparison(self, drafting: Drafting, is_right: bool) -> None:
        """Note whether a proposed token was right."""
        hit = 1.0 if is_right else 0.0
        kept = 1 - 1 / _MEMORY
        drafting.right = kept * drafting.right + hit
        drafting.compared = kept * drafting.compared + 1.0
        # Of all sequences: at first the plain average of all comparisons, in which the initial
        # value counts as one more. Later the old comparisons fade.
        self._compared = min(self._compared + 1, _MEMORY_OF_ALL)
        self._acceptance += (hit - self._acceptance) / (1 + self._compared)


def _begin_step(sequence: Sequence) -> Drafting:
    """Choose nothing for a sequence yet. Returns what is known of it."""
    if sequence.drafting is None:
        sequence.drafting = Drafting()
    drafting = sequence.drafting
    drafting.num_drafts = 0
    drafting.propose = 0
    if drafting.no_wait_steps:
        drafting.no_wait_steps -= 1
    return drafting
