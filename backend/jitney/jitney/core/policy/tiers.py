"""Latency tiers, as far as queues and running sequences go: who of which tier is admitted, and who
is preempted for whom. How much of a step each tier gets is in ``tier_limits``.

Each tier has a queue and, if the option says so, a limit for it and a cap of running sequences. A
full tier does not hold up another one. The first tier is the most urgent; those after it are
*lower*. The level of a sequence is the index of its tier until it has *aged*.

The aging time of a tier is the sum of ``aging_s`` of that tier and of all tiers between it and the
first. ``rank_s`` of a request is a point in time: arrival, plus the aging time of its tier, plus
what its priority adds. A sequence is ranked by that time, and ages at it. From then on its level is
0, that of the first tier, as far as the ``share`` of its tier goes. The running sequences of the
tier use up this share one after the other, in order: the share of all sequences that may run, and
the share of all blocks. A sequence for which too little of either is left has the level of its
tier. So a backlog that has aged neither starves nor takes everything.

The next waiting sequence to admit is *urgent* if a running sequence of a lower tier comes after it
in order. It is admitted before the running sequences are planned. Only if its tier has a target for
its first token (``ttft_ms``), running sequences of lower tiers are preempted for it.
"""

import itertools
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator

from jitney.config import EngineConfig
from jitney.core.kv_cache import KvCache
from jitney.core.policy.making_way import MakingWay
from jitney.core.policy.queue_limit import Admissible, check_queue_limit
from jitney.core.policy.running_counts import RunningCounts
from jitney.core.policy.seam import TierTerms
from jitney.core.request import Sequence, order, remove_ordered
from jitney.messages import Submit, TierStats


