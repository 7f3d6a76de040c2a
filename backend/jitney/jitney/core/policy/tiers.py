"""Latency tiers, as far as queues and running sequences go: who of which tier is admitted, and who
is preempted for whom. How much of a step each tier gets is in ``tier_limits``.

Each tier has a queue and, if the option says so, a limit for it and a cap of running sequences. A
full tier does not hold up another one. The first tier is the most urgent; those after it are
*lower*. The level of a sequence is the index of its tier until it has *aged*. The aging time of a
tier is the sum of ``aging_s`` of that tier and of all tiers between it and the first. ``rank_s`` of
a request is a point in time: arrival, plus the aging time of its tier, plus what its priority adds.
A sequence ages at that time, and is ranked by it. From then on its level is 0, that of the first
tier, as long as it and the sequences of its tier before it stay within the tier's ``share`` of
running sequences and blocks. So a backlog that has aged neither starves nor takes everything.

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
from jitney.core.policy.making_way import choose_victims
from jitney.core.policy.priorities import is_preempted_for
from jitney.core.policy.queue_limit import FreeSlots, check_queue_limit
from jitney.core.policy.seam import TierTerms
from jitney.core.request import Request, Sequence, order, remove_ordered
from jitney.messages import Submit, TierStats


class TierAdmission:
    """A queue and a cap for each tier. An ``Admission``."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KvCache,
        *,
        max_running: int,
        watermark: int,
    ) -> None:
        tiers = config.tiers
        self._config = config
        self._kv = kv
        self._watermark = watermark
        # By tier, since reset_counts(): requests of which no sequence was admitted within the aging
        # time of their tier.
        self._overdue = [0] * len(tiers)
        self.max_running = max_running
        # By tier: its `max_running` if that is below the engine's; else None.
        self._caps: list[int | None] = []
        for tier in tiers:
            has_cap = tier.max_running is not None and tier.max_running < max_running
            self._caps.append(tier.max_running if has_cap else None)
        # The aging time of each tier, in seconds. The first tier does not age.
        self._aging_s = [0.0, *itertools.accumulate(tier.aging_s for tier in tiers[1:])]
        self._queues: list[list[Sequence]] = [[] for _ in tiers]
        # By tier: key of a queued request -> how many sequences it has.
        self._queued: list[dict[int, int]] = [{} for _ in tiers]
        # By tier: key -> arrival of the queued requests that may become overdue, as they were
        # queued.
        self._may_be_overdue: list[OrderedDict[int, float]] = [OrderedDict() for _ in tiers]
        # Whether the last step left any sequences of the tier waiting.
        self._left_waiting = [False] * len(tiers)
        self._now = 0.0  # of the last plan

    # ------------------------------------------------------------------ requests

    def tier_terms_of(self, message: Submit) -> TierTerms:
        tier = self._tier_of(message)
        most_running = self._most_running(tier)
        return TierTerms(most_running=most_running, tier=tier, delay_s=self._aging_s[tier])

    def _most_running(self, tier: int) -> int:
        cap = self._caps[tier]
        return self.max_running if cap is None else cap

    def check_queue(self, message: Submit, running: list[Sequence]) -> None:
        tier = self._tier_of(message)
        # The limit of the engine counts the requests of this tier and of those above it, because
        # lower tiers do not delay it. The limit of the tier counts its own requests alone.
        self._check_limit(range(tier + 1), self._config.max_queued, running)
        own_limit = self._config.tiers[tier].max_queued
        if own_limit is not None:
            self._check_limit(range(tier, tier + 1), own_limit, running)

    def _check_limit(self, counting: range, limit: int, running: list[Sequence]) -> None:
        """Check a limit that counts the requests of the tiers ``counting``, for a further request
        of the last of them."""
        tier = counting[-1]
        check_queue_limit(
            [self._queued[each] for each in counting],
            limit,
            still_short=self._left_waiting[tier] and bool(self._queues[tier]),
            free_slots=lambda: self._free_slots(counting, running),
        )

    def count_queued(self, message: Submit) -> None:
        tier = self._tier_of(message)
        self._queued[tier][message.key] = message.params.n
        if tier > 0:  # the first tier does not age
            self._may_be_overdue[tier][message.key] = message.arrival

    def count_dequeued(self, message: Submit) -> None:
        tier = self._tier_of(message)
        del self._queued[tier][message.key]
        self._may_be_overdue[tier].pop(message.key, None)

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queued))

    def _tier_of(self, message: Submit) -> int:
        return self._config.tier_of(message.params.tier)

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

    def first(self, running: list[Sequence]) -> Sequence | None:
        """Each queue offers its first sequence, unless its tier is at its cap. Of these, the first
        by level and rank."""
        found = None
        found_order = None
        for queue in self._queues:
            if not queue:
                continue
            sequence = queue[0]
            if not self._is_within_cap(sequence, running):
                continue
            its_order = (self._level_if_admitted(sequence, running), sequence.rank)
            if found_order is None or its_order < found_order:
                found = sequence
                found_order = its_order
        return found

    def _is_within_cap(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether the cap of its tier lets a waiting sequence run. Whether the engine may run a
        further sequence is not asked: if it may not, others may be preempted for this one."""
        tier = sequence.request.tier
        cap = self._caps[tier]
        if cap is None:
            return True
        return cap - self.admitted(running)[tier] >= sequence.request.slots_needed

    # ------------------------------------------------------------------ running sequences

    def num_free_slots(self, running: list[Sequence]) -> int:
        return self.max_running - self.num_counted(self.admitted(running))

    def num_forks_due(self, running: list[Sequence]) -> int:
        # A tier never runs more sequences than its cap, so `num_counted` leaves out forks only.
        # Without the running sequences, the forks that count are left.
        return self.num_counted(self.admitted(running)) - len(running)

    def _free_slots(self, counting: range, running: list[Sequence]) -> FreeSlots:
        """How many more sequences may be admitted, in all and of each of these tiers."""
        admitted = self.admitted(running)
        total = self.max_running - self.num_counted(admitted)
        of_tier = []
        for tier in counting:
            cap = self._caps[tier]
            of_tier.append(total if cap is None else cap - admitted[tier])
        return FreeSlots(total, of_tier)

    def admitted(self, running: list[Sequence]) -> list[int]:
        """By tier: its running sequences, and the forks that their requests have yet to make."""
        admitted = [0] * len(self._caps)
        for sequence in running:
            request = sequence.request
            admitted[request.tier] += 1 + request.num_forks_due
        return admitted

    def num_counted(self, admitted: list[int]) -> int:
        """How many of the ``admitted`` sequences count towards ``max_running``. Forks beyond the
        cap of their tier do not count: they will wait, and keep no other sequence from running. A
        tier without a cap counts in full, so the sum may exceed ``max_running``."""
        counted = 0
        for cap, count in zip(self._caps, admitted, strict=True):
            if cap is not None:
                count = min(count, cap)
            counted += count
        return counted

    def is_full(self, request: Request, running: list[Sequence]) -> bool:
        if len(running) >= self.max_running:
            return True
        of_tier = [sequence for sequence in running if sequence.request.tier == request.tier]
        return len(of_tier) >= self._most_running(request.tier)

    # ------------------------------------------------------------------ levels

    def begin_step(self, running: list[Sequence], now: float) -> None:
        self._now = now
        self._count_overdue()
        self._set_levels(running)
        running.sort(key=order)

    def _set_levels(self, running: list[Sequence]) -> None:
        # By tier: the sequences so far, and their blocks.
        count = [0] * len(self._caps)
        blocks = [0] * len(self._caps)
        for sequence in running:
            tier = sequence.request.tier
            count[tier] += 1
            blocks[tier] += len(sequence.table)
            sequence.level = self._level(sequence, count[tier], blocks[tier])

    def _level(self, sequence: Sequence, count: int, blocks: int) -> int:
        """The level of a sequence. ``count``: the running sequences of its tier that come before
        it, and itself. ``blocks``: their blocks."""
        request = sequence.request
        ages_at = request.rank_s
        if self._now < ages_at:
            return request.tier
        share = self._config.tiers[request.tier].share
        within_count = count <= share * self.max_running
        within_blocks = blocks <= share * self._kv.num_blocks
        # The first sequence of a tier is within its share in any case.
        if count == 1 or (within_count and within_blocks):
            return 0
        return request.tier

    def _level_if_admitted(self, sequence: Sequence, running: list[Sequence]) -> int:
        """The level that a waiting sequence would have after the running ones of its tier."""
        ages_at = sequence.request.rank_s
        if self._now < ages_at:
            return sequence.level
        count = 1
        blocks = self._kv.blocks_for(sequence.num_tokens)
        for other in running:
            if other.request.tier == sequence.request.tier:
                count += 1
                blocks += len(other.table)
        return self._level(sequence, count, blocks)

    # ------------------------------------------------------------------ urgent sequences

    def urgent(self, running: list[Sequence]) -> Sequence | None:
        """The first to be admitted, if a running sequence of a lower tier comes after it in
        order, or one of its own tier that makes way by priority."""
        first = self.first(running)
        if first is None:
            return None
        # Even if `first` has aged, it has the level of its tier here (see `add`). Running sequences
        # that have aged have level 0. So they come before it, unless it is of the first tier: then
        # rank decides.
        for sequence in running:
            is_lower = sequence.request.tier > first.request.tier
            if is_lower and order(sequence) > order(first):
                return first
            if self._makes_way_by_priority(sequence, first):
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
            places=_Places(self, running),
            kv=self._kv,
            watermark=self._watermark,
        )

    def _candidates(self, urgent: Sequence, running: list[Sequence]) -> Iterator[Sequence]:
        """The running sequences that make way for ``urgent`` and come after it in order, the last
        one first: those of lower tiers if its tier has a target for its first token, and with
        ``priority_preempts`` those of its own tier that have a lower priority."""
        tier = urgent.request.tier
        for sequence in reversed(running):
            if order(sequence) < order(urgent):
                return  # it comes before the urgent one, and so do all that are left
            if sequence.request.tier > tier:
                if self._config.tiers[tier].ttft_ms is not None:
                    yield sequence
            elif self._makes_way_by_priority(sequence, urgent):
                yield sequence

    def _makes_way_by_priority(self, sequence: Sequence, urgent: Sequence) -> bool:
        if not self._config.priority_preempts or sequence.request.tier != urgent.request.tier:
            return False
        return is_preempted_for(sequence, urgent)

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


class _Places:
    """The places of all tiers, for ``choose_victims``."""

    def __init__(self, admission: TierAdmission, running: list[Sequence]) -> None:
        self._admission = admission
        self._admitted = admission.admitted(running)

    def give_up(self, sequence: Sequence) -> None:
        request = sequence.request
        self._admitted[request.tier] -= 1 + request.num_forks_due

    def any_is_free(self) -> bool:
        return self._admission.num_counted(self._admitted) < self._admission.max_running
