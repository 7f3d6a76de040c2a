"""The seam between the scheduler and its policies: what it asks them, in four Protocols. (A fifth
policy, ``making_way``, is no Protocol: one class answers, with any options.)

- :class:`Admission`: who waits, in which order, who may run, and who is preempted for whom.
- :class:`StepLimits`: how many seconds a step may take, and which rows fit into them.
- :class:`DraftPolicy`: which tokens are drafted.
- :class:`CostModel`: what a step costs, learned from completed steps.

Without options, ``plain`` answers: one queue by rank, no limits, no drafts. All methods are called
from the engine's thread. Lists of running sequences are the scheduler's own, in order: a policy
reads them, and only :meth:`Admission.begin_step` changes their order. These change what a policy
knows: ``add``, ``remove``, ``reset_counts``, :meth:`DraftPolicy.choice_of`, and the methods named
``begin…``, ``take_…``, ``count_…`` and ``note_…``. The others are queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from jitney.batch import Batch, Row, StepOutput
from jitney.core.policy.making_way import MakingWay
from jitney.core.policy.running_counts import RunningCounts
from jitney.core.request import Sequence
from jitney.messages import Submit, TierStats


@dataclass(frozen=True, slots=True)
class TierTerms:
    """The tier of a request, and what follows from it for the scheduler."""

    most_running: int
    """Most sequences of its tier that may run at once; without tiers, of all."""
    tier: int = 0
    """Index among the option ``tiers``; 0 without."""
    delay_s: float = 0.0
    """Added to the rank, in seconds."""


class Admission(Protocol):
    """Who waits, in which order, who may run, and who is preempted for whom. Owns the waiting
    sequences."""

    running_counts: RunningCounts
    """How many sequences run, and how many more may. ``live`` keeps it up to date."""

    @property
    def num_queued(self) -> int:
        """Requests of which nothing has been admitted yet."""

    # -- requests

    def tier_terms_of(self, message: Submit) -> TierTerms:
        """What follows from the tier of a new request."""

    def check_queue(self, message: Submit) -> None:
        """Raise UnavailableError if the queue is full for this request."""

    def count_queued(self, message: Submit) -> None:
        """A request is queued from now on."""

    def count_dequeued(self, message: Submit) -> None:
        """A queued request is admitted, or has ended: it is queued no longer."""

    # -- waiting sequences

    def add(self, sequence: Sequence) -> None:
        """A sequence waits."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence waits no longer. A fork that runs or ends as soon as it is made never waited:
        the call is ignored."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""

    def waiting(self) -> Iterator[Sequence]:
        """All sequences that wait, for checks of integrity. Asserts that they are in order."""

    def first(self) -> Sequence | None:
        """The waiting sequence to admit next, if any."""

    # -- running sequences

    def note_admitted(self, sequence: Sequence) -> None:
        """A sequence runs from now on, on its table."""

    def note_left(self, sequence: Sequence) -> None:
        """A sequence runs no longer: it has ended, or is preempted. It still has its table."""

    def begin_step(self, running: list[Sequence], now: float) -> None:
        """A step is to be planned: set the levels of the running sequences as of ``now``, and put
        them in order."""

    def urgent(self, running: list[Sequence]) -> Sequence | None:
        """The waiting sequence, if any, that is admitted before the running sequences are planned.
        Else running sequences that come after it would take the tokens and blocks that it needs."""

    def to_preempt(
        self, urgent: Sequence, hits: list[int], running: list[Sequence]
    ) -> list[Sequence]:
        """The running sequences to preempt so that ``urgent`` can run, the last one first.
        Empty if it can run without any preemption. Empty also if it could not run even if all
        sequences that may be preempted for it were. ``hits``: the cached blocks that it would begin
        with."""

    # -- reports

    def note_planned(self, now: float) -> None:
        """A step was planned."""

    def stats(self, running: list[Sequence], held_back: list[int]) -> list[TierStats]:
        """Gauges and counts by tier; empty without tiers. ``held_back``: what
        :attr:`StepLimits.held_back` has counted."""

    def reset_counts(self) -> None:
        """Count from zero."""


@dataclass(slots=True)
class DraftChoice:
    """The drafts of one decode, and what a draft model is asked for beside them."""

    drafts: list[int] = field(default_factory=list)
    propose: int = 0
    """Tokens that the draft model is to propose for the next step."""
    most_read: int = 0
    """Most tokens of the sequence that the draft model may read before it proposes."""

    @property
    def is_empty(self) -> bool:
        """Whether the decode is a plain one."""
        return not self.drafts and not self.propose

    def ask_nothing(self) -> None:
        """The draft model is not asked."""
        self.propose = 0
        self.most_read = 0


