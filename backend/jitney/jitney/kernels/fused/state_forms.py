"""What layers that keep states compute, written down: linear attention, state space models, short
convolutions.

All of them are of one shape, whose parts a :class:`StateForm` names::

    x          -> product "project"    -> projected: the inputs of the convolution, gates, numbers
    projected  -> short convolution    -> convolved
    convolved  -> recurrence, if any   -> mixed
    mixed      -> gate, if any         -> mixed
    mixed      -> product "output"     -> the result

transformers' modules for them differ in how their weights lie. ``recognise_states`` reads those;
``states`` has the fused module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from jitney.execution.state_slots import StateKey


@dataclass(frozen=True)
class ConvForm:
    """A convolution of each channel over the last ``taps`` tokens."""

    weight: Tensor
    """float32 [taps, channels]; the last tap is that of the token itself."""
    bias: Tensor | None
    """float32 [channels]"""
    silu: bool
    """Whether SiLU follows it."""
    offset: int
    """Where its inputs begin in a row of the projection. With ``is_gated`` they are the last of
    three parts, [before, after, x]: the input is ``before * x``, the result times ``after``."""
    is_gated: bool

    @property
    def taps(self) -> int:
        return self.weight.shape[0]

    @property
    def channels(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True)
class DeltaRuleForm:
    """The gated delta rule: ``kernels.cpu.delta_kernel`` says what it computes."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    rates: Tensor
    """float32 [value heads]"""
    biases: Tensor
    """float32 [value heads]"""
    betas: int
    """Where the numbers b of the value heads begin in a row of the projection."""
    gates: int
    """The same of the numbers a."""

    @property
    def width(self) -> int:
        """Of the result."""
        return self.value_heads * self.value_size

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a sequence's state."""
        return self.value_heads, self.key_size, self.value_size


@dataclass(frozen=True)
class ScanForm:
    """The recurrence of Mamba 2: ``kernels.cpu.scan_kernel`` says what it computes."""

    heads: int
    head_size: int
    groups: int
    state_size: int
    rates: Tensor
    """float32 [heads]"""
    biases: Tensor
    """float32 [heads]"""
    skips: Tensor
    """float32 [heads]"""
    steps: int
    """Where the heads' numbers for the time step begin in a row of the projection."""

    @property
    def width(self) -> int:
        """Of the result."""
        return self.heads * self.head_size

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a sequence's state."""
        return self.heads, self.head_size, self.state_size


@dataclass(frozen=True)
class GateForm:
    """A gate with SiLU on the result, and an RMS norm before or behind it."""

    norm: Literal["none", "first", "last"]
    scale: Tensor | None
    """float32 [groups * group size]"""
    epsilon: float
    groups: int
    """The norm is over each of so many groups."""
    offset: int
    """Where the gate begins in a row of the projection."""


@dataclass(frozen=True)
class StateForm:
    """What a layer computes between its two products."""

    conv_key: StateKey
    """Names the convolution's state: the inputs of the last ``taps`` tokens. How they lie in a slot
    is the kernel's matter."""
    recurrent_key: StateKey | None
    conv: ConvForm
    recurrence: DeltaRuleForm | ScanForm | None
    gate: GateForm | None

    @property
    def width(self) -> int:
        """Of the result, the input of the product ``output``."""
        return self.conv.channels if self.recurrence is None else self.recurrence.width


class SlotStates(NamedTuple):
    """The rows of a step, and the states in their slots."""

    rows: np.ndarray
    """int64 [R, 4]: an ``attention.RowSlot`` in each row."""
    conv: Tensor
    """[slots, …]"""
    recurrent: Tensor | None


StateKernel = Callable[[Tensor, SlotStates], Tensor]
"""(projected [T, …], states) -> mixed [T, width]. Overwrites the states of the rows."""
