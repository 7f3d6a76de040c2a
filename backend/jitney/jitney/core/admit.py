"""Admission: a waiting sequence gets what it holds while it runs, blocks for all of its tokens and,
if its model has slots, a slot. Called by the planner, which decides who is asked and when.

What of its prefix is cached it need not compute. In a model with slots that is what comes before a
snapshot whose blocks are cached: its slot is a copy of the snapshot then.
"""

from jitney.config import EngineConfig
from jitney.core.live import LiveRequests
from jitney.core.request import Request, Sequence
from jitney.core.step_plan import StepPlan


class Admitter:
    """Admits sequences of the live requests, one at a time."""

    def __init__(self, config: EngineConfig, live: LiveRequests, watermark: int) -> None:
        """Admissions leave ``watermark`` blocks free."""
        self._live = live
        self._block_size = config.block_size
        self._caching = config.prefix_caching
        self._preempts = config.eviction == "preempt"
        self._watermark = watermark

    def hits(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a waiting sequence would begin with."""
        blocks = self._cached_blocks(sequence)
        slots = self._live.slots
        if slots.is_used:
            count = slots.snapshots.longest(sequence.hashes, len(blocks))
            return blocks[:count]
        return blocks

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The cached blocks of the longest prefix that it could begin with, if there is a snapshot
        where it needs one."""
        if not self._reads_cache(sequence.request):
            return []
        # At least one token must be computed, to have logits to sample from.
        usable = (sequence.num_tokens - 1) // self._block_size
        return self._live.kv.find(sequence.hash_blocks(usable, self._block_size))

    def admit(self, plan: StepPlan, sequence: Sequence, hits: list[int], spare: int = 0) -> bool:
        """Run a waiting sequence, with blocks for all of its tokens: first ``hits``, the cached
        blocks that it begins with, then new ones. If too few blocks are free, or no slot is,
        returns False and changes nothing.

        If anything runs, blocks must stay free: ``spare``, or the watermark if that is more."""
        live = self._live
        request = sequence.request
        kv = live.kv
        key = None  # of the snapshot that it begins with
        if live.slots.is_used and hits:
            key = sequence.hashes[len(hits) - 1]
        if not self._has_slot(key):
            # Every running sequence has a slot of its own. But a step in flight, or a pending copy,
            # may still hold the slot of a sequence that has ended, or of a snapshot.
            return False
        if not self._preempts and kv.pending_copies():
            # Until this step has made a copy, its source is held beside all reserved blocks.
            return False
        reserve = sequence.reserved_blocks
        if not request.num_running:
            reserve += request.reserved_blocks
        if live.reserved_blocks + reserve > kv.num_blocks:
            return False
        cached_until = 0
        if live.slots.num_snapshots and not sequence.output:
            cached_until = len(self._cached_blocks(sequence)) * kv.block_size
        num_new = kv.blocks_for(sequence.num_tokens) - len(hits)
        # If nothing runs, no blocks will be freed. So the sequence must not wait for blocks that it
        # does not need itself.
        stay_free = 0
        if live.running:
            stay_free = max(self._watermark, spare)
        table = kv.allocate(hits, num_new, spare=stay_free)
        if table is None:
            # When a sequence ends, its reservation is given up at once. But its blocks are freed
            # only when no step in flight uses them. So in a plan ahead a reserved block may not be
            # free yet.
            assert self._preempts or plan.ahead, "a reserved block is not free"
            return False
        num_cached = len(hits) * kv.block_size
        request.set_prompt_counts(sequence, num_cached)
        sequence.decodes_from = sequence.num_tokens
        if sequence.output:  # see the docstring of decodes_from
            sequence.decodes_from -= 1
        sequence.slot = self._take_slot(key)
        sequence.cached_until = cached_until
        live.admit(sequence, table, num_cached, plan.now)
        if self._reads_cache(request):
            # A preempted sequence looks up its output, too, but only the prompt is counted.
            prompt_size = len(sequence.prompt)
            plan.counts.prefix_query_tokens += prompt_size
            plan.counts.prefix_hit_tokens += min(num_cached, prompt_size)
        return True

    def _has_slot(self, key: bytes | None) -> bool:
        """Whether :meth:`_take_slot` would get one, if slots are needed."""
        slots = self._live.slots
        if key is None:
            return not slots.is_short
        return slots.can_copy(slots.snapshots.slot_of(key))

    def _take_slot(self, key: bytes | None) -> int | None:
        """A slot that is to become a copy of the snapshot of ``key``; an empty one without. None if
        the model has no slots."""
        slots = self._live.slots
        if key is None:
            return slots.take()
        slots.snapshots.note_used(key)
        return slots.fork(slots.snapshots.slot_of(key))

    def _reads_cache(self, request: Request) -> bool:
        return self._caching and request.reads_cache
