"""Where snapshots are made (see ``snapshots``): the planner asks where chunks end, and which of a
step's rows end at a border that gets one.

There are three kinds of borders:

- the end of a prompt's last full block. The same prompt begins there, and a longer one that goes on
  from it. (If that block ends the prompt, it is the one before: the last token is always computed.)
- where the cached blocks of a prompt end although no snapshot is there. So two prompts share what
  comes before, and more of them may come.
- every so many blocks, for a preempted sequence and for prompts that share less.

A chunk ends at a border of the first two kinds if it reaches one. For the third kind it ends at
most a block early.
"""

from jitney.core.live import LiveRequests
from jitney.core.planned_step import BegunSnapshot, PlannedStep
from jitney.core.request import Sequence

_LEAST_BLOCKS = 8
"""A snapshot saves at least so many blocks of a prompt. For one at a prompt's end, the tokens after
it take a step of their own: about a decode, which costs more than a few blocks of a prompt."""
_EVERY_BLOCKS = 32
"""A sequence gets a snapshot of the third kind after at least so many blocks: with blocks of 16,
after 512 tokens, which is a step's default budget on a CPU."""
_SHARE_OF_ONE = 1 / 4
"""About the share of all snapshots that one sequence makes at equal distances. After that, the
distances grow with the position, so that a long sequence does not evict the snapshots of all
others."""


class Borders:
    """Chooses borders, and begins the snapshots of a step."""

    def __init__(
        self,
        live: LiveRequests,
        *,
        least: int = _LEAST_BLOCKS,
        every: int = _EVERY_BLOCKS,
    ) -> None:
        """``least`` and ``every`` are in blocks; see above."""
        self._live = live
        self._slots = live.slots
        self._block_size = live.kv.block_size
        self._least = least * self._block_size
        self._every = every * self._block_size
        # Two or more: then a distance is at most half of the position.
        self._most_equal = 2 + int(live.slots.num_snapshots * _SHARE_OF_ONE)

    # ------------------------------------------------------------------ where

    def end_of_chunk(self, sequence: Sequence, end: int) -> int:
        """Where the sequence's next chunk is to end, which may reach ``end``."""
        if not self._slots.num_snapshots:
            return end
        start = sequence.num_planned
        for border in (sequence.cached_until, self._end_of_prompt(sequence)):
            if start < border <= end and self._is_worth_it(sequence, border):
                return border
        border = end - end % self._block_size
        if border > start and self._is_due(sequence, border):
            return border
        return end

    def _is_wanted(self, sequence: Sequence, border: int) -> bool:
        """Whether the sequence gets a snapshot at a border that it reaches."""
        if border in (sequence.cached_until, self._end_of_prompt(sequence)):
            return self._is_worth_it(sequence, border)
        return self._is_due(sequence, border)

    def _end_of_prompt(self, sequence: Sequence) -> int:
        last_position = len(sequence.prompt) - 1
        return last_position - last_position % self._block_size

    def _is_worth_it(self, sequence: Sequence, border: int) -> bool:
        return border - sequence.snapshot_at >= self._least

    def _is_due(self, sequence: Sequence, border: int) -> bool:
        """Whether the latest snapshot is far enough before this border of the third kind."""
        distance = border - sequence.snapshot_at
        return distance >= max(self._every, border // self._most_equal)

    # ------------------------------------------------------------------ in a step

    def begin_snapshots(self, step: PlannedStep) -> None:
        """Begin the snapshots of a step whose rows are planned, as far as there are slots for
        them."""
        if not self._slots.num_snapshots:
            return
        for row in step.batch.rows:
            if row.end % self._block_size:  # asked first, because most rows end within a block
                continue
            sequence = self._live.sequence_of(row)
            assert sequence is not None, "a row is planned for a sequence that has ended"
            if self._is_wanted(sequence, row.end):
                self._begin_snapshot(step, sequence, row.end)

    def _begin_snapshot(self, step: PlannedStep, sequence: Sequence, border: int) -> None:
        """Begin a snapshot of a sequence's first ``border`` tokens, unless there is one, or no slot
        for it."""
        if self._has_snapshot(sequence, border):
            sequence.snapshot_at = border
            return
        slot = self._slots.begin_snapshot()
        if slot is None:
            return
        assert sequence.slot is not None
        step.batch.snapshots.append((sequence.slot, slot))
        step.snapshots.append(BegunSnapshot(sequence, border, slot))
        sequence.snapshot_at = border

    def _has_snapshot(self, sequence: Sequence, border: int) -> bool:
        """Whether there is a snapshot already. If so, it counts as used."""
        if border > sequence.num_tokens:
            return False  # the last of these tokens is still being sampled
        key = sequence.hash_blocks(border // self._block_size, self._block_size)[-1]
        snapshots = self._slots.snapshots
        if key not in snapshots:
            return False
        snapshots.note_used(key)
        return True
