"""A span for each request to the gateway, from its first byte to the last byte of its answer."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from jitney.tracing import HEADERS, Span, Tracing
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "id": "jitney.request_id",
    "owner": "jitney.key",
}
"""Field of the request's state, which ``gateway.py`` sets -> attribute of the span."""


class TracingMiddleware:
    """ASGI middleware that makes the spans.

    It replaces the headers that carry a trace: the client's give way to those of the new span. The
    application hands them on to the server, whose span becomes a child of the new one.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing, without: Collection[str]) -> None:
        """``without``: paths that get no spans."""
        self._app = app
        self._tracing = tracing
        self._without = without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"] in self._without:
            await self._app(scope, receive, send)
            return
        span = self._begin_span(scope)
        state = scope.setdefault("state", {})
        status = 500

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            _end_span(span, scope["method"], state, status)

    def _begin_span(self, scope: Scope) -> Span:
        """Begin the span of a request, as a child of the client's if its headers name one, and put
        the new span into the headers."""
        other_headers = []
        trace_headers = {}
        for name, value in scope["headers"]:
            text = name.decode("latin-1")
            if text in HEADERS:
                trace_headers[text] = value.decode("latin-1")
            else:
                other_headers.append((name, value))
        span = self._tracing.begin(scope["method"], trace_headers, time.monotonic())
        own_headers = [(name.encode(), value.encode()) for name, value in span.headers().items()]
        scope["headers"] = other_headers + own_headers
        return span


def _end_span(span: Span, method: str, state: Mapping[str, Any], status: int) -> None:
    path = state.get("path", "")
    attributes = {
        "http.request.method": method,
        "http.route": path,
        "http.response.status_code": status,
    }
    for field, attribute in _ATTRIBUTES.items():
        if state.get(field):
            attributes[attribute] = state[field]
    name = f"{method} {path}".strip()
    error = f"status {status}" if status >= 400 else ""
    span.end(time.monotonic(), attributes, name, error)
