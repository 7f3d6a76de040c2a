"""Fused modules, and the kernels that a device gives to build them from.

Each computes what the module it replaces does, in fewer and larger kernels: one product for query,
key and value; one kernel for the norms and the rotary embedding of the heads; the gate's activation
and the sum with the residual together with the product before or the norm after. Nothing waits for
the device, so a CUDA graph can capture all of it.

Tensors are [T, width] inside, and [1, T, width] where transformers calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.interface import AttentionCall, PagedFunction
from jitney.execution.low_rank import Pack, Part

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


CosSin = tuple[Tensor, Tensor]
Rotary = Callable[[Tensor, Tensor], CosSin]
"""A model's rotary module: (anything of its dtype and device, positions [1, T]) -> cos, sin."""
_MOST_TABLE_BYTES = 256 << 20


class Misfit(Exception):
    """A candidate lacks something, or computes something else. The text says what."""


def whole_rotary(made: CosSin, half: bool) -> CosSin:
    """cos and sin [T, R], a column for each rotated value, of what a model's rotary module gives:
    [1, T, R], or ``half`` as wide."""
    cos, sin = made[0][0], made[1][0]
    if half:
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos, sin


def rotary_table(rotary: Rotary, half: bool, length: int, like: Tensor) -> Tensor:
    """cos and sin (Su et al. 2021) of positions 0 to ``length`` - 1: [length, 2, R]. ``half`` as in
    :func:`whole_rotary`; ``like`` has the model's dtype and device. Raises Misfit if it is large.
    """
    positions = torch.arange(length, device=like.device).unsqueeze(0)
    size = 2 * length * whole_rotary(rotary(like, positions[:, :1]), half)[0].nbytes
    if size > _MOST_TABLE_BYTES:
        raise Misfit(f"the table of its rotary embedding would take {size:,} bytes")
    return torch.stack(whole_rotary(rotary(like, positions), half), 1)


def merged_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that gives the results of all side by side, and owns its weight."""
    if len(linears) == 1:
        return linears[0]
    weight = torch.cat([each.weight.detach() for each in linears])
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    result.weight = nn.Parameter(weight, requires_grad=False)
    if any(each.bias is not None for each in linears):
        zeros = weight.new_zeros(weight.shape[0])
        biases: list[Tensor] = [
            zeros[: x.out_features] if x.bias is None else x.bias for x in linears
        ]
        result.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False)
    return result


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
        """Those of query, key and value."""
        return self.query_heads, self.key_heads, self.key_heads

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [T, heads, head size] of all heads side by side."""
        heads = qkv.view(qkv.shape[0], -1, self.head_size)
        query, key, value = torch.split_with_sizes(heads, self.qkv_heads, 1)
        return query, key, value

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        """The call with these tensors."""
        return AttentionCall(
            self.layer, query, key, value, self.scale, self.window, self.softcap, self.sinks
        )  # fmt: skip


RowFunction = Callable[[Tensor], Tensor]
"""Of each row of [..., width] by itself: a norm's kernel, or a product."""
AttentionKernel = Callable[[Tensor, Tensor, Tensor, PagedFunction], Tensor]
"""(qkv, which it may overwrite, cos and sin [T, R], attention) -> [T, heads, head size]"""
StepProgram = Callable[[Tensor, Tensor, PagedFunction], Tensor | None]
"""(ids [T], rows, attention) -> the logits of ``rows``, or None if it cannot run the step"""


class AdaptedKernels(NamedTuple):
    """What steps with adapters are computed with."""

    pack: Pack | None = None
    """Makes ``LowRank.packed``, if the program needs it."""
    program: StepProgram | None = None
    """All layers as one native call."""


EndBranch = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(input of a branch's last product, residual, rows) -> (the sum's norm, the sum)"""


class FusedNorm(nn.Module):
    """A norm of its input [..., width]."""

    def __init__(self, form: NormForm, kernel: RowFunction) -> None:
        super().__init__()
        self.form, self.kernel = form, kernel

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., width]."""
        return self.kernel(x)


Norm = FusedNorm | None
"""None where a layer has none."""


class LayerNorms(NamedTuple):
    """The norms of a layer: of what goes into a branch, and of what comes out of it before it is
    added."""

    attention: Norm
    attended: Norm
    mlp: Norm
    mixed: Norm


class Places(NamedTuple):
    """The linear layers of one decoder layer that adapters may change, by the fused layers that
    they are parts of."""

    qkv: list[Part]
    output: list[Part]
    gated: list[Part]
    down: list[Part]


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
        """sum = residual + branch_norm(product(x)), of the given rows if there are any, and its
        norm; without ``norm``, the sum twice."""

    def program(self, model: "FusedForward") -> StepProgram | None:
        """All layers as one native call, where the device can do that for this model."""

    def adapted(self, model: "FusedForward", places: Sequence[Places]) -> AdaptedKernels:
        """For adapters that change these places of each layer."""


class FusedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gated: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gated, self.down = gated, down

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., hidden size]."""
        result: Tensor = self.down(self.gated(x.reshape(-1, x.shape[-1])))
        return result.view(x.shape)


class FusedAttention(nn.Module):
    """One product for query, key and value, attention, the output product."""

    def __init__(
        self,
        form: AttentionForm,
        qkv: nn.Module,
        output: nn.Module,
        half_rotary: bool,
        kernels: LayerKernels,
    ) -> None:
        """With ``half_rotary``, cos and sin have one column for each pair of values that is
        rotated."""
        super().__init__()
        self.form, self.half_rotary = form, half_rotary
        self.qkv, self.output = qkv, output
        # Bound once: a submodule's lookup and call cost as much as a small kernel.
        self._qkv, self.kernel = qkv.forward, kernels.attention(form)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        *args: object,
        paged: PagedFunction,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """As transformers calls it."""
        angles = whole_rotary(position_embeddings, self.half_rotary)
        return self.output(self.attend(hidden_states[0], angles, paged)).unsqueeze(0), None

    def attend(self, x: Tensor, angles: CosSin, paged: PagedFunction) -> Tensor:
        """All but the output product; cos and sin are [T, R]."""
        return self.kernel(self._qkv(x), *angles, paged).reshape(x.shape[0], -1)


class FusedDecoderLayer(nn.Module):
    """A decoder layer of two residual branches, attention and an MLP of whatever kind."""

    def __init__(
        self, attention: FusedAttention, mlp: nn.Module, norms: LayerNorms, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.norms = norms
        self._kernels, self._attend = kernels, attention.attend
        self._inner: RowFunction = nn.Identity().forward
        self._last: RowFunction = partial(first_of, mlp)
        if isinstance(mlp, FusedMLP):
            self._inner, self._last = mlp.gated.forward, mlp.down
        self._end_attention = kernels.end_branch(attention.output, norms.attended, norms.mlp)
        self._end = self.end_before(None)

    def end_before(self, norm: Norm) -> EndBranch:
        """The end of this layer together with ``norm``, which comes next."""
        return self._kernels.end_branch(self._last, self.norms.mixed, norm)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: CosSin,
        paged: PagedFunction,
        **unused: object,
    ) -> Tensor:
        """As transformers calls it."""
        angles = whole_rotary(position_embeddings, self.self_attn.half_rotary)
        hidden = hidden_states[0]
        norm = self.norms.attention
        x = hidden if norm is None else norm(hidden)
        return self._end(*self.run(x, hidden, angles, paged), None)[1].unsqueeze(0)

    def run(
        self, x: Tensor, residual: Tensor, angles: CosSin, paged: PagedFunction
    ) -> tuple[Tensor, Tensor]:
        """From the input of attention to the input of the layer's last product, and the residual
        behind attention."""
        x, residual = self._end_attention(self._attend(x, angles, paged), residual, None)
        return self._inner(x), residual


def first_of(mlp: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """What an MLP gives for x [T, hidden size]; some return the scores of their router as well."""
    result = mlp(x.unsqueeze(0))
    out: Tensor = result if isinstance(result, Tensor) else result[0]
    return out.view(x.shape)


@dataclass(eq=False)
class FusedForward:
    """A step of a causal model whose layers are all fused, without what transformers does around
    them for caches, masks and outputs that are not wanted here.

    The sum that ends a layer is computed together with the norm that begins the next. Only the rows
    whose logits are asked for go through the last norm and the head.
    """

    embed: nn.Module
    layers: Sequence[FusedDecoderLayer]
    tables: Sequence[Tensor]
    """Those of :func:`rotary_table`."""
    kinds: Sequence[int]
    """Of each layer: the index of its table."""
    norm: FusedNorm
    head: nn.Module
    softcap: float | None
    """That of the logits."""
    kernels: LayerKernels

    def __post_init__(self) -> None:
        self._first_norm = self.layers[0].norms.attention
        norms = [*(layer.norms.attention for layer in self.layers[1:]), self.norm]
        self._layers = [
            (layer.run, kind, layer.end_before(following))
            for layer, kind, following in zip(self.layers, self.kinds, norms, strict=True)
        ]
        self.program = self.kernels.program(self)

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, positions: Tensor, rows: Tensor, paged: PagedFunction
    ) -> Tensor:
        """``ids`` and ``positions`` are [T], ``rows`` indices of T. Returns their logits."""
        logits = None if self.program is None else self.program(ids, rows, paged)
        if logits is None:
            angles = self.angles(positions)
            residual: Tensor = self.embed(ids)
            x = residual if self._first_norm is None else self._first_norm(residual)
            for run, index, end in self._layers[:-1]:
                x, residual = end(*run(x, residual, angles[index], paged), None)
            run, index, end = self._layers[-1]
            inner = run(x, residual, angles[index], paged)
            x, _ = end(*inner, rows)
            logits = self.head(x)
        return self.cap(logits)

    def angles(self, positions: Tensor) -> list[CosSin]:
        """cos and sin [T, R] by each of the tables."""
        # Side by side for each token: where sin begins does not depend on how many there are, so
        # the kernel that reads it is the same for every step.
        found = (table.index_select(0, positions).unbind(1) for table in self.tables)
        return [(cos, sin) for cos, sin in found]

    def cap(self, logits: Tensor) -> Tensor:
        """Softly, if the model does."""
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
