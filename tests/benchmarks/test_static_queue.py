"""The client-side queue of static batching: a full batch or nothing, and the flush at the end."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from benchmarks.batching.static_queue import StaticQueue


class Model:
    """Doubles each number, and keeps the batches it was sent."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    async def answer(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        await asyncio.sleep(0)
        return [2 * number for number in numbers]


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 5))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_partial_batch_waits_for_ever() -> None:
    async def scene() -> None:
        model = Model()
        queue = StaticQueue(3, model.answer)
        tasks = [asyncio.ensure_future(queue.send(number)) for number in (1, 2)]
        await settle()
        assert model.batches == []
        assert queue.waiting == 2
        assert not any(task.done() for task in tasks)
        assert await queue.send(3) == 6
        assert await asyncio.gather(*tasks) == [2, 4]
        assert model.batches == [[1, 2, 3]]
        assert queue.waiting == 0

    play(scene())


def test_full_batches_leave_in_order_and_the_rest_at_the_flush() -> None:
    async def scene() -> None:
        model = Model()
        queue = StaticQueue(3, model.answer)
        tasks = [asyncio.ensure_future(queue.send(number)) for number in range(8)]
        await settle()
        assert model.batches == [[0, 1, 2], [3, 4, 5]]
        assert queue.waiting == 2
        queue.flush()
        assert await asyncio.gather(*tasks) == [2 * number for number in range(8)]
        assert model.batches[-1] == [6, 7]
        assert queue.batches_sent == 3

    play(scene())


def test_a_flush_of_nothing_sends_nothing() -> None:
    async def scene() -> None:
        model = Model()
        queue = StaticQueue(3, model.answer)
        queue.flush()
        await settle()
        assert model.batches == []

    play(scene())


def test_an_error_reaches_everybody_in_the_batch_and_nobody_else() -> None:
    async def scene() -> None:
        model = Model()

        async def answer(numbers: Sequence[int]) -> list[int]:
            if 1 in numbers:
                raise RuntimeError("the model failed")
            return await model.answer(numbers)

        queue = StaticQueue(2, answer)
        results = await asyncio.gather(*map(queue.send, range(4)), return_exceptions=True)
        assert [str(result) for result in results[:2]] == ["the model failed"] * 2
        assert results[2:] == [4, 6]

    play(scene())


def test_a_wrong_number_of_replies_is_an_error() -> None:
    async def scene() -> None:
        async def answer(numbers: Sequence[int]) -> list[int]:
            return list(numbers)[:-1]

        queue = StaticQueue(2, answer)
        results = await asyncio.gather(*map(queue.send, range(2)), return_exceptions=True)
        assert all("1 replies came for a batch of 2" in str(result) for result in results)

    play(scene())


def test_the_size_is_checked() -> None:
    with pytest.raises(ValueError, match="size 0"):
        StaticQueue(0, Model().answer)
