"""What the engine asks of whatever computes a step: the model's runner, or a fake one in tests.

Imports no torch, because fronts import the engine's modules.
"""

from typing import Protocol

from jitney.batch import Batch, StepOutput
from jitney.messages import ModelInfo


class LaunchedStep(Protocol):
    """A step that the device runs, or will run."""

    def wait(self) -> StepOutput:
        """Wait until the step is over and return its output.

        May raise anything; the step then counts as not computed. Whether it returns or raises, no
        part of the step runs any more. It is called once. Only if a KeyboardInterrupt ended that
        call, it is called again.
        """


class Runner(Protocol):
    """Computes the steps of one loaded model."""

    @property
    def info(self) -> ModelInfo:
        """What is known of the loaded model."""

    def launch(self, batch: Batch) -> LaunchedStep:
        """Begin a step: copy blocks, compute the rows, sample.

        If ``info.overlap`` is set, it returns without waiting for the step's end. At most two steps
        are then in flight, and they run in the order in which they were launched. If it is not set,
        the whole step may be computed before this returns, and the engine waits for each step
        before it launches the next.

        ``batch`` and the lists of its rows may change once this returns. May raise anything; no
        part of the step runs then. After a failure of any step the engine waits for the other step
        in flight, then launches the rows again, with the same slots.
        """
