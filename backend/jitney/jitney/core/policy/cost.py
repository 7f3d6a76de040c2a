"""What a step costs: a sum over its shape, with weights that are fitted to measured steps.

    seconds = w0 + w1 * chunked + w2 * tokens + w3 * samples + w4 * context, and what drafts add

Weights are fitted while the first steps run (after 1, 2, 4, … 64 of them), and then stay until
predictions are off: until 16 steps with chunks, or 16 without, took 3 % more or less in the mean
than was predicted. A fit minimizes the squared *relative* error over the last 256 steps, so a step
that something else held up, whose error is at most 1, moves little. What these steps do not tell
stays as it was: a batch that is full for an hour does not forget what a step of one row takes. What
no step has told apart, such as tokens and samples while all are decodes, shares the seconds. No
weight is negative.

What drafts and a draft model add is fitted to the steps that have any, and all else to the others:
so what a step would take without them stays what such steps took. While no step has drafts, what
these add fades: else a first one that something held up would be the last.

No clock here: whoever has one passes the seconds in.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jitney.core.policy.least_squares import Vector, dot, fit
from jitney.messages import Batch, RowOutput, StepOutput

_OFF = 0.03  # mean relative error, of one sign, from which weights are fitted anew
_CHECKED = 16  # steps with chunks, or without, whose errors that is the mean of
_WARM_UP = 64  # steps, in which weights are fitted whenever their number has doubled
_RECENT = 256  # steps, to which weights are fitted
_PRECISION = 1e-3  # of the weights as they were, beside measured steps
_FADING = 1 / 400  # share of the weights of drafts that a step without them takes away


class StepShape(NamedTuple):
    """What a step's seconds depend on. Tokens, samples and context without drafts."""

    steps: float = 1.0
    chunked: float = 0.0
    """1 if any row has more than one token."""
    tokens: float = 0.0
    samples: float = 0.0
    context: float = 0.0
    """Tokens of all contexts."""
    drafted: float = 0.0
    """Rows with drafts."""
    drafts: float = 0.0
    asked: float = 0.0
    """Rows for which a draft model computes any token."""
    passes: float = 0.0
    """Of a draft model that proposes."""
    read: float = 0.0
    """Tokens that it computes before."""

    @classmethod
    def of(cls, batch: Batch, outputs: Sequence[RowOutput] = ()) -> "StepShape":
        """Of a step; without the outputs of its rows, what the model alone computes."""
        rows = batch.rows
        drafts = sum(row.drafts for row in rows)
        tokens = batch.num_tokens - drafts
        return cls(
            chunked=1.0 if tokens > len(rows) else 0.0,
            tokens=tokens,
            samples=sum(len(row.sample) for row in rows),
            context=sum(row.end for row in rows) - drafts,
            drafted=sum(row.drafts > 0 for row in rows),
            drafts=drafts,
            asked=sum(one.read > 0 for one in outputs),
            passes=max((len(one.proposal) for one in outputs), default=0),
            read=sum(one.read for one in outputs),
        )


_PLAIN = 5
"""Of the fields, the first: those of steps without drafts."""
# In which weights are of one size, or should be told apart: what a draft model has read tells more
# of a step's seconds than how many rows asked it.
_UNITS = StepShape(
    steps=1.0,
    chunked=1.0,
    tokens=100.0,
    samples=100.0,
    context=10_000.0,
    drafted=10.0,
    drafts=100.0,
    asked=10.0,
    passes=5.0,
    read=100.0,
)


class StepCost:
    """Learns from one engine's steps. A ``CostModel``."""

    def __init__(self) -> None:
        self._plain = _Fitted(_UNITS[:_PLAIN])
        self._drafting = _Fitted(_UNITS[_PLAIN:])
        self.weights: StepShape | None = None
        """Seconds for one of each, none of them negative; None before any step was measured."""

    def note_step(self, batch: Batch, output: StepOutput, seconds: float) -> None:
        self.add(StepShape.of(batch, output.rows), seconds)

    def add(self, shape: StepShape, seconds: float) -> None:
        """A step was measured. One of no time at all, by a clock that stands still, is none."""
        if seconds <= 0.0:
            return
        plain = shape[:_PLAIN]
        drafting = shape[_PLAIN:]
        if any(drafting):
            added = seconds - dot(self._plain.weights, plain)
            self._drafting.add(drafting, added, seconds)
        else:
            self._plain.add(plain, seconds, seconds)
            self._drafting.fade()
        self.weights = StepShape(*self._plain.weights, *self._drafting.weights)

    def seconds(self, shape: StepShape) -> float:
        """What a step of this shape should take. 0 before any has been measured."""
        return 0.0 if self.weights is None else dot(self.weights, shape)


class _Measured(NamedTuple):
    """One measured step."""

    shape: Vector
    added: float
    """Seconds that these fields of the shape added to the step."""
    step: float
    """Seconds of the whole step, to which errors are relative."""


class _Fitted:
    """Some of the weights, and the measured steps that they are fitted to."""

    def __init__(self, units: Vector) -> None:
        self.weights = [0.0] * len(units)
        self._units = units
        self._unit = 0.0  # seconds of the first step
        self._count = 0
        self._recent: deque[_Measured] = deque(maxlen=_RECENT)
        # Of steps with and without the second field: chunks, or drafts.
        self._errors = {each: deque[float](maxlen=_CHECKED) for each in (False, True)}

    def add(self, shape: Vector, added: float, step: float) -> None:
        """A step was measured: ``added`` of its seconds are of these fields."""
        self._count += 1
        if self._count == 1:
            self._unit = step
        error = (dot(self.weights, shape) - added) / step
        errors = self._errors[shape[1] > 0.0]
        errors.append(max(min(error, 1.0), -1.0))
        self._recent.append(_Measured(shape, added, step))
        if self._is_due(errors):
            self._fit()

    def fade(self) -> None:
        """A step told nothing of these weights."""
        self.weights = [weight * (1 - _FADING) for weight in self.weights]

    def _is_due(self, errors: deque[float]) -> bool:
        """Whether to fit: whenever the number of steps has doubled at first, then if predictions
        are off."""
        if self._count <= _WARM_UP:
            return self._count & (self._count - 1) == 0
        if len(errors) < _CHECKED:
            return False
        return abs(sum(errors)) > _OFF * _CHECKED

    def _fit(self) -> None:
        for errors in self._errors.values():
            errors.clear()
        rows = [(one.shape, one.added, 1 / one.step**2) for one in self._recent]
        precision = [_PRECISION * (unit / self._unit) ** 2 for unit in self._units]
        self.weights = fit(rows, before=self.weights, precision=precision)
