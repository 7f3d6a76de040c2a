"""Rows of a step as attention sees them, a block table and a span of positions; and its call."""

from typing import Any

from jitney.batch import Row
from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import AttentionCall, AttentionFunction, LayerCache
from jitney.sampling_params import SamplingParams
from torch import Tensor


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


def attend_over(
    attend: AttentionFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """What ``attend`` gives of one layer; ``more`` is for it alone."""
    call = AttentionCall(0, q, k, v, scale, window, softcap, sinks)
    return attend(call, LayerCache(keys, values, attend, key_scale, value_scale), meta, **more)
