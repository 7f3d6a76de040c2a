"""Slots: what a sequence holds beside blocks, if its model keeps anything of fixed or unknown size
for it, such as the state of a linear attention or transformers' own cache object.

Owned and called by the scheduler alone. It deals in numbers; what is behind a slot is the runner's.
A slot is *free* or *held*: by the running sequence that it belongs to, by a snapshot, or by pending
copies of which it is the source. A sequence holds one slot from its admission until it ends, is
preempted, or is taken back. If its first row begins at position 0, the runner empties the slot
then; else the slot is the copy of a snapshot. So a slot is handed out again although the runner has
not heard yet that it was released. The next step tells it (:meth:`Slots.take_released`), so that it
need not keep what the slot holds.

Snapshots (see ``snapshots``) take slots that no sequence holds, and give them back when one needs
them: the least recently used is evicted. There are some slots more than sequences may run, so that
snapshots stay when all of them do. A snapshot is *begun* when a step is planned that makes it, and
found by its key once that step is complete.

Without slots (``total`` is 0) nobody holds any, and none is ever short.
"""

from collections import Counter
from collections.abc import Iterable

from jitney.core.snapshots import Snapshots


class Slots:
    """Slot numbers 0 … ``total`` − 1.

    Every operation that can run out of slots changes nothing when it does.
    """

    def __init__(self, num_slots: int, num_snapshots: int = 0) -> None:
        """At most ``num_slots`` sequences run. ``num_snapshots``: slots beside theirs."""
        assert num_slots >= 0
        self.total = num_slots + num_snapshots
        self.num_snapshots = num_snapshots
        """So many snapshots there is always room for. 0: none are kept."""
        self.snapshots = Snapshots()
        # The sequence or the snapshot, if any, plus the copies from the slot.
        self._holders = [0] * self.total
        self._free = list(range(self.total - 1, -1, -1))  # a stack: the warmest slot first
        self._begun: set[int] = set()  # of snapshots whose step is not complete
        self._pending_copies: dict[int, int] = {}  # destination -> source of copies not yet made
        # Free slots that no step has named yet. At first all: the runner may still keep what an
        # earlier scheduler has left in them.
        self._released = set(self._free)

    # ------------------------------------------------------------------ queries

    @property
    def is_used(self) -> bool:
        """Whether sequences of this model hold slots."""
        return self.total > 0

    @property
    def is_short(self) -> bool:
        """Whether a sequence that needs a slot would get none now."""
        return self.is_used and not self._free and self._key_to_evict() is None

    def can_copy(self, source: int) -> bool:
        """Whether a sequence would get a slot now that becomes a copy of ``source``."""
        return bool(self._free) or self._key_to_evict(kept=source) is not None

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
        if not self._free:
            self._evict()
        slot = self._free.pop()
        self._released.discard(slot)
        self._holders[slot] = 1
        return slot

    def fork(self, source: int | None) -> int | None:
        """A slot that becomes a copy of ``source``; None without slots. Call it only if not
        :attr:`is_short` or, if the source is a snapshot, if :meth:`can_copy`.

        Until the copy is made, the source is held. So it is not given to another sequence, even if
        its own sequence ends, or if the snapshot is evicted."""
        if source is None:
            return None
        self._holders[source] += 1  # first of all, so that it is not evicted for its own copy
        slot = self.take()
        assert slot is not None
        self._pending_copies[slot] = source
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

    # ------------------------------------------------------------------ snapshots

    def begin_snapshot(self) -> int | None:
        """A slot for a snapshot that a step makes. None if there is none to spare: a sequence must
        never wait for a slot because of snapshots that cannot be evicted yet."""
        if len(self._begun) >= self.num_snapshots or self.is_short:
            return None
        slot = self.take()
        assert slot is not None
        self._begun.add(slot)
        return slot

    def keep_snapshot(self, slot: int, key: bytes) -> None:
        """The step is complete: from now on the snapshot is found by ``key``, the hash of the block
        before its border. If another one is found by that key already, this one is dropped."""
        if key in self.snapshots:
            self.drop_snapshot(slot)
            return
        self._begun.remove(slot)
        self.snapshots.add(key, slot)

    def drop_snapshot(self, slot: int) -> None:
        """The snapshot that was begun in this slot has come to nothing."""
        self._begun.remove(slot)
        self._drop_holder(slot)

    def _key_to_evict(self, kept: int | None = None) -> bytes | None:
        """The key of the snapshot to evict next, if any: its slot is free then. ``kept``: the slot
        of one that stays."""
        for key in self.snapshots.keys_by_age():
            slot = self.snapshots.slot_of(key)
            if self._holders[slot] == 1 and slot != kept:
                return key
        return None

    def _evict(self) -> None:
        key = self._key_to_evict()
        assert key is not None, "no slot is free"
        self._drop_holder(self.snapshots.remove(key))

    def take_released(self) -> list[int]:
        """The slots that are free and were held since the last call: what they hold may go."""
        released = list(self._released)
        self._released.clear()
        return released

    # ------------------------------------------------------------------ integrity

    def check_integrity(self, held: Iterable[int], begun: Iterable[int] = ()) -> None:
        """Assert every invariant. ``held``: the slots of all running sequences, and those that are
        to be released when a step in flight is complete. ``begun``: those of the snapshots that
        steps in flight make."""
        owners = Counter(held)
        for slot, count in owners.items():
            assert count == 1, f"slot {slot} belongs to {count} sequences"
        for destination in self._pending_copies:
            assert owners[destination], f"a copy is pending to the free slot {destination}"
        assert set(begun) == self._begun, "a snapshot is begun by no step, or by none in flight"
        for slot in [*self._begun, *self.snapshots.slots()]:
            assert not owners[slot], f"slot {slot} is that of a sequence, and a snapshot"
            owners[slot] += 1
        owners.update(self._pending_copies.values())
        free = Counter(self._free)
        for slot in range(self.total):
            assert self._holders[slot] == owners[slot], f"slot {slot} has other holders"
            is_free = owners[slot] == 0
            assert free[slot] == int(is_free), f"slot {slot} is lost, or free and held"
            assert is_free or slot not in self._released, f"slot {slot} is held and released"
