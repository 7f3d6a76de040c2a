"""A server of OpenAI's API on kept connections. What it answers to a prompt, a test says."""

import json
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from tests.http_server import WebServer


class Reply(NamedTuple):
    """``body`` None: an error that names the prompt, or else the answer to it."""

    status: int = 200
    body: bytes | None = None
    headers: Mapping[str, str] = {}


Script = Callable[[int], Reply | None]
"""What the n-th request for a prompt gets, n from 1; None: the connection is closed."""


class ScriptedApi:
    """What it was asked."""

    def __init__(self, script: Mapping[str, Script], models: list[str]) -> None:
        self.script = script
        self.models = models
        self.url = ""
        self.asked: Counter[str] = Counter()
        self.times: dict[str, list[float]] = defaultdict(list)
        """When it was asked, in monotonic seconds, by prompt."""
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.headers: list[dict[str, str]] = []


@contextmanager
def scripted_api(
    script: Mapping[str, Script] | None = None,
    models: list[str] | None = None,
    port: int = 0,
    context: ssl.SSLContext | None = None,
    most_bytes: int = 1 << 30,
) -> Iterator[ScriptedApi]:
    """``models``: what it lists; it lists none if they are None. ``context``: of TLS.
    ``most_bytes``: a longer body is answered before it is read."""
    api = ScriptedApi(script or {}, models or [])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            with lock:
                api.connections += 1

        def do_GET(self) -> None:
            listed = {"data": [{"id": name} for name in api.models]}
            self.answer(Reply(200 if api.models else 404, json.dumps(listed).encode()))

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            if length > most_bytes:
                self.close_connection = True
                self.answer(Reply(413))
                self.connection.shutdown(socket.SHUT_WR)
                while self.connection.recv(1 << 20):
                    pass  # as servers do: else the client would lose the answer
                return
            body = json.loads(self.rfile.read(length))
            word = str(body.get("prompt"))[:100]
            with lock:
                api.asked[word] += 1
                api.times[word].append(time.monotonic())
                api.bodies.append(body)
                api.headers.append({name.lower(): value for name, value in self.headers.items()})
                count = api.asked[word]
            script = api.script.get(word)
            reply = Reply() if script is None else script(count)
            if reply is None:
                self.close_connection = True
                return
            if reply.body is None and reply.status == 200:
                made = {"object": "text_completion", "choices": [{"text": word}]}
                reply = reply._replace(body=json.dumps(made).encode())
            self.answer(reply)

        def answer(self, reply: Reply) -> None:
            data = reply.body
            if data is None:
                data = json.dumps({"error": {"message": f"it is {reply.status}"}}).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with WebServer(("localhost", port), Handler) as server:
        if context is not None:
            # Each connection shakes hands in its own thread: one that never does holds up nobody.
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        scheme = "http" if context is None else "https"
        api.url = f"{scheme}://localhost:{server.server_port}"
        try:
            yield api
        finally:
            server.shutdown()
