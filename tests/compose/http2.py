"""A client of HTTP/2 that misbehaves: it begins streams and takes no answer to any of them."""

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


class Http2:
    """One connection with TLS. With ``window`` 0 no body of an answer may be sent."""

    def __init__(self, port: int, window: int = 0) -> None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        raw = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket = context.wrap_socket(raw)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        self._next = 1
        self._received = b""
        self._over: set[int] = set()

    def ask(
        self, path: str, *headers: tuple[str, str], body: bytes | None = b"", method: str = "POST"
    ) -> None:
        """Begin a stream with these headers; a body of None is to come."""
        number, self._next = self._next, self._next + 2
        pseudo = {":method": method, ":scheme": "https", ":authority": "localhost", ":path": path}
        block = b"".join(
            b"\0" + _text(name.encode()) + _text(value.encode())
            for name, value in (*pseudo.items(), *headers)
        )
        flags = _END_HEADERS | (_END_STREAM if body == b"" else 0)
        sent = _frame(_HEADERS, flags, number, block)
        if body:
            sent += _frame(_DATA, _END_STREAM, number, body)
        self.socket.settimeout(60)
        self.socket.sendall(sent)

    def waiting(self) -> int:
        """Streams that have neither ended nor been cut off, by what has come so far."""
        for kind, flags, stream in self._frames():
            if kind == _RST_STREAM or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
                self._over.add(stream)
        return self._next // 2 - len(self._over)

    def _frames(self) -> Iterable[tuple[int, int, int]]:
        """Type, flags and stream of each frame that has come."""
        self.socket.settimeout(0.05)
        with contextlib.suppress(OSError):
            while piece := self.socket.recv(65536):
                self._received += piece
        while len(self._received) >= 9 + (size := int.from_bytes(self._received[:3], "big")):
            yield struct.unpack(">BBI", self._received[3:9])
            self._received = self._received[9 + size :]

    def close(self) -> None:
        self.socket.close()


def pile_up(port: int, connections: int, path: str, more: dict[str, str]) -> list[Http2]:
    """So many connections, unless they are refused, of 128 streams with large headers, and no room
    for answers."""
    held = []
    has_body = "content-length" in more
    for _ in range(connections):
        with contextlib.suppress(OSError):
            held.append(Http2(port))
            for _ in range(128):
                held[-1].ask(
                    path,
                    ("x-filler", "x" * 6000),
                    *more.items(),
                    body=None if has_body else b"",
                    method="POST" if has_body else "GET",
                )
    return held


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: bytes) -> bytes:
    """A string of HPACK, not compressed: its length in 7 bits and more, and itself."""
    length = len(text)
    if length < 127:
        return bytes([length]) + text
    length, made = length - 127, bytearray([127])
    while length >= 128:
        made.append(length % 128 + 128)
        length //= 128
    return bytes([*made, length]) + text
