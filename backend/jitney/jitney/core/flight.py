"""A step in flight: planned, handed to the runner, and neither updated nor reverted yet.

Without overlap there is one at most, and nobody looks at it. With overlap the next step is planned
while one is in flight, and for a moment there are two. What a step still reads and writes must not
be given to anybody else: tables that are given up meanwhile stay behind its *fence*, where they
keep their references, until the step is over.
"""

from dataclasses import dataclass, field

from jitney.request import Batch


@dataclass(slots=True)
class Flight:
    """One step, and what waits for its end."""

    batch: Batch
    lands_first: bool = False
    """Whether its samples must be known before anything further can be planned."""
    fenced: list[tuple[list[int], int]] = field(default_factory=list)
    """Block tables given up while it is in flight, with the number of their computed tokens."""


@dataclass(slots=True)
class Counts:
    """What happened since the counts were last set to zero."""

    rows: int = 0
    """Of steps that are over; so are the next three."""
    tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    """Surplus tokens, of sequences that had ended by then, are not among them."""
    hit_tokens: int = 0
    """Found in the prefix cache, of those looked up."""
    query_tokens: int = 0
