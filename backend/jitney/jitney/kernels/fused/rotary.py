"""Rotary embedding (Su et al. 2021): cos and sin, as fused layers take them.

A head has R rotated values. They are rotated in pairs, both values of a pair by one angle: which
two values are a pair is the layer's ``forms.Rotation``. Fused layers take cos and sin with a column
for each of the R values. So both columns of a pair are equal.

Rotary modules of transformers give their columns in one of three ways (:data:`AngleColumns`), which
need not be that of the layer's pairs: GLM has columns as for halves, and rotates neighbours.

Called by ``layers`` and ``fuse``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jitney.kernels.fused.forms import Misfit, Rotation

CosSin = tuple[Tensor, Tensor]
"""cos and sin: [T, R] in fused layers. A rotary module gives [1, T, R], or half of it."""
Rotary = Callable[[Tensor, Tensor], CosSin]
"""A model's rotary module: (a tensor of the model's dtype and device, positions [1, T]) -> (cos,
sin)."""
AngleColumns = Literal["once", "halves", "neighbours"]
"""Which columns a rotary module gives: R / 2, one for each pair; or R, whose second half repeats
the first one; or R, each next to its equal."""
NO_ANGLES: CosSin = (torch.empty(0), torch.empty(0))
"""For a layer without rotary embedding."""
MOST_TABLE_BYTES = 256 << 20
"""A larger table of cos and sin is not made."""
SURPLUS = 64
"""Positions of a table beyond the longest sequence. No token should be planned there; if one is, it
still finds a row of the table."""


def columns_of(cos: Tensor, head_size: int) -> AngleColumns:
    """Which columns cos [1, T, columns] has. Raises Misfit if it is wider than a head."""
    found: AngleColumns = "once"
    first, second = cos.tensor_split(2, -1)
    if torch.equal(first, second):
        found = "halves"
    elif torch.equal(cos[..., 0::2], cos[..., 1::2]):
        found = "neighbours"
    rotated = cos.shape[-1] * 2 if found == "once" else cos.shape[-1]
    if rotated > head_size:
        raise Misfit("its rotary embedding is wider than a head")
    return found


def whole_rotary(made: CosSin, columns: AngleColumns, rotation: Rotation) -> CosSin:
    """cos and sin [T, R] for a layer of this rotation, of those that a rotary module made: [1, T,
    ...] with these columns."""
    if rotation == "none":
        return NO_ANGLES
    cos, sin = made
    return _in_pairs(cos[0], columns, rotation), _in_pairs(sin[0], columns, rotation)


def _in_pairs(angles: Tensor, columns: AngleColumns, rotation: Rotation) -> Tensor:
    if columns == rotation:
        return angles
    if columns == "halves":
        angles, _ = angles.chunk(2, -1)
    elif columns == "neighbours":
        angles = angles[..., 0::2]
    if rotation == "halves":
        return torch.cat((angles, angles), -1)
    return angles.repeat_interleave(2, -1)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """cos and sin by position, for layers that rotate alike."""

    angles: Tensor
    """[positions, 2, R]: of the first positions."""
    is_whole: bool
    """Whether it has all positions. Always on a GPU, whose host does not wait for positions."""
    compute: Callable[[Tensor], CosSin]
    """cos and sin [T, R] of any positions [T]."""

    def at(self, positions: Tensor) -> CosSin:
        """cos and sin [T, R] of these positions."""
        if not self.is_whole and int(positions.max()) >= len(self.angles):
            return self.compute(positions)
        # cos and sin of a token are side by side. So the offset from cos to sin, and with it the
        # alignment of sin, is the same for any number of tokens. A compiler that makes a kernel for
        # each alignment, as that of the Triton language, then makes only one.
        cos, sin = self.angles.index_select(0, positions).unbind(1)
        return cos, sin


def rotary_table(
    rotary: Rotary, columns: AngleColumns, rotation: Rotation, length: int, like: Tensor
) -> RotaryTable:
    """The table of positions 0 to ``length`` - 1. ``like`` has the model's dtype and device.

    If it would be too large, it has fewer positions; on a GPU, Misfit is raised instead."""

    def compute(positions: Tensor) -> CosSin:
        return whole_rotary(rotary(like, positions.unsqueeze(0)), columns, rotation)

    positions = torch.arange(length, device=like.device)
    # The bytes of one position tell those of the table before it is made.
    first_cos, first_sin = compute(positions[:1])
    bytes_of_position = first_cos.nbytes + first_sin.nbytes
    fitting = MOST_TABLE_BYTES // bytes_of_position
    is_whole = fitting >= length
    if not is_whole and like.device.type != "cpu":
        size = length * bytes_of_position
        raise Misfit(f"the table of its rotary embedding would take {size:,} bytes")
    angles = torch.stack(compute(positions[:fitting]), 1)
    return RotaryTable(angles, is_whole=is_whole, compute=compute)