class TierAdmission:
    """A queue and a cap for each tier. An ``Admission``."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KvCache,
        making_way: MakingWay,
        *,
        max_running: int,
    ) -> None:
        tiers = config.tiers
        self._config = config
        self._kv = kv
        self._making_way = making_way
        self._now = 0.0  # of the last plan

        # -- what follows from the option
        # Name of a tier -> its index. None: the default tier.
        self._tier_of_name: dict[str | None, int] = {None: config.tier_of(None)}
        for index, tier in enumerate(tiers):
            self._tier_of_name[tier.name] = index
        # The aging time of each tier, in seconds. The first tier does not age.
        self._aging_s = [0.0, *itertools.accumulate(tier.aging_s for tier in tiers[1:])]

        # -- running sequences, by tier
        # A tier has a cap if its `max_running` is below the engine's.
        caps: list[int | None] = []
        for tier in tiers:
            has_cap = tier.max_running is not None and tier.max_running < max_running
            caps.append(tier.max_running if has_cap else None)
        self.running_counts = RunningCounts(max_running, caps)
        # Their blocks, without those that they got since the last plan.
        self._blocks = [0] * len(tiers)

        # -- waiting sequences and queued requests, by tier
        self._queues: list[list[Sequence]] = [[] for _ in tiers]
        # Whether the last step left any sequences of the tier waiting.
        self._left_waiting = [False] * len(tiers)
        # Key of a queued request -> how many sequences it has.
        self._queued: list[dict[int, int]] = [{} for _ in tiers]
        # Key -> arrival of the queued requests that may become overdue, in the order in which they
        # were queued.
        self._may_be_overdue: list[OrderedDict[int, float]] = [OrderedDict() for _ in tiers]
        # Since reset_counts(): requests of which no sequence was admitted within the aging time of
        # their tier.
        self._overdue = [0] * len(tiers)

    # ------------------------------------------------------------------ requests

    def tier_terms_of(self, message: Submit) -> TierTerms:
        tier = self._tier_of(message)
        most_running = self.running_counts.most_running(tier)
        return TierTerms(most_running=most_running, tier=tier, delay_s=self._aging_s[tier])

    def check_queue(self, message: Submit) -> None:
        tier = self._tier_of(message)
        # The limit of the engine counts the requests of this tier and of those above it, because
        # lower tiers do not delay it. The limit of the tier counts its own requests alone.
        self._check_limit(range(tier + 1), self._config.max_queued)
        own_limit = self._config.tiers[tier].max_queued
        if own_limit is not None:
            self._check_limit(range(tier, tier + 1), own_limit)

    def _check_limit(self, counting: range, limit: int) -> None:
        """Check a limit that counts the requests of the tiers ``counting``, for a further request
        of the last of them."""
        tier = counting[-1]
        check_queue_limit(
            [self._queued[each] for each in counting],
            limit,
            still_short=self._left_waiting[tier] and bool(self._queues[tier]),
            admissible=lambda: self._admissible(counting),
        )

    def _admissible(self, counting: range) -> Admissible:
        """How many more sequences may be admitted, in all and of each of these tiers."""
        counts = self.running_counts
        total = counts.num_admissible
        of_tier = []
        for tier in counting:
            cap = counts.caps[tier]
            of_tier.append(total if cap is None else cap - counts.admitted[tier])
        return Admissible(total, of_tier)

    def count_queued(self, message: Submit) -> None:
        tier = self._tier_of(message)
        self._queued[tier][message.key] = message.params.n
        # The first tier does not age. A request with `emitted` was queued before: its wait since
        # its arrival says nothing about this queue.
        if tier > 0 and not message.emitted:
            self._may_be_overdue[tier][message.key] = message.arrival

    def count_dequeued(self, message: Submit) -> None:
        tier = self._tier_of(message)
        del self._queued[tier][message.key]
        self._may_be_overdue[tier].pop(message.key, None)

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queued))

    def _tier_of(self, message: Submit) -> int:
        return self._tier_of_name[message.params.tier]

    # ------------------------------------------------------------------ waiting sequences

    def add(self, sequence: Sequence) -> None:
        tier = sequence.request.tier
        sequence.level = tier  # while it ran, its level may have been 0
        insort(self._queues[tier], sequence, key=order)

    def remove(self, sequence: Sequence) -> None:
        remove_ordered(self._queues[sequence.request.tier], sequence)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues))

    def waiting(self) -> Iterator[Sequence]:
        for tier, queue in enumerate(self._queues):
            for sequence in queue:
                assert sequence.request.tier == tier, "it waits in the queue of another tier"
            assert sorted(queue, key=order) == queue, "a queue is out of order"
            yield from queue

    def first(self) -> Sequence | None:
        """Each queue offers its first sequence, unless its tier is at its cap. Of these, the first
        by level and rank."""
        firsts: list[Sequence] = []
        for queue in self._queues:
            if not queue or not self._is_within_cap(queue[0]):
                continue
            firsts.append(queue[0])
        if len(firsts) > 1:
            return min(firsts, key=self._order_if_admitted)
        return firsts[0] if firsts else None

    def _is_within_cap(self, sequence: Sequence) -> bool:
        """Whether the cap of its tier lets a waiting sequence run. Whether the engine may run a
        further sequence is not asked: if it may not, others may be preempted for this one."""
        tier = sequence.request.tier
        counts = self.running_counts
        cap = counts.caps[tier]
        if cap is None:
            return True
        return cap - counts.admitted[tier] >= sequence.request.least_admissible

    # ------------------------------------------------------------------ running sequences

    def note_admitted(self, sequence: Sequence) -> None:
        self.running_counts.add(sequence)
        self._blocks[sequence.request.tier] += len(sequence.table)

    def note_left(self, sequence: Sequence) -> None:
        self.running_counts.remove(sequence)
        self._blocks[sequence.request.tier] -= len(sequence.table)

    # ------------------------------------------------------------------ levels

    def begin_step(self, running: list[Sequence], now: float) -> None:
        self._now = now
        self._count_overdue()
        self._set_levels(running)
        running.sort(key=order)

    def _set_levels(self, running: list[Sequence]) -> None:
        # By tier: the sequences so far, and their blocks.
        count = [0] * len(self._blocks)
        blocks = [0] * len(self._blocks)
        for sequence in running:
            tier = sequence.request.tier
            count[tier] += 1
            blocks[tier] += len(sequence.table)
            sequence.level = self._level(sequence, count[tier], blocks[tier])
        self._blocks = blocks

    def _level(self, sequence: Sequence, count: int, blocks: int) -> int:
        """The level of a sequence. ``count``: the running sequences of its tier that come before
        it, and itself. ``blocks``: their blocks."""
        tier = sequence.request.tier
        ages_at = sequence.request.rank_s
        if self._now < ages_at:
            return tier
        if count == 1:  # the first sequence of a tier is within its share in any case
            return 0
        share = self._config.tiers[tier].share
        if count > share * self.running_counts.max_running:
            return tier
        if blocks > share * self._kv.num_blocks:
            return tier
        return 0

    def _order_if_admitted(self, sequence: Sequence) -> tuple[int, tuple[float, int, int]]:
        """The order that a waiting sequence would have if it ran."""
        return (self._level_if_admitted(sequence), sequence.rank)

    def _level_if_admitted(self, sequence: Sequence) -> int:
        """The level that a waiting sequence would have, if it ran as the last of its tier."""
        ages_at = sequence.request.rank_s
        if self._now < ages_at:
            return sequence.level
        tier = sequence.request.tier
        count = self.running_counts.of_tier[tier] + 1
        blocks = self._blocks[tier] + self._kv.blocks_for(sequence.num_tokens)
        return self._level(sequence, count, blocks)

    # ------------------------------------------------------------------ urgent sequences

    def urgent(self, running: list[Sequence]) -> Sequence | None:
        first = self.first()
        if first is not None and self._making_way.is_urgent(first, running):
            return first
        return None

    def to_preempt(
        self, urgent: Sequence, hits: list[int], running: list[Sequence]
    ) -> list[Sequence]:
        return self._making_way.to_preempt(urgent, hits, running, self.running_counts)

    # ------------------------------------------------------------------ reports

    def note_planned(self, now: float) -> None:
        self._left_waiting = [bool(queue) for queue in self._queues]

    def _count_overdue(self) -> None:
        """Count the requests that were not admitted within the aging time of their tier. Priority
        moves the time at which a sequence ages, but not this count: it compares a wait with the
        option ``aging_s`` alone."""
        for tier, requests in enumerate(self._may_be_overdue):
            while requests:
                first = next(iter(requests))
                if self._now - requests[first] <= self._aging_s[tier]:
                    break
                del requests[first]
                self._overdue[tier] += 1

    def stats(self, running: list[Sequence], held_back: list[int]) -> list[TierStats]:
        num_running = Counter(sequence.request.tier for sequence in running)
        stats = []
        for tier, queue in enumerate(self._queues):
            oldest = min((sequence.waiting_since for sequence in queue), default=self._now)
            # If that is a fork, it may have begun to wait after the last plan.
            longest_wait = max(self._now - oldest, 0.0)
            of_tier = TierStats(
                waiting=len(queue),
                running=num_running[tier],
                held_back=held_back[tier],
                overdue=self._overdue[tier],
                oldest_s=longest_wait,
            )
            stats.append(of_tier)
        return stats

    def reset_counts(self) -> None:
        self._overdue = [0] * len(self._overdue)
