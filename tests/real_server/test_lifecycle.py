"""Loading what cannot be served; a front and a server that are killed, under the supervisor of
``jitney serve``; unloading and stopping with work in flight."""

import contextlib
import http.client
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from jitney.stop_signals import LOOK
from jitney_server.server import TritonServer
from jitney_server.stubs import model_of, model_processes
from jitney_server.supervision import Supervisor

from tests.real_server.client import Stream, generate, metric, settled, stream, wait_until
from tests.real_server.conftest import CONTEXT, START_S, write_model

EXIT_TIMEOUT_S = 60
GRACE_S = 2.5
ENDLESS = {
    "input_ids": [5, 6, 7],
    "stream": True,
    "sampling_parameters": {"max_tokens": CONTEXT - 3, "temperature": 0, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """One model that is well and two that are broken: one for the engine, one for its front.
    tests/execution has all ways."""
    root = tmp_path_factory.mktemp("broken")
    repository = root / "repository"
    good = {"model": str(checkpoint), "dtype": "float32", "threads": 1, "kv_cache_bytes": 1 << 22}
    write_model(repository, "good", {**good, "drain_s": 1.0})

    missing = root / "missing"
    shutil.copytree(checkpoint, missing)
    (missing / "model.safetensors").unlink()
    write_model(repository, "missing", {**good, "model": str(missing)})
    write_model(repository, "unknown_key", {**good, "max_num_sequences": 4})
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    """A server that goes on without the broken models. The last test stops it."""
    started = TritonServer(repository, keep_going=True, exit_timeout_s=EXIT_TIMEOUT_S)
    started.start(START_S)
    try:
        wait_until(lambda: started.admin.model_states()["good"][0] == "READY", 300)
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def reasons(server: TritonServer) -> dict[str, str]:
    """Why each model could not be loaded."""
    wait_until(
        lambda: all(
            state in ("READY", "UNAVAILABLE") for state, _ in server.admin.model_states().values()
        ),
        300,
    )
    states = server.admin.model_states()
    assert states.pop("good")[0] == "READY"
    assert {state for state, _ in states.values()} == {"UNAVAILABLE"}
    return {name: reason for name, (_, reason) in states.items()}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", ["safetensors"]),
        ("unknown_key", ["max_num_sequences", "did you mean 'max_num_seqs'"]),
    ],
)
def test_what_cannot_be_loaded_says_why(
    reasons: dict[str, str], name: str, said: list[str]
) -> None:
    for text in said:
        assert text in reasons[name].replace(",", ""), reasons[name]
    assert "Traceback" not in reasons[name]


def test_the_other_models_are_served(server: TritonServer, reasons: dict[str, str]) -> None:
    status, _ = generate(server.http_url, "good", text_input="a", max_tokens=3)
    assert status == 200
    status, body = generate(server.http_url, "missing", text_input="a")
    assert status != 200
    assert body["error"]


def cut(server: TritonServer, supervisor: Supervisor, victim: psutil.Process) -> float:
    """Kill it under a stream, which must end with one error; returns after how many seconds."""
    running = _start(server)

    def read() -> float:
        began = time.monotonic()
        while running.step():
            pass
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        victim.kill()
        reading = pool.submit(read)
        wait_until(lambda: supervisor.turn() or reading.done())
    assert running.reply.responses
    assert len(running.reply.errors) == running.reply.finals == 1
    # The client keeps its connection: the model must be loaded beside what the server holds for it.
    return reading.result()


MODEL_AGAIN = "model good is loaded again"
SERVER_AGAIN = "the server is ready again"


def is_served_again(said: list[str]) -> bool:
    """Whether the supervisor has repaired what a killed stub left.

    As a rule that is the model alone. But this server (2.51) ends now and then with the stub: if
    the stub held a lock in the memory that they share, ``boost::interprocess::lock_exception`` ends
    the server."""
    return any(MODEL_AGAIN in line or SERVER_AGAIN in line for line in said)


