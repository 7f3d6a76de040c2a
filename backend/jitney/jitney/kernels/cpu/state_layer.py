"""What a layer with states computes between its products, by the kernels of a CPU.

Made by ``layer_kernels``, for ``fused.states``; called by it, or by ``program``, where the kernels
are steps of a native call.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitney.kernels.cpu.attention_kernel import TAGS
from jitney.kernels.cpu.compiled import Kernel, KernelCall
from jitney.kernels.cpu.conv_kernel import CHANNELS_PER_ITEM, ConvCall, conv_body
from jitney.kernels.cpu.delta_kernel import MOST_KEY_SIZE, DeltaCall, delta_body
from jitney.kernels.cpu.emit import LANES, ceil_div
from jitney.kernels.cpu.gate_kernel import (
    NORM_FIRST,
    NORM_LAST,
    NORM_NONE,
    GateCall,
    compiled_gate,
)
from jitney.kernels.cpu.scan_kernel import MOST_STATE_SIZE, ScanCall, scan_body
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.state_forms import DeltaRuleForm, ScanForm, SlotStates, StateForm

_NORMS = {"none": NORM_NONE, "first": NORM_FIRST, "last": NORM_LAST}


# Compiled, or loaded from the cache of compiled code, at first use.


@lru_cache
def compiled_conv(dtype: torch.dtype) -> Kernel:
    tag = TAGS[dtype]
    return Kernel(lambda address: conv_body(tag, address))


@lru_cache
def compiled_delta(dtype: torch.dtype) -> Kernel:
    tag = TAGS[dtype]
    return Kernel(lambda address: delta_body(tag, address))


@lru_cache
def compiled_scan(dtype: torch.dtype) -> Kernel:
    tag = TAGS[dtype]
    return Kernel(lambda address: scan_body(tag, address))


class StateStep(NamedTuple):
    """One kernel, and its arguments except for ``count``."""

    kernel: Kernel
    arguments: KernelCall
    items_per_row: int | None
    """``count`` is so many for each row of the step. None: it is the number of tokens."""


@dataclass(frozen=True)
class StateMemory:
    """Addresses of what the kernels of a layer read and write; strides are in bytes."""

    rows: int
    """Of ``SlotStates.rows``."""
    projected: int
    projected_stride: int
    convolved: int
    """[tokens, channels]"""
    mixed: int
    """[tokens, width]"""


class CpuStateLayer:
    """A ``fused.state_forms.StateKernel``."""

    def __init__(self, form: StateForm, dtype: torch.dtype) -> None:
        """Raises Misfit for sizes that no kernel has."""
        self.form = form
        self._dtype = dtype
        _check_sizes(form)
        self._conv = compiled_conv(dtype)
        if isinstance(form.recurrence, DeltaRuleForm):
            self._recurrence = compiled_delta(dtype)
        elif form.recurrence is not None:
            self._recurrence = compiled_scan(dtype)
        if form.gate is not None:
            self._gate = compiled_gate(dtype)

    def __call__(self, projected: Tensor, states: SlotStates) -> Tensor:
        """See :data:`fused.state_forms.StateKernel`."""
        assert projected.dtype == self._dtype
        projected = projected.contiguous()
        tokens = projected.shape[0]
        mixed = projected.new_empty(tokens, self.form.width)
        convolved = mixed
        if self.form.recurrence is not None:
            convolved = projected.new_empty(tokens, self.form.conv.channels)
        memory = StateMemory(
            rows=states.rows.ctypes.data,
            projected=projected.data_ptr(),
            projected_stride=projected.stride(0) * projected.element_size(),
            convolved=convolved.data_ptr(),
            mixed=mixed.data_ptr(),
        )
        threads = torch.get_num_threads()
        for step in self.steps(memory, states):
            step.arguments.count = tokens
            items = tokens
            if step.items_per_row is not None:
                items = len(states.rows) * step.items_per_row
                step.arguments.count = items
            step.kernel.run(step.arguments, min(threads, items))
        return mixed

    def steps(self, memory: StateMemory, states: SlotStates) -> list[StateStep]:
        """The kernels, in the order in which they run. Of ``states``, the addresses are read."""
        form = self.form
        steps = [self._conv_step(memory, states)]
        if isinstance(form.recurrence, DeltaRuleForm):
            steps.append(self._delta_step(form.recurrence, memory, states))
        elif form.recurrence is not None:
            steps.append(self._scan_step(form.recurrence, memory, states))
        if form.gate is not None:
            steps.append(self._gate_step(memory))
        return steps

    def _conv_step(self, memory: StateMemory, states: SlotStates) -> StateStep:
        conv = self.form.conv
        size = self._dtype.itemsize
        assert states.conv.dtype == self._dtype
        items_per_row = ceil_div(conv.channels, CHANNELS_PER_ITEM)
        out = memory.mixed if self.form.recurrence is None else memory.convolved
        call = ConvCall(
            rows=memory.rows,
            items_per_row=items_per_row,
            x=memory.projected + conv.offset * size,
            x_stride=memory.projected_stride,
            out=out,
            out_stride=conv.channels * size,
            state=states.conv.data_ptr(),
            slot_stride=states.conv.stride(0) * size,
            channels=conv.channels,
            taps=conv.taps,
            weight=conv.weight.data_ptr(),
            bias=0 if conv.bias is None else conv.bias.data_ptr(),
            silu=conv.silu,
            gated=conv.is_gated,
            before=-2 * conv.channels * size,
            after=-conv.channels * size,
        )
        return StateStep(self._conv, call, items_per_row)

    def _shared_arguments(self, memory: StateMemory, states: SlotStates) -> dict[str, Any]:
        """Those of a recurrence that are not of one kind alone."""
        assert states.recurrent is not None
        assert states.recurrent.dtype == torch.float32
        size = self._dtype.itemsize
        return {
            "rows": memory.rows,
            "x": memory.convolved,
            "x_stride": self.form.conv.channels * size,
            "out": memory.mixed,
            "out_stride": self.form.width * size,
            "state": states.recurrent.data_ptr(),
            "slot_stride": states.recurrent.stride(0) * states.recurrent.element_size(),
        }

    def _delta_step(
        self, delta: DeltaRuleForm, memory: StateMemory, states: SlotStates
    ) -> StateStep:
        size = self._dtype.itemsize
        call = DeltaCall(
            items_per_row=delta.value_heads,
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            key_size=delta.key_size,
            value_size=delta.value_size,
            betas=memory.projected + delta.betas * size,
            gates=memory.projected + delta.gates * size,
            gate_stride=memory.projected_stride,
            rates=delta.rates.data_ptr(),
            biases=delta.biases.data_ptr(),
            **self._shared_arguments(memory, states),
        )
        return StateStep(self._recurrence, call, delta.value_heads)

    def _scan_step(self, scan: ScanForm, memory: StateMemory, states: SlotStates) -> StateStep:
        size = self._dtype.itemsize
        call = ScanCall(
            items_per_row=scan.heads,
            heads=scan.heads,
            head_size=scan.head_size,
            groups=scan.groups,
            state_size=scan.state_size,
            steps=memory.projected + scan.steps * size,
            steps_stride=memory.projected_stride,
            rates=scan.rates.data_ptr(),
            biases=scan.biases.data_ptr(),
            skips=scan.skips.data_ptr(),
            **self._shared_arguments(memory, states),
        )
        return StateStep(self._recurrence, call, scan.heads)

    def _gate_step(self, memory: StateMemory) -> StateStep:
        gate = self.form.gate
        assert gate is not None
        size = self._dtype.itemsize
        width = self.form.width
        call = GateCall(
            tokens_per_item=1,
            x=memory.mixed,
            x_stride=width * size,
            gate=memory.projected + gate.offset * size,
            gate_stride=memory.projected_stride,
            out=memory.mixed,
            out_stride=width * size,
            groups=gate.groups,
            group_size=width // gate.groups,
            norm=_NORMS[gate.norm],
            scale=0 if gate.scale is None else gate.scale.data_ptr(),
            epsilon=gate.epsilon,
            is_silu=1,
        )
        return StateStep(self._gate, call, None)


def _check_sizes(form: StateForm) -> None:
    """Raise Misfit for sizes that are no whole vectors, or more than a kernel has memory for."""
    sizes = [form.conv.channels]
    recurrence = form.recurrence
    if isinstance(recurrence, DeltaRuleForm):
        sizes += [recurrence.key_size, recurrence.value_size]
        if recurrence.key_size > MOST_KEY_SIZE:
            raise Misfit(f"its keys have more than {MOST_KEY_SIZE} numbers")
    elif isinstance(recurrence, ScanForm):
        sizes.append(recurrence.state_size)
        if recurrence.state_size > MOST_STATE_SIZE:
            raise Misfit(f"its states have more than {MOST_STATE_SIZE} numbers a line")
    if form.gate is not None:
        sizes.append(form.width // form.gate.groups)
    if any(size % LANES != 0 for size in sizes):
        raise Misfit(f"its sizes are no multiples of {LANES}")
