"""Angles of the rotary embedding (Su et al. 2021), out of a table where that is exact."""

from collections.abc import Callable

import torch
from torch import Tensor

_MOST_TABLE_BYTES = 256 << 20

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A model's rotary module: (anything of its dtype and device, positions [1, T]) -> cos, sin."""


def is_half(cos: Tensor) -> bool:
    """Whether cos [..., R] has one column for each pair of rotated values: else its second half is
    its first once more."""
    return not torch.equal(*cos.tensor_split(2, -1))


def whole_rotary(made: tuple[Tensor, Tensor], half: bool) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R], a column for each rotated value, of what a model's rotary module gives:
    [1, T, R], or ``half`` as wide."""
    cos, sin = made[0][0], made[1][0]
    if half:
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


class RotaryTable:
    """cos and sin of positions, out of a table of all of them where that fits and is exact."""

    def __init__(self, rotary: Rotary, half: bool, length: int, like: Tensor) -> None:
        """``length`` is that of the longest sequence; ``half`` as in :func:`whole_rotary`.
        ``like`` has the model's dtype and device."""
        self._rotary, self._half, self._like = rotary, half, like
        self.table = self._build(length)
        """[length, 2, R]; None if angles are computed in each step."""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, R], of positions [T]."""
        # Side by side for each token: where sin begins does not depend on how many there are, so
        # the kernel that reads it is the same for every step.
        table = self.table
        both = self._compute(positions) if table is None else table.index_select(0, positions)
        cos, sin = both.unbind(1)
        return cos, sin

    def _compute(self, positions: Tensor) -> Tensor:
        made = self._rotary(self._like, positions.unsqueeze(0))
        return torch.stack(whole_rotary(made, self._half), 1)

    def _build(self, length: int) -> Tensor | None:
        """None if it were too large, or if a module gives another result for a few positions than
        for many: some forms of scaling do."""
        early = min(1, length - 1)  # and not 0, of which all angles are 0
        few = torch.tensor([early, 0, length // 3, length - 1], device=self._like.device)
        alone, one = self._compute(few), self._compute(few[:1])
        if length * alone[0].nbytes > _MOST_TABLE_BYTES:
            return None
        table = self._compute(torch.arange(length, device=few.device))
        exact = torch.equal(table[few], alone) and torch.equal(table[few[:1]], one)
        return table if exact else None
