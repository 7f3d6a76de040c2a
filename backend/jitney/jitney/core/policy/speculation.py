"""Speculative decoding: which tokens are drafted, and how many of them a step computes.

A drafter proposes tokens that may follow a sequence. A row may compute some of them, its *drafts*,
after the token that is due; the step samples after each. Sampling is keyed by (seed, sequence
index, position). So the samples after right drafts are the very tokens that steps without drafts
would have made, and ``outcome`` keeps them as far as the drafts are right.

A draft is taken if the probability that it is accepted, times the value of a token, exceeds the
seconds that it adds to the step. The value of a token is the time of a step without drafts, divided
by its rows. ``cost`` predicts both times. In a full batch a token is worth so little that no draft
is taken.

The probability is the sequence's own as far as it is known, else that of all sequences. It is
learned by comparing proposals with the output. Proposals of n-grams are compared even if no step
computes them, which costs nothing. So it shows when drafts pay again.

A draft model must read a sequence before it can propose. A sequence asks for as many tokens as it
would take as drafts. It asks only if that gains more, until the sequence ends, than it costs to
read the sequence. In each step the model begins to read at most one new sequence. So if its drafts
are wrong, that is known before it has read many sequences. If asking gains nothing, one sequence
asks for a few tokens now and then: a *try*. Tries take at most a small share of the time.
"""

import enum
import math
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from jitney.batch import Row
from jitney.config import SpeculationConfig
from jitney.core.drafting import Drafting
from jitney.core.policy.cost import StepCost, StepShape
from jitney.core.policy.drafters import make_drafter
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
_TRIED = 4  # tokens that are asked for in a try
# Share of the time that one sequence saves for tries, if a draft model does not pay. Several
# sequences save a smaller share: see `_try`.
_TRIES = 0.03
# Most tokens that a draft model reads beside those that are unread when the step is planned. There
# is one for each of three cases:
# - The step samples a token, which is new.
# - The step begins to fill a block. Then all that the draft model has in this block counts as
#   unread (see `execution.draft`). That is one token at most: the newest one, the only one that the
#   draft model reads before the model computes it.
# - The sequence has a grammar. The last sample is read again, because a forced token may have
#   replaced it.
_REREAD = 3
# Drafts must gain so many times what they cost, for two reasons. Sequences with a high average are
# chosen, and an average may be high by chance. And the learned cost is linear, while that of real
# steps is not quite.
_MARGIN = 1.4

_unread = attrgetter("unread")


class Prices(NamedTuple):
    """What drafts cost, times ``_MARGIN``. 1.0 is the value of a token."""

    draft: float
    """It pays if it is right with a greater probability than this."""
    drafting_row: float = 0.0
    """Of a row that has drafts, beside the drafts."""
    asking_row: float = 0.0
    """Of a row that asks a draft model, beside passes and reading."""
    model_pass: float = 0.0
    """Of a pass of the draft model, which proposes one token for every row that asks."""
    read_token: float = 0.0
    """Of a token that the draft model reads before it proposes."""


NO_DRAFTS = Prices(draft=1.0, drafting_row=math.inf, asking_row=math.inf)
"""At these prices no draft pays."""


class _Phase(enum.Enum):
    """Whether a step or the next one *rests*: has no drafts, to measure what such a step takes."""

    NORMAL = enum.auto()
    BEFORE_REST = enum.auto()
    REST = enum.auto()


class _Candidate(NamedTuple):
    """A sequence that may ask the draft model in this step."""

    drafting: Drafting
    """``_ask`` writes its answer to ``drafting.propose``."""
    chance: float
    """The probability that a draft is right if those before it are."""
    drafts_left: int
    """Tokens that the sequence may still make, without the last one, which is never a draft."""
    unread: int
    """Tokens that the draft model has not read."""
    is_new: bool
    """Whether the draft model has read none of it."""

    @classmethod
    def of(cls, sequence: Sequence, drafting: Drafting, chance: float) -> "_Candidate":
        """A sequence whose drafts are right with probability ``chance``."""
        return cls(
            drafting=drafting,
            chance=chance,
            drafts_left=sequence.num_tokens_left - 1,
            unread=sequence.num_tokens - sequence.num_read,
            is_new=not sequence.num_read,
        )


