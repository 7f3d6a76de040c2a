"""The limit of a queue, ``max_queued``, as both kinds of admission apply it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jitney.errors import UnavailableError


class FreeSlots(NamedTuple):
    """How many sequences the next step can admit. Either may be negative."""

    total: int
    of_tier: Sequence[int]
    """At most so many of each tier that counts."""


def check_queue_limit(
    queued: Sequence[Mapping[int, int]],
    limit: int,
    *,
    still_short: bool,
    free_slots: Callable[[], FreeSlots],
) -> None:
    """Raise UnavailableError if the queue is full for a further request: if the next step cannot
    admit it, and ``limit`` or more requests are queued. Requests that the next step can admit do
    not count. A request is admitted as long as any slot is free, and takes one for each of its
    sequences.

    ``queued``: for each tier that counts, key of a queued request -> its number of sequences, in
    about the order of admission. The last tier is that of the further request. ``still_short``:
    sequences waited after the last step was planned, and some still wait. Then blocks or budget are
    short, and the next step may admit none. ``free_slots`` is called only if the limit may be
    reached.
    """
    total = sum(map(len, queued))
    if total < limit:
        return
    slots = FreeSlots(0, [0] * len(queued)) if still_short else free_slots()
    left = slots.total
    num_queued = total
    for of_tier, left_of_tier in zip(queued, slots.of_tier, strict=True):
        for num_sequences in of_tier.values():
            if min(left, left_of_tier) <= 0:
                break  # the others of this tier count, however many they are
            left -= num_sequences
            left_of_tier -= num_sequences
            num_queued -= 1
        fits = min(left, left_of_tier) > 0  # a further request of this tier
    if not fits and num_queued >= limit:
        raise UnavailableError.of_queue(num_queued, limit)
