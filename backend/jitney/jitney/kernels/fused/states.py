"""The fused form of modules that keep states (``state_forms``): two products, and between them what
a device's kernel computes. Built by ``fuse``.
"""

from typing import Any

import numpy as np
from torch import Tensor, nn

from jitney.execution.interface import PagedFunction, PagedStep
from jitney.execution.state_rows import SlotCache, find_cache
from jitney.execution.state_slots import StateSlots
from jitney.kernels.fused.rotary import NO_ANGLES, CosSin
from jitney.kernels.fused.state_forms import SlotStates, StateForm, StateKernel


class FusedStates(nn.Module):
    """A layer of this kind."""

    def __init__(
        self, form: StateForm, project: nn.Module, output: nn.Module, kernel: StateKernel
    ) -> None:
        super().__init__()
        self.form = form
        self.project = project
        self.output = output
        self.kernel: StateKernel = kernel
        self._project = project.forward

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As transformers calls it."""
        cache = find_cache([*args, *kwargs.values()])
        mixed = self._mix(hidden_states[0], cache)
        result: Tensor = self.output(mixed)
        return result.unsqueeze(0)

    def angles(self, made: CosSin) -> CosSin:
        """None of them are used."""
        return NO_ANGLES

    def mix(self, x: Tensor, cos_sin: CosSin, paged: PagedFunction) -> Tensor:
        """All but the output product, of x [T, hidden size]. Returns [T, width]."""
        cache = None
        if isinstance(paged, PagedStep):
            cache = paged.cache
            assert cache is not None, "a model with states gets them in each step"
        return self._mix(x, cache)

    def _mix(self, x: Tensor, cache: SlotCache | None) -> Tensor:
        """Without a cache, in a trial, x is one sequence from its first token on."""
        if cache is None:
            states = _empty_states(self.form, x)
        else:
            states = states_of(self.form, cache.slots, cache.row_table)
        return self.kernel(self._project(x), states)


def states_of(form: StateForm, slots: StateSlots, rows: np.ndarray) -> SlotStates:
    """The states of a layer in a step with these ``SlotStates.rows``."""
    recurrent = None
    if form.recurrent_key is not None:
        recurrent = slots.tensor(form.recurrent_key)
    return SlotStates(rows, slots.tensor(form.conv_key), recurrent)


def _empty_states(form: StateForm, x: Tensor) -> SlotStates:
    """One slot, for a sequence that consists of ``x``."""
    rows = np.array([[0, 0, len(x), 1]], np.int64)
    conv = x.new_empty(1, form.conv.taps * form.conv.channels)
    recurrent = None
    if form.recurrence is not None:
        recurrent = x.new_empty((1, *form.recurrence.state)).float()
    return SlotStates(rows, conv, recurrent)
