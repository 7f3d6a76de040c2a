"""Which logits a step needs, and what a row is answered: shared by the runners."""

from jitney.execution.sampler import Sampled
from jitney.request import Row, RowOutput


class Wanted:
    """Which of the step's T tokens need logits.

    ``tokens`` are their indices among the T, ascending per row; ``sampled_of_pairs`` gives, for
    each (row, sequence) to sample, its place in ``tokens``; ``prompt`` maps the number of a row
    that wants prompt logprobs to (its first place in ``tokens``, the tokens to be predicted).
    """

    def __init__(self, rows: list[Row]) -> None:
        self.tokens: list[int] = []
        self.sampled_of_pairs: list[int] = []
        self.prompt: dict[int, tuple[int, list[int]]] = {}
        begin = 0
        for r, row in enumerate(rows):
            count = len(row.token_ids)
            if row.params.prompt_logprobs is not None:
                # The token at position p predicts prompt[p + 1].
                targets = row.prompt[row.start + 1 : row.end + 1]
                if targets:
                    self.prompt[r] = (len(self.tokens), targets)
                    self.tokens.extend(range(begin, begin + len(targets)))
            if row.sample:
                last = begin + count - 1
                if not self.tokens or self.tokens[-1] != last:
                    self.tokens.append(last)
                self.sampled_of_pairs.extend([len(self.tokens) - 1] * len(row.sample))
            begin += count


def row_output(row: Row, sampled: list[Sampled]) -> RowOutput:
    """The answer for a row whose sequences drew ``sampled``."""
    tokens = []
    for each in sampled:
        if each.error is not None:
            return RowOutput([], error=each.error)
        tokens.append(each.token_id)
    if row.params.logprobs is None or not sampled:
        return RowOutput(tokens)
    return RowOutput(tokens, [each.logprobs or [] for each in sampled])
