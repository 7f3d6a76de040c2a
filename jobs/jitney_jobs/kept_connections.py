"""Kept connections to one server, for ``openai_server.py``.

httpx2's own pool asks every connection whether it is still there before each request, which with
32 of them takes longer than the request. Here the connection that was used last is taken.
"""

import ssl
from collections.abc import AsyncIterator, Callable

import httpx2


class KeptConnections(httpx2.AsyncBaseTransport):
    """As many connections as requests were ever under way at a time."""

    def __init__(self, context: ssl.SSLContext, kept_s: float) -> None:
        """``kept_s``: seconds for which a connection is kept that nobody uses."""
        self._context = context
        self._limits = httpx2.Limits(max_connections=1, keepalive_expiry=kept_s)
        self._all: list[httpx2.AsyncHTTPTransport] = []
        self._free: list[httpx2.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises the errors of httpx2."""
        connection = self._free.pop() if self._free else self._new()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._free.append(connection)
            raise
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        response.stream = _Watched(stream, lambda: self._free.append(connection))
        return response

    def _new(self) -> httpx2.AsyncHTTPTransport:
        connection = httpx2.AsyncHTTPTransport(
            verify=self._context, trust_env=False, limits=self._limits
        )
        self._all.append(connection)
        return connection

    async def aclose(self) -> None:
        """Close all of them."""
        for connection in self._all:
            await connection.aclose()


class _Watched(httpx2.AsyncByteStream):
    """The bytes of an answer. Tells once that it was closed."""

    def __init__(self, stream: httpx2.AsyncByteStream, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_close: Callable[[], None] | None = on_close

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            on_close = self._on_close
            self._on_close = None
            if on_close is not None:
                on_close()
