"""Rotary embedding (Su et al. 2021): cos and sin, as fused layers take them.

A head has R rotated values. They are rotated in pairs, both values of a pair by one angle. Fused
layers take cos and sin with a column for each of the R values: columns R / 2 to R repeat the first
R / 2. Most rotary modules of transformers give that. Some give *half* of it: the R / 2 columns that
differ, one for each pair. ``half`` says which of the two a module gives.

Called by ``layers`` and ``fuse``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from jitney.kernels.fused.forms import Misfit

CosSin = tuple[Tensor, Tensor]
"""cos and sin: [T, R] in fused layers. A rotary module gives [1, T, R], or half of it."""
Rotary = Callable[[Tensor, Tensor], CosSin]
"""A model's rotary module: (a tensor of the model's dtype and device, positions [1, T]) -> (cos,
sin)."""
MOST_TABLE_BYTES = 256 << 20
"""A larger table of cos and sin is not made."""
SURPLUS = 64
"""Positions of a table beyond the longest sequence. No token should be planned there; if one is, it
still finds a row of the table."""


def whole_rotary(made: CosSin, half: bool) -> CosSin:
    """cos and sin [T, R], of those that a rotary module made: [1, T, R], or with ``half``
    [1, T, R / 2]."""
    cos, sin = made
    cos = cos[0]
    sin = sin[0]
    if half:
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


def rotary_table(rotary: Rotary, half: bool, length: int, like: Tensor) -> Tensor:
    """cos and sin of positions 0 to ``length`` - 1: [length, 2, R]. ``like`` has the model's dtype
    and device. Raises Misfit if the table would be too large."""
    positions = torch.arange(length, device=like.device).unsqueeze(0)

    # The bytes of one position tell those of the table before it is made.
    first_cos, first_sin = whole_rotary(rotary(like, positions[:, :1]), half)
    size = length * (first_cos.nbytes + first_sin.nbytes)
    if size > MOST_TABLE_BYTES:
        raise Misfit(f"the table of its rotary embedding would take {size:,} bytes")
    return torch.stack(whole_rotary(rotary(like, positions), half), 1)
