"""Numbers in e4m3: 8 bits, of which 3 are fraction. Called by ``eight_bits``.

Rounding changes a value by at most 2⁻⁴ of itself. Values smaller than 2⁻⁶ · scale are the
exception: they change by at most 2⁻¹⁰ · scale.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
SIZE_STEP = 16
"""torch's e4m3 product takes a weight only if both its sizes are multiples of this. Of our kernels
for CPUs the number of inputs must be such a multiple; the number of outputs may be any."""
_LEAST = 1e-30
"""Taken for the largest value of a row if that is smaller: a row of zeros must not get scale 0."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [T, K] as e4m3 [T, K] and their scales, float32 [T, 1]: x ≈ q · scale.

    A NaN or an infinity in a row makes the whole row NaN: a broken activation is never hidden.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True).clamp_min(_LEAST)

    # The dividend is a tensor, too. torch computes ``number / tensor`` as
    # ``number * (1 / tensor)``, which rounds twice.
    inverse_scale = torch.full_like(largest, LARGEST) / largest
    return (wide * inverse_scale).to(E4M3), largest / LARGEST
