"""Where a step's time goes: stopwatches around the parts of the engine, for one benchmark run.

Only this benchmark wraps anything; the engine itself knows nothing of it. :func:`install` patches
the classes of its own process for good and so comes before anything is loaded. Parts are native
work (matrix products, kernels, sampling) or Python (schedule, update, metadata); what no stopwatch
sees is the Python between them and torch's small operations.
"""

import time
from collections.abc import Callable
from typing import Any

from jitney.core.scheduler import Scheduler
from jitney.execution import runner as runner_module
from jitney.kernels.cpu import attention_kernel, column_linear, layer_kernels, program
from jitney.kernels.cpu.linear import PackedLinear
from torch import nn

SEEN_BY_NONE = "Python and small operations"
PYTHON = ("schedule", "update", "metadata", SEEN_BY_NONE)
"""The parts that "scheduling and other Python" stands for."""


class Stopwatches:
    """Part -> seconds since the last :meth:`reset`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        """Start all from zero."""
        for part in self.seconds:
            self.seconds[part] = 0.0

    def wrap(self, function: Callable, part: str) -> Callable:
        """``function``, timed."""
        self.seconds.setdefault(part, 0.0)
        seconds = self.seconds
        clock = time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += clock() - began

        return call

    def report(self, elapsed: float) -> dict[str, float]:
        """All parts of ``elapsed`` seconds, with what none of them saw."""
        return {**self.seconds, SEEN_BY_NONE: elapsed - sum(self.seconds.values())}


def install() -> Stopwatches:
    """Put a stopwatch around every part of this process's engine."""
    watches = Stopwatches()

    def time_calls(owner: Any, name: str, part: str) -> None:
        setattr(owner, name, watches.wrap(getattr(owner, name), part))

    time_calls(Scheduler, "schedule", "schedule")
    time_calls(Scheduler, "update", "update")
    time_calls(runner_module, "build_metadata", "metadata")
    time_calls(runner_module, "sample", "sampling")
    for name in ("forward", "activated", "times", "plus"):
        time_calls(PackedLinear, name, "linear layers")
    time_calls(nn.Linear, "forward", "linear layers")
    time_calls(program.torch, "index_select", "embedding")
    for module, part in (
        (attention_kernel, "attention"),
        (layer_kernels, "norms and rotary"),
        (column_linear, "linear layers"),
        (program, "layers, one native call"),
    ):
        module.Kernel = _timed(module.Kernel, watches, part)
    return watches


def _timed(make: Callable, watches: Stopwatches, part: str) -> Callable:
    """Makes kernels as ``make`` does, whose runs are timed."""

    def made(body: Callable) -> Any:
        kernel = make(body)
        kernel.run = watches.wrap(kernel.run, part)
        return kernel

    return made
