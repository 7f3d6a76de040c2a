"""Who makes way for an urgent sequence: as few running sequences as will do, the last one first.

Called by the kinds of admission that preempt: they say who may make way at all.
"""

from collections.abc import Iterable
from typing import Protocol

from jitney.core.kv_cache import KvCache, WouldFree
from jitney.core.request import Sequence


class Places(Protocol):
    """The places of the running sequences, and of the forks that are due."""

    def give_up(self, sequence: Sequence) -> None:
        """Count as if this sequence ran no longer."""

    def any_is_free(self) -> bool:
        """Whether a further sequence may run."""


def choose_victims(
    urgent: Sequence,
    hits: list[int],
    candidates: Iterable[Sequence],
    *,
    num_running: int,
    places: Places,
    kv: KvCache,
    watermark: int,
) -> list[Sequence]:
    """The first of the ``candidates``, as many as must be preempted so that ``urgent`` can run.
    Empty if it can run without that, or if not even all of them would do. ``hits``: the cached
    blocks that it would begin with. ``watermark``: so many blocks must stay free unless nothing
    else runs."""
    kept = set(hits)
    needed = kv.blocks_for(urgent.num_tokens) - len(kept)
    free = kv.num_available_without(kept)

    def fits(num_left: int) -> bool:
        spare = watermark if num_left else 0
        return places.any_is_free() and free >= needed + spare

    if fits(num_running):
        return []
    would_free = WouldFree(kv)
    victims: list[Sequence] = []
    for sequence in candidates:
        victims.append(sequence)
        places.give_up(sequence)
        freed = would_free.give_up(sequence.table)
        # The urgent sequence begins with its hits. So a hit is not free for its other tokens.
        free += len(set(freed) - kept)
        if fits(num_running - len(victims)):
            return victims
    return []
