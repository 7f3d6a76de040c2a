"""What a step costs: seconds as a sum over the step's shape, with weights learned from steps.

    seconds = w0 + w1 * any_chunk + w2 * tokens + w3 * samples + w4 * context
              + five more terms for drafts and for a draft model

There are two fits. The weights of drafting are fitted to steps with drafts or a draft model, the
*plain* weights to all other steps, the plain ones. So the prediction for a plain step depends on
plain steps alone. In each plain step the weights of drafts fade. Otherwise, if something else
delayed the first step with drafts, drafts would seem too dear ever to be tried again.

Each fit is made after 1, 2, 4, … 64 of its steps. Then its weights stay until predictions are off:
until the latest 16 steps of one kind took in the mean 3 % more or less than was predicted. Only
steps since the last fit count for that. Plain steps are of two kinds: with chunks and without. So
are the other steps: with drafts and without.

A fit minimizes the squared *relative* error over the last 256 steps, so a step that something else
delayed changes little. A weight that these steps do not determine stays as it was: a batch that is
full for an hour does not forget what a step of one row takes. If two fields always grow together,
such as tokens and samples while all rows are decodes, their weights share the seconds. No weight is
negative.

No clock here: the caller measures the seconds.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from jitney.batch import Batch, RowOutput, StepOutput
from jitney.core.policy.least_squares import Point, Vector, dot, fit

_OFF = 0.03  # mean relative error above which weights are fitted anew
_CHECKED = 16  # latest steps of whose errors that is the mean
_WARM_UP = 64  # first steps, in which weights are fitted whenever their number has doubled
_RECENT = 256  # latest steps, to which weights are fitted
_PRECISION = 1e-3  # how much the old value of a weight counts in a fit; a measured step counts 1
_FADING = 1 / 400  # part of a draft's weight that a plain step takes away


class StepShape(NamedTuple):
    """What a step's seconds depend on. The first five fields are the *plain* ones, in which drafts
    do not count. The other five describe drafting. :class:`Weights` has the same order."""

    steps: float = 1.0
    """1: what a step takes in any case."""
    any_chunk: float = 0.0
    """1 if any row has more than one token."""
    tokens: float = 0.0
    samples: float = 0.0
    context: float = 0.0
    """Tokens of the contexts of all rows."""
    drafting_rows: float = 0.0
    """Rows with drafts."""
    draft_tokens: float = 0.0
    """Drafts of all rows."""
    asking_rows: float = 0.0
    """Rows for which a draft model reads any token."""
    model_passes: float = 0.0
    """Passes of the draft model to propose: the most tokens that it proposes for a row."""
    tokens_read: float = 0.0
    """Tokens of sequences that the draft model reads before it proposes."""

    @classmethod
    def of(cls, batch: Batch, outputs: Sequence[RowOutput] = ()) -> "StepShape":
        """The shape of a step. Without ``outputs``, what a draft model does is left out."""
        rows = batch.rows
        drafts = sum(row.drafts for row in rows)
        tokens = batch.num_tokens - drafts
        return cls(
            any_chunk=1.0 if tokens > len(rows) else 0.0,
            tokens=tokens,
            samples=sum(len(row.sample) for row in rows),
            context=sum(row.end for row in rows) - drafts,
            drafting_rows=len([row for row in rows if row.drafts]),
            draft_tokens=drafts,
            asking_rows=len([output for output in outputs if output.read]),
            model_passes=max((len(output.proposal) for output in outputs), default=0),
            tokens_read=sum(output.read for output in outputs),
        )


class Weights(NamedTuple):
    """What one of each field of a :class:`StepShape` takes, in seconds. The fields have the same
    order."""

    step: float = 0.0
    any_chunk: float = 0.0
    token: float = 0.0
    sample: float = 0.0
    context_token: float = 0.0
    drafting_row: float = 0.0
    draft: float = 0.0
    asking_row: float = 0.0
    model_pass: float = 0.0
    read_token: float = 0.0


_NUM_PLAIN = 5
"""How many fields of a shape are plain."""
_NUM_FADING = 2
"""How many weights of drafting fade: ``drafting_row`` and ``draft``, the first two. What a draft
model costs does not fade: it must not look cheaper with each step in which it is not asked."""
# Typical sizes of the fields. If fields always grow together, measured steps tell only what they
# take together. A fit then shares the seconds among these fields, in proportion to (field / typical
# size) ** 2: `_fit` says why. An example: one row asks a draft model, which reads 1,000 tokens
# first. Then `tokens_read` is 10 times its typical size, and `asking_rows` a tenth of its own. So
# nearly all of the seconds go to `tokens_read`.
_TYPICAL = StepShape(
    steps=1.0,
    any_chunk=1.0,
    tokens=100.0,
    samples=100.0,
    context=10_000.0,
    drafting_rows=10.0,
    draft_tokens=100.0,
    asking_rows=10.0,
    model_passes=5.0,
    tokens_read=100.0,
)


class StepCost:
    """Learns from one engine's steps. A ``CostModel``."""

    def __init__(self) -> None:
        self._plain = _Fitted(_TYPICAL[:_NUM_PLAIN])
        self._drafting = _Fitted(_TYPICAL[_NUM_PLAIN:], plain=self._plain)
        self.weights: Weights | None = None
        """None of them is negative. None before any step was measured."""

    def note_step(self, batch: Batch, output: StepOutput, seconds: float) -> None:
        self.add(StepShape.of(batch, output.rows), seconds)

    def add(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took ``seconds``. If these are 0, it was not measured."""
        if seconds <= 0.0:
            return
        plain = shape[:_NUM_PLAIN]
        drafting = shape[_NUM_PLAIN:]
        if any(drafting):
            step = _MeasuredStep(seconds, fields=drafting, plain=plain)
            kind = "with drafts" if shape.draft_tokens else "without drafts"
            self._drafting.add(step, kind)
        else:
            step = _MeasuredStep(seconds, fields=plain)
            kind = "with chunks" if shape.any_chunk else "without chunks"
            self._plain.add(step, kind)
            self._drafting.fade(_NUM_FADING)
        self.weights = Weights(*self._plain.weights, *self._drafting.weights)

    def seconds(self, shape: StepShape) -> float:
        """What a step of this shape should take. 0 before any has been measured."""
        return 0.0 if self.weights is None else dot(self.weights, shape)


class _MeasuredStep(NamedTuple):
    """A step that was measured, as one of the two fits keeps it."""

    seconds: float
    """Of the whole step. Errors are relative to them."""
    fields: Vector
    """The fields of its shape that the fit has weights for."""
    plain: Vector = ()
    """The plain fields, if ``fields`` are those of drafting."""


def _latest_errors() -> deque[float]:
    return deque(maxlen=_CHECKED)


class _Fitted:
    """The plain weights or those of drafting, and the recent steps that they are fitted to."""

    def __init__(self, typical: Vector, plain: "_Fitted | None" = None) -> None:
        """``typical``: the typical sizes of the fields. ``plain``: the plain weights, if these are
        those of drafting."""
        self.weights = [0.0] * len(typical)
        self._typical = typical
        self._plain = plain
        self._first_seconds = 0.0  # of the first step
        self._count = 0
        self._recent: deque[_MeasuredStep] = deque(maxlen=_RECENT)
        # Latest errors by kind of step. Else those of a rare kind would not show among the others.
        self._errors: defaultdict[str, deque[float]] = defaultdict(_latest_errors)

    def add(self, step: _MeasuredStep, kind: str) -> None:
        """Learn from a step."""
        self._count += 1
        if self._count == 1:
            self._first_seconds = step.seconds
        error = (dot(self.weights, step.fields) - self._seconds_of_fields(step)) / step.seconds
        errors = self._errors[kind]
        # Both bounds are the same, so a step that was much shorter than predicted counts no more
        # than one that was much longer.
        errors.append(max(min(error, 1.0), -1.0))
        self._recent.append(step)
        if self._is_due(errors):
            self._fit()

    def fade(self, count: int) -> None:
        """A step had none of these fields: the first ``count`` weights lose a little."""
        for index in range(count):
            self.weights[index] *= 1 - _FADING

    def _seconds_of_fields(self, step: _MeasuredStep) -> float:
        """The seconds of a step without those that its plain fields should take. These change while
        the plain weights are learned, so they are not kept with the step."""
        if self._plain is None:
            return step.seconds
        return step.seconds - dot(self._plain.weights, step.plain)

    def _is_due(self, errors: deque[float]) -> bool:
        """Whether to fit: at first when the number of steps has doubled, later when predictions
        are off."""
        if self._count <= _WARM_UP:
            return self._count.bit_count() == 1  # a power of 2
        if len(errors) < _CHECKED:
            return False
        return abs(sum(errors)) > _OFF * _CHECKED

    def _fit(self) -> None:
        self._errors.clear()
        points = [
            Point(step.fields, self._seconds_of_fields(step), importance=1 / step.seconds**2)
            for step in self._recent
        ]
        # The importance makes the error of a step relative to its seconds.
        #
        # The precision is a penalty for each change of a weight:
        #     penalty = _PRECISION * (change * typical size / first seconds) ** 2
        # It compares what the change adds to a step whose field has its typical size with the
        # seconds of the first step.
        #
        # If fields always grow together, the points tell only what all of their changes add
        # together: the sum of change * field. Then the penalties decide about the parts of that
        # sum. They are least if each change is in proportion to field / typical size ** 2. So the
        # part of a field, change * field, is in proportion to (field / typical size) ** 2.
        seconds = self._first_seconds
        precision = [_PRECISION * (size / seconds) ** 2 for size in self._typical]
        self.weights = fit(points, prior=self.weights, precision=precision)
