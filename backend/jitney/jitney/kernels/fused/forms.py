"""What a layer computes, described so that a device can give a kernel for it.

``fuse`` fills these forms from a model's modules; a device's :class:`LayerKernels` makes functions
of them; ``layers`` and ``whole_model`` are built of these functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.interface import AttentionCall, PagedFunction

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class Misfit(Exception):
    """A candidate lacks something, or computes something else. The text says what."""


@dataclass(frozen=True)
class NormForm:
    """An RMS norm: x / sqrt(mean(x²) + epsilon) * scale over the last dimension (Zhang and Sennrich
    2019)."""

    scale: Tensor
    """float32, contiguous; the weight, or 1 + the weight."""
    epsilon: float


@dataclass(frozen=True)
class AttentionForm:
    """How a layer calls attention: what an :class:`interface.AttentionCall` has beside tensors, and
    the norms before it."""

    layer: int
    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    norms: tuple[NormForm, NormForm] | None = None
    """Of query and key before they are rotated: of each head, with one epsilon, or of all heads
    together."""

    @property
    def wide_norms(self) -> bool:
        """Whether norms are of all heads together."""
        return self.norms is not None and self.norms[0].scale.numel() > self.head_size

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        """The numbers of heads of query, key and value."""
        return self.query_heads, self.key_heads, self.key_heads

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [T, heads, head size] of all heads side by side."""
        heads = qkv.view(qkv.shape[0], -1, self.head_size)
        query, key, value = heads.split_with_sizes(self.qkv_heads, 1)
        return query, key, value

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        """The call with these tensors."""
        return AttentionCall(
            layer=self.layer,
            query=query,
            key=key,
            value=value,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )


RowFunction = Callable[[Tensor], Tensor]
"""Of each row of [..., width] by itself: a norm's kernel, or a product."""
AttentionKernel = Callable[[Tensor, Tensor, Tensor, PagedFunction], Tensor]
"""(qkv [T, all heads * head size], which it may overwrite; cos [T, R]; sin [T, R]; attention) ->
[T, heads, head size]"""
EndBranch = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(x, the input of a branch's last product; the residual; indices of rows, or None for all) ->
(norm of the sum, the sum), of these rows alone. See :meth:`LayerKernels.end_branch`."""


class FusedNorm(nn.Module):
    """A norm of its input [..., width]."""

    def __init__(self, form: NormForm, kernel: RowFunction) -> None:
        super().__init__()
        self.form = form
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., width]."""
        return self.kernel(x)


Norm = FusedNorm | None
"""None where a layer has none."""


class LayerKernels(Protocol):
    """What a device computes the parts of a fused layer with.

    Each method makes a function once, so that a step has nothing to look up. It raises Misfit for a
    form that the device does not have.
    """

    def norm(self, form: NormForm) -> RowFunction:
        """The norm of x [..., width]."""

    def linear(self, products: Sequence[Any], activation: Activation | None = None) -> nn.Module:
        """One layer that gives the results of all side by side; with an activation, they are those
        of gate and up, and it gives ``activation(gate(x)) * up(x)``."""

    def attention(self, form: AttentionForm) -> AttentionKernel:
        """Norms and rotary embedding of the heads, then attention."""

    def end_branch(self, product: RowFunction, branch_norm: Norm, norm: Norm) -> EndBranch:
        """The end of a residual branch: sum = residual + branch_norm(product(x)), then norm(sum).
        A norm that is None is left out: without ``norm``, the function gives the sum twice."""
