"""The tokens that a request names in its parameters: allowed, biased and stop ids, and bad words.

They are made into arrays when the request is made, and kept with it. So a step hands them to NumPy
as they are, without a Python loop over them, however many there are. The sequences of a request
share them: they are never changed.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jitney.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NamedTokens:
    """Of one request."""

    allowed: "array[int] | None"
    """``allowed_token_ids``; None: all are allowed."""
    biased: "array[int]"
    """The ids of ``logit_bias``."""
    biases: "array[float]"
    """Parallel to ``biased``."""
    stops: "array[int]"
    """The ids that may not be sampled before there are ``min_tokens`` tokens. Empty if
    ``min_tokens`` is 0."""
    bad_words: "BadWords"

    @classmethod
    def of(
        cls, params: SamplingParams, stop_ids: Collection[int], bad_words_ids: Iterable[list[int]]
    ) -> "NamedTokens":
        """The tokens of the request with these parameters. ``stop_ids`` and ``bad_words_ids`` are
        described at :class:`~jitney.messages.Submit`."""
        allowed = params.allowed_token_ids
        bias = params.logit_bias or {}
        return cls(
            allowed=None if allowed is None else array("q", allowed),
            biased=array("q", bias),
            biases=array("f", bias.values()),
            stops=array("q", stop_ids if params.min_tokens else ()),
            bad_words=BadWords(bad_words_ids),
        )


class BadWords:
    """Lists of ids (*words*) whose last id may not follow the others.

    The *beginning* of a word is all of its ids but the last. The beginnings are kept in a tree, by
    their ids from the last to the first. To find the beginnings that the output ends with, a step
    goes through the tree and through the output, backwards from its end. It stops at the first id
    of the output that no beginning has there. So words that do not match take no time, however many
    they are.
    """

    def __init__(self, words: Iterable[list[int]]) -> None:
        self.longest = 0
        """Ids of the longest word; 0 without words."""
        self._root = _Beginning()
        for word in words:
            self._add(word)

    def _add(self, word: list[int]) -> None:
        *beginning, last = word
        node = self._root
        for token in reversed(beginning):
            node = node.longer.setdefault(token, _Beginning())
        node.endings.append(last)
        self.longest = max(self.longest, len(word))

    def endings(self, output: Sequence[int]) -> "list[array[int]]":
        """The last ids of the words whose beginning the output ends with."""
        node = self._root
        found = [node.endings]
        # A word's beginning has at most `longest - 1` ids.
        for distance in range(1, min(self.longest - 1, len(output)) + 1):
            longer = node.longer.get(output[-distance])
            if longer is None:
                break
            node = longer
            found.append(node.endings)
        return found


class _Beginning:
    """A node of the tree: the beginning of some words, or the end of a longer beginning."""

    __slots__ = ("endings", "longer")

    def __init__(self) -> None:
        self.endings = array("q")
        """The last ids of the words that have exactly this beginning."""
        self.longer: dict[int, _Beginning] = {}
        """Token -> the beginning with this token in front of it."""
