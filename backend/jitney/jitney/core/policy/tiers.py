"""Latency tiers, as far as queues and places go: who of which tier is admitted, and who makes way.
How much of a step each tier gets is in ``pace``.

Each tier has a queue and, if the option says so, a limit for it and a cap of running sequences. A
full tier does not hold up another one. Tiers are ordered by level: the level of a sequence is the
index of its tier until it has *aged*, that is, until it is older than ``aging_s`` of its tier and
of those between it and the first, added up. Then its level is 0, that of the first tier, as long as
the sequences of its tier stay within the tier's share of running sequences and blocks. So a backlog
that has aged neither starves nor takes everything.

A tier with a target for its first token is urgent: for its waiting sequences, running ones of lower
tiers are preempted.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from jitney.config import EngineConfig
from jitney.core.kv_cache import KvCache
from jitney.core.policy.seam import Terms
from jitney.core.request import Request, Sequence, by_rank, remove_ranked
from jitney.errors import UnavailableError
from jitney.messages import Submit, TierStats


@dataclass(slots=True)
class TierCounts:
    """What has been counted since the scheduler's counts were reset, by tier."""

    held_back: list[int]
    """Decodes left out and chunks cut, so that a step was within a target."""
    overdue: list[int]
    """Requests that aged before any of their sequences was admitted."""

    def reset(self) -> None:
        """Count from zero."""
        self.held_back = [0] * len(self.held_back)
        self.overdue = [0] * len(self.overdue)


