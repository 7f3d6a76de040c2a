"""Fused modules: each computes what the module that it replaces does, in fewer and larger kernels.

A decoder layer adds two branches to the residual, attention and the MLP::

    residual += after_attention_norm(attention(attention_norm(residual)))
    residual += after_mlp_norm(mlp(mlp_norm(residual)))

Most models have two of the four norms (:class:`LayerNorms`). Four things are fused:

- Query, key and value are one product.
- One kernel computes the norms of the heads and the rotary embedding.
- Gate and up are one product, which computes the activation as well.
- The *end of a branch* is one function (``LayerKernels.end_branch``): the branch's last product,
  its norm, the sum with the residual, and the norm with which the next branch begins.

The end of a layer's second branch needs the first norm of the next layer. So a
:class:`FusedDecoderLayer` is called in two steps: ``run`` computes all but the end of the second
branch, and what ``end_before`` returns computes that end.

``fuse`` builds these modules from a device's ``LayerKernels``. Tensors are [T, width] inside, and
[1, T, width] where transformers calls.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from jitney.execution.interface import PagedFunction
from jitney.kernels.fused.forms import (
    AttentionForm,
    EndBranch,
    LayerKernels,
    Norm,
    RowFunction,
)
from jitney.kernels.fused.latents import FusedLatents
from jitney.kernels.fused.rotary import CosSin, whole_rotary
from jitney.kernels.fused.states import FusedStates


class FusedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, gated: nn.Module, down: nn.Module) -> None:
        """``gated`` computes all but the product of ``down``."""
        super().__init__()
        self.gated = gated
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., hidden size]."""
        rows = x.reshape(-1, x.shape[-1])
        result: Tensor = self.down(self.gated(rows))
        return result.view(x.shape)


class FusedAttention(nn.Module):
    """One product for query, key and value; attention; the output product."""

    def __init__(
        self,
        form: AttentionForm,
        qkv: nn.Module,
        output: nn.Module,
        half_rotary: bool,
        kernels: LayerKernels,
    ) -> None:
        """``half_rotary``: whether the model's rotary module gives half of cos and sin (see
        ``rotary``)."""
        super().__init__()
        self.form = form
        self.half_rotary = half_rotary
        self.qkv = qkv
        self.output = output
        self.kernel = kernels.attention(form)
        # To call a submodule takes as long as a small kernel. Its forward is looked up once here,
        # and steps call that.
        self._qkv = qkv.forward

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        *args: object,
        paged: PagedFunction,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """As transformers calls it."""
        cos_sin = whole_rotary(position_embeddings, self.half_rotary)
        attended = self.mix(hidden_states[0], cos_sin, paged)
        return self.output(attended).unsqueeze(0), None

    def mix(self, x: Tensor, cos_sin: CosSin | None, paged: PagedFunction) -> Tensor:
        """All but the output product, of x [T, hidden size] and cos and sin [T, R]. Returns
        [T, heads * head size]."""
        assert cos_sin is not None
        return self.kernel(self._qkv(x), *cos_sin, paged).reshape(x.shape[0], -1)


Mixer = FusedAttention | FusedLatents | FusedStates
"""The first branch of a decoder layer, which mixes what tokens know. It has a method ``mix`` for
all but its last product, and ``output``, that product."""


class LayerNorms(NamedTuple):
    """The norms of a decoder layer, in the order in which they are computed."""

    attention: Norm
    """Of the input of attention."""
    after_attention: Norm
    """Of the output of attention, before it is added to the residual."""
    mlp: Norm
    """Of the input of the MLP."""
    after_mlp: Norm
    """Of the output of the MLP, before it is added to the residual."""


class FusedDecoderLayer(nn.Module):
    """A decoder layer. Its attention is fused; its MLP may be of any kind, fused or not."""

    returns_tuple = False
    """Whether transformers' layer returns its result as the first of a tuple."""

    def __init__(
        self, mixer: Mixer, mlp: nn.Module, norms: LayerNorms, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.mlp = mlp
        self.norms = norms
        self._kernels = kernels
        self._mix = mixer.mix
        self._end_first_branch = kernels.end_branch(
            product=mixer.output, branch_norm=norms.after_attention, norm=norms.mlp
        )

        # The branch of the MLP ends with a product. What comes before that product is the MLP's
        # first part. An MLP that is not fused cannot be divided: all of it is "the last product".
        self._first_part_of_mlp: RowFunction | None = None
        self._last_product: RowFunction = partial(call_mlp, mlp)
        if isinstance(mlp, FusedMLP):
            self._first_part_of_mlp = mlp.gated.forward
            self._last_product = mlp.down
        self._end_without_next = self.end_before(None)

    def end_before(self, next_norm: Norm) -> EndBranch:
        """A function for the end of this layer, together with the norm that begins the next one. It
        takes what :meth:`run` returns."""
        return self._kernels.end_branch(
            product=self._last_product, branch_norm=self.norms.after_mlp, norm=next_norm
        )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: CosSin | None = None,
        paged: PagedFunction,
        **unused: object,
    ) -> Any:
        """As transformers calls it."""
        cos_sin = None
        if not isinstance(self.mixer, FusedStates):
            assert position_embeddings is not None
            cos_sin = whole_rotary(position_embeddings, self.mixer.half_rotary)
        residual = hidden_states[0]
        norm = self.norms.attention
        x = residual if norm is None else norm(residual)
        x, residual = self.run(x, residual, cos_sin, paged)
        _, total = self._end_without_next(x, residual, None)
        return self.result_of(total)

    def result_of(self, total: Tensor) -> Any:
        """What transformers' layer returns, for the residual [T, hidden size] after it."""
        result = total.unsqueeze(0)
        return (result, None) if self.returns_tuple else result

    def run(
        self, x: Tensor, residual: Tensor, cos_sin: CosSin | None, paged: PagedFunction
    ) -> tuple[Tensor, Tensor]:
        """All but the end of the layer.

        ``x`` is the normed residual, the input of attention. Returns the input of the layer's last
        product, and the residual after attention.
        """
        mixed = self._mix(x, cos_sin, paged)
        x, residual = self._end_first_branch(mixed, residual, None)
        if self._first_part_of_mlp is not None:
            x = self._first_part_of_mlp(x)
        return x, residual


def call_mlp(mlp: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The result of any MLP for x [T, hidden size]. Some return the scores of their router as well,
    which are dropped."""
    result = mlp(x.unsqueeze(0))
    out: Tensor = result if isinstance(result, Tensor) else result[0]
    return out.view(x.shape)
