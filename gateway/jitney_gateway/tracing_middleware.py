"""A span for each request to the gateway, from its first byte to the last one of its answer."""

import time
from collections.abc import Collection

from jitney.tracing import HEADERS, Tracing
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class TracingMiddleware:
    """ASGI middleware. The application finds its span in the headers that carry a trace, which it
    hands on."""

    def __init__(self, app: ASGIApp, tracing: Tracing, without: Collection[str]) -> None:
        """``without``: paths that get no spans."""
        self._app = app
        self._tracing = tracing
        self._without = without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"] in self._without:
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        given = {name: headers.pop(name).decode("latin-1") for name in HEADERS if name in headers}
        span = self._tracing.begin(scope["method"], given, time.monotonic())
        scope["headers"] = [
            pair for pair in scope["headers"] if pair[0].decode("latin-1") in headers
        ]
        scope["headers"] += [(name.encode(), v.encode()) for name, v in span.headers().items()]
        state = scope.setdefault("state", {})
        status = 500

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            return await self._app(scope, receive, note)
        finally:
            path = state.get("path", "")
            said = {"model": "gen_ai.request.model", "id": "jitney.request_id", "key": "jitney.key"}
            attributes = {
                "http.request.method": scope["method"],
                "http.route": path,
                "http.response.status_code": status,
                **{name: state[key] for key, name in said.items() if state.get(key)},
            }
            error = f"status {status}" if status >= 400 else ""
            span.end(time.monotonic(), attributes, f"{scope['method']} {path}".strip(), error)
