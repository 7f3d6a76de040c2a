"""Profile `cpu`, run by a real engine: what it survives, and how it stops.

The last test ends it.
"""

import contextlib
import http.client
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.compose.engine.deployment import SERVICES, Deployment, wait_for
from tests.compose.engine.tight_models import write_slow_model
from tests.compose.monitoring import FIRED_BY_A_KILL, alerts, dashboard


@pytest.fixture(autouse=True)
def whole(deployment: Deployment) -> None:
    """Each test begins with a server that is ready, whatever became of the one before."""
    deployment.wait_healthy("triton-cpu")


def restarts(deployment: Deployment) -> int:
    """How often the engine has started the server's container anew."""
    count: int = deployment.inspect("triton-cpu")["RestartCount"]
    return count


def running(deployment: Deployment) -> float:
    """Requests that the language model has in its batch now, as the server itself says."""
    metrics = deployment.run_in("triton-cpu", "curl", "-s", "http://127.0.0.1:8002/metrics")
    found = re.findall(r'^jitney_running_requests\{.*model="pylm".*\} (\S+)$', metrics, re.M)
    return sum(map(float, found))


@contextlib.contextmanager
def streams(deployment: Deployment) -> Iterator[list[str]]:
    """Four clients who begin a stream as soon as the one before has ended, until the block ends.
    How each stream ended: `whole`, `cut` or, before its first token, `refused` with a reason."""
    client = deployment.client()
    outcomes: list[str] = []
    enough = threading.Event()

    def go_on() -> None:
        while not enough.is_set():
            try:
                events = [event for _, event in client.stream(150)]
            except (http.client.HTTPException, OSError):
                events = []
            if events and events[-1].get("finish_reason") == "length":
                outcomes.append("whole")
            elif len(events) == 1 and events[0].keys() & {"status", "error"}:
                outcomes.append("refused")
                enough.wait(0.2)
            else:
                outcomes.append("cut")

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(go_on) for _ in range(4)]
        try:
            wait_for(lambda: outcomes.count("whole") >= 4, "the first streams", 30)
            yield outcomes
        finally:
            enough.set()
    for each in working:
        each.result()


def kill_in_server(deployment: Deployment, pattern: str) -> None:
    """Kill the first process of the server's container whose command line has ``pattern``."""
    first = psutil.Process(deployment.inspect("triton-cpu")["State"]["Pid"])
    for each in first.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # nor a zombie, which has no command line
            if pattern in " ".join(each.cmdline()):
                each.kill()
                return
    raise AssertionError(f"no process of the server has {pattern!r} in its command line")


def test_a_killed_server_comes_back_and_is_reported(deployment: Deployment) -> None:
    client = deployment.client()
    before = restarts(deployment)
    since = deployment.logs("triton-cpu").count("the server is ready again")
    gone = deployment.query('max_over_time(up{job="triton"}[1m])')
    assert gone[0]["value"][1] == "1"
    with streams(deployment) as outcomes:
        kill_in_server(deployment, "bin/tritonserver")
        wait_for(lambda: "cut" in outcomes, "the streams to be cut", 20)
    fired: set[str] = set()
    told: list[tuple[int, str]] = []

    def back() -> bool:
        """Meanwhile: which alerts fire, and what clients are told."""
        for name in FIRED_BY_A_KILL:
            if deployment.query(alerts()[name]):
                fired.add(name)
        status, headers, _ = client.request("GET", "/v2")
        told.append((status, headers.get("retry-after", "")))
        again = deployment.logs("triton-cpu").count("the server is ready again") > since
        return again and client.request("GET", "/healthz")[0] == 200

    wait_for(back, "the server to come back", 180, lambda: deployment.logs("triton-cpu")[-3000:])
    assert fired >= {"ServerDown", "NotReady"}
    assert (503, "5") in told
    assert {status for status, _ in told} <= {200, 503}
    assert restarts(deployment) == before, "the container goes on"
    deployment.wait_healthy("triton-cpu")
    assert deployment.client().stream(8)[-1][1]["finish_reason"] == "length"
    wait_for(lambda: deployment.query(alerts()["Restarted"]), "Restarted to fire", 30)
    # What the dashboard draws into its panels.
    (marks,) = dashboard()["annotations"]["list"]
    wait_for(lambda: deployment.query(marks["expr"]), "the dashboard's mark of an alert", 30)


