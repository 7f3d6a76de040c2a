"""A step of a causal model whose layers are all fused. Built by ``fuse``.

It leaves out what transformers does around the layers for caches, masks and outputs that are not
used here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from jitney.execution.interface import PagedFunction
from jitney.execution.low_rank import BeginProducts, Pack, Part, plain_products
from jitney.kernels.fused.forms import EndBranch, FusedNorm, LayerKernels, Norm
from jitney.kernels.fused.layers import FusedDecoderLayer
from jitney.kernels.fused.rotary import CosSin

StepProgram = Callable[[Tensor, Tensor, PagedFunction], Tensor | None]
"""(ids [T], rows, attention) -> the logits of ``rows``, indices of the T tokens. None: it cannot
run this step."""


class Places(NamedTuple):
    """The linear layers of one decoder layer that adapters may change, by the four products of the
    fused layer. A product may join several of them: each :class:`Part` says which columns of the
    product's result are its own."""

    qkv: list[Part]
    output: list[Part]
    gated: list[Part]
    down: list[Part]


class AdaptedKernels(NamedTuple):
    """What steps with adapters are computed with."""

    begin_products: BeginProducts = plain_products
    """Computes the adapters' products where layers are called one by one."""
    pack: Pack | None = None
    """Turns an adapter's factors into the form that ``begin_products`` or ``program`` reads, which
    is kept as ``LowRank.packed``. None: they read the factors themselves."""
    program: StepProgram | None = None
    """All layers as one native call."""


class ModelKernels(LayerKernels, Protocol):
    """What a device computes a fused model with."""

    def program(self, model: "FusedForward") -> StepProgram | None:
        """All layers as one native call. None if the device cannot do that for this model."""

    def adapted_program(
        self, model: "FusedForward", places: Sequence[Places]
    ) -> AdaptedKernels | None:
        """Steps with adapters as one native call. ``places`` are those of each layer. None if the
        device cannot do that for this model."""

    def adapted_products(self, products: Sequence[Sequence[Part]]) -> AdaptedKernels:
        """What adapters add to these products, given by their parts, is computed with this where
        the products are called one by one. Some products may have no parts."""


class _LayerStep(NamedTuple):
    """What a step calls of one layer."""

    run: Callable[[Tensor, Tensor, CosSin, PagedFunction], tuple[Tensor, Tensor]]
    """See :meth:`FusedDecoderLayer.run`."""
    table: int
    """Index of the layer's rotary table."""
    end: EndBranch
    """The end of the layer, with the norm that begins the next one: see
    :meth:`FusedDecoderLayer.end_before`."""


@dataclass(eq=False)
class FusedForward:
    """An ``interface.StepFunction``: the whole model.

    Only the rows whose logits are asked for go through the last norm and the head.
    """

    embed: nn.Module
    layers: Sequence[FusedDecoderLayer]
    tables: Sequence[Tensor]
    """cos and sin of all positions, for each kind of layer: see :func:`rotary_table`."""
    table_of_layer: Sequence[int]
    """The index of each layer's table."""
    norm: FusedNorm
    """The last norm, before the head."""
    head: nn.Module
    softcap: float | None
    """Of the logits: see :meth:`cap`."""
    kernels: ModelKernels

    def __post_init__(self) -> None:
        # A step computes the first norm of the first layer by itself. All other layers get theirs
        # from the end of the layer before. After the last layer comes the norm of the model.
        first_norms: list[Norm] = [layer.norms.attention for layer in self.layers]
        self._first_norm = first_norms[0]
        next_norms = [*first_norms[1:], self.norm]

        steps = [
            _LayerStep(run=layer.run, table=table, end=layer.end_before(next_norm))
            for layer, table, next_norm in zip(
                self.layers, self.table_of_layer, next_norms, strict=True
            )
        ]
        self._last_step = steps.pop()
        self._steps_before = steps
        self.program = self.kernels.program(self)

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, positions: Tensor, rows: Tensor, paged: PagedFunction
    ) -> Tensor:
        """``ids`` and ``positions`` are [T], ``rows`` indices of T. Returns the logits of ``rows``,
        [rows, vocabulary]."""
        if self.program is not None:
            logits = self.program(ids, rows, paged)
            if logits is not None:
                return self.cap(logits)

        cos_sin = self.cos_sin(positions)
        residual: Tensor = self.embed(ids)
        x = residual if self._first_norm is None else self._first_norm(residual)
        for run, table, end in self._steps_before:
            x, residual = run(x, residual, cos_sin[table], paged)
            x, residual = end(x, residual, None)
        last = self._last_step
        x, residual = last.run(x, residual, cos_sin[last.table], paged)
        x, _ = last.end(x, residual, rows)
        return self.cap(self.head(x))

    def cos_sin(self, positions: Tensor) -> list[CosSin]:
        """cos and sin [T, R] of these positions, from each of the tables."""
        # cos and sin of a token are side by side. So the offset from cos to sin, and with it the
        # alignment of sin, is the same for any number of tokens. A compiler that makes a kernel for
        # each alignment, as that of the Triton language, then makes only one.
        found = (table.index_select(0, positions).unbind(1) for table in self.tables)
        return [(cos, sin) for cos, sin in found]

    def cap(self, logits: Tensor) -> Tensor:
        """The logits, mapped to ``softcap * tanh(logits / softcap)`` if the model does that."""
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap
