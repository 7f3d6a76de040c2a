"""Which running sequences make way for a waiting one: those of lower tiers, and with the option
``priority_preempts`` those of its own tier that have a lower priority.

Only sequences that come after the waiting one in order make way. An old request of a low priority
comes before a new one, so it does not make way, and none starves. A lower number of the parameter
``priority`` means a higher priority. Both kinds of admission ask here.
"""

from collections.abc import Iterator

from jitney.config import EngineConfig
from jitney.core.kv_cache import KvCache, WouldFree
from jitney.core.policy.running_counts import RunningCounts
from jitney.core.request import Sequence, order
from jitney.messages import Submit


class MakingWay:
    """Who makes way for whom in one engine. Keeps nothing between two calls."""

    def __init__(self, config: EngineConfig, kv: KvCache, watermark: int) -> None:
        """Admissions leave ``watermark`` blocks free, unless nothing else runs."""
        self._by_priority = config.priority_preempts
        # By tier: whether sequences of lower tiers are preempted for it.
        self._has_target = [tier.ttft_ms is not None for tier in config.tiers]
        self._any_may_be_urgent = self._by_priority or len(config.tiers) > 1
        self._kv = kv
        self._watermark = watermark

    @property
    def is_possible(self) -> bool:
        """Whether the options let any request make way."""
        return self._by_priority or any(self._has_target)

    def is_urgent(self, first: Sequence, running: list[Sequence]) -> bool:
        """Whether the first waiting sequence is admitted before the running ones are planned: if
        one of these is of a lower tier and comes after it in order, or makes way by priority."""
        if not self._any_may_be_urgent:
            return False
        tier = first.request.tier
        order_of_first = order(first)
        # From the end, where lower tiers and priorities are. So few are asked as a rule.
        for sequence in reversed(running):
            # Those that come before `first` do not make way. A running sequence of a lower tier is
            # one of them if it has aged: its level is 0, while `first`, which waits, has the level
            # of its own tier. Only if that is 0, too, rank decides.
            if order(sequence) < order_of_first:
                return False
            if sequence.request.tier > tier or self._makes_way(sequence, first):
                return True
        return False

    def to_preempt(
        self,
        urgent: Sequence,
        hits: list[int],
        running: list[Sequence],
        running_counts: RunningCounts,
    ) -> list[Sequence]:
        """The running sequences to preempt so that ``urgent`` can run, the last one first.

        Of those that make way, the last ones are taken, as few as possible. Empty if ``urgent`` can
        run at once. Empty also if it could not run even if all of them were preempted. ``hits``:
        the cached blocks that it would begin with."""
        kv = self._kv
        # The usual case: there is a slot, and blocks enough even without any hit.
        most_needed = kv.blocks_for(urgent.num_tokens) + self._watermark
        if running_counts.num_admissible > 0 and kv.num_available >= most_needed:
            return []
        kept = set(hits)
        needed = kv.blocks_for(urgent.num_tokens) - len(kept)
        free = kv.num_available_without(kept)
        if self._fits(running_counts, free, needed):
            return []
        counts_then = running_counts.copy()  # as after the preemptions so far
        # If there are blocks enough, too many sequences run. Then freed blocks are not counted:
        # that would take time.
        lacks_blocks = free < needed + self._watermark
        would_free = WouldFree(kv)
        victims: list[Sequence] = []
        for sequence in self._candidates(urgent, running):
            victims.append(sequence)
            counts_then.remove(sequence)
            if lacks_blocks:
                freed = would_free.give_up(sequence.table)
                # The urgent sequence begins with its hits. So a hit is not free for its other
                # tokens.
                free += len(set(freed) - kept)
            if self._fits(counts_then, free, needed):
                return victims
        return []

    def _fits(self, counts: RunningCounts, num_free: int, num_needed: int) -> bool:
        """Whether a sequence that needs so many blocks can run beside these running sequences."""
        spare = self._watermark if counts.num_running else 0
        return counts.num_admissible > 0 and num_free >= num_needed + spare

    def _candidates(self, urgent: Sequence, running: list[Sequence]) -> Iterator[Sequence]:
        """The running sequences that make way, the last one first."""
        order_of_urgent = order(urgent)
        for sequence in reversed(running):
            if order(sequence) < order_of_urgent:
                return  # it comes before the urgent one, and so do all that are left
            if self._makes_way(sequence, urgent):
                yield sequence

    def _makes_way(self, sequence: Sequence, urgent: Sequence) -> bool:
        """Whether a running sequence that comes after ``urgent`` is preempted for it."""
        request = sequence.request
        other = urgent.request
        return self.makes_way(request.tier, request.message, other.tier, other.message)

    def makes_way(self, tier: int, message: Submit, tier_of_urgent: int, urgent: Submit) -> bool:
        """Whether a request of a tier makes way for an urgent one that comes before it in order."""
        if tier > tier_of_urgent:
            return self._has_target[tier_of_urgent]
        if tier < tier_of_urgent or not self._by_priority:
            return False
        return message.params.priority > urgent.params.priority
