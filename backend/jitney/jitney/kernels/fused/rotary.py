"""Rotary embedding (Su et al. 2021) as fused layers take it: cos and sin with a column for each
rotated value, from a table by position. Called by ``layers`` and ``fuse``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from jitney.kernels.fused.forms import Misfit

CosSin = tuple[Tensor, Tensor]
"""cos and sin: [T, R], a column for each of the R rotated values of a head; [1, T, R] or
[1, T, R / 2] as a model's rotary module gives them."""
Rotary = Callable[[Tensor, Tensor], CosSin]
"""A model's rotary module: (anything of its dtype and device, positions [1, T]) -> cos, sin."""
_MOST_TABLE_BYTES = 256 << 20


def whole_rotary(made: CosSin, half: bool) -> CosSin:
    """cos and sin [T, R] of what a model's rotary module gives: [1, T, R], or with ``half``
    [1, T, R / 2]."""
    cos, sin = made
    cos = cos[0]
    sin = sin[0]
    if half:
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


def rotary_table(rotary: Rotary, half: bool, length: int, like: Tensor) -> Tensor:
    """cos and sin of positions 0 to ``length`` - 1: [length, 2, R]. ``half`` as in
    :func:`whole_rotary`; ``like`` has the model's dtype and device. Raises Misfit if it is large.
    """
    positions = torch.arange(length, device=like.device).unsqueeze(0)
    # Its size by one position, before memory is taken for all.
    cos_of_one, sin_of_one = whole_rotary(rotary(like, positions[:, :1]), half)
    size = length * (cos_of_one.nbytes + sin_of_one.nbytes)
    if size > _MOST_TABLE_BYTES:
        raise Misfit(f"the table of its rotary embedding would take {size:,} bytes")
    return torch.stack(whole_rotary(rotary(like, positions), half), 1)
