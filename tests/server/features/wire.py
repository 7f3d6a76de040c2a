"""A proxy that keeps every byte that passes: what a client and the server really said.

For HTTP/1.1, :meth:`Wire.http_messages` gives headers and bodies; for gRPC,
:meth:`Wire.grpc_messages` the messages as they were framed and whether each is compressed.
"""

import contextlib
import email.parser
import email.policy
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA_FRAME = 0
_PADDED = 0x8


@dataclass
class Conversation:
    """One connection, both directions."""

    sent: bytearray = field(default_factory=bytearray)
    """By the client."""
    received: bytearray = field(default_factory=bytearray)


class Wire:
    """A proxy in front of ``target`` (``host:port``), as a context manager."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.conversations: list[Conversation] = []

    @property
    def url(self) -> str:
        """Where clients find it, as ``host:port``."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Wire":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            # shutdown wakes the thread that is blocked in this socket; close alone would not.
            with contextlib.suppress(OSError):  # it is closed already
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def http_messages(self) -> list[tuple[Message, bytes]]:
        """Headers and body of the requests, then of the responses."""
        found = []
        for stream in (self._all("sent"), self._all("received")):
            found += list(_http_messages(stream))
        return found

    def grpc_messages(self, direction: str) -> list[tuple[bool, bytes]]:
        """Of ``sent`` or ``received``: whether each is compressed, and its bytes on the way."""
        return list(_grpc_messages(self._all(direction)))

    def _all(self, direction: str) -> bytes:
        return b"".join(bytes(getattr(one, direction)) for one in self.conversations)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            kept = Conversation()
            self.conversations.append(kept)
            for source, sink, record in (
                (client, server, kept.sent),
                (server, client, kept.received),
            ):
                threading.Thread(target=_pump, args=(source, sink, record), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    with contextlib.suppress(OSError):  # either side has gone
        while data := source.recv(1 << 16):
            record += data  # before it is passed on: whoever has the answer finds it recorded
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def _http_messages(stream: bytes) -> Iterator[tuple[Message, bytes]]:
    """Messages with a Content-Length, one after the other."""
    parser = email.parser.BytesParser(policy=email.policy.HTTP)
    while stream:
        head, _, rest = stream.partition(b"\r\n\r\n")
        headers = parser.parsebytes(head.partition(b"\r\n")[2], headersonly=True)
        length = int(headers.get("Content-Length", "0"))
        yield headers, rest[:length]
        stream = rest[length:]


def _grpc_messages(stream: bytes) -> Iterator[tuple[bool, bytes]]:
    """HTTP/2 frames -> the DATA of each stream -> messages of gRPC: a flag, a length, the bytes."""
    bodies: dict[int, bytearray] = defaultdict(bytearray)
    stream = stream.removeprefix(_HTTP2_PREFACE)
    while len(stream) >= 9:
        length = int.from_bytes(stream[:3], "big")
        kind, flags = stream[3], stream[4]
        number = int.from_bytes(stream[5:9], "big")
        if kind == _DATA_FRAME:
            assert not flags & _PADDED, "padded frames are not understood here"
            bodies[number] += stream[9 : 9 + length]
        stream = stream[9 + length :]
    for number in sorted(bodies):
        body = bytes(bodies[number])
        while body:
            length = int.from_bytes(body[1:5], "big")
            yield bool(body[0]), body[5 : 5 + length]
            body = body[5 + length :]