def answers(server: TritonServer) -> bool:
    """Over HTTP, on a connection of its own."""
    try:
        status, _ = generate(server.http_url, "good", text_input="a", max_tokens=3)
    except (OSError, http.client.HTTPException, ValueError):
        return False
    return status == 200


def test_a_killed_stub_and_a_killed_server(
    server: TritonServer, repository: Path, reasons: dict[str, str]
) -> None:
    """Each stream ends with an error (within 5 s on a machine that is not busy), and the model is
    served again. `jitney serve` itself does so in tests/server/test_serve.py."""
    shutil.rmtree(repository / "missing")  # else each start imports what it needs, for nothing
    said: list[str] = []
    supervisor = Supervisor(server, said.append)
    process = psutil.Process(server.pid)
    (stub,) = [each for each in process.children() if model_of(each) == "good"]
    assert cut(server, supervisor, stub) < 30
    wait_until(lambda: supervisor.turn() or is_served_again(said), START_S)
    wait_until(lambda: answers(server), START_S)
    if not any(SERVER_AGAIN in line for line in said):
        assert server.pid == process.pid, "only the model was loaded"
    said.clear()
    process = psutil.Process(server.pid)
    assert metric(server.metrics_url, "jitney_engine_up") == 1
    (name,) = re.findall(r"shm-region-prefix-name=(\S+)", " ".join(process.cmdline()))
    assert cut(server, supervisor, process) < 30
    wait_until(lambda: supervisor.turn() or any(SERVER_AGAIN in line for line in said), START_S)
    wait_until(lambda: answers(server), START_S)
    assert not list(Path("/dev/shm").glob(f"{name}*"))


def test_nobody_waits_over_http_for_a_killed_stub(
    server: TritonServer, reasons: dict[str, str]
) -> None:
    """Whether a response has come or not. The server itself would never end these requests, nor
    read that their clients have gone. What was cut off does not look whole."""
    said: list[str] = []

    def say(text: str) -> None:
        print(text)  # pytest shows it if the test fails
        said.append(text)

    supervisor = Supervisor(server, say)
    process = psutil.Process(server.pid)
    (stub,) = [each for each in process.children() if model_of(each) == "good"]
    begun = threading.Event()
    with ThreadPoolExecutor(10) as pool:
        endpoints = ["generate"] * 5 + ["generate_stream"] * 5
        asked = [pool.submit(_read_over_http, server, endpoint, begun) for endpoint in endpoints]
        assert begun.wait(120)
        stub.kill()
        killed = time.monotonic()
        wait_until(lambda: supervisor.turn() or all(each.done() for each in asked), 120)
    ends = [each.result() for each in asked]
    assert max(end.at - killed for end in ends) < 30  # within 5 s on a machine that is not busy
    assert [end.last for end in ends if b'"finish_reason":"length"' in end.last] == []
    assert any(b'"finish_reason":"None"' in end.last for end in ends)
    with contextlib.suppress(psutil.NoSuchProcess):  # see is_served_again()
        connections = process.net_connections("tcp")
        assert psutil.CONN_CLOSE_WAIT not in [each.status for each in connections]
    wait_until(lambda: supervisor.turn() or is_served_again(said), START_S)
    wait_until(lambda: answers(server), START_S)


class _End(NamedTuple):
    """Of an answer over HTTP."""

    at: float
    """When; monotonic seconds."""
    last: bytes
    """Its last line that is not empty."""


def _read_over_http(server: TritonServer, endpoint: str, begun: threading.Event) -> _End:
    """Ask for an answer without an end and read what comes. ``begun`` is set at the first line."""
    body = {
        **ENDLESS,
        "stream": endpoint == "generate_stream",
        "sampling_parameters": json.dumps(ENDLESS["sampling_parameters"]),
        "return_finish_reason": True,
    }
    last = b""
    connection = http.client.HTTPConnection(server.http_url, timeout=300)
    with contextlib.suppress(OSError, http.client.HTTPException):
        headers = {"Content-Type": "application/json"}
        path = f"/v2/models/good/{endpoint}"
        connection.request("POST", path, json.dumps(body), headers)
        for line in connection.getresponse():
            last = line.strip() or last
            begun.set()
    connection.close()
    return _End(time.monotonic(), last)


