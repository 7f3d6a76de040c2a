"""What a step costs: a sum over its shape, with weights that are fitted to measured steps.

    seconds = w0 + w1 * chunked + w2 * tokens + w3 * samples + w4 * context, and what drafts add

Weights are fitted after 1, 2, 4, … 64 steps. Then they stay until predictions are off: until 16
steps with chunks, or 16 without, took in the mean 3 % more or less than was predicted.

A fit minimizes the squared *relative* error over the last 256 steps. So a step that something else
delayed changes little. Weights that these steps do not determine stay as they were: a batch that is
full for an hour does not forget what a step of one row takes. Where two fields always grow
together, such as tokens and samples while all rows are decodes, their weights share the seconds. No
weight is negative.

The weights of drafts and of a draft model are fitted to steps that have drafts, the other weights
to all other steps. So the prediction for a step without drafts depends on such steps alone. While
no step has drafts, the weights of drafts fade. Otherwise, if something else delayed the first step
with drafts, drafts would seem too dear ever to be tried again.

No clock here: whoever has one passes the seconds in.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jitney.batch import Batch, RowOutput, StepOutput
from jitney.core.policy.least_squares import Vector, dot, fit

_OFF = 0.03  # mean relative error above which weights are fitted anew
_CHECKED = 16  # latest steps, with chunks or without, of whose errors that is the mean
_WARM_UP = 64  # first steps, in which weights are fitted whenever their number has doubled
_RECENT = 256  # latest steps, to which weights are fitted
_PRECISION = 1e-3  # how much the weights before a fit count in it, compared with a measured step
_FADING = 1 / 400  # of the weights of drafts, the part that a step without drafts takes away


class StepShape(NamedTuple):
    """What a step's seconds depend on. Drafts do not count among tokens, samples and context."""

    steps: float = 1.0
    chunked: float = 0.0
    """1 if any row has more than one token."""
    tokens: float = 0.0
    samples: float = 0.0
    context: float = 0.0
    """Tokens of the contexts of all rows."""
    drafted: float = 0.0
    """Rows with drafts."""
    drafts: float = 0.0
    """Drafts of all rows."""
    asked: float = 0.0
    """Rows for which a draft model computes any token."""
    passes: float = 0.0
    """Passes of the draft model to propose: the most tokens that it proposes for a row."""
    read: float = 0.0
    """Tokens of sequences that the draft model computes before it proposes."""

    @classmethod
    def of(cls, batch: Batch, outputs: Sequence[RowOutput] = ()) -> "StepShape":
        """The shape of a step. Without ``outputs``, what a draft model does is left out."""
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
"""The first 5 fields of a shape describe a step without drafts."""
_FADED = 2
"""Of the fields of drafting, ``drafted`` and ``drafts`` fade while no step has drafts, so that
drafts are tried again. What a draft model costs stays: asking it must not look cheap unasked."""
# Counted in these units, the fields have weights of about one size. Where the steps do not tell
# fields apart, those that are large in their units take more of the seconds: so what a draft model
# has read takes more of them than how many rows asked it.
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
        """Seconds for one of each field, none negative. None before any step was measured."""

    def note_step(self, batch: Batch, output: StepOutput, seconds: float) -> None:
        self.add(StepShape.of(batch, output.rows), seconds)

    def add(self, shape: StepShape, seconds: float) -> None:
        """Learn from a measured step. Steps that took no time were not measured."""
        if seconds <= 0.0:
            return
        plain = shape[:_PLAIN]
        drafting = shape[_PLAIN:]
        if any(drafting):
            added = seconds - dot(self._plain.weights, plain)
            self._drafting.add(drafting, added, seconds)
        else:
            self._plain.add(plain, seconds, seconds)
            self._drafting.fade(_FADED)
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
        self._first_seconds = 0.0  # of the first step
        self._count = 0
        self._recent: deque[_Measured] = deque(maxlen=_RECENT)
        # The latest errors, apart for steps in which the second field of the shape is not 0 (True):
        # steps with chunks or, of the fields of drafting, steps with drafts.
        self._errors = {each: deque[float](maxlen=_CHECKED) for each in (False, True)}

    def add(self, shape: Vector, added: float, step: float) -> None:
        """Learn from a step of ``step`` seconds, to which these fields added ``added``."""
        self._count += 1
        if self._count == 1:
            self._first_seconds = step
        error = (dot(self.weights, shape) - added) / step
        errors = self._errors[shape[1] > 0.0]
        errors.append(max(min(error, 1.0), -1.0))
        self._recent.append(_Measured(shape, added, step))
        if self._is_due(errors):
            self._fit()

    def fade(self, count: int) -> None:
        """A step had none of these fields: the first ``count`` weights lose a little."""
        for index in range(count):
            self.weights[index] *= 1 - _FADING

    def _is_due(self, errors: deque[float]) -> bool:
        """Whether to fit: at first when the number of steps has doubled, later when predictions
        are off."""
        if self._count <= _WARM_UP:
            return self._count.bit_count() == 1  # a power of 2
        if len(errors) < _CHECKED:
            return False
        return abs(sum(errors)) > _OFF * _CHECKED

    def _fit(self) -> None:
        for errors in self._errors.values():
            errors.clear()
        rows = [(one.shape, one.added, 1 / one.step**2) for one in self._recent]
        # An error is relative if it is divided by seconds: those of a step in `rows`, those of the
        # first step for a weight, times its unit.
        seconds = self._first_seconds
        precision = [_PRECISION * (unit / seconds) ** 2 for unit in self._units]
        self.weights = fit(rows, before=self.weights, precision=precision)
