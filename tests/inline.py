"""An engine whose resources are made at once, in its own thread: each run of a test is the same."""

from collections.abc import Callable
from typing import Any

from jitney.engine.engine import Engine


class Inline:
    """In place of the new threads of ``engine.making``."""

    def submit(self, call: Callable[..., object], *args: Any) -> None:
        call(*args)


def make_at_once(engine: Engine) -> Engine:
    threads: list[Any] = [Inline() for _ in engine.pending.threads]
    engine.pending.threads = threads
    return engine
