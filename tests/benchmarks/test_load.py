"""The load generator against targets whose behaviour is known."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.batching.load import Reply, closed_loop, open_loop, run_precisely
from benchmarks.batching.static_queue import StaticQueue


class Sleeper:
    """Answers after ``seconds``, any number at a time, or one after the other."""

    waiting = 0

    def __init__(self, seconds: float, *, one_at_a_time: bool = False) -> None:
        self.seconds = seconds
        self.most = self.now = 0
        self.numbers: list[int] = []
        self._lock = asyncio.Lock() if one_at_a_time else None

    async def send(self, number: int) -> Reply:
        self.numbers.append(number)
        self.now += 1
        self.most = max(self.most, self.now)
        if self._lock is None:
            await asyncio.sleep(self.seconds)
        else:
            async with self._lock:
                await asyncio.sleep(self.seconds)
        self.now -= 1
        return Reply(number, 2 * number, time.perf_counter())

    def flush(self) -> None:
        pass


class Gathering:
    """A static queue in front of an immediate answer."""

    def __init__(self, size: int) -> None:
        self.queue: StaticQueue[Reply] = StaticQueue(size, self._answer)

    @property
    def waiting(self) -> int:
        return self.queue.waiting

    async def send(self, number: int) -> Reply:
        return await self.queue.send(number)

    def flush(self) -> None:
        self.queue.flush()

    async def _answer(self, numbers: Sequence[int]) -> list[Reply]:
        await asyncio.sleep(0.001)
        return [Reply(number, None) for number in numbers]


def test_an_open_loop_keeps_to_its_moments() -> None:
    arrivals = np.array([0.0, 0.05, 0.06, 0.2])
    run, replies = run_precisely(open_loop(Sleeper(0.1), arrivals))
    assert sorted(reply.number for reply in replies) == [0, 1, 2, 3]
    assert [reply.data for reply in replies] == [2 * reply.number for reply in replies]
    assert run.seconds >= 0.3, "from moment zero to the last answer"
    assert (run.latencies >= 0.1).all()
    assert run.first is not None
    assert len(run.first) == 4


def test_latency_counts_from_the_scheduled_arrival() -> None:
    """Ten requests at once to a target that takes them one by one: the last has waited for all."""

    async def scene() -> np.ndarray:
        run, _ = await open_loop(Sleeper(0.02, one_at_a_time=True), np.zeros(10))
        return run.latencies

    latencies = np.sort(run_precisely(scene()))
    assert latencies[-1] >= 0.2
    assert latencies[0] < latencies[-1] - 0.15


@pytest.mark.parametrize("concurrency", [1, 5])
def test_a_closed_loop_keeps_so_many_under_way(concurrency: int) -> None:
    target = Sleeper(0.02)
    run, replies = run_precisely(closed_loop(target, concurrency, 1.0))
    assert target.most == concurrency
    assert len(set(target.numbers)) == len(target.numbers) == len(replies)
    assert len(replies) <= concurrency * (1.0 / 0.02 + 1), "each waits for its answer"
    assert len(replies) >= 2 * concurrency, "and sends again"
    assert not run.stalled


def test_a_static_queue_that_cannot_fill_stalls() -> None:
    run, replies = run_precisely(closed_loop(Gathering(8), 4, 0.2))
    assert run.stalled
    assert len(replies) == 4
    assert (run.latencies >= 0.2).all()


def test_an_error_ends_the_run() -> None:
    class Failing(Sleeper):
        async def send(self, number: int) -> Reply:
            if number == 3:
                raise RuntimeError("refused")
            return await super().send(number)

    with pytest.raises(RuntimeError, match="refused"):
        run_precisely(open_loop(Failing(0.01), np.linspace(0, 0.05, 5)))
    with pytest.raises(RuntimeError, match="refused"):
        run_precisely(closed_loop(Failing(0.01), 2, 5.0))