def test_a_model_whose_process_is_killed_is_loaded_again(deployment: Deployment) -> None:
    before = restarts(deployment)
    kill_in_server(deployment, "/models/minilm/1/")
    wait_for(
        lambda: "model minilm is loaded again" in deployment.logs("triton-cpu"),
        "the model to be loaded",
        60,
        lambda: deployment.logs("triton-cpu")[-3000:],
    )
    assert restarts(deployment) == before
    deployment.wait_healthy("triton-cpu")
    assert len(deployment.client().embed("again")) == 384


def test_a_restart_drains_and_serves_what_the_repository_has_then(deployment: Deployment) -> None:
    """Another model is there only after it, and does no harm before."""
    client = deployment.client()
    write_slow_model(Path(deployment.settings["MODEL_REPOSITORY"]) / "added")
    assert client.request("GET", "/v2/models/added/ready")[0] != 200
    with streams(deployment) as outcomes:
        deployment.compose("restart", "triton-cpu", timeout_s=120)
    assert set(outcomes) == {"whole", "refused"}
    deployment.wait_healthy("triton-cpu")
    assert client.request("GET", "/v2/models/added/ready")[0] == 200


def test_an_upgrade_drains_and_replaces_what_changed_alone(deployment: Deployment) -> None:
    client = deployment.client()
    services = ("triton-cpu", "proxy", "prometheus")
    before = {name: deployment.container(name) for name in services}
    changed = {**deployment.settings, "SERVER_MEMORY": "9g"}
    upgraded = Deployment(deployment.engine, deployment.project, changed)
    with streams(deployment) as outcomes:
        upgraded.compose("up", "--build", "--detach", timeout_s=1200)
    assert set(outcomes) == {"whole", "refused"}
    after = {name: upgraded.container(name) for name in services}
    assert {name for name in services if after[name] != before[name]} == {"triton-cpu"}
    upgraded.wait_healthy("triton-cpu")
    wait_for(lambda: client.request("GET", "/healthz")[0] == 200, "the proxy to find it", 15)
    assert upgraded.inspect("triton-cpu")["HostConfig"]["Memory"] == 9 << 30
    assert client.stream(8)[-1][1]["finish_reason"] == "length"


def test_a_stop_lets_streams_end_and_every_container_ends_with_0(deployment: Deployment) -> None:
    client = deployment.client()
    client.stream(8)
    client.complete(8)
    idle = client.grpc()  # an open stream without a request: it must not hold up the end
    idle.start_stream(lambda result, error: None, headers=client.headers)
    with ThreadPoolExecutor(12) as pool:
        began = time.monotonic()
        list(pool.map(client.stream, [100] * 12))
        # They are met while all run, and end within the grace of the stop, on a slow machine too.
        long = max(600, min(900, int(2000 / (time.monotonic() - began))))
        over_http = [pool.submit(client.stream, long) for _ in range(4)]
        at_gateway = [pool.submit(client.complete, long) for _ in range(4)]
        over_grpc = [pool.submit(client.grpc_stream, long) for _ in range(4)]
        wait_for(lambda: running(deployment) == 12, "all streams to run", 60)
        began = time.monotonic()
        deployment.compose("stop", timeout_s=120)
        took = time.monotonic() - began
        streams = [each.result() for each in over_http]
        texts = ["".join(text for _, text in each.result()) for each in over_grpc]
        texts += [each.result() for each in at_gateway]
    idle.close()
    for events in streams:
        assert events[-1][1]["finish_reason"] == "length", events[-1]
        assert texts[0] == "".join(event["text_output"] for _, event in events)
    assert len(set(texts)) == 1
    ended = {name: deployment.inspect(name)["State"]["ExitCode"] for name in SERVICES}
    del ended["disks"]  # heeds no signal, and has nothing to lose
    assert set(ended.values()) == {0}, f"{ended}\n" + deployment.logs("triton-cpu")[-3000:]
    assert not any(deployment.inspect(name)["State"]["OOMKilled"] for name in SERVICES)
    assert took < 45
