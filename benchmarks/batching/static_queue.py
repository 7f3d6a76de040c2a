"""The client-side queue of static batching: a full batch or nothing.

What a gateway or a script does that gathers requests itself: whoever comes waits until the batch is
full; then it leaves as one request, and everybody gets the answer together. There is no timer: the
last, partial batch leaves only when somebody calls ``flush``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Reply = TypeVar("Reply")


class StaticQueue(Generic[Reply]):
    """Gathers request numbers and hands ``size`` of them at a time to ``send_batch``.

    ``send_batch`` gets the numbers in the order of their arrival and returns a reply for each. If
    it raises, everyone in that batch gets the error. Belongs to one event loop.
    """

    def __init__(
        self, size: int, send_batch: Callable[[Sequence[int]], Awaitable[Sequence[Reply]]]
    ) -> None:
        if size < 1:
            raise ValueError(f"size {size} must be at least 1")
        self.size = size
        self.batches_sent = 0
        self._send_batch = send_batch
        self._waiting: list[tuple[int, asyncio.Future[Reply]]] = []
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """How many wait for their batch to fill."""
        return len(self._waiting)

    async def send(self, number: int) -> Reply:
        """Wait for the batch of this request to fill and be answered."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, future))
        if len(self._waiting) == self.size:
            self.flush()
        return await future

    def flush(self) -> None:
        """Send what waits now, full or not. Does nothing if nobody waits."""
        if not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        self.batches_sent += 1
        task = asyncio.get_running_loop().create_task(self._answer(batch))
        self._under_way.add(task)  # a task that nobody refers to may be collected
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, batch: list[tuple[int, asyncio.Future[Reply]]]) -> None:
        try:
            replies = await self._send_batch([number for number, _ in batch])
            if len(replies) != len(batch):
                raise RuntimeError(f"{len(replies)} replies came for a batch of {len(batch)}")
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), reply in zip(batch, replies, strict=True):
            if not future.done():
                future.set_result(reply)
