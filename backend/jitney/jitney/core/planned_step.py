"""A planned step. It is *in flight* while it is in ``LiveRequests.in_flight``: given to the runner,
and neither updated nor reverted yet.

Without overlap at most one step is in flight. With overlap the next one is planned meanwhile, so
for a moment there are two. Blocks that a step in flight still reads or writes must not be allocated
again, and neither may slots: what is given up meanwhile is freed when it is complete.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from jitney.batch import Batch
from jitney.core.request import Sequence


class DeferredFree(NamedTuple):
    """A block table, and a slot, that were given up while a step in flight could still use them."""

    table: list[int]
    num_computed: int
    """Its leading tokens that are written: ``integrity`` checks the blocks after them."""
    slot: int | None = None


class BegunSnapshot(NamedTuple):
    """A snapshot that a step makes."""

    sequence: Sequence
    end: int
    """Of its tokens that the snapshot is the past of."""
    slot: int


@dataclass(slots=True)
class PlannedStep:
    """One step, what follows from it for plans ahead, and the block tables to free when it is
    complete."""

    batch: Batch
    must_complete_first: bool = False
    """Whether no further step can be planned before the samples of this one are known: because
    forks begin with them, or because the step is a retry (see ``Scheduler.retry``)."""
    host_reads_samples: bool = False
    """Whether there are sequences whose next row the host can plan only when it knows their sample.
    A plan ahead leaves these sequences out."""
    target: float | None = None
    """Seconds that the step should take at most, if a policy limits them."""
    snapshots: list[BegunSnapshot] = field(default_factory=list)
    """They are found once the step is complete."""
    deferred: list[DeferredFree] = field(default_factory=list)
    """What to free when the step is complete."""
