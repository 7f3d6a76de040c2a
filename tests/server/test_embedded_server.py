"""The embedded server, really started: with models of plain Python, so that it is quick."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpc
from jitney.errors import LoadError
from jitney_server import server as module
from jitney_server import starting_stubs
from jitney_server.server import TritonServer

from tests.real_server.client import wait_until

pytestmark = pytest.mark.server

CONFIG = """
backend: "python"
input [{ name: "x" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [-1] }]
"""
PLUS_ONE = """
import os, sys, time
import jitney.config, psutil  # ours, by an editable install; and one of the environment
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        print("PREFIX", sys.prefix, "NUMPY", numpy.__version__, flush=True)
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            print("RUNNING", x[0], flush=True)
            time.sleep(float(x[0]) / 1000)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]))
        return responses
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("weights.bin is truncated: 3 of 5 bytes")
    def execute(self, requests): ...
"""


def add_model(repository: Path, name: str, source: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (version / "model.py").write_text(source, encoding="utf-8")


def infer(address: str, x: list[int], model: str = "plus_one") -> tuple[int, dict]:
    """Status and decoded answer of one request on a connection of its own."""
    body = {"inputs": [{"name": "x", "shape": [len(x)], "datatype": "INT32", "data": x}]}
    return post(address, f"/v2/models/{model}/infer", body)


def post(
    address: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(address, timeout=60)
    with contextlib.closing(connection):
        headers = {"Connection": "close", **(headers or {})}
        connection.request("POST", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else {}


def group_of(server: TritonServer) -> list[psutil.Process]:
    """The live processes of the server's group."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == server.pid and is_alive(process):
                members.append(process)
    return members


def wait_until_gone(members: list[psutil.Process]) -> None:
    """A dead one may wait for init to collect it."""
    wait_until(lambda: not any(is_alive(process) for process in members))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    add_model(folder, "plus_one", PLUS_ONE)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository) as running:
        yield running


def test_it_answers_with_our_environment(server: TritonServer) -> None:
    status, answer = infer(server.http_url, [1, 2, 3])
    assert status == 200
    assert answer["outputs"][0]["data"] == [2, 3, 4]
    import sys

    assert f"PREFIX {sys.prefix} NUMPY 1." in server.log_tail(500)


def test_a_large_form_does_not_end_it(repository: Path) -> None:
    """Its HTTP library has every form twice on the stack of a thread. curl sends forms."""
    body = {
        "inputs": [{"name": "x", "shape": [1], "datatype": "INT32", "data": [1]}],
        "parameters": {"filler": "x" * (32 << 20)},
    }
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    with TritonServer(repository) as server:
        status, answer = post(server.http_url, "/v2/models/plus_one/infer", body, form)
        assert status == 200
        assert answer["outputs"][0]["data"] == [2]


def test_it_listens_on_loopback_only(server: TritonServer) -> None:
    listening = {
        connection.laddr.ip
        for process in group_of(server)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1", "::ffff:127.0.0.1"}, "the second is gRPC's way to say it"


def test_it_serves_on_an_address_of_ipv6(repository: Path) -> None:
    with TritonServer(repository, host="::1") as server:
        status, answer = infer(server.http_url, [1])
        assert status == 200
        assert answer["outputs"][0]["data"] == [2]
        with grpc.InferenceServerClient(server.grpc_url) as client:
            assert client.is_model_ready("plus_one")
        assert "nv_inference_count" in server.admin.metrics()


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/plus_one/unload",
        "/v2/systemsharedmemory/unregister",
        "/v2/logging",
        "/v2/trace/setting",
    ],
)
def test_a_client_without_the_key_is_refused(server: TritonServer, path: str) -> None:
    assert post(server.http_url, path)[0] == 403
    assert post(server.http_url, path, None, {"jitney-key": "guess"})[0] == 403
    assert server.is_ready()


def test_grpc_restrictions(server: TritonServer) -> None:
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(triton.InferenceServerException, match="restricted"):
            client.unload_model("plus_one")
        key = {f"triton-grpc-protocol-{name}": v for name, v in server.admin_headers.items()}
        index = client.get_model_repository_index(headers=key)
        assert index.models[0].name == "plus_one"
        assert client.is_model_ready("plus_one")


def test_a_stop_leaves_nothing_behind(repository: Path) -> None:
    """With an idle keep-alive connection open, which holds up the server's own shutdown."""
    server = TritonServer(repository, exit_timeout_s=60)
    server.start()
    idle = http.client.HTTPConnection(server.http_url, timeout=60)
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    members = group_of(server)
    assert len(members) >= 2, "the server and its stub"
    runtime = server._runtime.path
    log = server.log_file
    begin = time.monotonic()
    assert server.stop() is True
    assert time.monotonic() - begin < 60, "the idle connection held it up"
    assert server.exit_status == 0, "it ended by itself"
    idle.close()
    assert runtime is not None
    assert log is not None
    wait_until_gone(members)
    assert not runtime.exists()
    assert not log.exists(), "a clean stop takes its temporary log along"
    assert not list(Path("/dev/shm").glob(f"{runtime.name}*"))
    assert server.stop() is True, "twice is once"
    server.start()  # and again
    with ThreadPoolExecutor() as pool:
        running = pool.submit(infer, server.http_url, [1500])
        wait_until(lambda: "RUNNING 1500" in server.log_tail(500))
        assert server.stop() is True
        status, answer = running.result(timeout=60)
    assert (status, answer["outputs"][0]["data"]) == (200, [1501]), "it ended before the stop"


