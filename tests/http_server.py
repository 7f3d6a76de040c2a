"""A web server of the tests' own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    """A thread for each connection. None of them keeps the process from ending."""

    daemon_threads = True
    request_queue_size = 1024
    """More connections than a test opens at once. With those that find no room (socketserver has
    room for 5), the kernel tries again after 1, 2, 4, … seconds."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """``host:port`` of a server on a free port."""
    with WebServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
