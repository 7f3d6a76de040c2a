"""Process 1 of the server containers, with a program of its own in the server's place."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.compose.free_ports import free_port
from tests.server.client import wait_until
from tests.signals import heed_signals

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "server" / "entrypoint.py"

# A server with one model's process, ready after a moment, with requests in flight as a file says.
# It ends at SIGTERM with the status in another file.
_SERVER = """#!{python}
import http.server, os, pathlib, signal, subprocess, sys, threading
folder = pathlib.Path({folder!r})
(folder / "arguments").write_text("\\n".join(sys.argv[1:]))
options = dict(each.split("=", 1) for each in sys.argv[1:])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b""
        if self.path == "/metrics":
            n = (folder / "in_flight").read_text()
            body = f'jitney_running_requests{{{{model="chat"}}}} {{n}}\\n'.encode()
        said = (folder / "ready").exists() or (folder / self.path.split("/")[-1]).exists()
        self.send_response(200 if said else 400)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *rest): pass
signal.signal(signal.SIGTERM, lambda *rest: os._exit(int((folder / "status").read_text())))
stub = subprocess.Popen(
    ["bin/triton_python_backend_stub", str(folder / "models/chat/1/model.py")], executable="/bin/sh"
)
(folder / "stub").write_text(str(stub.pid))
for port in ("--http-port", "--metrics-port"):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(options[port])), Handler)
    threading.Thread(target=server.serve_forever).start()
