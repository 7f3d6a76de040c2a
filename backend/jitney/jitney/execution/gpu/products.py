"""Linear layers whose result for a row is bitwise the same whatever rows there are beside it.

cuBLAS chooses tiles, and how the sum is split, by the number of rows. Here both are fixed by the
shape and dtype of the weight alone. Put in the place of linear layers by ``invariant``.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor, nn

from jitney.execution.gpu.product_kernel import product_kernel


class Tiles(NamedTuple):
    """How a product is cut; never by the number of rows."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Few rows read the weight once: what counts then is how many programs do, and how much each has
# under way. A narrow weight is cut into smaller tiles, each of them longer along K.
_WIDE = Tiles(64, 128, 64, 4, 4)
_NARROW = Tiles(64, 64, 128, 4, 4)
_WIDE_OUTPUTS = 12288
_FLOAT32 = Tiles(32, 64, 32, 4, 2)
"""Not for the matrix units, which would round operands to fewer bits."""
_GROUP = 16


def tiles_for(outputs: int, dtype: torch.dtype) -> Tiles:
    """The tiles of products with a weight of ``outputs`` rows."""
    if dtype == torch.float32:
        return _FLOAT32
    return _WIDE if outputs >= _WIDE_OUTPUTS else _NARROW


class InvariantLinear(nn.Module):
    """x @ weight.T + bias in the weight's dtype, summed in float32 in one order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight`` is [out_features, in_features], of any strides; it is not copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.tiles = tiles_for(self.out_features, weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        out = multiply(x.reshape(-1, self.in_features), self.weight, self.bias, self.tiles)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """x [M, K] @ weight.T [K, N] + bias."""
    x = x.contiguous()
    if x.data_ptr() % 16:  # for such addresses other code would be compiled
        x = x.clone()
    rows, (outputs, inputs) = x.shape[0], weight.shape
    assert x.shape[1] == inputs
    assert x.dtype == weight.dtype
    out = x.new_empty((rows, outputs))
    grid = (triton.cdiv(rows, tiles.m) * triton.cdiv(outputs, tiles.n),)
    product_kernel[grid](
        out,
        x,
        weight,
        weight if bias is None else bias,
        rows,
        N=outputs,
        K=inputs,
        STRIDE_N=weight.stride(0),
        STRIDE_K=weight.stride(1),
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        BLOCK_K=tiles.k,
        GROUP=_GROUP,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