class Speculation:
    """Chooses the drafts of each step. A ``DraftPolicy``."""

    is_active = True

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.asks = config.drafter != "ngram"
        """Whether the runner makes the proposals, for the rows that ask for one."""
        self.drafter = make_drafter(config)
        self._most = config.max_drafts
        self._cost = cost
        self._acceptance = 0.5  # part of the compared proposals that were right, of all sequences
        self._compared = 0  # comparisons that are in it
        self._saved_for_try = 0.0  # in values of a token
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
        asking: list[_Candidate] = []
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
            count, gain = _worth(chance, prices.draft, size)
            if gain >= prices.drafting_row:
                drafting.num_drafts = count
            if self.asks and _may_ask(sequence):
                asking.append(_Candidate.of(sequence, drafting, chance))
        if asking:
            self._ask(asking, prices)

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
        # the row's sample first. It writes none that the sequence may not compute.
        end_of_row = sequence.num_planned + 1 + len(drafts)
        left = sequence.max_computed - end_of_row
        choice = DraftChoice(drafts, propose=min(drafting.propose, left))
        if choice.propose:
            unread = sequence.num_tokens + len(drafts) - sequence.num_read
            choice.most_read = min(unread + _REREAD, most_read)
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
        """If any of the rows asked a draft model, what was saved for a try is spent."""
        if any(row.propose for row in rows):
            self._saved_for_try = 0.0

    # ------------------------------------------------------------------ whom to ask

    def _ask(self, asking: list[_Candidate], prices: Prices) -> None:
        """Decide how many tokens a draft model is to propose for each sequence."""
        self._propose_what_pays(asking, prices)
        passes = _passes_that_pay(asking, prices)
        for candidate in asking:
            drafting = candidate.drafting
            drafting.propose = min(drafting.propose, passes)
        # The passes were counted as if all new sequences asked: they will, one after the other.
        _ask_one_new_sequence(asking)
        if not passes:
            self._try(asking, prices)

    def _propose_what_pays(self, asking: list[_Candidate], prices: Prices) -> None:
        """Let each sequence ask for as many tokens as it would take as drafts, if these gain more
        than it costs to read the sequence first. The price of passes comes later, because all
        sequences share it."""
        fixed = prices.drafting_row + prices.asking_row
        for candidate in asking:
            count, gain = _worth(candidate.chance, prices.draft, self._most)
            if not count:
                continue
            # The sequence is read once, and the drafts gain in every step until it ends.
            steps_left = candidate.drafts_left / (1 + count)
            if (gain - fixed) * steps_left >= prices.read_token * candidate.unread:
                candidate.drafting.propose = count

    def _try(self, asking: list[_Candidate], prices: Prices) -> None:
        """Asking gains nothing: save a little in each step. Once that pays for a try, ask for the
        sequence of which the model has the least to read."""
        least = min(asking, key=_unread)
        cost = prices.drafting_row + prices.asking_row
        cost += prices.read_token * least.unread
        cost += _TRIED * (prices.model_pass + prices.draft)
        # A step of n rows is worth n tokens, and saves _TRIES * sqrt(n) of them. With more rows, a
        # try comes after fewer steps, though tries take a smaller share of the time: _TRIES /
        # sqrt(n).
        self._saved_for_try += _TRIES * len(asking) ** 0.5
        if cost <= self._saved_for_try:
            least.drafting.propose = min(_TRIED, self._most)

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


def _may_ask(sequence: Sequence) -> bool:
    """Whether a sequence may ask the draft model in this step. It must compute one token, known or
    pending, and no part of a prompt or of forced tokens."""
    # It must still get three tokens: the sample of this step, a draft after it, and the last token,
    # which is never computed and so cannot be a draft.
    if sequence.num_tokens_left < 3:
        return False
    return sequence.num_planned >= max(sequence.decodes_from, sequence.num_tokens - 1)


def _ask_one_new_sequence(asking: list[_Candidate]) -> None:
    """Of the sequences that the draft model has not read at all, let only the shortest ask."""
    new = [candidate for candidate in asking if candidate.is_new and candidate.drafting.propose]
    new.sort(key=_unread)
    for candidate in new[1:]:
        candidate.drafting.propose = 0


def _worth(chance: float, price: float, most: int) -> tuple[int, float]:
    """How many drafts pay, at most ``most``, and what they gain together. Each is right with
    probability ``chance`` if those before it are. A draft pays while the probability that it and
    all before it are right exceeds its price. It gains the difference."""
    count = 0
    gain = 0.0
    right = chance  # the probability that this draft and those before it are right
    while count < most and right > price:
        count += 1
        gain += right - price
        right *= chance
    return count, gain


def _passes_that_pay(asking: list[_Candidate], prices: Prices) -> int:
    """How many passes of the draft model gain more than they cost, for all rows together. 0 if all
    passes gain less than it costs the rows to ask at all."""
    passes = 0
    wanting = [candidate for candidate in asking if candidate.drafting.propose]
    if not wanting:
        return 0
    fixed = (prices.drafting_row + prices.asking_row) * len(wanting)
    total = -fixed  # the gain of all passes so far
    while wanting:
        gain = -prices.model_pass  # of one more pass
        for candidate in wanting:
            gain += candidate.chance ** (passes + 1) - prices.draft
        if gain < 0.0:
            break
        passes += 1
        total += gain
        # The next pass makes a token only for the rows that ask for more than these passes made.
        wanting = [candidate for candidate in wanting if candidate.drafting.propose > passes]
    return passes if total >= 0.0 else 0
