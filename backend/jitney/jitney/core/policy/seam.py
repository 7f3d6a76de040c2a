"""The seam between the scheduler and its policies: what it asks them, in four Protocols.

- :class:`Admission`: who waits, in which order, who may run, and who makes way.
- :class:`StepLimits`: what limits a step, and who may be in it.
- :class:`DraftPolicy`: which tokens are drafted.
- :class:`CostModel`: what was learned from a completed step.

Without options, ``plain`` answers: one queue by rank, no limits, no drafts. All methods are called
from the engine's thread. Lists of running sequences are the scheduler's own, by rank: a policy
reads them, and only :meth:`Admission.sort` changes their order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from jitney.core.request import Request, Sequence
from jitney.messages import Batch, Row, StepOutput, Submit, TierStats


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a request is queued and run."""

    most_running: int
    """Most sequences of its tier, or of all, that may run at once."""
    tier: int = 0
    """Index among the option ``tiers``; 0 without."""
    delay_s: float = 0.0
    """Its sequences rank so many seconds later than by priority and arrival."""


class Admission(Protocol):
    """Who waits, in which order, who may run, and who makes way. Owns the waiting sequences."""

    max_running: int
    """Most sequences that may run."""

    @property
    def num_queued(self) -> int:
        """Requests of which nothing has been admitted yet."""

    # -- requests

    def terms_of(self, message: Submit) -> Terms:
        """The terms of a new request."""

    def check_queue(self, message: Submit, running: list[Sequence]) -> None:
        """Raise UnavailableError if the queue is full for this request."""

    def count_queued(self, message: Submit) -> None:
        """A request is queued from now on."""

    def count_dequeued(self, message: Submit) -> None:
        """A queued request is admitted, or ends."""

    # -- waiting sequences

    def add(self, sequence: Sequence) -> None:
        """A sequence waits."""

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer. A fork that has just been made never waited, and is ignored."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""

    def waiting(self) -> Iterator[Sequence]:
        """All of them, for checks of integrity: asserts that their order is right."""

    def first(self, running: list[Sequence]) -> Sequence | None:
        """The waiting sequence to admit next."""

    # -- running sequences

    def places(self, running: list[Sequence]) -> int:
        """How many more sequences may be admitted beside ``running`` and the forks that are due of
        these. Below 0 by the forks of one request that find no place: these will wait."""

    def is_full(self, request: Request, running: list[Sequence]) -> bool:
        """Whether no further sequence of this request may run."""

    def sort(self, running: list[Sequence], now: float) -> None:
        """A step is to be planned: sort what runs by the ranks of this moment."""

    def urgent(self, running: list[Sequence]) -> Sequence | None:
        """The waiting sequence, if any, to admit before running ones have their rows."""

    def in_the_way(
        self, first: Sequence, hits: list[int], running: list[Sequence]
    ) -> list[Sequence]:
        """Running sequences that make way for an urgent one, the last by rank first. None of them
        if it can run without that, or cannot run anyway. ``hits``: the cached blocks that it would
        begin with."""

    # -- reports

    def note_planned(self, now: float) -> None:
        """A step was planned."""

    def stats(self, running: list[Sequence]) -> list[TierStats]:
        """Gauges and counts by tier; empty without tiers."""

    def reset_counts(self) -> None:
        """Count from zero."""


@dataclass(slots=True)
class DraftChoice:
    """The drafts of one decode, and what a draft model is asked for beside them."""

    drafts: list[int] = field(default_factory=list)
    propose: int = 0
    """Tokens that the draft model is to propose for the next step."""
    read: int = 0
    """Tokens that it may compute before, at most."""

    @property
    def is_empty(self) -> bool:
        """Whether the decode is a plain one."""
        return not self.drafts and not self.propose

    def ask_nothing(self) -> None:
        """The draft model is not asked."""
        self.propose = 0
        self.read = 0


class StepLimits(Protocol):
    """What limits the step that is being planned, and what of it is taken."""

    is_active: bool
    """Whether anything is ever limited. If not, the planner need not ask for each row."""

    @property
    def target(self) -> float | None:
        """Of the step that is planned: seconds that it should take at most. None if nothing limits
        it."""

    def begin(self, running: list[Sequence]) -> None:
        """A step of these sequences is to be planned; it has no rows yet."""

    def limits(self, sequence: Sequence) -> bool:
        """Whether the decodes of a sequence are limited. They have no drafts then."""

    def may_decode(self, sequence: Sequence) -> bool:
        """Whether the step has room for a decode of this sequence."""

    def count_decode(self, sequence: Sequence) -> None:
        """Its row is planned."""

    def limit_chunk(self, sequence: Sequence, most: int) -> int:
        """Plan a chunk of ``most`` tokens, or of as many as the step has room for: how many."""

    def limit_drafts(self, choice: DraftChoice) -> None:
        """Plan the drafts of a decode, cut down to what the step has room for."""

    def note_step(self, target: float | None, now: float) -> None:
        """A step with this :attr:`target` is complete."""


class DraftPolicy(Protocol):
    """Which tokens are drafted."""

    is_active: bool
    """Whether any sequence ever has drafts. If not, the planner need not ask for each row."""

    def begin(self, running: list[Sequence], limits: StepLimits) -> None:
        """A step of these sequences is to be planned: choose who may have drafts."""

    def choice_of(self, sequence: Sequence, most: int, most_read: int) -> DraftChoice:
        """What a decode computes behind its token: at most so many drafts and, if a draft model
        is asked, tokens that this reads before."""

    def waits_for_sample(self, sequence: Sequence) -> bool:
        """Whether a plan ahead leaves out a sequence whose next token is still being sampled,
        because its drafts are worth more than a step."""

    def note_refused(self, sequence: Sequence) -> None:
        """The step has no room for what was chosen."""

    def note_rows(self, rows: list[Row]) -> None:
        """A step of these rows is complete, or raised."""


class CostModel(Protocol):
    """Learns what a step costs."""

    def note_step(self, batch: Batch, output: StepOutput, seconds: float) -> None:
        """A step is complete. ``seconds`` that it took; 0 if that was not measured."""
