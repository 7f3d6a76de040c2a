"""Which sequences ask the draft model for a proposal, and for how many tokens. Called by
``speculation``, in each step.

A draft model must read a sequence before it can propose. A sequence asks for as many tokens as it
would take as drafts. It asks only if that gains more, until the sequence ends, than it costs to
read the sequence. In each step the model begins to read at most one new sequence. So if its drafts
are wrong, that is known before it has read many sequences. If asking gains nothing, one sequence
asks for a few tokens now and then: a *try*. Tries take at most a small share of the time.
"""

from operator import attrgetter
from typing import NamedTuple

from jitney.batch import Row
from jitney.core.drafting import Drafting
from jitney.core.policy.prices import Prices, worth
from jitney.core.request import Sequence

_TRIED = 4  # tokens that are asked for in a try
# Share of the time that one sequence saves for tries, if a draft model does not pay. Several
# sequences save a smaller share: see `_try`.
_TRIES = 0.03

_unread = attrgetter("unread")


class Candidate(NamedTuple):
    """A sequence that may ask the draft model in this step."""

    drafting: Drafting
    """:class:`Asking` writes its answer to ``drafting.propose``."""
    chance: float
    """The probability that a draft is right if those before it are."""
    drafts_left: int
    """Tokens that the sequence may still make, without the last one, which is never a draft."""
    unread: int
    """Tokens that the draft model has not read."""
    is_new: bool
    """Whether the draft model has read none of it."""

    @classmethod
    def of(cls, sequence: Sequence, drafting: Drafting, chance: float) -> "Candidate":
        """A sequence whose drafts are right with probability ``chance``."""
        return cls(
            drafting=drafting,
            chance=chance,
            drafts_left=sequence.num_tokens_left - 1,
            unread=sequence.num_tokens - sequence.num_read,
            is_new=not sequence.num_read,
        )


class Asking:
    """Chooses in each step who asks. Keeps what is saved for the next try."""

    def __init__(self, most: int) -> None:
        """``most``: most drafts of a sequence in one step."""
        self._most = most
        self._saved_for_try = 0.0  # in values of a token

    def note_rows(self, rows: list[Row]) -> None:
        """A step is over. If any of its rows asked, what was saved for a try is spent."""
        if any(row.propose for row in rows):
            self._saved_for_try = 0.0

    def choose(self, asking: list[Candidate], prices: Prices) -> None:
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

    def _propose_what_pays(self, asking: list[Candidate], prices: Prices) -> None:
        """Let each sequence ask for as many tokens as it would take as drafts, if these gain more
        than it costs to read the sequence first. The price of passes comes later, because all
        sequences share it."""
        fixed = prices.drafting_row + prices.asking_row
        for candidate in asking:
            count, gain = worth(candidate.chance, prices.draft, self._most)
            if not count:
                continue
            # The sequence is read once, and the drafts gain in every step until it ends.
            steps_left = candidate.drafts_left / (1 + count)
            if (gain - fixed) * steps_left >= prices.read_token * candidate.unread:
                candidate.drafting.propose = count

    def _try(self, asking: list[Candidate], prices: Prices) -> None:
        """Asking gains nothing: save a little in each step. Once that pays for a try, ask for the
        sequence of which the model has the least to read."""
        least = min(asking, key=_unread)
        cost = prices.drafting_row + prices.asking_row
        cost += prices.read_token * least.unread
        cost += _TRIED * (prices.model_pass + prices.draft)
        # A step of n rows is worth n tokens. Of these, _TRIES * sqrt(n) are saved. So with more
        # rows, tries take a smaller share of the time, _TRIES / sqrt(n), and still come after fewer
        # steps.
        self._saved_for_try += _TRIES * len(asking) ** 0.5
        if cost <= self._saved_for_try:
            least.drafting.propose = min(_TRIED, self._most)


def may_ask(sequence: Sequence) -> bool:
    """Whether a sequence may ask the draft model in this step. It must compute one token, known or
    pending, and no part of a prompt or of forced tokens."""
    # It must still get three tokens: the sample of this step, a draft after it, and the last token,
    # which is never computed and so cannot be a draft.
    if sequence.num_tokens_left < 3:
        return False
    return sequence.num_planned >= max(sequence.decodes_from, sequence.num_tokens - 1)


def _ask_one_new_sequence(asking: list[Candidate]) -> None:
    """Of the sequences that the draft model has not read at all, let only the shortest ask."""
    new = [candidate for candidate in asking if candidate.is_new and candidate.drafting.propose]
    new.sort(key=_unread)
    for candidate in new[1:]:
        candidate.drafting.propose = 0


def _passes_that_pay(asking: list[Candidate], prices: Prices) -> int:
    """How many passes of the draft model gain more than they cost, for all rows together. 0 if all
    passes gain less than it costs the rows to ask at all."""
    passes = 0
    # The rows for which the next pass makes a token.
    askers = [candidate for candidate in asking if candidate.drafting.propose]
    if not askers:
        return 0
    fixed = (prices.drafting_row + prices.asking_row) * len(askers)
    total = -fixed  # the gain of all passes so far
    while askers:
        gain = -prices.model_pass  # of one more pass
        for candidate in askers:
            gain += candidate.chance ** (passes + 1) - prices.draft
        if gain < 0.0:
            break
        passes += 1
        total += gain
        askers = [candidate for candidate in askers if candidate.drafting.propose > passes]
    return passes if total >= 0.0 else 0
