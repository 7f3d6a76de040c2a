"""The limit of a queue, ``max_queued``, as both kinds of admission apply it."""

from collections.abc import Iterable

from jitney.errors import UnavailableError


def check_queue_limit(queued: Iterable[int], limit: int, *, free_slots: int) -> None:
    """Raise UnavailableError if the queue is full for a further request: if the next step cannot
    admit it, and ``limit`` or more requests are queued. Requests that the next step can admit do
    not count. A request is admitted as long as any slot is free, and takes one for each of its
    sequences.

    ``queued``: the number of sequences of each queued request, in about the order of admission.
    ``free_slots``: how many sequences the next step can admit.
    """
    num_queued = 0
    for num_sequences in queued:
        if free_slots > 0:
            free_slots -= num_sequences
        else:
            num_queued += 1
    if free_slots <= 0 and num_queued >= limit:
        raise UnavailableError.of_queue(num_queued, limit)
