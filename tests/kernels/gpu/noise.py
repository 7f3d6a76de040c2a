"""Random input for the GPU's kernels, on a GPU if there is one."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 4e-4}
"""Relative to the norm of the right result: one rounding of each value, and float32 sums. The
interpreter cuts float32 off to bfloat16, which is twice as far as rounding."""


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)
