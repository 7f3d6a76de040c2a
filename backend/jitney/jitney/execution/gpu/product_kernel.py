# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# The compiler of the Triton language infers the types of what it compiles here.
"""The kernel of matrix products whose rows do not depend on how many there are (``products``)."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter holds bfloat16 as integers and would multiply those."""


@triton.jit(do_not_specialize=["rows"])  # one row is computed by the code that computes many
def product_kernel(
    out,  # [rows, N]
    x,  # [rows, K]
    weight,  # [N, K], of any strides
    bias,  # [N], with HAS_BIAS
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * STRIDE_K
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * N + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=some_row & some_column)
