"""The kernel that quantizes activations to e4m3 on a GPU: one pass over a row instead of five.

Imported only where such layers are made (``fp8``), because it needs the Triton language.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jitney.quantization.e4m3 import DTYPE, LEAST, MAX

_MAX = tl.constexpr(MAX)
_FLOOR = tl.constexpr(LEAST)


@triton.jit
def _quantize_row(x, stride, q, scales, size, BLOCK: tl.constexpr):
    """Program r reads row r of x, of at most BLOCK values, and writes that of q and its scale.

    Both divisions round as IEEE 754 has it, so the result is bit for bit that of plain torch. A NaN
    in the row must reach the result, hence the explicit propagation in the maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, mask=columns < size, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.reduce(tl.abs(values), 0, _larger), _FLOOR, tl.PropagateNan.ALL)
    scaled = values * tl.div_rn(_MAX, largest)
    tl.store(q + row * size + columns, scaled.to(q.dtype.element_ty), mask=columns < size)
    tl.store(scales + row, tl.div_rn(largest, _MAX))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)


def quantize_rows(x: Tensor, dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor]:
    """As ``e4m3.quantize_rows``. With ``dtype`` float32 the products before they are cast:
    the interpreter's own cast to 8 bits (triton 3.6) loses the carry into the exponent."""
    count, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    q = torch.empty(count, size, dtype=dtype, device=x.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    block, warps = launch_shape(size)
    _quantize_row[(count,)](x, x.stride(0), q, scales, size, BLOCK=block, num_warps=warps)
    return q, scales


def launch_shape(size: int) -> tuple[int, int]:
    """Values of a row that a program holds at once, and its warps: 16 bytes a thread and load."""
    block = max(triton.next_power_of_2(size), 128)
    return block, min(max(block // 512, 1), 16)