def _start(server: TritonServer) -> Stream:
    running = Stream(server.grpc_url, "good", ENDLESS)
    running.step()
    return running


def _request(server: TritonServer, action: str) -> None:
    import urllib.request

    urllib.request.urlopen(
        urllib.request.Request(
            f"http://{server.http_url}/v2/repository/models/good/{action}",
            data=b"{}",
            headers=server.admin_headers,
        ),
        timeout=300,
    ).read()


def test_unload_with_work_in_flight(server: TritonServer) -> None:
    tensors: dict[str, Any] = {
        **ENDLESS,
        "sampling_parameters": {"max_tokens": 500, "temperature": 0, "ignore_eos": True},
        "return_num_output_tokens": True,
    }
    running = Stream(server.grpc_url, "good", tensors)
    running.step()
    unloading = threading.Thread(target=_request, args=(server, "unload"))
    unloading.start()
    wait_until(lambda: server.admin.model_states()["good"][0] != "READY")
    refused = stream(server.grpc_url, "good", text_input="a")
    assert refused.responses == []
    assert refused.finals == 1
    reply = running.read()
    assert reply.errors == []
    assert sum(reply.all("num_output_tokens")) == 500
    unloading.join(300)
    wait_until(lambda: server.admin.model_states()["good"][0] == "UNAVAILABLE")
    _request(server, "load")
    wait_until(lambda: server.admin.model_states()["good"][0] == "READY", 300)


def test_a_stray_signal_stops_no_model(server: TritonServer) -> None:
    """That of a launcher that stops its server, without its note."""
    for process in model_processes(server.pid):
        process.send_signal(LOOK)
    time.sleep(0.5)
    reply = stream(server.grpc_url, "good", text_input="a")
    assert reply.errors == []


def test_a_stream_cancelled_after_its_end_does_not_hold_up_the_exit(
    server: TritonServer,
) -> None:
    """The client goes away without having read the final flag, and not while the server takes it
    (docs/troubleshooting.md); the last test stops the server."""

    def ended() -> float:
        return metric(server.metrics_url, "jitney_requests_total", model="good")

    before = settled(ended)
    one = Stream(server.grpc_url, "good", {"text_input": "a", "stream": True})
    one.step()
    assert settled(ended, lambda now: now > before) == before + 1
    one.cancel()


def test_sigterm_with_work_in_flight(server: TritonServer) -> None:
    """One request that ends in time, though after ``drain_s``, one that does not, and an idle
    client that keeps its stream open all the while. What was cut off is counted."""
    idle = Stream(server.grpc_url, "good", {"text_input": "a", "stream": True})
    while idle.step():
        pass
    running = _start(server)
    short = {"max_tokens": 5, "ignore_eos": True}
    tensors = {"text_input": "a", "stream": True, "sampling_parameters": short}
    in_time = Stream(server.grpc_url, "good", tensors)
    in_time.step()
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        reading = [pool.submit(one.read) for one in (running, in_time)]
        cut_after: list[float] = []
        reading[0].add_done_callback(lambda _: cut_after.append(time.monotonic() - began))
        clean = server.stop(GRACE_S)
        took = time.monotonic() - began
    cut, whole = (one.result() for one in reading)
    assert cut.responses, "what was made is delivered"
    assert cut.error.startswith("UNAVAILABLE: the server is shutting down")
    assert whole.errors == []
    assert whole.text
    assert cut_after[0] > GRACE_S
    assert not clean
    assert server.last_stop.cut_requests
    assert server.last_stop.problem is not None
    assert "1 request was cut off" in server.last_stop.problem
    assert took < GRACE_S + 30, "the idle client held it up"
    idle.close()
