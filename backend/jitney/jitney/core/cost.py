"""How long a step takes, as learned from steps that were measured.

Seconds are modelled as a sum over a step's shape. The weights minimize the squared *relative*
error: recursive least squares, as a Kalman filter whose weights drift. So old steps count less, but
what no step tells for a while stays as it was known; and a step that something else held up, whose
error is at most 1, moves little. What no step has told apart, such as tokens and samples while all
are decodes, shares the seconds. What drafts and a draft model add is learned from the steps that
have any, and all else from the others: so what a step would take without them stays what such steps
took. While no step has drafts, what these add fades: else a first one that something held up would
be the last. No clock here: whoever has one passes the seconds in.
"""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from jitney.messages import Batch, RowOutput

Vector = Sequence[float]

_NOISE, _DRIFT = 1e-2, 1e-5  # variances: of the relative error, of a weight from step to step
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
        rows, drafts = batch.rows, sum(row.drafts for row in batch.rows)
        tokens, context = batch.num_tokens - drafts, sum(row.end for row in rows) - drafts
        samples = sum(len(row.sample) for row in rows)
        plain = (1.0, float(tokens > len(rows)), tokens, samples, context)
        asked, read = sum(one.read > 0 for one in outputs), sum(one.read for one in outputs)
        passes = max((len(one.proposal) for one in outputs), default=0)
        return cls(*plain, sum(row.drafts > 0 for row in rows), drafts, asked, passes, read)


_PLAIN, _DRAFTS = 5, 2
"""Of the fields, the first: those of steps without drafts; and the next ones, of drafts alone."""
# In which weights are of one size, or should be told apart: what a draft model has read tells more
# of a step's seconds than how many rows asked it.
_UNITS = StepShape(1.0, 1.0, 100.0, 100.0, 10_000.0, 10.0, 100.0, 10.0, 5.0, 100.0)


class StepCost:
    """Learns from one engine's steps."""

    def __init__(self) -> None:
        self._plain, self._drafting = _Filter(_UNITS[:_PLAIN]), _Filter(_UNITS[_PLAIN:])
        self.weights: StepShape | None = None
        """Seconds for one of each; None before any step has been measured."""

    def add(self, shape: StepShape, seconds: float) -> None:
        """A step was measured. One of no time at all, by a clock that stands still, is none."""
        if seconds <= 0.0:
            return
        plain, drafting = shape[:_PLAIN], shape[_PLAIN:]
        if not any(drafting):
            self._plain.add(plain, seconds, seconds)
            self._drafting.fade(_DRAFTS)
        else:
            self._drafting.add(drafting, seconds, seconds - _dot(self._plain.weights, plain))
        self.weights = StepShape(*self._plain.weights, *self._drafting.weights)

    def seconds(self, shape: StepShape) -> float:
        """What a step of this shape should take. 0 before any has been measured."""
        return 0.0 if self.weights is None else _dot(self.weights, shape)


class _Filter:
    """Some of the weights."""

    def __init__(self, units: Vector) -> None:
        size = len(units)
        self.weights = [0.0] * size
        self._units = units
        self._unit: float | None = None  # the first step's seconds
        self._variance = [[float(i == j) for j in range(size)] for i in range(size)]

    def add(self, shape: Vector, step: float, seconds: float) -> None:
        """So much of a ``step`` is theirs, both in seconds."""
        self._unit = self._unit or step
        scale = [self._unit / unit for unit in self._units]
        x = [a * each / step for a, each in zip(shape, scale, strict=True)]
        error = (seconds - _dot(self.weights, shape)) / step
        spread = [_dot(row, x) for row in self._variance]
        total = _NOISE + _dot(spread, x)
        for i, row in enumerate(self._variance):
            gain = spread[i] / total
            self.weights[i] += scale[i] * gain * error
            for j, each in enumerate(spread):
                row[j] -= gain * each
            row[i] += _DRIFT

    def fade(self, count: int) -> None:
        """A step told nothing of the first so many."""
        for i in range(count):
            self.weights[i] *= 1 - _FADING
            self._variance[i][i] += 10 * _DRIFT


def _dot(a: Vector, b: Vector) -> float:
    return sum(map(mul, a, b))
