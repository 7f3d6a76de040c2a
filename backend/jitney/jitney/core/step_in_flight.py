"""A step in flight: planned, handed to the runner, and neither updated nor reverted yet.

Without overlap there is at most one. With overlap the next step is planned while one is in flight,
so for a moment there are two. Blocks that a step in flight still reads or writes must not be
allocated again: block tables that are given up meanwhile are freed when it is complete.
"""

from dataclasses import dataclass, field

from jitney.messages import Batch


@dataclass(slots=True)
class StepInFlight:
    """One step, and the block tables to free when it is complete."""

    batch: Batch
    completes_first: bool = False
    """Whether its samples must be known before anything further can be planned."""
    leaves_out: bool = False
    """Whether it samples for sequences that a plan ahead leaves out: the host must know the sample
    before it can plan their next row."""
    target: float | None = None
    """Seconds that it should take at most, if ``policy`` limits it."""
    deferred: list[tuple[list[int], int]] = field(default_factory=list)
    """Deferred frees: tables given up while it is in flight, each with its number of computed
    tokens."""
