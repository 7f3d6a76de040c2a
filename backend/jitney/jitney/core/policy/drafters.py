"""Where drafts come from: what followed the same tokens before, or what the runner proposed.

``speculation`` asks a drafter for what may follow a sequence, and decides how much of it a step
computes.
"""

from itertools import cycle, islice
from typing import Protocol

from jitney.config import SpeculationConfig
from jitney.core.drafting import NgramIndex
from jitney.core.request import Sequence

# Tokens of long texts that one step indexes, for all sequences together: about half a millisecond.
_MOST_INDEXED = 512
# Tokens by which an output may grow in a step, and be indexed in the next one whatever else is.
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

    The sequences of a request share the index of its prompt. Each has one of its own output.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._longest = longest
        self._lengths = range(longest, shortest - 1, -1)
        self._indexable = _MOST_INDEXED  # tokens of long texts that this step may still index

    def begin_step(self) -> None:
        self._indexable = _MOST_INDEXED

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """What followed the latest occurrence of the longest n-gram that has occurred before. A
        long prompt is indexed over several steps, in which nothing is proposed."""
        drafting = sequence.drafting
        assert drafting is not None
        of_prompt = sequence.request.prompt_ngrams
        of_output = drafting.ngrams
        size = sequence.num_tokens
        prompt_size = len(sequence.prompt)
        if of_prompt.end < prompt_size and not self._index(of_prompt, sequence, prompt_size):
            return []
        if not of_output.end:
            of_output.end = prompt_size
        # N-grams that end in the last token are left out: nothing follows them yet.
        num_new = size - 1 - of_output.end
        if num_new > _MOST_GROWN and not self._index(of_output, sequence, size - 1):
            return []
        first = self._first_needed(of_output)
        tokens = tuple(sequence.tokens(first, size))
        self._add_ngrams(of_output, tokens, first, size - 1)
        for length in self._lengths:
            ngram = hash(tokens[-length:])
            # The latest occurrence: in the output, or else in the prompt.
            end = of_output.positions.get(ngram)
            if end is None:
                end = of_prompt.positions.get(ngram)
            if end is not None:
                return _what_followed(sequence, end, most)
        return []

    def _index(self, index: NgramIndex, sequence: Sequence, end: int) -> bool:
        """Index the n-grams of a long text that end at positions up to ``end``, as many as this
        step may still index. Returns whether none is left."""
        count = min(end - index.end, self._indexable)
        self._indexable -= count
        first = self._first_needed(index)
        reached = index.end + count
        self._add_ngrams(index, tuple(sequence.tokens(first, reached)), first, reached)
        return reached == end

    def _first_needed(self, index: NgramIndex) -> int:
        """Position of the first token of the first n-grams that are not indexed yet."""
        return max(index.end + 1 - self._longest, 0)

    def _add_ngrams(self, index: NgramIndex, tokens: tuple[int, ...], first: int, end: int) -> None:
        """Index the n-grams that end at positions up to ``end``. ``tokens`` begin at the position
        ``first``."""
        positions = index.positions
        for position in range(index.end + 1, end + 1):
            offset = position - first  # of the end of the n-grams, in `tokens`
            for length in self._lengths:
                if length <= offset:
                    positions[hash(tokens[offset - length : offset])] = position
        index.end = max(index.end, end)


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
