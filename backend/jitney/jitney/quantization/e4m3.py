"""Numbers in e4m3: 8 bits, of which 3 are fraction.

The error of rounding one value to e4m3 is at most 2⁻⁴ of it where it is normal, and at most
2⁻¹⁰ · scale below 2⁻⁶ · scale; :data:`MAX` times the scale is the largest value of its row.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
MAX = torch.finfo(DTYPE).max  # 448
LEAST = 1e-30
"""Keeps the scale of a row of zeros from being 0; smaller than any value of interest squared."""
ALIGNMENT = 16
"""What the kernels for scaled products ask of a weight's two dimensions."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [T, K] as e4m3 [T, K] and their scales, float32 [T, 1]: x ≈ q · scale.

    A NaN or an infinity in a row makes the row NaN: a broken activation is never hidden.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True).clamp_min(LEAST)
    # A tensor over a tensor: torch takes a number over a tensor for a product with the reciprocal.
    return (wide * (torch.full_like(largest, MAX) / largest)).to(DTYPE), largest / MAX
