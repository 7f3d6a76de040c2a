"""The policies of an engine without options: one queue by rank, steps without limits, no drafts."""

from bisect import insort
from collections.abc import Iterator

from jitney.batch import Batch, Row, StepOutput
from jitney.core.policy.making_way import MakingWay
from jitney.core.policy.queue_limit import Admissible, check_queue_limit
from jitney.core.policy.running_counts import RunningCounts
from jitney.core.policy.seam import DraftChoice, StepLimits, TierTerms
from jitney.core.request import Sequence, order, remove_ordered
from jitney.messages import Submit, TierStats


class ByRank:
    """One queue, the lowest rank first. An ``Admission``."""

    def __init__(self, max_running: int, max_queued: int, making_way: MakingWay) -> None:
        self.running_counts = RunningCounts(max_running)
        self._making_way = making_way
        # Key of a queued request -> how many sequences it has.
        self._queued: dict[int, int] = {}
        self._max_queued = max_queued
        self._queue: list[Sequence] = []
        self._left_waiting = False  # whether the last step did not admit all that waited

    # ------------------------------------------------------------------ requests

    def tier_terms_of(self, message: Submit) -> TierTerms:
        return TierTerms(most_running=self.running_counts.max_running)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def check_queue(self, message: Submit) -> None:
        check_queue_limit(
            [self._queued],
            self._max_queued,
            still_short=self._left_waiting and bool(self._queue),
            admissible=self._admissible,
        )

    def _admissible(self) -> Admissible:
        total = self.running_counts.num_admissible
        return Admissible(total, of_tier=[total])

    def count_queued(self, message: Submit) -> None:
        self._queued[message.key] = message.params.n

    def count_dequeued(self, message: Submit) -> None:
        del self._queued[message.key]

    # ------------------------------------------------------------------ waiting sequences

    def add(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=order)

    def remove(self, sequence: Sequence) -> None:
        remove_ordered(self._queue, sequence)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def waiting(self) -> Iterator[Sequence]:
        assert sorted(self._queue, key=order) == self._queue, "the queue is out of order"
        return iter(self._queue)

    def first(self) -> Sequence | None:
        return self._queue[0] if self._queue else None

    # ------------------------------------------------------------------ running sequences

    def note_admitted(self, sequence: Sequence) -> None:
        self.running_counts.add(sequence)

    def note_left(self, sequence: Sequence) -> None:
        self.running_counts.remove(sequence)

    def begin_step(self, running: list[Sequence], now: float) -> None:
        """Ranks never change, and all levels are 0."""

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
        self._left_waiting = bool(self._queue)

    def stats(self, running: list[Sequence], held_back: list[int]) -> list[TierStats]:
        return []

    def reset_counts(self) -> None:
        """Nothing is counted."""


class NoLimits:
    """Nothing but the token budget limits a step. A ``StepLimits``."""

    is_active = False
    target = None

    def __init__(self) -> None:
        self.held_back: list[int] = []

    def begin(self, running: list[Sequence]) -> None:
        """Nothing is limited."""

    def is_limited(self, sequence: Sequence) -> bool:
        return False

    def seconds_for_decode(self, sequence: Sequence) -> float | None:
        return 0.0

    def note_held_back(self, sequence: Sequence) -> None:
        """Nothing is limited."""

    def count_decode(self, sequence: Sequence, seconds: float) -> None:
        """Nothing is limited."""

    def take_chunk(self, sequence: Sequence, most: int) -> int:
        return most

    def take_drafts(self, choice: DraftChoice) -> None:
        """Nothing is limited."""

    def note_step(self, target: float | None, now: float) -> None:
        """Nothing is learned."""

    def reset_counts(self) -> None:
        """Nothing is counted."""


class NoDrafts:
    """No sequence has drafts. A ``DraftPolicy``."""

    is_active = False

    def begin(self, running: list[Sequence], limits: StepLimits) -> None:
        """There is nothing to choose."""

    def has_choice(self, sequence: Sequence) -> bool:
        return False

    def choice_of(self, sequence: Sequence, most: int, most_read: int) -> DraftChoice:
        return DraftChoice()

    def waits_for_sample(self, sequence: Sequence) -> bool:
        return False

    def note_refused(self, sequence: Sequence) -> None:
        """Nothing was chosen."""

    def note_rows(self, rows: list[Row]) -> None:
        """Nothing is learned."""


class NoCosts:
    """Nobody asks what a step costs. A ``CostModel``."""

    def note_step(self, batch: Batch, output: StepOutput, seconds: float) -> None:
        """Nothing is learned."""
