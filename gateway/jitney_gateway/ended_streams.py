"""Streams of a Triton server whose answer has come, read to their ends: by the gateway, and by jobs
whose model is on a server."""

import asyncio
import contextlib
from collections.abc import AsyncIterable
from typing import Any


class EndedStreams:
    """Of one event loop.

    A stream whose answer is known is not cancelled: a cancel that meets the final response crashes
    the server (2.51), or keeps it from ever unloading the model.
    """

    def __init__(self) -> None:
        self._reading: set[asyncio.Task[None]] = set()
        """The event loop does not keep tasks from being collected."""

    def add(self, stream: AsyncIterable[Any]) -> None:
        """Read it to its end, beside whatever comes next."""
        reading = asyncio.create_task(_read_to_end(stream))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    def cancel(self) -> None:
        """Cancel what is left of them, since the connection ends."""
        for reading in self._reading:
            reading.cancel()


async def _read_to_end(stream: AsyncIterable[Any]) -> None:
    with contextlib.suppress(Exception):
        async for _ in stream:
            pass
