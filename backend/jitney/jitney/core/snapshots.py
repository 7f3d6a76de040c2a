"""Snapshots: copies of what sequences held in their slots at *borders*, where a block ends. A
sequence whose tokens begin with the same blocks begins with such a copy: another request with the
same beginning, or the same sequence after a preemption.

Owned by ``Slots``. ``borders`` says where snapshots are made, ``admit`` looks for them.

A snapshot and the blocks before its border are evicted independently of each other. A prefix is a
hit only as far as both are there.
"""

from collections import OrderedDict
from collections.abc import Iterator


class Snapshots:
    """The snapshots that can be found by the hash of the block that ends at their border."""

    def __init__(self) -> None:
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def slot_of(self, key: bytes) -> int:
        """The slot that holds a snapshot."""
        return self._slot_of[key]

    def slots(self) -> list[int]:
        """The slots of all snapshots."""
        return list(self._slot_of.values())

    def keys_by_age(self) -> Iterator[bytes]:
        """All keys, that of the least recently used snapshot first."""
        return iter(self._slot_of)

    def longest(self, hashes: list[bytes], most: int) -> int:
        """How many of the first ``most`` blocks of the chain ``hashes`` come before the last of its
        snapshots; 0 if it has none."""
        for count in range(most, 0, -1):
            if hashes[count - 1] in self._slot_of:
                return count
        return 0

    def add(self, key: bytes, slot: int) -> None:
        """A new snapshot."""
        assert key not in self._slot_of, "a border has two snapshots"
        self._slot_of[key] = slot

    def note_used(self, key: bytes) -> None:
        """A snapshot was of use: it is the last to be evicted."""
        self._slot_of.move_to_end(key)

    def remove(self, key: bytes) -> int:
        """A snapshot is evicted. Returns its slot."""
        return self._slot_of.pop(key)
