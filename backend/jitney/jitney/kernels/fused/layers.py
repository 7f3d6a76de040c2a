"""Fused modules: each computes what the module that it replaces does, in fewer and larger kernels.

A decoder layer adds two branches to the residual, attention and the MLP::

    residual += after_attention_norm(attention(attention_norm(residual)))
    residual += after_mlp_norm(mlp(mlp_norm(residual)))

Most models have two of the four norms (:class:`LayerNorms`), and some have other :class:`Wiring`.
Four things are fused:

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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from jitney.execution.interface import PagedFunction
from jitney.kernels.fused.forms import (
    AttentionForm,
    EndBranch,
    LayerKernels,
    Norm,
    Rotation,
    RouterForm,
    RowFunction,
)
from jitney.kernels.fused.latents import FusedLatents
from jitney.kernels.fused.rotary import NO_ANGLES, AngleColumns, CosSin, whole_rotary
from jitney.kernels.fused.states import FusedStates


class MlpNames(NamedTuple):
    """Of the linear layers that a fused MLP joins, in the MLP that it replaces."""

    gated: Sequence[str]
    down: str


class FusedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, or without a gate, ``down(activation(up(x)))``."""

    def __init__(self, gated: nn.Module, down: nn.Module, names: MlpNames) -> None:
        """``gated`` computes all but the product of ``down``, also if there is no gate."""
        super().__init__()
        self.gated = gated
        self.down = down
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., hidden size]."""
        rows = x.reshape(-1, x.shape[-1])
        result: Tensor = self.down(self.gated(rows))
        return result.view(x.shape)


class FusedMixture(nn.Module):
    """A router, and the experts among which it chooses."""

    def __init__(self, router: nn.Module, form: RouterForm, experts: nn.Module) -> None:
        """``router`` gives a number for each expert; ``experts`` are ``LayerKernels.experts``."""
        super().__init__()
        self.router = router
        self.form = form
        self.experts: Any = experts

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., hidden size]."""
        rows = x.reshape(-1, x.shape[-1])
        return self._route(rows, None).view(x.shape)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The result plus ``other``, both [T, hidden size], rounded once."""
        return self._route(x, other)

    def _route(self, x: Tensor, other: Tensor | None) -> Tensor:
        result: Tensor = self.experts.route(x, self.router(x), self.form, other)
        return result


class FusedAttention(nn.Module):
    """One product for query, key and value; attention; the output product."""

    def __init__(
        self,
        form: AttentionForm,
        qkv: nn.Module,
        output: nn.Module,
        columns: AngleColumns,
        kernels: LayerKernels,
    ) -> None:
        """``columns``: which the model's rotary module gives."""
        super().__init__()
        self.form = form
        self.rotation: Rotation = form.rotation
        self.columns = columns
        self.qkv = qkv
        self.output = output
        self.kernel = kernels.attention(form)
        # To call a submodule takes as long as a small kernel. Its forward is looked up once here,
        # and steps call that.
        self._qkv = qkv.forward

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin = NO_ANGLES,
        *args: object,
        paged: PagedFunction,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """As transformers calls it."""
        attended = self.mix(hidden_states[0], self.angles(position_embeddings), paged)
        return self.output(attended).unsqueeze(0), None

    def angles(self, made: CosSin) -> CosSin:
        """cos and sin as :meth:`mix` takes them, of those that the rotary module made."""
        return whole_rotary(made, self.columns, self.rotation)

    def mix(self, x: Tensor, cos_sin: CosSin, paged: PagedFunction) -> Tensor:
        """All but the output product, of x [T, hidden size] and cos and sin [T, R]. Returns
        [T, heads * head size]."""
        return self.kernel(self._qkv(x), *cos_sin, paged).reshape(x.shape[0], -1)


Mixer = FusedAttention | FusedLatents | FusedStates
"""The first branch of a decoder layer, which mixes what tokens know. It has a method ``mix`` for
all but its last product, ``output``, that product, and ``angles`` for what ``mix`` takes."""


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


class Wiring(NamedTuple):
    """How a layer's two branches are added to the residual."""

    parallel: bool = False
    """Whether both read the residual as it was before the layer. Without a norm of its own, the MLP
    then reads what attention reads. Else it reads the sum after attention."""
    factor: float = 1.0
    """What each branch gives is multiplied by this before it is added."""


class LayerPaths(NamedTuple):
    """Where the parts of a layer stood in the layer that it replaces."""

    mlp: str
    """The name of the MLP."""
    qkv: Sequence[str] = ()
    """From the layer on, the linear layers that this product joins, and so for the next one. Both
    are empty where adapters cannot change the first branch: it is no plain attention."""
    output: Sequence[str] = ()


class FusedDecoderLayer(nn.Module):
    """A decoder layer. Its attention is fused; its MLP may be of any kind, fused or not."""

    returns_tuple = False
    """Whether transformers' layer returns its result as the first of a tuple."""

    def __init__(
        self,
        mixer: Mixer,
        mlp: nn.Module,
        norms: LayerNorms,
        wiring: Wiring,
        paths: LayerPaths,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.mlp = mlp
        self.norms = norms
        self.wiring = wiring
        self.paths = paths
        self._kernels = kernels
        self._mix = mixer.mix
        self._end_first_branch = kernels.end_branch(
            product=mixer.output,
            branch_norm=norms.after_attention,
            norm=None if wiring.parallel else norms.mlp,
            factor=wiring.factor,
        )

        # The branch of the MLP ends with a product. What comes before that product is the MLP's
        # first part. An MLP that is not fused cannot be divided: all of it is "the last product".
        self._first_part_of_mlp: RowFunction | None = None
        self._last_product: RowFunction = partial(call_mlp, mlp)
        if isinstance(mlp, FusedMixture):
            self._last_product = mlp
        if isinstance(mlp, FusedMLP):
            self._first_part_of_mlp = mlp.gated.forward
            self._last_product = mlp.down
        self._end_without_next = self.end_before(None)

    def end_before(self, next_norm: Norm) -> EndBranch:
        """A function for the end of this layer, together with the norm that begins the next one. It
        takes what :meth:`run` returns."""
        return self._kernels.end_branch(
            product=self._last_product,
            branch_norm=self.norms.after_mlp,
            norm=next_norm,
            factor=self.wiring.factor,
        )

    def forward(
        self,
        hidden_states: Tensor,
        *args: object,
        position_embeddings: CosSin = NO_ANGLES,
        paged: PagedFunction,
        **unused: object,
    ) -> Any:
        """As transformers calls it."""
        cos_sin = self.mixer.angles(position_embeddings)
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
        self, x: Tensor, residual: Tensor, cos_sin: CosSin, paged: PagedFunction
    ) -> tuple[Tensor, Tensor]:
        """All but the end of the layer.

        ``x`` is the normed residual, the input of attention. Returns the input of the layer's last
        product, and the residual after attention.
        """
        mixed = self._mix(x, cos_sin, paged)
        if self.wiring.parallel:
            if self.norms.mlp is not None:
                x = self.norms.mlp(residual)
            _, residual = self._end_first_branch(mixed, residual, None)
        else:
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
