"""Option ``priority_preempts``: a waiting request preempts running ones of a lower priority.

Without the option a request of high priority is the next to be admitted, but waits until a place
is free. The parameter ``priority`` is the higher the lower its number is.
"""

from collections.abc import Iterator

from jitney.core.kv_cache import KvCache
from jitney.core.policy.making_way import choose_victims
from jitney.core.policy.plain import ByRank
from jitney.core.request import Sequence, order


def is_preempted_for(sequence: Sequence, urgent: Sequence) -> bool:
    """Whether a running sequence may be preempted for a waiting one: if its request has a lower
    priority, and it comes after the waiting one in order. An old request of a low priority comes
    before a new one, so that none starves."""
    own = sequence.request.message.params.priority
    of_urgent = urgent.request.message.params.priority
    return own > of_urgent and order(sequence) > order(urgent)


class PriorityAdmission(ByRank):
    """One queue by rank, from which the first request may preempt others. An ``Admission``."""

    def __init__(self, max_running: int, max_queued: int, kv: KvCache, watermark: int) -> None:
        super().__init__(max_running, max_queued)
        self._kv = kv
        self._watermark = watermark

    def urgent(self, running: list[Sequence]) -> Sequence | None:
        first = self.first(running)
        if first is None:
            return None
        if any(is_preempted_for(sequence, first) for sequence in running):
            return first
        return None

    def to_preempt(
        self, urgent: Sequence, hits: list[int], running: list[Sequence]
    ) -> list[Sequence]:
        return choose_victims(
            urgent,
            hits,
            self._candidates(urgent, running),
            num_running=len(running),
            places=_Places(self.num_free_slots(running)),
            kv=self._kv,
            watermark=self._watermark,
        )

    def _candidates(self, urgent: Sequence, running: list[Sequence]) -> Iterator[Sequence]:
        """The running sequences that may be preempted, the last one first."""
        for sequence in reversed(running):
            if is_preempted_for(sequence, urgent):
                yield sequence


class _Places:
    def __init__(self, free: int) -> None:
        self._free = free

    def give_up(self, sequence: Sequence) -> None:
        self._free += 1 + sequence.request.num_forks_due

    def any_is_free(self) -> bool:
        return self._free > 0