signal.pause()
"""
# Run by the shell under the stub's name; its first argument is this file.
_MODEL = "trap 'touch {folder}/told' TERM\nwhile :; do sleep 0.05; done\n"


class Container:
    """The entry point over the program above."""

    def __init__(self, folder: Path, *arguments: str, ready: bool = True) -> None:
        self.folder = folder
        for name, text in (("bin/tritonserver", _SERVER), ("models/chat/1/model.py", _MODEL)):
            file = folder / name
            file.parent.mkdir(parents=True)
            file.write_text(text.format(python=sys.executable, folder=str(folder)))
            file.chmod(0o755)
        self.write(in_flight="0", status="0", **({"ready": ""} if ready else {}))
        self.ports = {name: free_port() for name in ("http", "grpc", "metrics")}
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        command = [sys.executable, str(SCRIPT), f"--native={folder}", *ports, *arguments]
        command.insert(3, f"--models={folder / 'models'}")
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
            preexec_fn=heed_signals,
        )

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def wait_until_listening(self) -> None:
        """It is started, ready or not; the port of the metrics is its last."""
        address = ("127.0.0.1", self.ports["metrics"])

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(address):
                return True
            return False

        wait_until(listens)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert "ready with chat" in self.process.stdout.readline()

    def ended(self, timeout_s: float = 120) -> tuple[int, str]:
        """Exit status, and what was printed since."""
        text, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text


@pytest.fixture
def containers(tmp_path: Path):
    made: list[Container] = []

    def start(*arguments: str, ready: bool = True) -> Container:
        made.append(Container(tmp_path, *arguments, ready=ready))
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            left = [each.process, *psutil.Process(each.process.pid).children(recursive=True)]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):  # the shell ends its own `sleep`
                    process.kill()
            each.process.wait()


def test_the_server_is_shut_in(containers) -> None:
    container = containers("--host=127.0.0.1", "--", "--log-verbose=1")
    container.wait_until_ready()
    given = (container.folder / "arguments").read_text().splitlines()
    assert "--model-control-mode=none" in given
    closed = [each for each in given if "restricted" in each]
    assert len(closed) == 2
    for each in closed:
        names, _, key = each.partition("=")[2].partition(":jitney-key=")
        assert set(names.split(",")) == {"shared-memory", "model-repository", "trace", "logging"}
        assert len(key) == 32
    assert given[-1] == "--log-verbose=1"
    container.process.terminate()
    assert container.ended()[0] == 0


def test_a_stop_waits_for_requests_and_ends_with_0(containers) -> None:
    container = containers("--drain-s=10")
    container.wait_until_ready()
    container.write(in_flight="2")
    container.process.terminate()
    wait_until((container.folder / "told").exists)  # the model
    time.sleep(0.5)
    assert container.process.poll() is None
    container.write(in_flight="0")
    status, text = container.ended()
    assert status == 0, text


@pytest.mark.parametrize(("requests", "status"), [("2", "0"), ("0", "3")])
def test_a_stop_that_cuts_something_off_ends_with_1(containers, requests: str, status: str) -> None:
    container = containers("--drain-s=1.5")
    container.wait_until_ready()
    container.write(in_flight=requests, status=status)
    container.process.terminate()
    assert container.ended()[0] == 1


def test_a_server_that_is_still_loading_is_ended_at_once(containers) -> None:
    container = containers(ready=False)
    container.wait_until_listening()
    began = time.monotonic()
    container.process.terminate()
    assert container.ended()[0] == 0
    assert time.monotonic() - began < 30, "it was drained"


def test_a_server_that_serves_without_being_ready_is_drained(containers) -> None:
    """One model did not load, and the server was told to go on."""
    container = containers("--drain-s=1.5", ready=False)
    container.write(live="", in_flight="2")
    container.wait_until_listening()
    container.process.terminate()
    status, text = container.ended()
    assert (status, "not every request had ended" in text) == (1, True), text


def test_a_lost_model_ends_the_container(containers) -> None:
    container = containers("--lost-model-s=1")
    container.wait_until_ready()
    os.kill(int((container.folder / "stub").read_text()), signal.SIGKILL)
    status, text = container.ended()
    assert (status, "the process of model chat is gone" in text) == (1, True), text


def test_an_ended_server_ends_the_container_and_nothing_is_left(containers) -> None:
    container = containers()
    container.wait_until_ready()
    stub = int((container.folder / "stub").read_text())
    container.write(status="5")
    server = subprocess.run(
        ["ps", "-o", "ppid=", "-p", str(stub)], capture_output=True, text=True, check=True
    )
    os.kill(int(server.stdout), signal.SIGTERM)
    status, text = container.ended()
    assert (status, "with status 5" in text) == (1, True), text
    wait_until(
        lambda: not Path(f"/proc/{stub}").exists() or "Z" in Path(f"/proc/{stub}/stat").read_text()
    )


def test_a_server_that_is_no_longer_ready_ends_the_container(containers) -> None:
    container = containers("--unready-s=1")
    container.wait_until_ready()
    (container.folder / "ready").unlink()
    status, text = container.ended()
    assert (status, "not been ready" in text) == (1, True), text


@pytest.fixture
def health() -> ModuleType:
    """deploy/server/health.py as a module."""
    spec = importlib.util.spec_from_file_location("health", SCRIPT.with_name("health.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_health_check_does_not_ask_for_models_that_came_later(
    containers, health: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = containers()
    container.wait_until_ready()
    monkeypatch.setattr(health, "_SERVED", container.folder / "jitney-served")
    repository = container.folder / "models"
    (repository / "next").mkdir()
    assert health.model_names(repository) == ["chat", "next"]
    assert health.remembered(repository) == ["chat"]


def test_the_health_check_asks_every_model_by_name(tmp_path: Path, health: ModuleType) -> None:
    for name in ("chat", "embed", ".hidden"):
        (tmp_path / name).mkdir()
    assert health.model_names(tmp_path) == ["chat", "embed"]
    asked, not_ready = [], {"/v2/models/embed/ready"}

    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(400 if self.path in not_ready else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"127.0.0.1:{server.server_port}"
    try:
        assert health.not_ready(url, ["chat", "embed"]) == ["embed"]
        not_ready.clear()
        assert health.not_ready(url, ["chat", "embed"]) == []
    finally:
        server.shutdown()
        server.server_close()
    assert asked[:3] == ["/v2/health/ready", "/v2/models/chat/ready", "/v2/models/embed/ready"]
    assert health.not_ready(url, ["chat"])[-1].startswith("server (")
