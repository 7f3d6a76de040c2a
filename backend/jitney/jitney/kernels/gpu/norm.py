"""Norms, residual sums and gated activations on a GPU, each one kernel over the rows it is given.

One program computes a row of a norm, so that its result does not depend on the rows beside it; sums
are float32, in an order that the width alone decides. Tensors are [T, width] unless stated, with
rows that may lie apart. Results are new tensors.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from jitney.kernels.fused.layers import Activation, FusedNorm, Misfit, NormForm

MOST_WIDTH = 16384
"""Values of the widest row: one program holds it in its registers."""
_GATE_BLOCK = 1024


def norm_rows(x: Tensor, form: NormForm) -> Tensor:
    """x is [..., width]."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return add_norm(rows, norm=form)[0].view(x.shape)


def layer_norm(norm: nn.LayerNorm) -> FusedNorm:
    """The same norm, in a kernel that takes each row alone. Raises Misfit for one that is too wide,
    or over several dimensions."""
    if len(norm.normalized_shape) != 1 or norm.normalized_shape[0] > MOST_WIDTH:
        raise Misfit(f"it is not over one dimension of at most {MOST_WIDTH}")
    weight = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight.detach()
    bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.detach()
    form = NormForm(weight.float().contiguous(), norm.eps, bias.float().contiguous())
    return FusedNorm(form, partial(norm_rows, form=form))


def add_norm(
    branch: Tensor,
    residual: Tensor | None = None,
    *,
    branch_norm: NormForm | None = None,
    norm: NormForm | None = None,
    indices: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum) where sum is ``branch_norm(branch) + residual``.

    Without ``norm`` the first is the sum, too; without ``residual`` the sum is the branch, which
    ``norm`` is then applied to. With ``indices``, int64 [S], only those rows are computed, in that
    order. The sum is rounded to the dtype of its parts before it is normed. ``out`` is where the
    norm is written, a new tensor if it is not given.
    """
    assert residual is not None or (norm is not None and branch_norm is None)
    rows, width = branch.shape[0] if indices is None else indices.shape[0], branch.shape[1]
    sums = branch if residual is None else branch.new_empty((rows, width))
    if norm is None:
        out = sums
    elif out is None:
        out = branch.new_empty((rows, width))
    assert branch.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    assert width <= MOST_WIDTH
    block = triton.next_power_of_2(width)
    branch_scale, branch_epsilon, _ = _parts(branch_norm)
    scale, epsilon, bias = _parts(norm)
    add_norm_kernel[(rows,)](
        out, sums, branch, residual, None if indices is None else indices.contiguous(),
        branch_scale, scale, bias,
        out.stride(0), branch.stride(0), 0 if residual is None else residual.stride(0),
        branch_epsilon, epsilon, WIDTH=width, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out, sums


def norm_in_place(x: Tensor, norm: NormForm) -> None:
    """Norm each row of x [T, width], which may be a part of the columns of a larger tensor."""
    add_norm(x, norm=norm, out=x)


def _parts(norm: NormForm | None) -> tuple[Tensor | None, float, Tensor | None]:
    return (None, 0.0, None) if norm is None else (norm.scale, norm.epsilon, norm.bias)


def gate(x: Tensor, activation: Activation) -> Tensor:
    """activation(left half) * right half of each row of x [T, 2 N]: [T, N]."""
    rows, width = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = x.new_empty((rows, width))
    grid = (rows, triton.cdiv(width, _GATE_BLOCK))
    gate_kernel[grid](out, x, x.stride(0), width, _GATE_BLOCK, activation, num_warps=4)
    return out


def warps(block: int) -> int:
    """For one program per row: 16 values a thread, so that a thread has several loads under way."""
    return max(1, min(16, block // 512))


@triton.jit
def _normed(x, width, epsilon, scale, columns, inside):
    """x / sqrt(mean(x²) + epsilon) * scale of a row whose padding is 0."""
    factor = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    return x * factor * tl.load(scale + columns, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["indices"])  # it may be a part of a step's
def add_norm_kernel(
    out,  # [rows, WIDTH], rows out_stride apart: the norm of the sum; not written without a scale
    sums,  # [rows, WIDTH]: branch + residual; not written without a residual
    branch,  # [T, WIDTH], rows branch_stride apart
    residual,  # [T, WIDTH], rows residual_stride apart, or None
    indices,  # int64 [rows]: which of the T, or None
    branch_scale,  # float32 [WIDTH]: the branch is normed before it is added; or None
    scale,  # float32 [WIDTH], or None
    bias,  # float32 [WIDTH]: the norm is a layer norm; None: an RMS norm
    out_stride,
    branch_stride,
    residual_stride,
    branch_epsilon,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is held in the registers of one program: read once, before anything is written."""
    row = tl.program_id(0).to(tl.int64)
    source = row if indices is None else tl.load(indices + row)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(branch + source * branch_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if branch_scale is not None:
        x = _normed(x, WIDTH, branch_epsilon, branch_scale, columns, inside)
    if residual is not None:
        address = residual + source * residual_stride + columns
        x += tl.load(address, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sums.dtype.element_ty)
        tl.store(sums + row * WIDTH + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if scale is not None:
        if bias is not None:
            x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
        x = _normed(x, WIDTH, epsilon, scale, columns, inside)
        if bias is not None:
            x += tl.load(bias + columns, mask=inside, other=0.0)
        tl.store(out + row * out_stride + columns, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    out,  # [rows, WIDTH]
    x,  # [rows, 2 WIDTH]: the gate, then what it is multiplied with; rows stride apart
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """activation(gate) * up of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x += row * stride
    gate = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh z) is the logistic function of 2 z.
        y = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        y = tl.maximum(gate, 0.0)
    tl.store(out + row * WIDTH + columns, (y * up).to(out.dtype.element_ty), mask=inside)
