"""Numbers in e4m3: 8 bits, of which 3 are fraction.

Rounding a value to e4m3 changes it by at most 2⁻⁴ of itself, or by at most 2⁻¹⁰ · scale where it
is smaller than 2⁻⁶ · scale. Called by ``eight_bits``.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
ALIGNMENT = 16
"""The two sizes of a weight must be multiples of it for the kernels of scaled products."""
_LEAST = 1e-30
"""Stands for the largest value of a row of zeros, so that its scale is not 0. Rows of interest
have larger ones."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [T, K] as e4m3 [T, K] and their scales, float32 [T, 1]: x ≈ q · scale.

    A NaN or an infinity in a row makes the whole row NaN: a broken activation is never hidden.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True).clamp_min(_LEAST)

    # Both operands are tensors: torch computes ``number / tensor`` as ``number * (1 / tensor)``,
    # which rounds twice.
    inverse_scale = torch.full_like(largest, LARGEST) / largest
    return (wide * inverse_scale).to(E4M3), largest / LARGEST
