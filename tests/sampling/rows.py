"""Rows as the scheduler makes them, for the sampler alone, and what they draw."""

from collections.abc import Iterator
from typing import Any

from jitney.batch import Row
from jitney.execution.sampler import SampledToken, sample
from jitney.named_tokens import NamedTokens
from jitney.sampling_params import SamplingParams
from jitney.token_counts import TokenCounts
from torch import Tensor


class Allows:
    """A grammar's state that allows these ids of the first ``size``."""

    error = None
    ended = False

    def __init__(self, *ids: int, size: int = 80) -> None:
        self._mask = sum(1 << token for token in ids).to_bytes(-(-size // 32) * 4, "little")

    def accept(self, token_ids: list[int]) -> None:
        """Not asked here."""

    def mask(self) -> bytes:
        return self._mask


class Long(list[int]):
    """Tokens of a long context, of which no step goes through all. ``copied``: how many were copied
    by slices."""

    copied = 0

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("each token is looked at")

    def __add__(self, other: object) -> list[int]:
        raise AssertionError("each token is copied")

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            self.copied += len(found)
        return found


def make_row(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    stop_ids: frozenset[int] = frozenset(),
    bad_words_ids: list[list[int]] | None = None,
    grammar: Allows | None = None,
    **params: Any,
) -> Row:
    """A row that decodes one token after ``prompt`` + ``output``; other names are parameters."""
    prompt, output = prompt or [1, 2, 3], output or []
    params.setdefault("seed", 0)
    sampling = SamplingParams(**params)
    return Row(
        key=1,
        index=0,
        token_ids=[(prompt + output)[-1]],
        start=len(prompt) + len(output) - 1,
        block_table=[],
        sample=(0,),
        params=sampling,
        prompt=prompt,
        output=output,
        stop_ids=stop_ids,
        bad_words_ids=bad_words_ids or [],
        grammar=grammar,
        counts=TokenCounts.of(prompt, output),
        named_tokens=NamedTokens.of(sampling, stop_ids, bad_words_ids or []),
    )


def sampled(logits: Tensor, pairs: list[tuple[Row, int]]) -> list[SampledToken]:
    """The next token of each pair, on the host."""
    return sample(logits, pairs).wait()
