"""A front of a real engine's process, for tests."""

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
from jitney.engine.supervisor import SupervisedEngine
from jitney.messages import (
    Cancelled,
    Failed,
    Finished,
    StepReport,
    StepStats,
    Submit,
    Tokens,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.solo_stream import solo_stream

LOADER = "tests.engine.deadly_runner:loader"
PATIENCE_S = 60.0
"""A start of a process on a busy machine takes seconds."""


class Front:
    """An engine's process, the thread that runs it, and what came of each request."""

    def __init__(self, model: str = "fine", loader: str = LOADER, **options: Any) -> None:
        config = make_config({"model": model, "block_size": 4, **options})
        self.engine = SupervisedEngine(config, loader)
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, Finished | Cancelled | Failed] = {}
        self.submits: dict[int, Submit] = {}
        self.blocks: set[int] = set()
        self.stats = StepStats()  # of the last report that was read
        self._keys = itertools.count()
        self._thread = threading.Thread(target=self.engine.run, args=(self.reports,), daemon=True)

    def start(self) -> "Front":
        self.engine.start()
        self._thread.start()
        return self

    def make(
        self,
        *prompt: int,
        max_tokens: int = 8,
        seed: int | None = None,
        lora_name: str | None = None,
        **more: Any,
    ) -> Submit:
        key = next(self._keys)
        seed = key if seed is None else seed
        params = SamplingParams(max_tokens=max_tokens, seed=seed, lora_name=lora_name)
        now = time.monotonic()
        self.submits[key] = Submit(key=key, prompt=list(prompt), params=params, arrival=now, **more)
        return self.submits[key]

    def submit(self, *prompt: int, **more: Any) -> int:
        submit = self.make(*prompt, **more)
        self.engine.send(submit)
        return submit.key

    def read_until(self, holds: Callable[[], bool]) -> None:
        """Take reports until ``holds()``."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            try:
                report = self.reports.get(timeout=0.02)
            except queue.Empty:
                assert time.monotonic() < deadline, "it did not happen in time"
                continue
            self.stats = report.stats
            if report.stats.batch_sequences:
                self.blocks.add(report.stats.blocks_total)
            for event in report.events:
                if isinstance(event, Tokens):
                    self.streams.setdefault(event.key, []).extend(event.ids)
                elif isinstance(event, (Finished, Cancelled, Failed)):
                    assert event.key not in self.ends, "a second end"
                    self.ends[event.key] = event

    def finish(self, *keys: int) -> None:
        """Wait for these requests' ends, and compare what they got with what they must get."""
        self.read_until(lambda: all(key in self.ends for key in keys))
        for key in keys:
            assert isinstance(self.ends[key], Finished), self.ends[key]
            assert self.streams[key] == solo_stream(self.submits[key])

    def has(self, key: int, tokens: int) -> bool:
        return len(self.streams.get(key, ())) >= tokens

    def kill(self) -> None:
        assert self.engine.pid is not None
        os.kill(self.engine.pid, signal.SIGKILL)

    def close(self) -> None:
        self.engine.stop()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()


def fork_server_of(front: Front) -> psutil.Process:
    parent = psutil.Process(front.engine.pid).parent()
    assert parent is not None
    return parent
