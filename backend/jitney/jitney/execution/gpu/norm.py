"""Norms, residual sums and gated activations on a GPU, each one kernel over the rows it is given.

The tensors are two-dimensional, [T, width], with rows that may lie apart. Results are new tensors.
"""

import torch
import triton
from torch import Tensor, nn

from jitney.execution.gpu import norm_kernels
from jitney.execution.linear import Activation
from jitney.execution.structure import NormForm

_ACTIVATIONS: dict[Activation, int] = {
    "silu": norm_kernels.SILU.value,
    "gelu": norm_kernels.GELU.value,
    "gelu_tanh": norm_kernels.GELU_TANH.value,
    "relu": norm_kernels.RELU.value,
}
_MOST_IN_REGISTERS = 16384
"""Widest row that one program keeps; a wider one is read once per pass."""
_WIDE_BLOCK = 8192
_GATE_BLOCK = 1024


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) * scale over the last dimension."""

    scale: Tensor

    def __init__(self, form: NormForm) -> None:
        super().__init__()
        self.register_buffer("scale", form.scale.detach().contiguous(), persistent=False)
        self.epsilon = form.epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., width]."""
        out, _ = add_norm(_rows(x), norm=self)
        return out.view(x.shape)

    def extra_repr(self) -> str:
        return f"{self.scale.numel()}, epsilon={self.epsilon}"


class LayerNorm(nn.Module):
    """What ``nn.LayerNorm`` over one dimension gives, in a kernel that takes each row alone."""

    MOST = _MOST_IN_REGISTERS
    """Widest row."""
    weight: Tensor
    bias: Tensor

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        weight = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight.detach()
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.detach()
        self.register_buffer("weight", weight.float().contiguous(), persistent=False)
        self.register_buffer("bias", bias.float().contiguous(), persistent=False)
        self.epsilon = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., width]."""
        rows = _rows(x)
        width = rows.shape[1]
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        block = triton.next_power_of_2(width)
        norm_kernels.layer_norm_kernel[(rows.shape[0],)](
            out,
            rows,
            self.weight,
            self.bias,
            rows.stride(0),
            self.epsilon,
            WIDTH=width,
            BLOCK=block,
            num_warps=warps(block),
        )
        return out.view(x.shape)


def add_norm(
    branch: Tensor,
    residual: Tensor | None = None,
    *,
    branch_norm: RmsNorm | None = None,
    norm: RmsNorm | None = None,
    wanted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum) where sum is ``branch_norm(branch) + residual``.

    Without ``norm`` the first is the sum, too; without ``residual`` the sum is the branch, which
    ``norm`` is then applied to. With ``wanted``, int64 [S], only those rows are computed, in that
    order. The sum is rounded to the dtype of its parts before it is normed.
    """
    assert residual is not None or (norm is not None and branch_norm is None)
    shape = (branch.shape[0] if wanted is None else wanted.shape[0], branch.shape[1])
    sums = branch if residual is None else branch.new_empty(shape)
    out = sums if norm is None else branch.new_empty(shape)
    _launch(out, sums, branch, residual, branch_norm, norm, wanted)
    return out, sums


def norm_in_place(x: Tensor, norm: RmsNorm) -> None:
    """Norm each row of x [T, width], a part of the columns of a larger tensor, say."""
    _launch(x, x, x, None, None, norm, None)


def _launch(
    out: Tensor,
    sums: Tensor,
    branch: Tensor,
    residual: Tensor | None,
    branch_norm: RmsNorm | None,
    norm: RmsNorm | None,
    wanted: Tensor | None,
) -> None:
    rows, width = out.shape
    assert branch.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    block, kernel = triton.next_power_of_2(width), norm_kernels.add_norm_kernel
    if block > _MOST_IN_REGISTERS:
        block, kernel = _WIDE_BLOCK, norm_kernels.wide_add_norm_kernel
    unread = branch  # in the place of what there is not
    kernel[(rows,)](
        out,
        sums,
        branch,
        unread if residual is None else residual,
        unread if wanted is None else wanted.contiguous(),
        unread if branch_norm is None else branch_norm.scale,
        unread if norm is None else norm.scale,
        out.stride(0),
        branch.stride(0),
        0 if residual is None else residual.stride(0),
        0.0 if branch_norm is None else branch_norm.epsilon,
        0.0 if norm is None else norm.epsilon,
        WIDTH=width,
        BLOCK=block,
        GATHER=wanted is not None,
        ADD=residual is not None,
        NORM_BRANCH=branch_norm is not None,
        NORM=norm is not None,
        num_warps=warps(block),
    )


def gate(x: Tensor, activation: Activation) -> Tensor:
    """activation(left half) * right half of each row of x [T, 2 N]: [T, N]."""
    rows, width = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    grid = (rows, triton.cdiv(width, _GATE_BLOCK))
    norm_kernels.gate_kernel[grid](
        out,
        x,
        x.stride(0),
        WIDTH=width,
        BLOCK=_GATE_BLOCK,
        ACTIVATION=_ACTIVATIONS[activation],
        num_warps=4,
    )
    return out


def warps(block: int) -> int:
    """For one program per row: 16 values a thread, so that a thread has several loads under way."""
    return max(1, min(16, block // 512))


def _rows(x: Tensor) -> Tensor:
    """[..., width] as rows whose values lie side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
