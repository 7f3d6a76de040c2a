"""The whole of a plain causal model, fused: what ``fuse`` puts in the place of its ``forward``.

Imported only where Numba is.
"""

from typing import Any, NamedTuple

from torch import Tensor

from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.panels import PanelLinear
from jitney.execution.program import StepProgram


class Output(NamedTuple):
    """What is read of transformers' own output, which takes longer to make than a small kernel."""

    logits: Tensor


class FusedForward:
    """``forward`` of a causal model whose layers are all fused, without what transformers does
    around them for caches, masks and outputs that are not wanted here.

    Steps of service run as a :class:`program.StepProgram` where one can be made, and layer by layer
    else. Only the rows whose logits are asked for go through the last norm and the head.
    """

    def __init__(self, module: Any) -> None:
        """``module`` has ``lm_head`` and ``model``, which has the other parts by Llama's names."""
        inner = module.model
        self._embed, self._rotary, self._norm = inner.embed_tokens, inner.rotary_emb, inner.norm
        self._layers = [layer.run for layer in inner.layers]
        self._head = module.lm_head
        self._program: StepProgram | None = None
        if StepProgram.can_run(inner.layers):
            weight = inner.embed_tokens.weight.detach()
            head = self._head if isinstance(self._head, PanelLinear) else None
            self._program = StepProgram(weight, self._rotary, inner.layers, self._norm, head)

    @property
    def has_program(self) -> bool:
        """Whether steps of service are one native call."""
        return self._program is not None

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        paged: PagedFunction,
        **unused: object,
    ) -> Output:
        """As transformers calls it: ``input_ids`` and ``position_ids`` are [1, T]."""
        return Output(self.step(input_ids[0], position_ids[0], logits_to_keep, paged).unsqueeze(0))

    def step(self, ids: Tensor, positions: Tensor, wanted: Tensor, paged: PagedFunction) -> Tensor:
        """``ids`` and ``positions`` are [T], ``wanted`` indices of T. Returns their logits."""
        program = self._program
        if program is not None and isinstance(paged, PagedStep) and program.fits(paged):
            out = program(ids, wanted, paged)
            return out if program.has_head else self._head(out)
        hidden = self._embed(ids.unsqueeze(0))
        cos, sin = self._rotary(hidden, positions.unsqueeze(0))
        for run in self._layers:
            hidden = run(hidden, cos, sin, paged)
        return self._head(self._norm(hidden[0, wanted]))
