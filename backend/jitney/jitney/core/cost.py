"""How long a step takes, as learned from steps that were measured.

Seconds are modelled as a sum over a step's shape. The weights minimize the squared *relative*
error: recursive least squares, as a Kalman filter whose weights drift. So old steps count less, but
what no step tells for a while stays as it was known; and a step that something else held up, whose
error is at most 1, moves little. What no step has told apart, such as tokens and samples while all
are decodes, shares the seconds. No clock here: whoever has one passes the seconds in.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jitney.messages import Batch, RowOutput

_NOISE, _DRIFT = 1e-2, 1e-5  # variances: of the relative error, of a weight from step to step


class StepShape(NamedTuple):
    """What a step's seconds depend on."""

    steps: float = 1.0
    chunked: float = 0.0
    """1 if any row has more than one token."""
    tokens: float = 0.0
    samples: float = 0.0
    context: float = 0.0
    """Tokens of all contexts."""
    passes: float = 0.0
    """Of a draft model that proposes."""
    proposed: float = 0.0
    """Tokens that it proposes."""
    caught: float = 0.0
    """Tokens that it computes before."""
    asked: float = 0.0
    """1 if it computes any."""

    @classmethod
    def of(cls, batch: Batch, outputs: Sequence[RowOutput] = ()) -> "StepShape":
        """Of a step; without the outputs of its rows, what the model alone computes."""
        rows, tokens = batch.rows, batch.num_tokens
        samples, context = sum(row.num_samples for row in rows), sum(row.end for row in rows)
        proposed = [len(each.proposal) for each in outputs]
        passes, caught = max(proposed, default=0), sum(each.caught for each in outputs)
        of_model = (passes, sum(proposed), caught, float(caught + passes > 0))
        return cls(1.0, float(tokens > len(rows)), tokens, samples, context, *of_model)


_UNITS = StepShape(
    1.0, 1.0, 100.0, 100.0, 10_000.0, 10.0, 100.0, 1000.0, 1.0
)  # in which weights are of one size


class StepCost:
    """Learns from one engine's steps."""

    def __init__(self) -> None:
        size = len(_UNITS)
        self._variance = [[float(i == j) for j in range(size)] for i in range(size)]
        self._found = [0.0] * size  # in units of the first step's seconds
        self._first: float | None = None

    @property
    def weights(self) -> StepShape | None:
        """Seconds for one of each; None before any step has been measured."""
        if self._first is None:
            return None
        pairs = zip(self._found, _UNITS, strict=True)
        return StepShape(*(self._first * value / unit for value, unit in pairs))

    def add(self, shape: StepShape, seconds: float) -> None:
        """A step was measured. One of no time at all, by a clock that stands still, is none."""
        if seconds <= 0.0:
            return
        self._first = self._first or seconds
        x = [self._first / seconds * a / unit for a, unit in zip(shape, _UNITS, strict=True)]
        spread = [_dot(row, x) for row in self._variance]
        total, error = _NOISE + _dot(spread, x), 1.0 - _dot(self._found, x)
        for i, row in enumerate(self._variance):
            gain = spread[i] / total
            self._found[i] += gain * error
            for j, each in enumerate(spread):
                row[j] -= gain * each
            row[i] += _DRIFT

    def seconds(self, shape: StepShape) -> float:
        """What a step of this shape should take. 0 before any has been measured."""
        return 0.0 if self.weights is None else _dot(self.weights, shape)


def _dot(a: list[float] | StepShape, b: list[float] | StepShape) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
