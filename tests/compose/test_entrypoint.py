"""Process 1 of the server containers, with a program of its own in the server's place."""

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.compose.free_ports import free_port
from tests.real_server.client import wait_until
from tests.signals import heed_signals

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "server" / "entrypoint.py"

# A server with one model's process, ready after a moment, with requests in flight as a file says.
# It ends at SIGTERM with the status in another file. A model whose process has ended is still
# ready to it; at a load it starts one, unless it is to refuse.
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
    def do_POST(self):
        global state
        closed = [each for each in sys.argv if each.startswith("--http-restricted-api=")]
        said, action = (200 if self.headers["jitney-key"] in closed[0] else 403), self.path[-6:]
        if action == "unload":
            state = "UNLOADING"
        elif action == "t/load":
            if (folder / "refuse").exists():
                said = 400
            elif state != "READY":
                load()
        with (folder / "calls").open("a") as calls:
            print(self.path, said, file=calls)
        self.send_response(said)
        self.end_headers()
        if state == "UNLOADING" and (folder / "in_flight").read_text() == "0":
            state = "UNAVAILABLE"
        self.wfile.write(f'[{{{{"name": "chat", "state": "{{state}}"}}}}]'.encode())
    def log_message(self, *rest): pass
stubs = []
def load():
    global state
    stub = ["bin/triton_python_backend_stub", str(folder / "models/chat/1/model.py")]
    stubs.append(subprocess.Popen(stub, executable="/bin/sh"))
    (folder / "stub").write_text(str(stubs[-1].pid))
    state = "READY"
def end(*rest):
    if not (folder / "ignore").exists():
        os._exit(int((folder / "status").read_text()))
signal.signal(signal.SIGTERM, end)
load()
for port in ("--http-port", "--metrics-port"):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(options[port])), Handler)
    threading.Thread(target=server.serve_forever).start()
while True:
    signal.pause()
"""
# Run by the shell under the stub's name; its first argument is this file.
_MODEL = """trap 'touch {folder}/told' TERM
trap 'cat "$JITNEY_STOP_NOTE" >>{folder}/noted' URG
while :; do sleep 0.05; done
"""


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
        self.wait_until_said("ready")

    def wait_until_said(self, text: str) -> None:
        """Reads what is printed, as far as a line with ``text``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"{text!r} was not said")

    def server(self) -> int:
        """The process id of the server that runs now."""
        (server,) = psutil.Process(self.process.pid).children()
        return server.pid

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
    assert "--model-control-mode=explicit" in given
    closed = [each for each in given if "restricted" in each]
    assert len(closed) == 2
    for each in closed:
        names, _, key = each.partition("=")[2].partition(":jitney-key=")
        assert set(names.split(",")) == {"shared-memory", "model-repository", "trace", "logging"}
        assert len(key) == 32
        shown = psutil.Process(container.process.pid).children()[0].cmdline()
        assert key not in "".join(shown), "every local user can read it there"
    assert "--log-verbose=1" in given
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
    assert (container.folder / "noted").read_text() == "wait"


@pytest.mark.parametrize(
    ("requests", "status", "expected"), [("2", "0", 1), ("2", "5", 1), ("0", "5", 3)]
)
def test_the_status_tells_requests_that_were_cut_off_from_a_server_that_did_not_end_well(
    containers, requests: str, status: str, expected: int
) -> None:
    container = containers("--drain-s=1.5")
    container.wait_until_ready()
    container.write(in_flight=requests, status=status)
    container.process.terminate()
    assert container.ended()[0] == expected
    noted = "wait" if requests == "0" else "waitend"
    assert (container.folder / "noted").read_text() == noted


def test_a_server_that_does_not_end_is_killed_soon_after_the_time_for_requests(containers) -> None:
    """As with this server's race: a model stays UNLOADING though nothing is in flight."""
    container = containers("--drain-s=2", "--exit-timeout-s=3600")
    container.write(ignore="")
    container.wait_until_ready()
    container.process.terminate()
    status, text = container.ended()
    assert (status, "was killed" in text) == (3, True), text


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


def kill(container: Container, what: str) -> int:
    """Kill the model's process, or its server; returns which."""
    process = psutil.Process(int((container.folder / "stub").read_text()))
    process = process if what == "stub" else process.parent()
    process.kill()
    return process.pid


def test_a_model_whose_process_is_killed_is_loaded_again(containers) -> None:
    container = containers()
    container.wait_until_ready()
    server = container.server()
    killed = kill(container, "stub")
    container.wait_until_said("the process of model chat has ended")
    container.wait_until_said("model chat is loaded again")
    assert container.server() == server, "it goes on: other models may have requests"
    assert int((container.folder / "stub").read_text()) != killed
    calls = (container.folder / "calls").read_text().splitlines()
    assert [call for call in calls if "index" not in call] == [
        "/v2/repository/models/chat/unload 200",
        "/v2/repository/models/chat/load 200",
    ]
    container.process.terminate()
    assert container.ended()[0] == 0


