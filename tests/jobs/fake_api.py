"""A server of OpenAI's API: it answers what it was asked."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from tests.http_server import WebServer

KEY = "a-key-that-nobody-may-read-0123456789"
STATUS = {"refused": 400, "fault": 500, "late": 504, "busy": 429, "gone": 404, "unpaid": 402}
PASSES = ("busy",)


class Api(BaseHTTPRequestHandler):
    """A prompt may name a status, which passes for some, or wait for ever."""

    asked: ClassVar[Counter[str]] = Counter()
    left = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = self.headers["authorization"] == f"Bearer {KEY}"
        word = body.get("prompt", "")
        self.asked[word] += 1
        if word == "for ever":  # until its client has left
            self.rfile.read(1)
            self.left.set()
            return
        status = STATUS.get(word, 200) if known else 401
        status = 200 if word in PASSES and self.asked[word] > 1 else status
        answer = {"path": self.path, "body": body} if status == 200 else {"error": word}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def api() -> Iterator[str]:
    """Its address."""
    Api.asked.clear()
    with WebServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
