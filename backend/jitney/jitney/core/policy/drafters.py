"""Where drafts come from: what followed the same tokens before, or what the runner proposed.

``speculation`` asks a drafter for what may follow a sequence, and decides how much of it a step
computes.
"""

from itertools import cycle, islice
from typing import Protocol

from jitney.config import SpeculationConfig
from jitney.core.drafting import NgramIndex
from jitney.core.request import Sequence, SequenceState

# Tokens of long texts that one step indexes, for all sequences together: about half a millisecond.
_MOST_INDEXED = 512
# Of these, the tokens that are indexed in one turn of a sequence. Then it is the turn of the next
# one.
_TURN = 64
# A text is indexed at once, outside the turns, if it has at most so many new tokens: what a
# sequence grows by in one step.
_MOST_GROWN = 16


class Drafter(Protocol):
    """Where proposals come from: a search of the text so far, or a model."""

    def begin_step(self) -> None:
        """A step is to be planned."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """At most ``most`` tokens that may follow the known tokens of ``sequence``."""


class NgramDrafter:
    """Looks for the last tokens earlier in prompt or output, and proposes what followed them there
    ("prompt lookup").

    The sequences of a request share the index of its prompt. Each has one of its own output. Long
    texts are indexed over several steps, a turn of each sequence after the other.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._longest = longest
        self._lengths = range(longest, shortest - 1, -1)
        self._left = _MOST_INDEXED  # tokens of long texts that this step may still index
        # Sequences that wait for their next turn, in order. Some may have ended. (A dictionary
        # without values: it keeps the order.)
        self._waiting: dict[Sequence, None] = {}

    def begin_step(self) -> None:
        self._left = _MOST_INDEXED
        while self._left and self._waiting:
            sequence = next(iter(self._waiting))
            del self._waiting[sequence]
            if sequence.state is SequenceState.ENDED:
                continue
            if not self._take_turn(sequence, min(_TURN, self._left)):
                self._waiting[sequence] = None

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """What followed the latest occurrence of the longest n-gram that has occurred before. While
        a long text is being indexed, nothing is proposed."""
        drafting = sequence.drafting
        assert drafting is not None
        of_output = drafting.ngrams
        if not of_output.end:
            of_output.end = len(sequence.prompt)
        if not _is_indexed(sequence, of_output):
            if sequence in self._waiting:  # begin_step() gives it its turns
                return []
            # Its first turn: it may take what the turns of the others have left of this step.
            if not self._take_turn(sequence, self._left):
                self._waiting[sequence] = None
                return []
        # Only the tokens of the last step are left to index. N-grams that end in the last token are
        # left out: nothing follows them yet.
        size = sequence.num_tokens
        first = self._first_needed(of_output)
        tokens = tuple(sequence.tokens(first, size))
        self._add_ngrams(of_output, tokens, first, size - 1)
        end = self._latest_end(sequence, of_output, tokens)
        if end is None:
            return []
        return _what_followed(sequence, end, most)

    def _latest_end(
        self, sequence: Sequence, of_output: NgramIndex, tokens: tuple[int, ...]
    ) -> int | None:
        """The position after the latest occurrence of the longest n-gram that ends ``tokens``: in
        the output, or else in the prompt. None: none of them has occurred."""
        in_output = of_output.positions
        in_prompt = sequence.request.prompt_ngrams.positions
        for length in self._lengths:
            ngram = hash(tokens[-length:])
            end = in_output.get(ngram)
            if end is None:
                end = in_prompt.get(ngram)
            if end is not None:
                return end
        return None

    def _take_turn(self, sequence: Sequence, most: int) -> bool:
        """Index the next tokens of a sequence, at most so many: first those of its prompt, then
        those of its output. Returns whether its text is indexed then."""
        assert sequence.drafting is not None
        of_prompt = sequence.request.prompt_ngrams
        of_output = sequence.drafting.ngrams
        count = self._index(of_prompt, sequence, end=len(sequence.prompt), most=most)
        count += self._index(of_output, sequence, end=sequence.num_tokens - 1, most=most - count)
        self._left -= count
        return _is_indexed(sequence, of_output)

    def _index(self, ngrams: NgramIndex, sequence: Sequence, end: int, most: int) -> int:
        """Index the n-grams that end at the next positions, up to ``end``, and at no more than
        ``most`` positions. Returns at how many."""
        count = max(min(end - ngrams.end, most), 0)
        if count:
            first = self._first_needed(ngrams)
            reached = ngrams.end + count
            self._add_ngrams(ngrams, tuple(sequence.tokens(first, reached)), first, reached)
        return count

    def _first_needed(self, ngrams: NgramIndex) -> int:
        """The position from which tokens are needed to index the next n-grams. The longest of them
        begins there."""
        return max(ngrams.end + 1 - self._longest, 0)

    def _add_ngrams(
        self, ngrams: NgramIndex, tokens: tuple[int, ...], first: int, end: int
    ) -> None:
        """Index the n-grams that end at the next positions up to ``end``. ``tokens``: those from
        the position ``first`` on."""
        positions = ngrams.positions
        for position in range(ngrams.end + 1, end + 1):
            offset = position - first  # in `tokens`: where these n-grams end
            for length in self._lengths:
                if length <= offset:
                    positions[hash(tokens[offset - length : offset])] = position
        ngrams.end = max(ngrams.end, end)


def _is_indexed(sequence: Sequence, of_output: NgramIndex) -> bool:
    """Whether all of a text is indexed but the tokens of the last step."""
    if sequence.request.prompt_ngrams.end < len(sequence.prompt):
        return False
    return sequence.num_tokens - 1 - of_output.end <= _MOST_GROWN


def _what_followed(sequence: Sequence, end: int, most: int) -> list[int]:
    """``most`` tokens from position ``end`` on. If the sequence has fewer, these are repeated: a
    text that repeats itself once may do so again."""
    found = sequence.tokens(end, min(end + most, sequence.num_tokens))
    if len(found) == most:
        return found
    return list(islice(cycle(found), most))


class RunnerDrafter:
    """Proposes what the runner proposed in the step that made the last token. The runner has it
    from a draft model, or from a head of the model itself."""

    def begin_step(self) -> None:
        """Nothing is counted."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Empty unless the sequence's last row asked for a proposal."""
        return sequence.runner_proposal[:most]


def make_drafter(config: SpeculationConfig) -> Drafter:
    """The drafter that the option names."""
    if config.drafter == "ngram":
        return NgramDrafter(config.ngram_min, config.ngram_max)
    return RunnerDrafter()
