"""What penalized sequences have in their contexts, kept on the device between steps.

Owned by ``edits``. A penalty needs each token of the context and how often it was made. Naming all
of them in every step would cost the host time that grows with the context; here a step sends what
is new since the sequence's last one: as a rule one token.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.request import Row

# A sequence that was not penalized for so many steps loses its place, if another needs it.
_IDLE_STEPS = 64
_LEAST_WIDTH = 256


@dataclass(slots=True)
class _Context:
    """One sequence. Its tokens stand in the order in which they first came."""

    slot: int
    prompt: int
    """Length of its prompt."""
    used: int = 0
    """The last step that asked for it."""
    known: int = 0
    """How many tokens of its output are counted."""
    last: int = 0
    """The last of those."""
    places: dict[int, int] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)

    def is_of(self, row: Row) -> bool:
        """Whether ``row`` goes on from here. (A look at the ends is enough for a key used twice by
        mistake; the engine's are unique.)"""
        known = self.known
        return (
            self.prompt == len(row.prompt)
            and known <= len(row.output)
            and (not known or self.last == row.output[known - 1])
        )


class Contexts:
    """A pool [slots × width, 2] i32 on the device: (token, how often it was made) pairs, a
    sequence's in one slot. Both sizes double when they must."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._width = _LEAST_WIDTH
        self._slots = 0
        self._free: list[int] = []
        self._contexts: dict[tuple[int, int], _Context] = {}  # the longest unused first
        self._changes: dict[tuple[int, int], tuple[int, int]] = {}
        """(slot, place) -> (token, how often made), to be sent."""
        self.pool = torch.zeros((0, 2), dtype=torch.int32, device=device)

    def begin(self) -> None:
        """A new step."""
        self._step += 1

    def forget(self) -> None:
        """Begin anew: after a failed step nobody knows what the device has."""
        self._contexts.clear()
        self._changes.clear()
        self._free = list(range(self._slots))

    def update(self, row: Row, index: int) -> tuple[int, int]:
        """The slot of sequence ``index`` of ``row``, and how many tokens it has there."""
        key = (row.key, index)
        context = self._contexts.pop(key, None)
        if context is not None and not context.is_of(row):
            self._free.append(context.slot)
            context = None
        if context is None:
            context = _Context(self._take_slot(), len(row.prompt))
            if row.params.repetition_penalty != 1.0:
                for token in dict.fromkeys(row.prompt):
                    self._count(context, token, 0)
        context.used = self._step
        self._contexts[key] = context
        for token in row.output[context.known :]:
            self._count(context, token, 1)
            context.last = token
        context.known = len(row.output)
        return context.slot, len(context.made)

    def changes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """What :meth:`apply` must be given, on the device: places in the pool [N], pairs [N, 2].
        Grows the pool first, if it must."""
        widest = max((len(each.made) for each in self._contexts.values()), default=0)
        slots, width = self._slots, self._width
        while width < widest:
            width *= 2
        if slots * width != len(self.pool):
            self._grow(slots, width)
        where = np.array(list(self._changes), dtype=np.int64).reshape(-1, 2)
        pairs = np.array(list(self._changes.values()), dtype=np.int32).reshape(-1, 2)
        self._changes.clear()
        return where[:, 0] * width + where[:, 1], pairs

    def apply(self, places: Tensor, pairs: Tensor) -> None:
        """Write the changes, in stream order."""
        self.pool.index_copy_(0, places, pairs)

    @property
    def width(self) -> int:
        """Places of a slot. Slot s begins at s × width."""
        return self._width

    def _count(self, context: _Context, token: int, times: int) -> None:
        place = context.places.setdefault(token, len(context.made))
        if place == len(context.made):
            context.made.append(0)
        context.made[place] += times
        self._changes[context.slot, place] = (token, context.made[place])

    def _take_slot(self) -> int:
        if not self._free and self._contexts:
            key, oldest = next(iter(self._contexts.items()))
            if oldest.used + _IDLE_STEPS < self._step:
                del self._contexts[key]
                return oldest.slot
        if not self._free:
            more = max(8, self._slots)
            self._free = list(range(self._slots, self._slots + more))
            self._slots += more
        return self._free.pop()

    def _grow(self, slots: int, width: int) -> None:
        new = torch.zeros((slots, width, 2), dtype=torch.int32, device=self._device)
        if len(self.pool):
            old = self.pool.view(-1, self._width, 2)
            new[: old.shape[0], : self._width] = old
        self.pool, self._width = new.view(-1, 2), width
