"""Linear layers whose result for a row is bitwise the same whatever rows there are beside it.

cuBLAS chooses tiles, and how the sum is split, by the number of rows. Here both are fixed by the
shape and dtype of the weight alone. Put in the place of linear layers by ``layer_kernels``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from jitney.kernels.gpu.language import dot


class ProductTiles(NamedTuple):
    """How a product is cut; never by the number of rows."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Few rows read the weight once: what counts then is how many programs do, and how much each has
# under way. A narrow weight is cut into smaller tiles, each of them longer along K.
_WIDE = ProductTiles(64, 128, 64, 4, 4)
_NARROW = ProductTiles(64, 64, 128, 4, 4)
_WIDE_OUTPUTS = 12288
_FLOAT32 = ProductTiles(32, 64, 32, 4, 2)
"""Not for the matrix units, which would round operands to fewer bits."""
_GROUP = 16


def product_tiles(outputs: int, dtype: torch.dtype) -> ProductTiles:
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
        self.tiles = product_tiles(self.out_features, weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        left = x.reshape(-1, self.in_features).contiguous()
        if left.data_ptr() % 16:  # for such addresses other code would be compiled
            left = left.clone()
        weight, tiles, rows = self.weight, self.tiles, left.shape[0]
        assert left.dtype == weight.dtype
        out = left.new_empty((rows, self.out_features))
        grid = (triton.cdiv(rows, tiles.m) * triton.cdiv(self.out_features, tiles.n),)
        product_kernel[grid](
            out, left, weight, self.bias, rows, *weight.shape, *weight.stride(),
            tiles.m, tiles.n, tiles.k, _GROUP, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


@triton.jit(do_not_specialize=["rows"])  # one row is computed by the code that computes many
def product_kernel(
    out,  # [rows, N]
    x,  # [rows, K]
    weight,  # [N, K], of any strides
    bias,  # [N], or None
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of x @ weight.T + bias.

    Each element of it is summed over K in steps of BLOCK_K, from 0 on, in float32, in one program.
    Programs that share a part of the weight are near in time: GROUP tiles of rows, then the next N.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    program = tl.program_id(0)
    first_m = program // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)
    inside = program % (GROUP * tiles_n)
    row = ((first_m + inside % group) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (inside // group * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    some_row, some_column = (row < rows)[:, None], (column < N)[None, :]
    left = x + row[:, None] * K + depth[None, :]
    right = weight + column[None, :] * STRIDE_N + depth[:, None] * STRIDE_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(left, mask=some_row, other=0.0)
            b = tl.load(right, mask=some_column, other=0.0)
        else:
            a = tl.load(left, mask=some_row & (start + depth < K)[None, :], other=0.0)
            b = tl.load(right, mask=some_column & (start + depth < K)[:, None], other=0.0)
        total = dot(a, b, total)
        left += BLOCK_K
        right += BLOCK_K * STRIDE_K
    if bias is not None:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    address = out + row[:, None] * N + column[None, :]
    tl.store(address, total.to(out.dtype.element_ty), mask=some_row & some_column)
