"""What the parts of a layer compute, written down so that a device can give functions for them.

A *form* describes one computation. ``fuse`` fills in forms from a model's modules. A device's
:class:`LayerKernels` makes a function of each form. ``layers`` and ``whole_model`` are built of
these functions. Tensors of T tokens are [T, width].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.interface import AttentionCall, Latents, PagedFunction
from jitney.kernels.fused.state_forms import StateForm, StateKernel

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Rotation = Literal["halves", "neighbours", "none"]
"""Which of a head's first R values the rotary embedding turns together: values i and i + R / 2,
as in Llama; values 2 i and 2 i + 1, as in GLM; or no rotary embedding."""
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class Misfit(Exception):
    """A module cannot be replaced. The text says why: what it lacks, or what differs."""


# ------------------------------------------------------------------ forms


@dataclass(frozen=True)
class NormForm:
    """An RMS norm (Zhang and Sennrich 2019), over the last dimension:
    ``x / sqrt(mean(x²) + epsilon) * scale``. If it is ``centred``, the layer norm (Ba et al. 2016):
    the same of x - mean(x), plus ``bias``."""

    scale: Tensor
    """float32, contiguous. It is the module's weight, or 1 + the weight."""
    epsilon: float
    centred: bool = False
    bias: Tensor | None = None
    """As ``scale``. Only a centred norm has one."""


class HeadNorms(NamedTuple):
    """The norms of query and key before the rotary embedding. Both have the same epsilon.

    Either both normalise each head by itself, and their scales are [head size]; or both normalise
    all heads of a token together, and their scales are [heads * head size].
    """

    query: NormForm
    key: NormForm


