"""Where drafts come from: what followed the same tokens before, or what the runner proposed.

``speculation`` asks a drafter for what may follow a sequence, and decides how much of it a step
computes.
"""

from typing import Protocol

from jitney.config import SpeculationConfig
from jitney.core.request import Drafting, Sequence

_INDEXED_AT_ONCE = 1024  # tokens of a sequence in a step: about a millisecond


class Drafter(Protocol):
    """Where proposals come from: a search of the text so far, or a model."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """At most ``most`` tokens that may follow the known tokens of ``sequence``."""


class NgramDrafter:
    """Proposes what has followed the last tokens before, in prompt or output ("prompt lookup")."""

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
        if drafting.indexed < size - 1:  # not indexed to its end yet
            return []
        last = sequence.tokens(max(size - self._longest, 0), size)
        for length in self._lengths:
            end = drafting.ngrams.get(hash(tuple(last[-length:])))
            if end is not None:
                return _what_followed(sequence, end, most)
        return []

    def _index(self, sequence: Sequence, drafting: Drafting) -> None:
        """Index the n-grams that end in further tokens. Those that end in the last token are left
        out, because nothing follows them yet."""
        done = drafting.indexed
        until = min(sequence.num_tokens - 1, done + _INDEXED_AT_ONCE)
        begin = max(done - self._longest, 0)
        tokens = sequence.tokens(begin, until)
        for end in range(done + 1, until + 1):
            end_in_tokens = end - begin
            for length in self._lengths:
                if length <= end_in_tokens:
                    ngram = tuple(tokens[end_in_tokens - length : end_in_tokens])
                    drafting.ngrams[hash(ngram)] = end
        drafting.indexed = max(until, done)


def _what_followed(sequence: Sequence, end: int, most: int) -> list[int]:
    """``most`` tokens from position ``end`` on. If the sequence has fewer, those that it has are
    repeated: a text that repeats itself once may do so again."""
    size = sequence.num_tokens
    found = sequence.tokens(end, min(end + most, size))
    period = size - end
    while len(found) < most:
        found.append(found[-period])
    return found


class RunnerDrafter:
    """Proposes what the runner proposed in the step that made the last token. The runner has it
    from a draft model, or from a head of the model itself."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Nothing unless the row asked for it."""
        return sequence.proposed[:most]


def make_drafter(config: SpeculationConfig) -> Drafter:
    """The drafter that the option names."""
    if config.drafter == "ngram":
        return NgramDrafter(config.ngram_min, config.ngram_max)
    return RunnerDrafter()
