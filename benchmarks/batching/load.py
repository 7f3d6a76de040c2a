"""The load generator: sends requests at given times, or keeps a number of them running.

Owns the clock and the records of one run. A target is anything that answers ``send(number)``.
Requests are prepared before the run and answers are checked after it, so that the generator needs
little processor time; this time is measured too.
"""

import asyncio
import gc
import selectors
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from benchmarks.batching.outcomes import Run

_LEAD_S = 0.02
"""Between the start of an open loop and its moment zero, so that the first is not late."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came; ``data`` is decoded and checked after the run."""

    number: int
    data: Any
    first_at: float | None = None
    """``time.perf_counter`` at the first token of an answer that comes in pieces."""


class Target(Protocol):
    """What is under load."""

    async def send(self, number: int) -> Reply:
        """Send request ``number`` and wait for its answer. Raises if it fails."""
        ...

    def flush(self) -> None:
        """No more requests will come: send what was held back."""
        ...

    @property
    def waiting(self) -> int:
        """Requests held back on the client's side."""
        ...


@dataclass
class _Record:
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(when it was due, how long it took)"""
    lateness: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    async def one(self, target: Target, number: int, due: float) -> None:
        self.lateness.append(time.perf_counter() - due)
        reply = await target.send(number)
        now = time.perf_counter()
        self.latencies.append((due, now - due))
        self.done.append(now)
        self.replies.append(reply)
        if reply.first_at is not None:
            self.first.append(reply.first_at - due)

    def run(self, began: float, cpu: float, stalled: bool = False) -> Run:
        return Run(
            latencies=np.array([latency for _, latency in sorted(self.latencies)]),
            lateness=np.array(self.lateness),
            seconds=max(self.done) - began,
            cpu_seconds=cpu,
            first=np.array(self.first) if self.first else None,
            stalled=stalled,
        )


async def open_loop(target: Target, arrivals: np.ndarray) -> tuple[Run, list[Reply]]:
    """Request ``i`` leaves at ``arrivals[i]`` seconds, whatever became of those before it.

    Behind the last one the target is flushed. The run lasts until every answer is there.
    """
    record = _Record()
    with _quiet():
        cpu = time.process_time()
        began = time.perf_counter() + _LEAD_S
        tasks = []
        for number, at in enumerate(arrivals):
            due = began + float(at)
            # A generator that is late still lets the tasks run that it has made.
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(record.one(target, number, due)))
        await asyncio.sleep(0)  # the last task starts: its request is with the target
        target.flush()
        await asyncio.gather(*tasks)
        cpu = time.process_time() - cpu
    return record.run(began, cpu), record.replies


async def closed_loop(target: Target, concurrency: int, seconds: float) -> tuple[Run, list[Reply]]:
    """``concurrency`` users, each of whom sends the next request when the last one is answered.

    After ``seconds`` nobody sends another one; what is under way then is waited for. If nobody was
    answered by then and everybody waits in a queue on the client's side, the run has stalled: the
    flush at its end is all that gets them out.
    """
    record = _Record()
    numbers = iter(range(1 << 62))
    with _quiet():
        cpu = time.process_time()
        began = time.perf_counter()
        ends = began + seconds

        async def user() -> None:
            while (now := time.perf_counter()) < ends:
                await record.one(target, next(numbers), now)

        users = [asyncio.ensure_future(user()) for _ in range(concurrency)]
        done, _ = await asyncio.wait(users, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        stalled = not record.done and target.waiting == concurrency
        pending = asyncio.gather(*users)
        while not pending.done():  # a user answered late may have sent once more
            target.flush()
            await asyncio.wait([pending], timeout=0.02)
        await pending
        cpu = time.process_time() - cpu
    return record.run(began, cpu, stalled), record.replies


def run_precisely(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a loop whose timers are exact to microseconds.

    The usual loop waits with epoll, whose timeouts are whole milliseconds, rounded up: as much as a
    small model's whole latency.
    """
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    ) as runner:
        return runner.run(main)


@contextmanager
def _quiet() -> Iterator[None]:
    """No collection of garbage in the middle of a run."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
