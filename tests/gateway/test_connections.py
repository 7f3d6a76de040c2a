"""Connections to a gateway: how many, and how long one may wait without a request."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from jitney_gateway import connections
from jitney_gateway.connections import ConnectionBounds

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HELD = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = b"GET / HTTP/1.1\r\nHost: "
SLOW_BODY = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE_BYTES = 32 << 20


@contextmanager
def gateway(
    most: int, head_s: float, enough: threading.Event
) -> Iterator[Callable[[bytes], socket.socket]]:
    """A server with these bounds. Gives what opens a connection and sends something. An answer to
    HELD begins, and ends when it is ``enough``. One to LARGE has LARGE_BYTES more."""

    async def answer(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        while scope["path"] == "/body" and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        while scope["path"] == "/held" and not enough.is_set():
            await asyncio.sleep(0.01)
        large = bytes(LARGE_BYTES) if scope["path"] == "/large" else b""
        await send({"type": "http.response.body", "body": large + b"two"})

    config = uvicorn.Config(answer, log_level="warning", lifespan="off", timeout_keep_alive=60)
    ConnectionBounds(most, head_s).apply_to(config)
    server = uvicorn.Server(config)
    opened: list[socket.socket] = []

    def connect(data: bytes) -> socket.socket:
        client = socket.create_connection(listener.getsockname(), timeout=30)
        client.sendall(data)
        opened.append(client)
        return client

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield connect
        finally:
            enough.set()
            for client in opened:
                client.close()
            server.should_exit = True
            thread.join()


def read_answer(client: socket.socket) -> bytes:
    """Up to the end of an answer, or of the connection."""
    data = bytearray()
    while b"two" not in data[-32:]:
        try:
            piece = client.recv(1 << 20)
        except ConnectionResetError:
            break
        if not piece:
            break
        data += piece
    return bytes(data)


def is_cut_off(client: socket.socket) -> bool:
    """Whether the gateway closes a connection that was sent nothing."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_without_a_request_make_way(caplog: pytest.LogCaptureFixture) -> None:
    """Those that wait longest. What is answered goes on, and one line of the log says it."""
    enough = threading.Event()
    with caplog.at_level(logging.WARNING), gateway(4, 60, enough) as connect:
        answered = connect(HELD)
        assert answered.recv(12) == b"HTTP/1.1 200"
        slow = [connect(SLOW) for _ in range(3)]
        time.sleep(0.3)  # they are known to the gateway, in this order
        other = connect(REQUEST)
        assert b"two" in read_answer(other)
        assert is_cut_off(slow[0])
        third = connect(REQUEST)
        assert b"two" in read_answer(third)
        enough.set()
        assert b"two" in read_answer(answered)
        slow[2].sendall(b"x\r\n\r\n")
        assert b"two" in read_answer(slow[2])
    assert len([record for record in caplog.records if "connections are open" in record.msg]) == 1


@pytest.mark.parametrize("sent", [SLOW_BODY, LARGE])
def test_connections_with_a_slow_client_make_way(sent: bytes) -> None:
    """Whether it sends a body slowly, or does not read its answer."""
    enough = threading.Event()
    with gateway(3, 60, enough) as connect:
        answered = connect(HELD)
        assert answered.recv(12) == b"HTTP/1.1 200"
        slow = [connect(sent) for _ in range(2)]
        time.sleep(0.5)  # the gateway has answered, as far as it can
        other = connect(REQUEST)
        assert b"two" in read_answer(other)
        assert b"two" not in read_answer(slow[0])
        enough.set()
        assert b"two" in read_answer(answered)


def test_an_answer_may_take_any_time_to_be_read() -> None:
    with gateway(100, 0.3, threading.Event()) as connect:
        client = connect(LARGE)
        time.sleep(1)
        assert len(read_answer(client)) > LARGE_BYTES


def test_a_new_connection_is_cut_off_if_every_other_has_a_request() -> None:
    enough = threading.Event()
    with gateway(2, 60, enough) as connect:
        answered = [connect(HELD) for _ in range(2)]
        assert [client.recv(12) for client in answered] == [b"HTTP/1.1 200"] * 2
        assert is_cut_off(connect(b""))
        enough.set()
        assert all(b"two" in read_answer(client) for client in answered)


@pytest.mark.parametrize("sent", [b"", SLOW])
def test_a_request_must_come_in_time(sent: bytes) -> None:
    """The first, and the next one on the same connection. An answer may take longer."""
    enough = threading.Event()
    with gateway(100, 1.0, enough) as connect:
        client = connect(HELD)
        assert client.recv(12) == b"HTTP/1.1 200"
        time.sleep(1.5)
        enough.set()
        assert b"two" in read_answer(client)
        client.sendall(REQUEST)
        assert b"two" in read_answer(client)
        client.sendall(sent)
        began = time.monotonic()
        assert is_cut_off(client)
        assert is_cut_off(connect(sent))
        assert time.monotonic() - began < 20


def test_a_quarter_of_the_files_is_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 768), (connections.resource.RLIM_INFINITY, 16_384)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections.most_connections() == most
