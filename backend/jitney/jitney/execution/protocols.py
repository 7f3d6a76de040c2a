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

        May raise anything: the step then counts as not computed. In either case nothing of it still
        runs afterwards. Called once, and once more if a KeyboardInterrupt ended that call.
        """


class Runner(Protocol):
    """Computes the steps of one loaded model."""

    @property
    def info(self) -> ModelInfo:
        """What is known of the loaded model."""

    def launch(self, batch: Batch) -> LaunchedStep:
        """Begin a step: make the copies, compute the rows, sample.

        With ``info.overlap`` it returns without waiting for the step's end. Steps run in the order
        in which they are launched, and at most two are in flight. Otherwise it may compute the
        whole step before it returns, and the engine waits for each step before the next launch.

        ``batch`` and the lists of its rows may change once this returns. May raise anything: then
        nothing of the step runs. After a failure of any step the engine waits for the other step in
        flight, then launches the rows again, with the same slots.
        """
