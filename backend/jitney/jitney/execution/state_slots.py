"""The states that layers keep beside K and V, or in place of them: linear attention, state space
models, short convolutions. A state is of a fixed size, whatever a sequence's length.

A sequence holds one slot, a number that the scheduler gives it (``core.slots``). For each state of
each layer there is one tensor here whose dimension 0 counts slots. A slot that a sequence gets
holds what another one left: a row that begins a sequence never reads it.

Which states there are is found by a trial (``state_trial``). A step reads and writes them through
``state_rows``, and the runner copies slots for forks and snapshots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

StateKind = Literal["conv", "recurrent"]
"""As transformers' caches call them: the last inputs of a convolution, and what a recurrence
carries from token to token."""


class StateKey(NamedTuple):
    """Names one state of a model."""

    layer: int
    kind: StateKind
    number: int
    """transformers' ``state_idx``: a layer may have several states of a kind."""


class StateShape(NamedTuple):
    """One sequence's share of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one slot."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class StateModule:
    """A module that reads and writes states."""

    path: str
    """In the model, as it was loaded."""
    keys: list[StateKey]
    """All of one layer."""
    by_token: bool
    """Whether it goes on after a state by one token at a time only. Some modules of transformers
    take one token or a whole prompt, and forget the state for anything else."""

    @property
    def layer(self) -> int:
        """Which all of its states belong to."""
        return self.keys[0].layer


@dataclass(frozen=True)
class StateLayout:
    """What states a model keeps, as a trial has found out."""

    cache_argument: str
    """The name under which the model itself takes a cache."""
    shapes: dict[StateKey, StateShape]
    modules: list[StateModule]
    empty_layers: list[Any]
    """By layer, transformers' cache of it. A model asks them for their kind as it makes its masks;
    nothing is ever written into them."""
    shares_attention: bool
    """Whether one attention module serves several layers, as in Zamba. Then the module does not
    know for which of them it is called."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        return sum(state.num_bytes for state in self.shapes.values())

    @property
    def goes_on_in_chunks(self) -> bool:
        """Whether all modules go on after a state by several tokens at once, as after a
        snapshot."""
        return not any(module.by_token for module in self.modules)

    @property
    def scan_bytes(self) -> int:
        """An estimate of what a layer holds for each token of a prompt that it computes at once. A
        module that goes on by one token only is a Mamba 1: its scan has three tensors in float32
        with a state for each token. Others hold no states but those of whole chunks."""
        largest = 0
        for module in self.modules:
            if module.by_token:
                states = [self.shapes[key].shape for key in module.keys]
                largest = max(largest, *(torch.Size(shape).numel() for shape in states))
        return 3 * torch.float32.itemsize * largest


SlotIndex = slice | Tensor
"""Slots of a group of rows, in their order: a slice if their numbers follow each other."""


class StateSlots:
    """The states of all sequences. Owned by the runner, which computes one step at a time."""

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._tensors = {
            key: torch.zeros(num_slots, *state.shape, dtype=state.dtype, device=device)
            for key, state in layout.shapes.items()
        }

    def index_of(self, slots: Sequence[int]) -> SlotIndex:
        """``slots`` as an index of dimension 0."""
        first = slots[0]
        if list(slots) == list(range(first, first + len(slots))):
            return slice(first, first + len(slots))
        return torch.tensor(slots, device=self._device)

    def read(self, keys: Sequence[StateKey], index: SlotIndex) -> LinearAttentionLayer:
        """The states of a group of rows, as transformers' modules take them. They may be views of
        the slots, or copies: :meth:`write` is called after the module has changed them."""
        layer = self.empty(keys)
        for key in keys:
            state = self._tensors[key][index]
            if key.kind == "conv":
                layer.conv_states[key.number] = state
                layer.conv_kernel_size[key.number] = state.shape[-1]
                layer.is_conv_states_initialized[key.number] = True
            else:
                layer.recurrent_states[key.number] = state
                layer.is_recurrent_states_initialized[key.number] = True
        for number in layer.has_previous_state:
            layer.has_previous_state[number] = True
        return layer

    def empty(self, keys: Sequence[StateKey]) -> LinearAttentionLayer:
        """The states of rows that begin: transformers makes them."""
        of_layer = self.layout.empty_layers[keys[0].layer]
        return LinearAttentionLayer(of_layer.number_of_states)

    def write(
        self, keys: Sequence[StateKey], index: SlotIndex, layer: LinearAttentionLayer
    ) -> None:
        """Keep what a module has made of the states of a group of rows."""
        for key in keys:
            states = layer.conv_states if key.kind == "conv" else layer.recurrent_states
            state = states[key.number]
            assert state is not None, "the module has not written its state"
            kept = self._tensors[key]
            if isinstance(index, slice) and kept[index].data_ptr() == state.data_ptr():
                continue  # it was changed where it is
            kept[index] = state

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots: (source, destination). All sources are read before any destination is
        written."""
        if not copies:
            return
        source, destination = torch.tensor(copies, device=self._device).unbind(1)
        for tensor in self._tensors.values():
            tensor[destination] = tensor[source]

    def save(self, slots: Sequence[int]) -> dict[StateKey, Tensor]:
        """A copy of these slots, for :meth:`restore`."""
        index = torch.tensor(slots, device=self._device)
        return {key: tensor[index] for key, tensor in self._tensors.items()}

    def restore(self, slots: Sequence[int], saved: dict[StateKey, Tensor]) -> None:
        """Put back what :meth:`save` of the same slots has returned."""
        index = torch.tensor(slots, device=self._device)
        for key, tensor in self._tensors.items():
            tensor[index] = saved[key]