class StepLimits(Protocol):
    """How many seconds the step that is being planned may take, and how many of them the rows so
    far take."""

    is_active: bool
    """Whether anything is ever limited. If not, the planner skips the questions about decodes."""

    held_back: list[int]
    """By tier: how many decodes the latest plan left out, plus how many chunks it cut. Both
    :meth:`begin` and :meth:`reset_counts` set these counts to 0. So a step that is planned again
    counts once."""

    @property
    def target(self) -> float | None:
        """Seconds that the planned step should take at most. None if nothing limits it."""

    def begin(self, running: list[Sequence]) -> None:
        """A step of these sequences is to be planned; it has no rows yet."""

    def is_limited(self, sequence: Sequence) -> bool:
        """Whether the decodes of a sequence are limited. They have no drafts then."""

    def seconds_for_decode(self, sequence: Sequence) -> float | None:
        """The seconds that a decode of this limited sequence takes. None: the step has not so many
        left, so the decode is to be left out."""

    def note_held_back(self, sequence: Sequence) -> None:
        """A decode of this sequence is left out."""

    def count_decode(self, sequence: Sequence, seconds: float) -> None:
        """A decode of this limited sequence is planned, and takes these seconds."""

    def take_chunk(self, sequence: Sequence, most: int) -> int:
        """Take the seconds for a chunk of at most ``most`` tokens. Returns how many tokens it may
        have. Called once for each chunk."""

    def take_drafts(self, choice: DraftChoice) -> None:
        """The decode itself is in the step in any case. Cut its drafts, and what a draft model is
        asked for, down to what the step has seconds left for, and take the seconds of what
        remains."""

    def note_step(self, target: float | None, now: float) -> None:
        """A step with this :attr:`target` is complete."""

    def reset_counts(self) -> None:
        """Count from zero."""


class DraftPolicy(Protocol):
    """Which tokens are drafted."""

    is_active: bool
    """Whether any sequence ever has drafts. If not, the planner skips the questions about them."""

    def begin(self, running: list[Sequence], limits: StepLimits) -> None:
        """A step of these sequences is to be planned: choose which of them may have drafts."""

    def has_choice(self, sequence: Sequence) -> bool:
        """Whether :meth:`begin` chose anything for a sequence. If not, :meth:`choice_of` need not
        be called."""

    def choice_of(self, sequence: Sequence, most: int, most_read: int) -> DraftChoice:
        """What a decode computes after its token: at most ``most`` drafts. If a draft model is
        asked to propose, it may read at most ``most_read`` tokens first."""

    def waits_for_sample(self, sequence: Sequence) -> bool:
        """Whether a plan ahead leaves out a sequence whose next token is still being sampled,
        because its drafts are worth more than a step."""

    def note_refused(self, sequence: Sequence) -> None:
        """The step has no budget, blocks or seconds left for the drafts that were chosen for a
        sequence."""

    def note_rows(self, rows: list[Row]) -> None:
        """A step of these rows is over: complete, or failed."""


class CostModel(Protocol):
    """Learns what a step costs."""

    def note_step(self, batch: Batch, output: StepOutput, seconds: float) -> None:
        """A step is complete. ``seconds``: how long it took, 0 if that was not measured."""


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one engine. ``choose`` makes them."""

    admission: Admission
    making_way: MakingWay
    limits: StepLimits
    drafts: DraftPolicy
    cost: CostModel

    def tier_stats(self, running: list[Sequence]) -> list[TierStats]:
        """Gauges and counts by tier; empty without tiers."""
        return self.admission.stats(running, self.limits.held_back)

    def reset_counts(self) -> None:
        """Count from zero."""
        self.admission.reset_counts()
        self.limits.reset_counts()

    def note_step(
        self,
        batch: Batch,
        output: StepOutput,
        *,
        target: float | None,
        seconds: float,
        now: float,
    ) -> None:
        """A step is complete: tell the policies that learn from it. ``target`` is what
        ``limits.target`` was when the step was planned. ``seconds``: how long the step took, 0 if
        that was not measured."""
        self.drafts.note_rows(batch.rows)
        self.cost.note_step(batch, output, seconds)
        self.limits.note_step(target, now)
