"""Linear layers on a GPU for option ``batch_invariant``: a row's result has the same bits, whatever
other rows there are.

cuBLAS chooses tiles by the number of rows, and so the order of its sums. Here the tiles depend on
the weight alone, by its dtype and its number of outputs.

Called by ``gpu_layers`` and ``gpu_fuse``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from jitney.kernels.gpu.language import dot


class InvariantTiles(NamedTuple):
    """How a product is cut; in brackets, the kernel's names."""

    rows: int
    """Rows of x of a tile (BLOCK_M)."""
    outputs: int
    """Outputs of a tile (BLOCK_N)."""
    inputs: int
    """Inputs that are loaded at once, and summed in one step (BLOCK_K)."""
    warps: int
    stages: int
    """Steps whose inputs are in shared memory or on their way there, the one in use among them."""


# A step of few rows waits for the weight. Therefore many programs should read it, each with many
# loads under way. A weight of few outputs is cut into smaller tiles, with more inputs at once.
_MANY_OUTPUTS = InvariantTiles(rows=64, outputs=128, inputs=64, warps=4, stages=4)
_FEW_OUTPUTS = InvariantTiles(rows=64, outputs=64, inputs=128, warps=4, stages=4)
_FROM_OUTPUTS = 12288
"""A weight has many outputs from this number on."""
_FLOAT32 = InvariantTiles(rows=32, outputs=64, inputs=32, warps=4, stages=2)
"""Not for the matrix units, which would round the operands to fewer bits."""
_GROUP = 16
"""Tiles of rows whose programs have consecutive numbers, and so run at about the same time: they
share a part of the weight."""
_ALIGNMENT = 16
"""Bytes. The compiler makes other code for an address that is no multiple of it."""


def invariant_tiles(outputs: int, dtype: torch.dtype) -> InvariantTiles:
    """The tiles for a weight of ``dtype`` with so many outputs."""
    if dtype == torch.float32:
        return _FLOAT32
    return _MANY_OUTPUTS if outputs >= _FROM_OUTPUTS else _FEW_OUTPUTS


class InvariantLinear(nn.Module):
    """``x @ weight.T + bias`` in the weight's dtype, summed in float32 in one order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight`` is [out_features, in_features], of any strides. It is not copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.tiles = invariant_tiles(self.out_features, weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        rows_of_x = x.reshape(-1, self.in_features).contiguous()
        if rows_of_x.data_ptr() % _ALIGNMENT:
            rows_of_x = rows_of_x.clone()
        weight = self.weight
        assert rows_of_x.dtype == weight.dtype
        rows = len(rows_of_x)
        out = rows_of_x.new_empty((rows, self.out_features))
        tiles = self.tiles
        tiles_of_rows = triton.cdiv(rows, tiles.rows)
        tiles_of_outputs = triton.cdiv(self.out_features, tiles.outputs)
        product_kernel[(tiles_of_rows * tiles_of_outputs,)](
            out, rows_of_x, weight, self.bias, rows, *weight.shape, *weight.stride(),
            tiles.rows, tiles.outputs, tiles.inputs, _GROUP,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


@triton.jit
def _tile_of_program(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile of rows, tile of outputs) of a program.

    GROUP tiles of rows come first, for the same outputs; then the next outputs. Programs that run
    at the same time then read the same part of the weight. Here for 3 tiles of rows, 2 of outputs
    and GROUP = 2::

        program            0   1   2   3   4   5
        tile of rows       0   1   0   1   2   2
        tile of outputs    0   0   1   1   0   1
    """
    first_m = program // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)  # the last group may have fewer
    in_group = program % (GROUP * tiles_n)
    return first_m + in_group % group, in_group // group


@triton.jit(do_not_specialize=["rows"])  # one row is computed by the code that computes many
def product_kernel(
    out,  # [rows, N]
    x,  # [rows, K]
    weight,  # [N, K], of any strides
    bias,  # [N] or None
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_N: tl.constexpr,  # of the weight; likewise the next
    STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Programs (tiles of rows * tiles of outputs): each computes a tile of x @ weight.T + bias. It
    sums over K from 0 on, BLOCK_K at a time, in float32."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = _tile_of_program(tl.program_id(0), tiles_m, tiles_n, GROUP)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    real_row = (row < rows)[:, None]
    real_column = (column < N)[None, :]
    left = x + row[:, None] * K + depth[None, :]
    right = weight + column[None, :] * STRIDE_N + depth[:, None] * STRIDE_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(left, mask=real_row, other=0.0)
            b = tl.load(right, mask=real_column, other=0.0)
        else:
            a = tl.load(left, mask=real_row & (start + depth < K)[None, :], other=0.0)
            b = tl.load(right, mask=real_column & (start + depth < K)[:, None], other=0.0)
        total = dot(a, b, total)
        left += BLOCK_K
        right += BLOCK_K * STRIDE_K
    if bias is not None:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    address = out + row[:, None] * N + column[None, :]
    tl.store(address, total.to(out.dtype.element_ty), mask=real_row & real_column)
