"""Slots: what a sequence holds beside blocks, if its model keeps anything of fixed or unknown size
for it, such as the state of a linear attention or transformers' own cache object.

Owned and called by the scheduler alone. It deals in numbers; what is behind a slot is the runner's.
A slot is *free* or *held*: by the running sequence that it belongs to, by a pending copy of which
it is the source, or by both. A sequence holds one slot from its admission until it ends, is
preempted, or is taken back. Its first row begins at position 0, and the runner empties the slot
then. So a slot is handed out again although the runner has not heard yet that it was released. The
next step tells it (:meth:`Slots.take_released`), so that it need not keep what the slot holds.

Without slots (``num_slots`` is 0) nobody holds any, and none is ever short.
"""

from collections import Counter
from collections.abc import Iterable


class Slots:
    """Slot numbers 0 … ``num_slots`` − 1.

    Every operation that can run out of slots changes nothing when it does.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 0
        self.num_slots = num_slots
        self._holders = [0] * num_slots  # the sequence, if any, plus the copies from the slot
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: the warmest slot first
        self._pending_copies: dict[int, int] = {}  # destination -> source of copies not yet made
        # Free slots that no step has named yet. At first all: the runner may still keep what an
        # earlier scheduler has left in them.
        self._released = set(self._free)

    # ------------------------------------------------------------------ queries

    @property
    def is_used(self) -> bool:
        """Whether sequences of this model hold slots."""
        return self.num_slots > 0

    @property
    def is_short(self) -> bool:
        """Whether a sequence that needs a slot would get none now."""
        return self.is_used and not self._free

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def pending_copies(self) -> list[tuple[int, int]]:
        """(source, destination) of all copies that the next step must make before it computes."""
        return [(source, destination) for destination, source in self._pending_copies.items()]

    # ------------------------------------------------------------------ slots of sequences

    def take(self) -> int | None:
        """A slot for a sequence that begins; None without slots. Call it only if not
        :attr:`is_short`."""
        if not self.is_used:
            return None
        slot = self._free.pop()
        self._released.discard(slot)
        self._holders[slot] = 1
        return slot

    def fork(self, source: int | None) -> int | None:
        """A slot that becomes a copy of ``source``; None without slots. Call it only if not
        :attr:`is_short`.

        Until the copy is made, the source is held. So it is not given to another sequence, even if
        its own sequence ends."""
        slot = self.take()
        if slot is None or source is None:
            return None
        self._pending_copies[slot] = source
        self._holders[source] += 1
        return slot

    def complete_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """These pending copies have been made: their sources are no longer held for them."""
        for source, destination in copies:
            expected = self._pending_copies.pop(destination)
            assert source == expected, "a slot was copied that was not pending"
            self._drop_holder(source)

    def release(self, slot: int | None) -> None:
        """The sequence of this slot gives it up. A pending copy to the slot is cancelled."""
        if slot is None:
            return
        self._drop_holder(slot)
        source = self._pending_copies.pop(slot, None)
        if source is not None:
            self._drop_holder(source)

    def _drop_holder(self, slot: int) -> None:
        assert self._holders[slot] > 0, "a slot was released that nobody held"
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)
            self._released.add(slot)

    def take_released(self) -> list[int]:
        """The slots that are free and were held since the last call: what they hold may go."""
        released = list(self._released)
        self._released.clear()
        return released

    # ------------------------------------------------------------------ integrity

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert every invariant. ``held``: the slots of all running sequences, and those that are
        to be released when a step in flight is complete."""
        owners = Counter(held)
        for slot, count in owners.items():
            assert count == 1, f"slot {slot} belongs to {count} sequences"
        for destination in self._pending_copies:
            assert owners[destination], f"a copy is pending to the free slot {destination}"
        owners.update(self._pending_copies.values())
        free = Counter(self._free)
        for slot in range(self.num_slots):
            assert self._holders[slot] == owners[slot], f"slot {slot} has other holders"
            is_free = owners[slot] == 0
            assert free[slot] == int(is_free), f"slot {slot} is lost, or free and held"
            assert is_free or slot not in self._released, f"slot {slot} is held and released"
