"""An answer of a language model on its way to the client: whole, or as server-sent events.

When a client leaves, the requests to the model must end at once. Each generator here closes the one
that it reads: ``server_sent_events`` closes ``events_of_steps``, which closes the steps of
``ServerClient.generate``, and that cancels the requests. The outermost one is closed

- before the headers of a stream by ``wait_for_first``;
- during a stream and after it by ``EventStream``;
- for an answer that is no stream by ``while_connected``, which cancels what reads it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi.responses import StreamingResponse
from jitney.errors import CancelledError, JitneyError
from starlette.types import Receive, Scope, Send

from jitney_gateway.answers import ModelAnswer
from jitney_gateway.gateway_metrics import AnswerTimer
from jitney_gateway.model_steps import Step
from jitney_gateway.refusals import unforeseen_error
from jitney_gateway.wire import JsonObject

T = TypeVar("T")
HEADERS_S = 1.0
"""Seconds after which a stream begins, even if the model has said nothing yet: until then, an error
has a status of its own."""
SILENCE_S = 5.0
"""Seconds without a byte after which a stream sends a sign of life."""
NextEvents = asyncio.Future[list[JsonObject] | None]
"""Becomes the events of the next step, or None after the last step."""


async def events_of_steps(
    steps: AsyncGenerator[Step], answer: ModelAnswer, timer: AnswerTimer, request_id: str
) -> AsyncGenerator[list[JsonObject]]:
    """The events that the answer makes of each step."""
    try:
        async for step in steps:
            timer.add_step(step)
            yield list(answer.feed(step))
    except JitneyError:
        raise
    except Exception:
        raise unforeseen_error(request_id) from None
    finally:
        await steps.aclose()
        timer.end(answer.usage.prompt_tokens, answer.usage.completion_tokens)


async def exhaust(events: AsyncGenerator[list[JsonObject]]) -> None:
    """Take all events: at the end the answer has been fed every step."""
    async for _ in events:
        pass


async def wait_for_first(receive: Receive, events: AsyncGenerator[list[JsonObject]]) -> NextEvents:
    """Wait for the first events of a stream, at most ``HEADERS_S`` seconds: then its headers are
    sent.

    Raises an error that comes before, which can still become a response with a status of its own.
    Raises CancelledError if the client leaves first.
    """
    first: NextEvents = asyncio.ensure_future(anext(events, None))
    try:
        await while_connected(receive, _done_or_late(first))
        if first.done():
            first.result()  # this raises the error, if there was one
    except BaseException:
        await _abandon(first, events)
        raise
    return first


async def _done_or_late(task: asyncio.Future[Any]) -> None:
    await asyncio.wait({task}, timeout=HEADERS_S)


async def _abandon(pending: NextEvents, events: AsyncGenerator[list[JsonObject]]) -> None:
    """Close ``events``. ``pending`` are its next ones, for which it may still be at work."""
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await events.aclose()


async def server_sent_events(
    first: NextEvents, more: AsyncGenerator[list[JsonObject]], answer: ModelAnswer
) -> AsyncGenerator[bytes]:
    """The bytes of a stream: the events of each step in one piece, and then the end of the answer,
    which may be an error. ``first`` are the events of the first step.

    After each ``SILENCE_S`` seconds without any bytes comes a sign of life, so that proxies and
    clients do not take the stream for dead.
    """
    pending = first
    sent_at = time.monotonic()
    try:
        while True:
            remaining = sent_at + SILENCE_S - time.monotonic()
            await asyncio.wait({pending}, timeout=max(remaining, 0.0))
            if not pending.done():
                yield answer.sign_of_life
                sent_at = time.monotonic()
                continue
            events = pending.result()
            if events is None:
                break
            if events:
                yield _encoded(events)
                sent_at = time.monotonic()
            pending = asyncio.ensure_future(anext(more, None))
        last = answer.closing_events()
    except JitneyError as error:
        last = answer.error_events(error)
    finally:
        await _abandon(pending, more)
    yield _encoded(last) + answer.end_of_stream


def _encoded(events: Sequence[JsonObject]) -> bytes:
    return b"".join(map(_encoded_event, events))


def _encoded_event(event: JsonObject) -> bytes:
    """A server-sent event. It has a name in the APIs whose events have a type."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return name.encode() + b"data: " + msgspec.json.encode(event) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream that ends the model's requests at once when its client has gone."""

    def __init__(
        self,
        stream: AsyncGenerator[bytes],
        first: NextEvents,
        events: AsyncGenerator[list[JsonObject]],
    ) -> None:
        """``stream`` is made of ``first`` and ``events``."""
        super().__init__(stream, media_type="text/event-stream")
        self._stream = stream
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()
            # If the client left before the first byte, `stream` has not begun. Then closing it does
            # not close what it would have read.
            await _abandon(self._first, self._events)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work`` and return its result. If the client leaves first, ``work`` is cancelled, and
    CancelledError is raised."""

    async def wait_for_disconnect() -> None:
        message = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()

    disconnect = asyncio.create_task(wait_for_disconnect())
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((disconnect, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledError("the client has gone")
        return task.result()
    finally:
        disconnect.cancel()
        task.cancel()
        await asyncio.gather(disconnect, task, return_exceptions=True)
