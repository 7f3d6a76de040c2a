"""Where drafts come from: what followed the same tokens before, or what the runner proposed.

``speculation`` asks a drafter for what may follow a sequence, and decides how much of it a step
computes.
"""

from itertools import cycle, islice
from typing import Protocol

from jitney.config import SpeculationConfig
from jitney.core.drafting import Drafting
from jitney.core.request import Sequence

_INDEXED_AT_ONCE = 1024  # tokens of a sequence that one step indexes: about a millisecond


class Drafter(Protocol):
    """Where proposals come from: a search of the text so far, or a model."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """At most ``most`` tokens that may follow the known tokens of ``sequence``."""


class NgramDrafter:
    """Looks for the last tokens earlier in prompt or output, and proposes what followed them there
    ("prompt lookup")."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._longest = longest
        self._lengths = range(longest, shortest - 1, -1)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """What followed the latest occurrence of the longest n-gram that has occurred before. A
        long prompt is indexed over several calls, which propose nothing."""
        drafting = sequence.drafting
        assert drafting is not None
        size = sequence.num_tokens
        self._index(sequence, drafting)
        if drafting.indexed < size - 1:  # the sequence is not indexed to its end yet
            return []
        last = sequence.tokens(max(size - self._longest, 0), size)
        for length in self._lengths:
            # The hash alone, to save memory: a collision costs a wrong draft.
            end = drafting.ngrams.get(hash(tuple(last[-length:])))
            if end is not None:
                return _what_followed(sequence, end, most)
        return []

    def _index(self, sequence: Sequence, drafting: Drafting) -> None:
        """Index the n-grams that end in tokens beyond the first ``indexed`` ones, in parts if these
        are many. N-grams that end in the last token are left out: nothing follows them yet."""
        old_size = drafting.indexed
        new_size = min(sequence.num_tokens - 1, old_size + _INDEXED_AT_ONCE)
        if new_size <= old_size:
            return
        # The first new n-grams begin in tokens that are indexed already.
        first = max(old_size - self._longest, 0)
        tokens = sequence.tokens(first, new_size)
        for end in range(old_size + 1, new_size + 1):
            offset = end - first  # of the end, in `tokens`
            for length in self._lengths:
                if length <= offset:
                    ngram = tuple(tokens[offset - length : offset])
                    drafting.ngrams[hash(ngram)] = end
        drafting.indexed = new_size


def _what_followed(sequence: Sequence, end: int, most: int) -> list[int]:
    """``most`` tokens from position ``end`` on. If the sequence has fewer, these are repeated: a
    text that repeats itself once may do so again."""
    found = sequence.tokens(end, min(end + most, sequence.num_tokens))
    return list(islice(cycle(found), most))


class RunnerDrafter:
    """Proposes what the runner proposed in the step that made the last token. The runner has it
    from a draft model, or from a head of the model itself."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Empty unless the sequence's last row asked for a proposal."""
        return sequence.runner_proposal[:most]


def make_drafter(config: SpeculationConfig) -> Drafter:
    """The drafter that the option names."""
    if config.drafter == "ngram":
        return NgramDrafter(config.ngram_min, config.ngram_max)
    return RunnerDrafter()
