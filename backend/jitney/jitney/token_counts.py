"""How often tokens occur in a sequence, for the penalties that depend on it.

The counts are kept with the sequence. So a step counts only the tokens that it adds, however long
prompt and output are. The scheduler adds each token. The sampler hands the arrays to NumPy as they
are, without a Python loop over their entries.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

_NOTHING: Mapping[int, int] = MappingProxyType({})


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs in its output."""

    def __init__(self, prompt_ids: "array[int]") -> None:
        """The counts of an empty output."""
        self.prompt_ids = prompt_ids
        """The prompt's distinct tokens, if a penalty depends on them. The sequences of a request
        share this array: it is never changed."""
        self.output_ids = array("q")
        """The output's distinct tokens, in the order in which they first occur."""
        self.output_counts = array("q")
        """Parallel to ``output_ids``: how often each occurs in the output."""
        self.ahead: Mapping[int, int] = _NOTHING
        """Token -> how often it occurs in the tokens that :meth:`after` was given. They are not
        counted in the arrays."""
        self._indices: dict[int, int] = {}  # token -> its index in the arrays

    @classmethod
    def of(cls, prompt: Iterable[int], output: Sequence[int]) -> "TokenCounts":
        """Count these tokens."""
        counts = cls(distinct(prompt))
        counts.add(output)
        return counts

    def add(self, token_ids: Iterable[int]) -> None:
        """These tokens were appended to the output."""
        assert not self.ahead, "counts made by after() are only read"
        for token in token_ids:
            index = self._indices.get(token)
            if index is None:
                self._indices[token] = len(self.output_ids)
                self.output_ids.append(token)
                self.output_counts.append(1)
            else:
                self.output_counts[index] += 1

    def after(self, token_ids: Sequence[int]) -> "TokenCounts":
        """The counts as if these few tokens were appended. It shares the arrays, which are not
        copied. So the returned counts must not be used once tokens are added to ``self``."""
        ahead = dict(self.ahead)
        for token in token_ids:
            ahead[token] = ahead.get(token, 0) + 1
        counts = TokenCounts(self.prompt_ids)
        counts.output_ids = self.output_ids
        counts.output_counts = self.output_counts
        counts.ahead = ahead
        counts._indices = self._indices
        return counts

    def index_of(self, token: int) -> int | None:
        """The index of a token in the arrays. None: it is not there."""
        return self._indices.get(token)


def distinct(token_ids: Iterable[int]) -> "array[int]":
    """Each token once, in the order in which they first occur."""
    return array("q", dict.fromkeys(token_ids))
