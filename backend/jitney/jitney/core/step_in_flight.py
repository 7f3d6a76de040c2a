"""A step in flight: planned, handed to the runner, and neither updated nor reverted yet.

Without overlap there is at most one. With overlap the next step is planned while one is in flight,
so for a moment there are two. Blocks that a step in flight still reads or writes must not be
allocated again: block tables that are given up meanwhile are freed when it is complete.
"""

from dataclasses import dataclass, field

import msgspec

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
    gap: float | None = None
    """What limits it, see ``tiers``."""
    deferred: list[tuple[list[int], int]] = field(default_factory=list)
    """Deferred frees: tables given up while it is in flight, each with its number of computed
    tokens."""


class Counts(msgspec.Struct):
    """What happened since the counts were last set to zero, by its names in ``StepStats``."""

    batch_sequences: int = 0
    """Of complete steps; so are the next two."""
    prefill_tokens: int = 0
    generated_tokens: int = 0
    """Without surplus tokens, of sequences that had ended by then."""
    forced_tokens: int = 0
    """Of these, the ones that a grammar forced."""
    draft_rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that were right."""
    prefix_hit_tokens: int = 0
    """Found in the prefix cache, of those looked up."""
    prefix_query_tokens: int = 0
