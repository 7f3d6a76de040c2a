"""Rotary embeddings from a table, in a model that is not fused as a whole and whose results must
not depend on the batch: torch's cos and sin of many numbers may differ in the last bit from those
of few. Called by a device's accelerator.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.probe import embedding_weight
from jitney.execution.quantized import find_children, layers_that_round_inputs
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.rotary import MOST_TABLE_BYTES, SURPLUS
from jitney.kernels.fused.trial import Checker, first_positions, run_model, spread_positions


def look_up_rotary(module: PreTrainedModel, length: int) -> None:
    """Let the rotary modules of ``module`` read tables; ``length`` is that of the longest sequence.
    Raises Misfit, and changes nothing, if the model then gives other logits."""
    found = find_children(module, _is_rotary)
    if not found:
        return
    trials = [first_positions(module), spread_positions(module, length)]
    expected = [run_model(module, positions) for positions in trials]
    for rotary, holders in found.items():
        table = _RotaryTable(rotary, length + SURPLUS)
        for holder, name in holders:
            setattr(holder, name, table)
    like = embedding_weight(module).new_zeros(1)
    checker = Checker(like, coarse=bool(layers_that_round_inputs(module)))
    try:
        for positions, right in zip(trials, expected, strict=True):
            got = run_model(module, positions)
            checker.check_same("its result with a table of its rotary embedding", got, right)
    except Misfit:
        for rotary, holders in found.items():
            for holder, name in holders:
                setattr(holder, name, rotary)
        raise


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


class _RotaryTable(nn.Module):
    """In place of a rotary module: what it gives for each position."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        super().__init__()
        self._rotary = rotary
        self._length = length
        self._tables: dict[object, list[Tensor]] = {}
        """By further arguments, which say for which kind of layer."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the rotary module: x gives dtype and device, the positions are [1, T]."""
        kind = (args, tuple(kwargs.items()))
        tables = self._tables.get(kind)
        if tables is None:
            tables = self._make(x, *args, **kwargs)
            self._tables[kind] = tables
        found = [table.index_select(1, position_ids[0]) for table in tables]
        return tuple(found)

    def _make(self, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
        positions = torch.arange(self._length, device=x.device).unsqueeze(0)
        of_one = self._rotary(x, positions[:, :1], *args, **kwargs)
        if not isinstance(of_one, tuple) or any(each.shape[:2] != (1, 1) for each in of_one):
            raise Misfit("its rotary module gives no cos and sin for each token")
        size = self._length * sum(each.nbytes for each in of_one)
        if size > MOST_TABLE_BYTES:
            raise Misfit(f"the table of its rotary embedding would take {size:,} bytes")
        return list(self._rotary(x, positions, *args, **kwargs))
