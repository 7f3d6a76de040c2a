"""The bytes of a request's body."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from jitney_gateway import request_body
from jitney_gateway.refusals import StatusError


def test_a_body_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_S", 0.05)

    async def stream() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    request: Any = SimpleNamespace(stream=stream, headers={})
    with pytest.raises(StatusError, match="the body did not come within") as caught:
        asyncio.run(request_body.read_body(request))
    assert caught.value.status == 408