def test_a_server_that_is_killed_is_started_again_and_nothing_of_it_is_left(containers) -> None:
    container = containers()
    container.wait_until_ready()
    stub = int((container.folder / "stub").read_text())
    (name,) = re.findall(r"prefix-name=(\S+)", (container.folder / "arguments").read_text())
    region, foreign = Path(f"/dev/shm/{name}1"), Path(f"/dev/shm/x{name}1")
    region.touch()
    foreign.touch()
    try:
        kill(container, "server")
        container.wait_until_said("the server ended by itself")
        container.wait_until_said("the server is ready again")
        assert not region.exists()
        assert foreign.exists(), "another server's"
    finally:
        foreign.unlink()
    wait_until(
        lambda: not Path(f"/proc/{stub}").exists() or "Z" in Path(f"/proc/{stub}/stat").read_text()
    )
    container.process.terminate()
    assert container.ended()[0] == 0


def test_what_would_end_the_server_without_a_proxy_is_said(containers) -> None:
    started = containers()
    started.wait_until_said("may end this server")


# Process 1 with a server, a process whose parent has ended, and a child of its own that has.
PROCESS_1 = """
import ctypes, psutil, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import entrypoint
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
server = subprocess.Popen(["sleep", "600"])
subprocess.run(["sh", "-c", "sleep 0.1 &"])
deadline = time.monotonic() + 60
def children():
    return [child.pid for child in psutil.Process().children()]
while children() != [server.pid] and time.monotonic() < deadline:
    entrypoint.collect_orphans(server.pid)
    time.sleep(0.05)
assert children() == [server.pid]
server.kill()
time.sleep(0.2)
entrypoint.collect_orphans(server.pid)
assert server.wait() == -9
"""


def test_process_1_collects_what_others_leave_and_not_its_server() -> None:
    command = [sys.executable, "-c", PROCESS_1, str(SCRIPT.parent)]
    assert subprocess.run(command, check=False, timeout=120).returncode == 0


def test_after_a_few_repairs_a_new_container_must_take_over(containers) -> None:
    container = containers("--most-repairs=2")
    container.wait_until_ready()
    container.write(refuse="")
    kill(container, "stub")
    status, text = container.ended()
    assert status == 1, text
    assert text.count("model chat cannot be loaded again: the server answered") == 2
    assert "2 repairs within 10 minutes were not enough" in text


def test_a_server_that_does_not_come_up_ends_the_container(containers) -> None:
    container = containers(ready=False)
    container.wait_until_listening()
    kill(container, "server")
    status, text = container.ended()
    assert (status, "with status -9" in text) == (1, True), text


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


def test_the_health_check_asks_every_model_by_name(
    tmp_path: Path, health: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the metrics, whether it has an engine."""
    for name in ("chat", "embed", ".hidden"):
        (tmp_path / name).mkdir()
    assert health.model_names(tmp_path) == ["chat", "embed"]
    asked, not_ready = [], {"/v2/models/embed/ready"}
    up = {"chat": "1", "slow": "1"}

    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            said = [f'jitney_engine_up{{model="{name}",version="1"}} {up[name]}' for name in up]
            body = "\n".join([*said, ""]).encode() if self.path == "/metrics" else b""
            self.send_response(400 if self.path in not_ready else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"127.0.0.1:{server.server_port}"
    try:
        assert health.not_ready(url, ["chat", "embed"]) == ["embed"]
        not_ready.clear()
        assert health.not_ready(url, ["chat", "embed"]) == []
        not_ready.add("/v2/models/m%C3%BC%20model/ready")
        assert health.not_ready(url, ["m\u00fc model"]) == [], "the server does not decode names"
        assert health.not_ready(url, ["a+b:1%"]) == []
        assert asked.pop() == "/v2/models/a+b:1%/ready"
        assert health.without_engine(url) == []
        up["slow"] = "0"
        assert health.without_engine(url) == ["slow (no engine)"]
        monkeypatch.setattr(sys, "argv", ["health.py", f"--url={url}", f"--metrics-url={url}"])
        monkeypatch.setattr(health, "_SERVED", tmp_path / "served")
        health.remember(tmp_path)
        assert health.main() == 1
        up["slow"] = "1"
        assert health.main() == 0
    finally:
        server.shutdown()
        server.server_close()
    assert asked[:3] == ["/v2/health/ready", "/v2/models/chat/ready", "/v2/models/embed/ready"]
    assert health.not_ready(url, ["chat"])[-1].startswith("server (")
    assert health.without_engine(url) == [], "it may have no metrics"
