"""The limit of a queue, ``max_queued``, as both kinds of admission apply it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jitney.errors import UnavailableError


class Admissible(NamedTuple):
    """How many sequences the next step can admit. Either may be negative."""

    total: int
    of_tier: Sequence[int]
    """At most so many sequences of each tier whose requests are counted."""


def check_queue_limit(
    queued: Sequence[Mapping[int, int]],
    limit: int,
    *,
    still_short: bool,
    admissible: Callable[[], Admissible],
) -> None:
    """Raise UnavailableError if the queue is full for a further request. It is full if both hold:

    - the next step cannot admit the further request;
    - ``limit`` or more requests are queued, without those that the next step can admit.

    A request is admitted as long as any further sequence may run, and counts as all of its own.

    - ``queued``: one mapping for each tier whose requests are counted, from the key of a queued
      request to its number of sequences. They are roughly in the order of admission. The last tier
      is that of the further request.
    - ``still_short``: the last plan left sequences waiting, and some still wait. So blocks or
      budget were short. Then it is assumed that the next step admits nobody.
    - ``admissible``: called only if the limit may be reached.
    """
    total = sum(map(len, queued))
    if total < limit:
        return
    nobody = Admissible(0, [0] * len(queued))
    found = nobody if still_short else admissible()
    left = found.total
    left_of_last_tier = 0
    num_queued = total
    for of_tier, left_of_tier in zip(queued, found.of_tier, strict=True):
        for num_sequences in of_tier.values():
            if min(left, left_of_tier) <= 0:
                break  # the others of this tier count, however many they are
            left -= num_sequences
            left_of_tier -= num_sequences
            num_queued -= 1
        left_of_last_tier = left_of_tier
    fits = min(left, left_of_last_tier) > 0  # the further request is of the last tier
    if not fits and num_queued >= limit:
        raise UnavailableError.of_queue(num_queued, limit)
