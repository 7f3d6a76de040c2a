"""Norms, sums with the residual and gated activations on a GPU, in the Triton language.

Each is one kernel over rows. One program computes a row of a norm, with sums in float32, in an
order that depends on the row's width alone. So a row's result does not depend on the other rows.

The functions take x [T, width] whose rows may lie apart, and return new tensors, unless they say
otherwise. Called by ``gpu_layers`` and ``gpu_fuse``.
"""

import triton
import triton.language as tl
from torch import Tensor

from jitney.kernels.fused.forms import Activation, NormForm

MOST_WIDTH = 16384
"""The most values of a row: one program holds it in its registers."""
_GATE_BLOCK = 1024
"""Values that a program of the gate's kernel computes."""


# ------------------------------------------------------------------ launches


def norm_rows(x: Tensor, norm: NormForm, bias: Tensor | None = None) -> Tensor:
    """The RMS norm of x [..., width].

    With ``bias``, float32 [width], it is a layer norm (Ba et al. 2016): the norm of x - mean(x),
    plus the bias.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape)
    _launch(len(rows), branch=rows, norm=norm, bias=bias, out=out)
    return out.view(x.shape)


def norm_in_place(x: Tensor, norm: NormForm) -> None:
    """Replace each row of x by its RMS norm. x may be a part of the columns of a larger tensor."""
    _launch(len(x), branch=x, norm=norm, out=x)


def add_norm(
    branch: Tensor,
    residual: Tensor,
    branch_norm: NormForm | None = None,
    norm: NormForm | None = None,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(norm(sum), sum)``, where ``sum = residual + branch_norm(branch)``.

    Either norm may be left out; without ``norm`` the sum is returned twice. ``indices``, int64
    [S]: only these rows are computed, in this order. The sum is rounded to the dtype of its parts
    before it is normed.
    """
    rows = len(branch) if indices is None else len(indices)
    width = branch.shape[1]
    sums = branch.new_empty((rows, width))
    out = sums if norm is None else branch.new_empty((rows, width))
    _launch(
        rows,
        branch=branch,
        residual=residual,
        branch_norm=branch_norm,
        norm=norm,
        indices=indices,
        sums=sums,
        out=out,
    )
    return out, sums


def _launch(
    rows: int,
    *,
    branch: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    sums: Tensor | None = None,
    branch_norm: NormForm | None = None,
    norm: NormForm | None = None,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
) -> None:
    """Launch ``add_norm_kernel``, which says what the tensors are."""
    assert branch.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    width = branch.shape[1]
    assert width <= MOST_WIDTH
    if indices is not None:
        indices = indices.contiguous()
    if sums is None:
        sums = branch  # any tensor will do: not written without a residual
    block = triton.next_power_of_2(width)
    # By position, as in the kernel's signature: a launch with keywords takes the host longer.
    add_norm_kernel[(rows,)](
        out, sums, branch, residual, indices,
        None if branch_norm is None else branch_norm.scale,
        None if norm is None else norm.scale,
        bias,
        out.stride(0), branch.stride(0), 0 if residual is None else residual.stride(0),
        0.0 if branch_norm is None else branch_norm.epsilon,
        0.0 if norm is None else norm.epsilon,
        WIDTH=width, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip


def gate(x: Tensor, activation: Activation) -> Tensor:
    """``activation(left half) * right half`` of each row of x [T, 2 * N]: [T, N]."""
    assert x.stride(1) == 1
    rows = x.shape[0]
    width = x.shape[1] // 2
    out = x.new_empty((rows, width))
    grid = (rows, triton.cdiv(width, _GATE_BLOCK))
    gate_kernel[grid](out, x, x.stride(0), width, _GATE_BLOCK, activation, num_warps=4)
    return out


def warps_for(block: int) -> int:
    """Warps of a program that holds ``block`` values: 16 values for each thread, so that each has
    several loads under way."""
    return max(1, min(16, block // 512))


# ------------------------------------------------------------------ kernels


@triton.jit
def _normed(x, width, epsilon, scale, column, inside):
    """x / sqrt(mean(x²) + epsilon) * scale, of a row x whose padding is 0."""
    factor = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    return x * factor * tl.load(scale + column, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["indices"])  # they may be a slice of a step's indices
def add_norm_kernel(
    out,  # [rows, WIDTH], rows out_stride apart: the norm of the sum; not written without scale
    sums,  # [rows, WIDTH]: the sum; not written without residual
    branch,  # [T, WIDTH], rows branch_stride apart
    residual,  # [T, WIDTH], rows residual_stride apart. None: the sum is the branch
    indices,  # int64 [rows]: which of the T rows are computed. None: all
    branch_scale,  # float32 [WIDTH]: of the branch's norm. None: it has none
    scale,  # float32 [WIDTH]: of the sum's norm. None: it has none
    bias,  # float32 [WIDTH]: the sum's norm is a layer norm. None: it is an RMS norm
    out_stride,
    branch_stride,
    residual_stride,
    branch_epsilon,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH, rounded up to a power of 2
):
    """Programs (rows): each reads a row once, before it writes anything."""
    row = tl.program_id(0).to(tl.int64)
    source = row if indices is None else tl.load(indices + row)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(branch + source * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
    if branch_scale is not None:
        x = _normed(x, WIDTH, branch_epsilon, branch_scale, column, inside)
    if residual is not None:
        address = residual + source * residual_stride + column
        x += tl.load(address, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sums.dtype.element_ty)
        tl.store(sums + row * WIDTH + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if scale is not None:
        if bias is not None:
            x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
        x = _normed(x, WIDTH, epsilon, scale, column, inside)
        if bias is not None:
            x += tl.load(bias + column, mask=inside, other=0.0)
        tl.store(out + row * out_stride + column, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    out,  # [rows, WIDTH]
    x,  # [rows, 2 * WIDTH]: gate, then up; rows ``stride`` apart
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Programs (rows, WIDTH / BLOCK, rounded up): activation(gate) * up of BLOCK values of a
    row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x += row * stride
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is 1 / (1 + exp(-2 * z)). Here 2 * z is 1.59... times the cubic.
        cubic = gate + 0.044715 * gate * gate * gate
        activated = gate / (1.0 + tl.exp(-1.5957691216057308 * cubic))
    else:
        tl.static_assert(ACTIVATION == "relu")
        activated = tl.maximum(gate, 0.0)
    tl.store(out + row * WIDTH + column, (activated * up).to(out.dtype.element_ty), mask=inside)
