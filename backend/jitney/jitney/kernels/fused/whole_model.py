"""A step of a causal model whose layers are all fused. Built by ``fuse``.

It leaves out what transformers does around the layers for caches, masks and outputs that are not
used here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.interface import PagedFunction
from jitney.execution.low_rank import BeginProducts, Pack, Part, plain_products
from jitney.kernels.fused.forms import EndBranch, FusedNorm, LayerKernels, Misfit, Norm, Scaling
from jitney.kernels.fused.layers import FusedDecoderLayer
from jitney.kernels.fused.rotary import NO_ANGLES, CosSin, RotaryTable

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

    runs_programs: bool
    """Whether a step of a usual model, such as a Llama, is one native call."""

    def head(self, linear: Any, scaling: Scaling) -> nn.Module:
        """The output layer: ``linear``, which :meth:`linear` made, and what scales its result."""

    def program(self, model: "FusedForward") -> StepProgram | None:
        """All layers as one native call. Raises Misfit, with the reason, if the device cannot do
        that for this model; None if it has no such calls."""

    def adapted_program(
        self, model: "FusedForward", places: Sequence[Places]
    ) -> AdaptedKernels | None:
        """Steps with adapters as one native call. ``places`` are those of each layer. None if the
        device cannot do that for this model."""

    def adapted_products(self, products: Sequence[Sequence[Part]]) -> AdaptedKernels:
        """What adapters add to these products, given by their parts, is computed with this where
        the products are called one by one. Some products may have no parts."""


@dataclass(frozen=True, eq=False)
class InputRows:
    """What the first layer reads: ``embed(ids) * factor + positions[its position]``."""

    embed: nn.Module
    is_table: bool
    """Whether ``embed`` is a table with a row for each token, its ``weight``. If it is not, there
    is no factor: it is called as it is."""
    factor: float = 1.0
    positions: Tensor | None = None
    """[positions, width]: learned positions, if the model has any."""

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[T, width] of the ids [T] at these positions [T]."""
        if not self.is_table:
            rows: Tensor = self.embed(ids)
            return rows
        weight: Any = self.embed.weight
        rows = functional.embedding(ids, weight)
        if self.factor != 1.0:
            rows = rows * self.factor
        if self.positions is not None:
            rows = rows + functional.embedding(positions, self.positions)
        return rows


class ScaledHead(nn.Module):
    """The output layer, and what is done to its result."""

    def __init__(self, linear: nn.Module, scaling: Scaling) -> None:
        super().__init__()
        self.linear = linear
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return self.scaling(self.linear(x))


class _LayerStep(NamedTuple):
    """What a step calls of one layer."""

    run: Callable[[Tensor, Tensor, CosSin, PagedFunction], tuple[Tensor, Tensor]]
    """See :meth:`FusedDecoderLayer.run`."""
    table: int | None
    """Index of the layer's rotary table."""
    end: EndBranch
    """The end of the layer, with the norm that begins the next one: see
    :meth:`FusedDecoderLayer.end_before`."""


@dataclass(eq=False)
class FusedForward:
    """An ``interface.StepFunction``: the whole model.

    Only the rows whose logits are asked for go through the last norm and the head.
    """

    input_rows: InputRows
    layers: Sequence[FusedDecoderLayer]
    layers_path: str
    """Of the list of layers in the module."""
    tables: Sequence[RotaryTable]
    """One for each kind of layer."""
    table_of_layer: Sequence[int | None]
    """The index of each layer's table. None: the layer has no rotary embedding."""
    norm: FusedNorm
    """The last norm, before the head."""
    head: nn.Module
    """What :meth:`ModelKernels.head` made."""
    kernels: ModelKernels
    why_no_program: str | None = None
    """Why a step of this model is not one native call, where the device has such calls."""

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
        self.program: StepProgram | None = None
        try:
            self.program = self.kernels.program(self)
        except Misfit as misfit:
            self.why_no_program = str(misfit)

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, positions: Tensor, rows: Tensor, paged: PagedFunction
    ) -> Tensor:
        """``ids`` and ``positions`` are [T], ``rows`` indices of T. Returns the logits of ``rows``,
        [rows, vocabulary]."""
        if self.program is not None:
            logits = self.program(ids, rows, paged)
            if logits is not None:
                return logits

        cos_sin = self.cos_sin(positions)
        residual = self.input_rows(ids, positions)
        x = residual if self._first_norm is None else self._first_norm(residual)
        for run, table, end in self._steps_before:
            x, residual = run(x, residual, cos_sin[table], paged)
            x, residual = end(x, residual, None)
        last = self._last_step
        x, residual = last.run(x, residual, cos_sin[last.table], paged)
        x, _ = last.end(x, residual, rows)
        found: Tensor = self.head(x)
        return found

    def cos_sin(self, positions: Tensor) -> dict[int | None, CosSin]:
        """cos and sin [T, R] of these positions, from each of the tables, by its index."""
        found: dict[int | None, CosSin] = {None: NO_ANGLES}
        for index, table in enumerate(self.tables):
            found[index] = table.at(positions)
        return found
