"""Where drafts come from: what followed the same tokens before, or what the runner proposed.

``speculation`` asks a drafter for what may follow a sequence, and decides how much of it a step
computes.
"""

from typing import Protocol

from jitney.config import SpeculationConfig
from jitney.core.request import Drafting, Sequence

_INDEXED_AT_ONCE = 1024  # tokens: a millisecond


class Drafter(Protocol):
    """Where proposals come from: a search of the text so far, or a model."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """At most so many tokens that may follow the known ones of ``sequence``."""


class NgramDrafter:
    """Proposes what has followed the last tokens before, in prompt or output ("prompt lookup")."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._longest = longest
        self._lengths = range(longest, shortest - 1, -1)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """What followed the latest of the longest matches. Nothing while a long prompt is still
        being indexed, some tokens in each call."""
        drafting = sequence.drafting
        assert drafting is not None
        size = sequence.num_tokens
        self._index(sequence, drafting)
        if drafting.indexed < size - 1:
            return []
        last = sequence.tokens(max(size - self._longest, 0), size)
        for length in self._lengths:
            end = drafting.ngrams.get(hash(tuple(last[-length:])))
            if end is not None:
                return _what_followed(sequence, end, most)
        return []

    def _index(self, sequence: Sequence, drafting: Drafting) -> None:
        """Note where the n-grams of further tokens end. The last one is left out, because nothing
        follows it yet."""
        done = drafting.indexed
        until = min(sequence.num_tokens - 1, done + _INDEXED_AT_ONCE)
        begin = max(done - self._longest, 0)
        tokens = sequence.tokens(begin, until)
        for end in range(done + 1, until + 1):
            in_tokens = end - begin
            for length in self._lengths:
                if length <= in_tokens:
                    ngram = tuple(tokens[in_tokens - length : in_tokens])
                    drafting.ngrams[hash(ngram)] = end
        drafting.indexed = max(until, done)


def _what_followed(sequence: Sequence, end: int, most: int) -> list[int]:
    """So many tokens from position ``end`` on. Where the text ends, it repeats itself: it goes on
    as it has begun."""
    size = sequence.num_tokens
    found = sequence.tokens(end, min(end + most, size))
    period = size - end
    while len(found) < most:
        found.append(found[-period])
    return found


class RunnerDrafter:
    """Proposes what the runner did in the step that made the last token: its draft model, or a head
    of the model itself."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Nothing unless the row asked for it."""
        return sequence.proposed[:most]


def make_drafter(config: SpeculationConfig) -> Drafter:
    """The one that the option names."""
    if config.drafter == "ngram":
        return NgramDrafter(config.ngram_min, config.ngram_max)
    return RunnerDrafter()
