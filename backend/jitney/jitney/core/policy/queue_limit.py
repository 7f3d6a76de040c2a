"""The limit of a queue, ``max_queued``, as both kinds of admission apply it."""

from collections.abc import Callable, Mapping, Sequence

from jitney.errors import UnavailableError


def check_queue_limit(
    queued: Sequence[Mapping[int, int]],
    limit: int,
    *,
    still_short: bool,
    num_free_slots: Callable[[], int],
) -> None:
    """Raise UnavailableError if the queue is full for a further request: if the next step cannot
    admit it, and ``limit`` or more requests are queued. Requests that the next step can admit do
    not count. A request is admitted as long as any slot is free, and takes one for each of its
    sequences.

    ``queued``: for each tier that counts, key of a queued request -> its number of sequences, in
    about the order of admission. ``still_short``: sequences waited after the last step was planned,
    and some still wait. Then blocks or budget are short, and the next step may admit none.
    ``num_free_slots``: tells how many sequences the next step could admit otherwise. It is called
    only if the limit may be reached.
    """
    if sum(map(len, queued)) < limit:
        return
    free_slots = 0 if still_short else num_free_slots()
    num_queued = 0
    for of_tier in queued:
        for num_sequences in of_tier.values():
            if free_slots > 0:
                free_slots -= num_sequences
            else:
                num_queued += 1
    if free_slots <= 0 and num_queued >= limit:
        raise UnavailableError.of_queue(num_queued, limit)