@dataclass(frozen=True)
class AttentionForm:
    """What a layer does with the query, key and value that its product gives: the norms of the
    heads, and the constant arguments of the :class:`interface.AttentionCall`."""

    layer: int
    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    norms: HeadNorms | None = None
    is_gated: bool = False
    """Whether the product gives, behind the values, a gate for each query head: what the head gives
    is multiplied by ``sigmoid(gate)``."""
    rotation: Rotation = "halves"

    @classmethod
    def of(cls, call: AttentionCall) -> "AttentionForm":
        """The form of a layer without norms that makes this call."""
        _, query_heads, head_size = call.query.shape
        return cls(
            layer=call.layer,
            query_heads=query_heads,
            key_heads=call.key.shape[1],
            head_size=head_size,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    @property
    def wide_norms(self) -> bool:
        """Whether there are norms, and they normalise all heads together."""
        return self.norms is not None and self.norms.query.scale.numel() > self.head_size

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        """The numbers of heads of query, key and value."""
        return self.query_heads, self.key_heads, self.key_heads

    @property
    def gate_offset(self) -> int:
        """Where the gates begin in a row of the product."""
        return sum(self.qkv_heads) * self.head_size

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [T, its heads, head size]. ``qkv`` is [T, all heads * head
        size]: the heads of query, then those of key, then those of value, then any gates."""
        heads = qkv[:, : self.gate_offset].unflatten(1, (-1, self.head_size))
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


@dataclass(frozen=True)
class LatentForm:
    """What an attention over latents does with the queries and latents that its products give: the
    norm of the latents, and the constant arguments of the call."""

    layer: int
    heads: int
    key_size: int
    """Elements of a head's query that are not rotated: its first ones."""
    scale: float
    window: int | None
    latents: Latents
    norm: NormForm
    """Of a latent without its rotary part."""

    def call(self, query: Tensor, latent: Tensor) -> AttentionCall:
        """The call for ``query`` [T, heads * head size] and ``latent`` [T, rank + rotary size and
        more]."""
        latents = self.latents
        row = latent[:, None, : latents.rank + latents.rotary_size]
        return AttentionCall(
            layer=self.layer,
            query=query.unflatten(1, (self.heads, -1)),
            key=row,
            value=row[..., : latents.rank],
            scale=self.scale,
            window=self.window,
            latents=latents,
        )


@dataclass(frozen=True)
class RouterForm:
    """How a mixture of experts chooses among a router's numbers, one for each expert: the largest
    ones, with the softmax of their numbers as scores."""

    chosen: int
    """How many experts a token goes to."""
    over_all: bool
    """Whether the softmax is over all experts, or over those that were chosen alone."""


class Scaling(NamedTuple):
    """What may be done to a product: times ``factor``, and with a ``softcap``
    ``softcap * tanh(that / softcap)``."""

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.factor != 1.0:
            x = x * self.factor
        if self.softcap is not None:
            x = torch.tanh(x / self.softcap) * self.softcap
        return x


# ------------------------------------------------------------------ functions of a device

RowFunction = Callable[[Tensor], Tensor]
"""A function of each row by itself, such as a norm or a product: x [..., width] -> [..., width of
the result]."""
AttentionKernel = Callable[[Tensor, Tensor, Tensor, PagedFunction], Tensor]
"""(qkv, cos, sin, attention) -> [T, query heads, head size]. qkv is that of
:meth:`AttentionForm.split`, and may be overwritten. cos and sin are [T, R], in any float type; they
are not read if there is no rotary embedding."""


class LatentKernel(Protocol):
    """The norm of latents, the rotary embedding, and attention."""

    added_bytes: int
    """Of weights that it holds beside those of the form."""

    def __call__(
        self, query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction
    ) -> Tensor:
        """[T, heads, value size], of the arguments of :meth:`LatentForm.call`, which may be
        overwritten. cos and sin are [T, R]."""


EndBranch = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""The end of a residual branch, attention or MLP: (x, residual, rows) -> (normed sum, sum), as
:meth:`LayerKernels.end_branch` defines them. x is the input of the branch's last product. ``rows``
are the indices of the tokens whose results are asked for; None: all."""


class FusedNorm(nn.Module):
    """A norm of x [..., width]."""

    weight: Tensor | None = None
    """That of the norm which this one replaced. Some models ask for its dtype."""

    def __init__(self, form: NormForm, kernel: RowFunction) -> None:
        super().__init__()
        self.form = form
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x)


Norm = FusedNorm | None
"""A norm of a layer; None if the layer does not have it."""


class LayerKernels(Protocol):
    """What a device computes the parts of a fused layer with.

    Each method makes a function once, so that a step has nothing to look up. It raises Misfit for a
    form that the device does not have.
    """

    def norm(self, form: NormForm) -> RowFunction:
        """The norm of x [..., width]."""

    def linear(
        self, products: Sequence[Any], activation: Activation | None = None, *, gated: bool = True
    ) -> nn.Module:
        """One layer for several linear layers of the same input. It gives their results side by
        side.

        With an activation, ``products`` are gate and up, merged or not. The layer then gives
        ``activation(gate(x)) * up(x)``. If it is not ``gated``, it gives the activation of the
        results.

        A layer with an activation has a method ``plus(x, other)``, which adds ``other`` to the
        results of the products, side by side, before the activation.
        """

    def experts(self, gate_up: Tensor, down: Tensor, activation: Activation) -> nn.Module:
        """E gated MLPs, whose weights are ``gate_up`` [E, 2 * inner size, hidden size] and ``down``
        [E, hidden size, inner size]. The layer takes the states [T, hidden size], and the experts
        and scores [T, k] of each token, and gives the sum of what these experts give, each times
        its score.

        It has a method ``route(x, numbers, form, other)``, which takes the numbers [T, E] of a
        router instead, and a :class:`RouterForm`. With ``other`` [T, hidden size], that is added.
        """

    def attention(self, form: AttentionForm) -> AttentionKernel:
        """The norms of the heads, the rotary embedding, and attention."""

    def latents(self, form: LatentForm) -> LatentKernel:
        """The norm of latents, the rotary embedding, and attention over latents."""

    def states(self, form: StateForm) -> StateKernel:
        """What a layer with states computes between its products."""

    def end_branch(
        self, product: RowFunction, branch_norm: Norm, norm: Norm, factor: float = 1.0
    ) -> EndBranch:
        """The end of a residual branch: all that follows the input of its last product::

            sum = residual + branch_norm(product(x)) * factor
            normed = norm(sum)

        ``norm`` is the norm with which the next branch begins. Either norm may be None, and is then
        left out. Without ``norm``, ``normed`` is ``sum``.
        """