def test_a_request_beyond_the_grace_is_ended(repository: Path, tmp_path: Path) -> None:
    server = TritonServer(repository, log_file=tmp_path / "log")
    server.start()
    members = group_of(server)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(infer, server.http_url, [300_000])
        wait_until(lambda: "RUNNING 300000" in server.log_tail(500))
        assert server.stop(grace_s=0.5) is False
        with pytest.raises((http.client.HTTPException, OSError)):
            running.result(timeout=60)
    wait_until_gone(members)
    assert (tmp_path / "log").exists(), "a log that was asked for is kept"


def test_a_killed_server_leaves_nothing_behind(repository: Path) -> None:
    server = TritonServer(repository)
    server.start()
    members, runtime = group_of(server), server._runtime.path
    assert server.pid is not None
    assert runtime is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_alive())
    assert not server.is_ready()
    assert server.stop() is False
    wait_until_gone(members)
    assert not runtime.exists()
    assert not list(Path("/dev/shm").glob(f"{runtime.name}*"))
    assert server.log_file is not None
    server.log_file.unlink()


def test_a_model_that_fails_is_explained(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    add_model(folder, "plus_one", PLUS_ONE)
    add_model(folder, "broken", BROKEN)
    server = TritonServer(folder, log_file=tmp_path / "log")
    with pytest.raises(LoadError) as caught:
        server.start()
    assert "broken: Internal: ValueError: weights.bin is truncated: 3 of 5 bytes" in str(
        caught.value
    )
    assert len(str(caught.value).splitlines()) == 3
    assert not server.is_alive()

    with TritonServer(folder, models=["plus_one"]) as subset:
        assert subset.admin.model_states()["plus_one"][0] == "READY"
        assert subset.admin.model_states()["broken"][0] == ""


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "slow", "import time\ntime.sleep(60)\n" + PLUS_ONE)
    server = TritonServer(tmp_path / "repository", log_file=tmp_path / "log")
    with pytest.raises(LoadError, match="not ready within 2 s"):
        server.start(timeout_s=2)
    assert not server.is_alive()


def start_that_prints(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each server that is started print one line and end."""

    def launch(
        command: object, secret: object, environment: object, **options: Any
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["/bin/sh", "-c", 'echo "$1"; exit 1', "sh", line], **options)

    monkeypatch.setattr(module, "launch", launch)


def test_the_log_that_an_error_names_stays(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jitney serve` stops the server after a start that failed."""
    server = TritonServer(repository)
    start_that_prints("error: creating server: no", monkeypatch)
    with pytest.raises(LoadError) as caught:
        server.start()
    assert server.stop()
    named = Path(str(caught.value).rpartition("The whole log is ")[2])
    assert named.read_text(encoding="utf-8") == "error: creating server: no\n"
    named.unlink()


def test_a_start_that_ctrl_c_ends_leaves_no_log(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TritonServer(repository)
    start_that_prints("loading", monkeypatch)
    logs = []

    def interrupt(timeout_s: float) -> None:
        logs.append(server.log_file)
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_wait_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert not logs[0].exists()


def test_a_start_notices_a_stub_that_has_ended(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server itself waits for it without an end."""

    def launch(
        command: object, secret: object, environment: object, **options: Any
    ) -> "subprocess.Popen[bytes]":
        # `sleep` does not ask for the status of the child that it has from the shell.
        return subprocess.Popen(["/bin/sh", "-c", "exit 1 & exec sleep 60"], **options)

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(starting_stubs, "_LOOK_S", 0.1)
    monkeypatch.setattr(starting_stubs, "_ENDED_S", 0.3)
    server = TritonServer(repository, log_file=tmp_path / "log")
    with pytest.raises(LoadError, match="the process of a model has ended while the server"):
        server.start(timeout_s=50)
    assert not server.is_alive()


def test_a_restart_that_fails_is_not_explained_by_an_earlier_start(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the earlier start stays in the file."""

    server = TritonServer(repository, log_file=tmp_path / "log")
    start_that_prints("failed to load 'old' version 1: Internal: no", monkeypatch)
    with pytest.raises(LoadError, match="old: Internal: no"):
        server.start()
    start_that_prints("error: creating server: out of memory", monkeypatch)
    with pytest.raises(LoadError, match="creating server: out of memory") as caught:
        server.restart()
    assert "old" not in str(caught.value)
    assert "failed to load 'old'" in (tmp_path / "log").read_text(encoding="utf-8")
