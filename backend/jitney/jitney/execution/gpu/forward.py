"""The whole of a causal model, fused: what ``gpu.fuse`` puts in the place of its ``forward``.

It carries the residual from layer to layer, so that each sum is one kernel with the norm that
follows. Only the rows whose logits are asked for go through the last norm and the head.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.gpu.layers import FusedLayer, whole_rotary
from jitney.execution.gpu.norm import RmsNorm, add_norm
from jitney.execution.interface import PagedFunction

_MOST_TABLE_BYTES = 512 << 20
_CHUNK = 16384
"""Positions of a table that are computed at once."""

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A model's rotary module: (anything of its dtype and device, positions [1, T]) -> cos, sin."""


class Output(NamedTuple):
    """What is read of transformers' own output."""

    logits: Tensor


class RotaryTable:
    """cos and sin of positions, out of a table of all of them where that fits and is exact."""

    def __init__(self, rotary: Rotary, half: bool, length: int | None, like: Tensor) -> None:
        """``length`` is that of the longest sequence; ``half`` as in :func:`layers.whole_rotary`.
        ``like`` has the model's dtype and device."""
        self._rotary, self._half, self._like = rotary, half, like
        self._table: Tensor | None = None
        if length is not None:
            self._table = self._build(length)

    @property
    def has_table(self) -> bool:
        """Whether nothing is computed in a step."""
        return self._table is not None

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, R], of positions [T]."""
        if self._table is None:
            return self._compute(positions)
        # Side by side for each token: where sin begins does not depend on how many there are, so
        # the kernel that reads it is the same for every step.
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos, sin

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return whole_rotary(self._rotary(self._like, positions.unsqueeze(0)), self._half)

    def _build(self, length: int) -> Tensor | None:
        """[length, 2, R]; None if it were too large, or if a module gives another result for a few
        positions than for many: some forms of scaling do."""
        early = min(1, length - 1)  # and not 0, of which all angles are 0
        few = torch.tensor([early, 0, length // 3, length - 1], device=self._like.device)
        alone = torch.stack(self._compute(few), 1)
        if length * alone.shape[-1] * alone.element_size() * 2 > _MOST_TABLE_BYTES:
            return None
        table = alone.new_empty((length, *alone.shape[1:]))
        for start in range(0, length, _CHUNK):
            end = min(length, start + _CHUNK)
            positions = torch.arange(start, end, device=few.device)
            table[start:end] = torch.stack(self._compute(positions), 1)
        one = few[:1]
        same = torch.equal(table[few], alone) and torch.equal(
            table[one], torch.stack(self._compute(one), 1)
        )
        return table if same else None


class FusedForward:
    """``forward`` of a causal model whose layers are all fused, without what transformers does
    around them for caches, masks and outputs that are not wanted here."""

    def __init__(
        self,
        embed: nn.Module,
        rotaries: Sequence[RotaryTable],
        layers: Sequence[FusedLayer],
        rotary_of_layer: Sequence[int],
        norm: RmsNorm,
        head: nn.Module,
        softcap: float | None,
    ) -> None:
        """``rotary_of_layer`` has, for each layer, its place in ``rotaries``."""
        self._embed, self._rotaries, self._norm, self._head = embed, rotaries, norm, head
        self._softcap = softcap
        self._layers = list(zip(layers, rotary_of_layer, strict=True))
        self._first_norm = layers[0].attention_norm
        # What ends each layer: the norm of its own branch, and that of the next layer's input.
        self._next_norms: list[RmsNorm | None] = [each.attention_norm for each in layers[1:]]

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        paged: PagedFunction,
        **unused: object,
    ) -> Output:
        """As transformers calls it: ``input_ids`` and ``position_ids`` are [1, T]."""
        return Output(self.step(input_ids[0], position_ids[0], logits_to_keep, paged).unsqueeze(0))

    def step(self, ids: Tensor, positions: Tensor, wanted: Tensor, paged: PagedFunction) -> Tensor:
        """``ids`` and ``positions`` are [T], ``wanted`` indices of T. Returns their logits."""
        residual = self._embed(ids)
        turns = [rotary(positions) for rotary in self._rotaries]
        x = residual if self._first_norm is None else self._first_norm(residual)
        branch_norm: RmsNorm | None = None
        branch: Any = None
        for place, (layer, rotary) in enumerate(self._layers):
            if place > 0:
                norm = self._next_norms[place - 1]
                x, residual = add_norm(branch, residual, branch_norm=branch_norm, norm=norm)
            branch, residual = layer.run(x, residual, *turns[rotary], paged)
            branch_norm = layer.mixed_norm
        x, _ = add_norm(branch, residual, branch_norm=branch_norm, norm=self._norm, wanted=wanted)
        logits: Tensor = self._head(x)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
