"""The language model of the real server with :mod:`tests.survival.arithmetic_runner`, and with a
front that fails or stands still while a test wants it. Imported by the server's stub."""

import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from jitney.engine import supervisor
from jitney.frontend import model
from jitney.frontend.channel import Channel
from jitney.frontend.metrics import ModelMetrics
from jitney.frontend.service import Service
from jitney.frontend.sweeper import Sweeper

from tests.survival.arithmetic_runner import GATE, LOADER

LONGEST_GATE_S = 120.0
FAULTS: dict[str, tuple[type, str]] = {
    "encode": (Service, "_make_reply"),
    "metrics": (ModelMetrics, "flush"),
    "responder": (ModelMetrics, "add_step"),
    "sweeper": (Sweeper, "turn"),
}
"""By thread, what raises once if a file of the thread's name lies there; the file goes."""


class TritonPythonModel(model.TritonPythonModel):
    """What the stub looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """As always, with other parts."""
        folder = Path(args["model_repository"])
        supervisor.SupervisedEngine = partial(supervisor.SupervisedEngine, loader=LOADER)  # type: ignore[misc,assignment]
        for thread, (owner, name) in FAULTS.items():
            setattr(owner, name, _failing(getattr(owner, name), folder / thread))
        Channel.send = _waiting(Channel.send, folder / GATE)  # type: ignore[method-assign]
        super().initialize(args)


def _failing(work: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @wraps(work)
    def call(*args: Any, **more: Any) -> Any:
        if file.exists():
            file.unlink()
            raise ZeroDivisionError("as the test wants it")
        return work(*args, **more)

    return call


def _waiting(work: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @wraps(work)
    def call(*args: Any, **more: Any) -> Any:
        until = time.monotonic() + LONGEST_GATE_S
        while file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return work(*args, **more)

    return call