class TierAdmission:
    """A queue and a cap for each tier. An ``Admission``."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KvCache,
        *,
        max_running: int,
        watermark: int,
        counts: TierCounts,
    ) -> None:
        tiers = config.tiers
        self._config = config
        self._kv = kv
        self._watermark = watermark
        self._counts = counts
        self.max_running = max_running
        self._caps = [min(one.max_running or max_running, max_running) for one in tiers]
        # Seconds after which the requests of each tier have aged.
        self._aging = [0.0, *accumulate(one.aging_s for one in tiers[1:])]
        self._queues: list[list[Sequence]] = [[] for _ in tiers]
        self._queued: list[set[int]] = [set() for _ in tiers]  # keys
        # Arrival and key of the requests that may become overdue, the first to arrive first.
        self._aging_requests: list[deque[tuple[float, int]]] = [deque() for _ in tiers]
        # Whether the last step did not admit all that waited.
        self._left_waiting = [False] * len(tiers)
        self._now = 0.0  # of the last plan

    # ------------------------------------------------------------------ requests

    def terms_of(self, message: Submit) -> Terms:
        tier = self._tier_of(message)
        return Terms(most_running=self._caps[tier], tier=tier, delay_s=self._aging[tier])

    def check_queue(self, message: Submit, running: list[Sequence]) -> None:
        tier = self._tier_of(message)
        # The limit of the engine counts the requests of this tier and of those above it, because
        # lower tiers do not delay it. The limit of the tier counts its own requests alone.
        not_below = sum(map(len, self._queued[: tier + 1]))
        self._check_limit(tier, not_below, self._config.max_queued, running)
        own_limit = self._config.tiers[tier].max_queued
        if own_limit is not None:
            self._check_limit(tier, len(self._queued[tier]), own_limit, running)

    def _check_limit(self, tier: int, queued: int, most: int, running: list[Sequence]) -> None:
        if queued < most:
            return
        # Requests that the next step will admit do not count. But if the last step left sequences
        # of the tier waiting, the next one may admit none.
        held_up = self._left_waiting[tier] and self._queues[tier]
        if not held_up:
            queued -= max(self._places_of(tier, running), 0)
        if queued >= most:
            raise UnavailableError.of_queue(queued, most)

    def count_queued(self, message: Submit) -> None:
        tier = self._tier_of(message)
        self._queued[tier].add(message.key)
        if tier > 0:  # the first tier does not age
            self._aging_requests[tier].append((message.arrival, message.key))

    def count_dequeued(self, message: Submit) -> None:
        self._queued[self._tier_of(message)].remove(message.key)

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queued))

    def _tier_of(self, message: Submit) -> int:
        return self._config.tier_of(message.params.tier)

    # ------------------------------------------------------------------ waiting sequences

    def add(self, sequence: Sequence) -> None:
        tier = sequence.request.tier
        sequence.level = tier  # while it ran, its level may have been 0
        insort(self._queues[tier], sequence, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        remove_ranked(self._queues[sequence.request.tier], sequence)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues))

    def waiting(self) -> Iterator[Sequence]:
        for tier, queue in enumerate(self._queues):
            assert all(one.request.tier == tier for one in queue), "it waits in another queue"
            assert sorted(queue, key=by_rank) == queue, "a queue is out of order"
            yield from queue

    def first(self, running: list[Sequence]) -> Sequence | None:
        """Of the first sequences of all queues, the first by level and rank that its tier's cap
        lets run."""
        found = None
        found_rank = None
        for queue in self._queues:
            if not queue:
                continue
            sequence = queue[0]
            if not self._finds_place(sequence, running):
                continue
            rank = (self._level_if_admitted(sequence, running), sequence.rank)
            if found_rank is None or rank < found_rank:
                found = sequence
                found_rank = rank
        return found

    def _finds_place(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether the cap of its tier lets a waiting sequence run."""
        tier = sequence.request.tier
        if self._caps[tier] == self.max_running:  # no cap
            return True
        return self._places_of(tier, running) >= sequence.request.places_needed

    # ------------------------------------------------------------------ places

    def places(self, running: list[Sequence]) -> int:
        return self._places_beside(self._admitted(running))

    def _places_of(self, tier: int, running: list[Sequence]) -> int:
        """How many more sequences of a tier may be admitted. Below 0 as :meth:`places`."""
        admitted = self._admitted(running)
        places = self._places_beside(admitted)
        cap = self._caps[tier]
        if cap == self.max_running:
            return places
        return min(places, cap - admitted[tier])

    def _admitted(self, running: list[Sequence]) -> list[int]:
        """By tier: running sequences, and the forks that these have yet to make."""
        admitted = [0] * len(self._caps)
        for one in running:
            admitted[one.request.tier] += 1 + one.request.forks_due
        return admitted

    def _places_beside(self, admitted: list[int]) -> int:
        """How many more sequences may run beside so many of each tier."""
        places = self.max_running
        for cap, count in zip(self._caps, admitted, strict=True):
            # Forks beyond the cap of their tier will wait, and keep nobody else from running. A
            # tier without a cap counts in full: its forks may make the result negative.
            if cap < self.max_running:
                count = min(count, cap)
            places -= count
        return places

    def is_full(self, request: Request, running: list[Sequence]) -> bool:
        if len(running) >= self.max_running:
            return True
        of_tier = sum(one.request.tier == request.tier for one in running)
        return of_tier >= self._caps[request.tier]

    # ------------------------------------------------------------------ levels

    def sort(self, running: list[Sequence], now: float) -> None:
        self._now = now
        self._count_overdue()
        count = [0] * len(self._caps)
        blocks = [0] * len(self._caps)
        for sequence in running:
            tier = sequence.request.tier
            count[tier] += 1
            blocks[tier] += len(sequence.table)
            sequence.level = self._level(sequence, count[tier], blocks[tier])
        running.sort(key=by_rank)

    def _level(self, sequence: Sequence, count: int, blocks: int) -> int:
        """The level of a sequence. ``count`` and ``blocks`` are of the running sequences of its
        tier up to this one, and of this one."""
        request = sequence.request
        if request.aged_arrival > self._now:
            return request.tier
        share = self._config.tiers[request.tier].share
        within_count = count <= share * self.max_running
        within_blocks = blocks <= share * self._kv.num_blocks
        # The first sequence of a tier is within its share in any case.
        if count == 1 or (within_count and within_blocks):
            return 0
        return request.tier

    def _level_if_admitted(self, sequence: Sequence, running: list[Sequence]) -> int:
        """The level that a waiting sequence would have beside those of its tier that run."""
        if sequence.request.aged_arrival > self._now:
            return sequence.level
        blocks = self._kv.blocks_for(sequence.num_tokens)
        count = 1
        for one in running:
            if one.request.tier == sequence.request.tier:
                count += 1
                blocks += len(one.table)
        return self._level(sequence, count, blocks)

    # ------------------------------------------------------------------ who makes way

    def urgent(self, running: list[Sequence]) -> Sequence | None:
        """The first to be admitted, if a running sequence of a lower tier ranks behind it. Admitted
        before the step is planned, it has its prompt computed before those of lower tiers."""
        first = self.first(running)
        if first is None:
            return None
        for one in running:
            if one.request.tier > first.request.tier and by_rank(one) > by_rank(first):
                return first
        return None

    def in_the_way(
        self, first: Sequence, hits: list[int], running: list[Sequence]
    ) -> list[Sequence]:
        if self._config.tiers[first.request.tier].ttft_ms is None:
            return []
        kv = self._kv
        kept = set(hits)
        needed = kv.blocks_for(first.num_tokens) - len(kept)
        free = kv.num_free_but(kept)
        admitted = self._admitted(running)
        # Blocks that several victims share are free once all of these have given them up.
        given_up: Counter[int] = Counter()
        victims: list[Sequence] = []

        def fits() -> bool:
            """Whether ``first`` can run once the victims so far are preempted."""
            # If nothing runs then, no blocks need to stay free.
            spare = self._watermark if len(victims) < len(running) else 0
            return self._places_beside(admitted) > 0 and free >= needed + spare

        for sequence in reversed(running):
            if fits() or by_rank(sequence) < by_rank(first):
                break  # those before it rank before `first`, too
            request = sequence.request
            if request.tier <= first.request.tier:
                continue
            victims.append(sequence)
            admitted[request.tier] -= 1 + request.forks_due
            freed = kv.freed_by(sequence.table, given_up)
            free += len(set(freed) - kept)
        if not fits():
            return []
        return victims

    # ------------------------------------------------------------------ reports

    def note_planned(self, now: float) -> None:
        self._left_waiting = [bool(queue) for queue in self._queues]

    def _count_overdue(self) -> None:
        """Count the requests that were not admitted while they aged."""
        for tier, requests in enumerate(self._aging_requests):
            while requests:
                arrival, key = requests[0]
                if self._now - arrival <= self._aging[tier]:
                    break
                requests.popleft()
                if key in self._queued[tier]:
                    self._counts.overdue[tier] += 1

    def stats(self, running: list[Sequence]) -> list[TierStats]:
        by_tier = Counter(one.request.tier for one in running)
        stats = []
        for tier, queue in enumerate(self._queues):
            oldest = min((one.waiting_since for one in queue), default=self._now)
            of_tier = TierStats(
                waiting=len(queue),
                running=by_tier[tier],
                held_back=self._counts.held_back[tier],
                overdue=self._counts.overdue[tier],
                oldest_s=self._now - oldest,
            )
            stats.append(of_tier)
        return stats

    def reset_counts(self) -> None:
        self._counts.reset()
