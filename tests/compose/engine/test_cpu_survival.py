"""Profile `cpu`, run by a real engine: what it survives, and how it stops.

The last test ends it.
"""

import contextlib
import http.client
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.compose.engine.deployment import SERVICES, Deployment, wait_for
from tests.compose.engine.tight_models import write_slow_model
from tests.compose.monitoring import FIRED_BY_A_KILL, alerts, dashboard


def restarts(deployment: Deployment) -> int:
    """How often the engine has started the server's container anew."""
    count: int = deployment.inspect("triton-cpu")["RestartCount"]
    return count


def running(deployment: Deployment) -> float:
    """Requests that the language model has in its batch now, as the server itself says."""
    metrics = deployment.run_in("triton-cpu", "curl", "-s", "http://127.0.0.1:8002/metrics")
    found = re.findall(r'^jitney_running_requests\{.*model="pylm".*\} (\S+)$', metrics, re.M)
    return sum(map(float, found))


def kill_in_server(deployment: Deployment, pattern: str) -> None:
    """Kill the first process of the server's container whose command line has ``pattern``."""
    first = psutil.Process(deployment.inspect("triton-cpu")["State"]["Pid"])
    found = [each for each in first.children(recursive=True) if pattern in " ".join(each.cmdline())]
    found[0].kill()


def test_a_killed_server_comes_back_and_is_reported(deployment: Deployment) -> None:
    client = deployment.client()
    before = restarts(deployment)
    gone = deployment.query('max_over_time(up{job="triton"}[1m])')
    assert gone[0]["value"][1] == "1"
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(client.stream, 900)
        wait_for(lambda: running(deployment) > 0, "the stream to run", 10)
        kill_in_server(deployment, "bin/tritonserver")
        with contextlib.suppress(http.client.HTTPException, OSError):
            events = cut.result(30)  # it ends, and not as if it were complete
            assert "finish_reason" not in events[-1][1]
    fired: set[str] = set()
    told: list[tuple[int, str]] = []

    def back() -> bool:
        """Meanwhile: which alerts fire, and what clients are told."""
        for name in FIRED_BY_A_KILL:
            if deployment.query(alerts()[name]):
                fired.add(name)
        status, headers, _ = client.request("GET", "/v2")
        told.append((status, headers.get("retry-after", "")))
        return restarts(deployment) > before and client.request("GET", "/healthz")[0] == 200

    wait_for(back, "the server to come back", 180, lambda: deployment.logs("triton-cpu")[-3000:])
    assert fired >= {"ServerDown", "NotReady"}
    assert (503, "5") in told
    assert {status for status, _ in told} <= {200, 503}
    deployment.wait_healthy("triton-cpu")
    assert deployment.client().stream(8)[-1][1]["finish_reason"] == "length"
    wait_for(lambda: deployment.query(alerts()["Restarted"]), "Restarted to fire", 30)
    # What the dashboard draws into its panels.
    (marks,) = dashboard()["annotations"]["list"]
    wait_for(lambda: deployment.query(marks["expr"]), "the dashboard's mark of an alert", 30)


def test_a_killed_model_process_brings_a_new_server(deployment: Deployment) -> None:
    before = restarts(deployment)
    kill_in_server(deployment, "/models/minilm/1/")
    wait_for(
        lambda: restarts(deployment) > before,
        "a new server",
        60,
        lambda: deployment.logs("triton-cpu")[-3000:],
    )
    assert "the process of model minilm is gone" in deployment.logs("triton-cpu")
    deployment.wait_healthy("triton-cpu")
    assert len(deployment.client().embed("again")) == 384


def test_a_restart_drains_and_serves_what_the_repository_has_then(deployment: Deployment) -> None:
    """Another model is there only after it, and does no harm before."""
    client = deployment.client()
    client.stream(8)
    write_slow_model(Path(deployment.settings["MODEL_REPOSITORY"]) / "added")
    assert client.request("GET", "/v2/models/added/ready")[0] != 200
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(client.stream, 600)
        wait_for(lambda: running(deployment) > 0, "the stream to run", 10)
        deployment.compose("restart", "triton-cpu", timeout_s=120)
        assert streaming.result()[-1][1]["finish_reason"] == "length"
    deployment.wait_healthy("triton-cpu")
    assert client.request("GET", "/v2/models/added/ready")[0] == 200


def test_an_upgrade_drains_and_replaces_what_changed_alone(deployment: Deployment) -> None:
    client = deployment.client()
    client.stream(8)
    services = ("triton-cpu", "proxy", "prometheus")
    before = {name: deployment.container(name) for name in services}
    changed = {**deployment.settings, "SERVER_MEMORY": "9g"}
    upgraded = Deployment(deployment.engine, deployment.project, changed)
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(client.stream, 600)
        wait_for(lambda: running(deployment) > 0, "the stream to run", 10)
        upgraded.compose("up", "--build", "--detach", timeout_s=1200)
        assert streaming.result()[-1][1]["finish_reason"] == "length"
    after = {name: upgraded.container(name) for name in services}
    assert {name for name in services if after[name] != before[name]} == {"triton-cpu"}
    upgraded.wait_healthy("triton-cpu")
    wait_for(lambda: client.request("GET", "/healthz")[0] == 200, "the proxy to find it", 15)
    assert upgraded.inspect("triton-cpu")["HostConfig"]["Memory"] == 9 << 30
    assert client.stream(8)[-1][1]["finish_reason"] == "length"


def test_a_stop_lets_streams_end_and_every_container_ends_with_0(deployment: Deployment) -> None:
    client = deployment.client()
    client.stream(8)
    idle = client.grpc()  # an open stream without a request: it must not hold up the end
    idle.start_stream(lambda result, error: None, headers=client.headers)
    with ThreadPoolExecutor(12) as pool:
        over_http = [pool.submit(client.stream, 600) for _ in range(8)]
        over_grpc = [pool.submit(client.grpc_stream, 600) for _ in range(4)]
        wait_for(lambda: running(deployment) == 12, "all streams to run", 10)
        began = time.monotonic()
        deployment.compose("stop", timeout_s=120)
        took = time.monotonic() - began
        streams = [each.result() for each in over_http]
        texts = ["".join(text for _, text in each.result()) for each in over_grpc]
    idle.close()
    for events in streams:
        assert events[-1][1]["finish_reason"] == "length", events[-1]
        assert texts[0] == "".join(event["text_output"] for _, event in events)
    assert len(set(texts)) == 1
    ended = {name: deployment.inspect(name)["State"]["ExitCode"] for name in SERVICES}
    assert ended == dict.fromkeys(SERVICES, 0), deployment.logs("triton-cpu")[-3000:]
    assert not any(deployment.inspect(name)["State"]["OOMKilled"] for name in SERVICES)
    assert took < 45
