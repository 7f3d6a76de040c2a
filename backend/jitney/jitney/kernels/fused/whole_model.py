"""A step of a causal model whose layers are all fused, without what transformers does around them
for caches, masks and outputs that are not used here. Built by ``fuse``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from jitney.execution.interface import PagedFunction
from jitney.execution.low_rank import Pack, Part
from jitney.kernels.fused.forms import EndBranch, FusedNorm, LayerKernels
from jitney.kernels.fused.layers import FusedDecoderLayer
from jitney.kernels.fused.rotary import CosSin

StepProgram = Callable[[Tensor, Tensor, PagedFunction], Tensor | None]
"""(ids [T], rows, attention) -> the logits of ``rows``, or None if it cannot run the step"""


class Places(NamedTuple):
    """The linear layers of one decoder layer that adapters may change. Each list has those that one
    fused layer is made of, with the columns of its result that they give."""

    qkv: list[Part]
    output: list[Part]
    gated: list[Part]
    down: list[Part]


class AdaptedKernels(NamedTuple):
    """What steps with adapters are computed with."""

    pack: Pack | None = None
    """Makes ``LowRank.packed``, if the program needs it."""
    program: StepProgram | None = None
    """All layers as one native call."""


class ModelKernels(LayerKernels, Protocol):
    """What a device computes a fused model with."""

    def program(self, model: "FusedForward") -> StepProgram | None:
        """All layers as one native call, where the device can do that for this model."""

    def adapted(self, model: "FusedForward", places: Sequence[Places]) -> AdaptedKernels:
        """For adapters that change these places of each layer."""


class _LayerStep(NamedTuple):
    """What a step calls of one layer."""

    run: Callable[[Tensor, Tensor, CosSin, PagedFunction], tuple[Tensor, Tensor]]
    """See :meth:`FusedDecoderLayer.run`."""
    table: int
    """Index of the layer's rotary table."""
    end: EndBranch
    """The sum that ends the layer, and the norm that begins the next."""


@dataclass(eq=False)
class FusedForward:
    """An ``interface.StepFunction``: the whole model.

    The sum that ends a layer is computed together with the norm that begins the next. Only the rows
    whose logits are asked for go through the last norm and the head.
    """

    embed: nn.Module
    layers: Sequence[FusedDecoderLayer]
    tables: Sequence[Tensor]
    """See :func:`rotary_table`."""
    table_of_layer: Sequence[int]
    """The index of each layer's table."""
    norm: FusedNorm
    head: nn.Module
    softcap: float | None
    """Of the logits."""
    kernels: ModelKernels

    def __post_init__(self) -> None:
        first_norm, *next_norms = (layer.norms.attention for layer in self.layers)
        next_norms.append(self.norm)
        self._first_norm = first_norm
        self._steps: list[_LayerStep] = []
        per_layer = zip(self.layers, self.table_of_layer, next_norms, strict=True)
        for layer, table, next_norm in per_layer:
            self._steps.append(_LayerStep(layer.run, table, layer.end_before(next_norm)))
        self.program = self.kernels.program(self)

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, positions: Tensor, rows: Tensor, paged: PagedFunction
    ) -> Tensor:
        """``ids`` and ``positions`` are [T], ``rows`` indices of T. Returns their logits."""
        if self.program is not None:
            logits = self.program(ids, rows, paged)
            if logits is not None:
                return self.cap(logits)

        angles = self.angles(positions)
        residual: Tensor = self.embed(ids)
        x = residual if self._first_norm is None else self._first_norm(residual)
        *before, last = self._steps
        for run, table, end in before:
            x, residual = run(x, residual, angles[table], paged)
            x, residual = end(x, residual, None)
        x, residual = last.run(x, residual, angles[last.table], paged)
        x, _ = last.end(x, residual, rows)
        return self.cap(self.head(x))

    def angles(self, positions: Tensor) -> list[CosSin]:
        """cos and sin [T, R] by each of the tables."""
        # cos and sin of a token are side by side: the offset from one to the other does not depend
        # on the number of tokens, so the kernel that reads them is the same for every step.
        found = (table.index_select(0, positions).unbind(1) for table in self.tables)
        return [(cos, sin) for cos, sin in found]

    def cap(self, logits: Tensor) -> Tensor:
        """The logits, softly capped if the model does that."""
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap
