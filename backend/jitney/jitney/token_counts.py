"""How often tokens occur in a sequence, for the penalties that depend on it.

Kept with the sequence, so that a step costs as much as the tokens that it adds, however long prompt
and output are. The scheduler adds each token; the sampler reads the arrays through NumPy, which
takes no turn of a Python loop for each entry.
"""

from array import array
from collections.abc import Iterable, Sequence


class TokenCounts:
    """The distinct tokens of one sequence."""

    def __init__(self, prompt_ids: "array[int]", below: "TokenCounts | None" = None) -> None:
        """Of an empty output. ``prompt_ids``: see there. ``below``: what :meth:`after` copied."""
        self.prompt_ids = prompt_ids
        """The prompt's distinct tokens, if a penalty depends on them. The sequences of a request
        share this array: it is never changed."""
        self.output_ids = array("q")
        """The output's distinct tokens, in the order in which they first occur."""
        self.output_counts = array("q")
        """Parallel to ``output_ids``: how often each occurs in the output."""
        self._below = below
        self._indices: dict[int, int] = {}  # token -> index in the two; not those of `_below`

    @classmethod
    def of(cls, prompt: Iterable[int], output: Sequence[int]) -> "TokenCounts":
        """Count these tokens."""
        counts = cls(distinct(prompt))
        counts.add(output)
        return counts

    def add(self, token_ids: Iterable[int]) -> None:
        """These tokens were appended to the output."""
        for token in token_ids:
            index = self._index_of(token)
            if index is None:
                self._indices[token] = len(self.output_ids)
                self.output_ids.append(token)
                self.output_counts.append(1)
            else:
                self.output_counts[index] += 1

    def after(self, token_ids: Sequence[int]) -> "TokenCounts":
        """The counts as if these few tokens were appended. Used up before tokens are added to this
        one."""
        ahead = TokenCounts(self.prompt_ids, below=self)
        ahead.output_ids = self.output_ids[:]
        ahead.output_counts = self.output_counts[:]
        ahead.add(token_ids)
        return ahead

    def _index_of(self, token: int) -> int | None:
        index = self._indices.get(token)
        if index is None and self._below is not None:
            return self._below._index_of(token)
        return index


def distinct(token_ids: Iterable[int]) -> "array[int]":
    """Each token once, in the order in which they first occur."""
    return array("q", dict.fromkeys(token_ids))
