"""Rows of a step as attention sees them: a block table and a span of positions."""

from jitney.messages import Row
from jitney.sampling_params import SamplingParams


def row(table: list[int], start: int, end: int) -> Row:
    return Row(
        key=0,
        index=0,
        token_ids=[1] * (end - start),
        start=start,
        block_table=table,
        sample=(),
        params=SamplingParams(),
        prompt=[],
        output=[],
        stop_ids=frozenset(),
        bad_words_ids=[],
    )
