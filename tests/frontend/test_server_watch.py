"""A model's process ends with its server."""

import ast
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.real_server.client import wait_until

BACKENDS = Path(__file__).resolve().parents[2] / "backend"
MODELS = ("jitney/jitney/frontend/model.py", "onnxruntime/model.py", "tensorrt/model.py")

# Its exit handlers never end, and its main thread waits for a lock that nobody releases: so a stub
# waits in memory that a dead server had locked.
STUB = """
import atexit, threading, time
from jitney.server_watch import end_with_server
end_with_server()
atexit.register(time.sleep, 3600)
print("watches", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
SERVER = """
import subprocess, sys, time
stub = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
stub.stdout.readline()
print(stub.pid, flush=True)
time.sleep(3600)
"""


def has_ended(process: psutil.Process) -> bool:
    """Who takes over an orphan may collect it late."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_model_whose_server_is_killed_ends_whatever_it_waits_for(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVER, STUB]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        stub = psutil.Process(int(server.stdout.readline()))
        try:
            assert not has_ended(stub)
            os.kill(server.pid, number)  # until `with` ends, the server is a zombie
            wait_until(lambda: has_ended(stub))
        finally:
            if not has_ended(stub):
                stub.kill()


@pytest.mark.parametrize("file", MODELS)
def test_every_backend_watches_its_server_before_it_loads_anything(file: str) -> None:
    module = ast.parse((BACKENDS / file).read_text(encoding="utf-8"))
    initialize = next(
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name == "initialize"
    )
    is_docstring_first = ast.get_docstring(initialize) is not None
    assert ast.unparse(initialize.body[int(is_docstring_first)]) == "end_with_server()"


# Its own socket stays open.
HEIR = """
import socket, time
own = socket.create_server(("127.0.0.1", 0))
from jitney.server_watch import end_with_server
end_with_server()
print(own.getsockname()[1], flush=True)
time.sleep(3600)
"""


def test_a_model_does_not_keep_connections_of_the_server_open() -> None:
    """The server starts it with all of its sockets. A client must read the end of its connection
    when the server closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname(), timeout=60)
    connection, _ = listener.accept()
    for inherited in (listener, connection):
        inherited.set_inheritable(True)
    command = [sys.executable, "-c", HEIR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, close_fds=False) as heir, client:
        try:
            assert heir.stdout is not None
            own_port = int(heir.stdout.readline())
            connection.close()
            assert client.recv(1) == b""
            held = psutil.Process(heir.pid).net_connections("tcp")
            assert [each.laddr.port for each in held] == [own_port]
        finally:
            heir.kill()
            listener.close()
