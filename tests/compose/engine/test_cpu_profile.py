"""Profile `cpu` as docker-compose.yml has it, run by a real engine on real networks: what clients
get, who is kept out, what is watched, and what it survives. Grafana alone is missing.

The tests share one deployment, in this order: the last ones end its server.
"""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from tests.compose.engine.clients import tensor
from tests.compose.engine.deployment import Deployment, wait_for
from tests.compose.monitoring import alerts, dashboard_queries, value_of

SERVICES = ("triton-cpu", "proxy", "prometheus", "prober")
# Nothing here can show these: no GPU, and no request that fails by our fault.
NOT_HERE = {"GpuMemoryFull"}


# --------------------------------------------------------------------------- who gets in


@pytest.mark.parametrize("name", ["", "wrong"])
def test_without_a_known_key_nothing_is_served(deployment: Deployment, name: str) -> None:
    client = deployment.client("")
    if name:
        client = type(client)(client.port, client.certificate, "W" * 43)
    for path in ("/v2", "/v2/models/pylm", "/v2/models/pylm/infer", "/v2/models/pylm/generate"):
        status, headers, body = client.request("POST", path, b"{}")
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        assert "API key" in json.loads(body)["error"]
    with client.grpc() as connection, pytest.raises(InferenceServerException) as refused:
        connection.is_server_ready(headers=client.headers)
    assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
    with pytest.raises(InferenceServerException, match="API key"):
        client.grpc_stream(4)


def test_a_key_in_another_case_is_another_key(deployment: Deployment) -> None:
    client = deployment.client()
    other = type(client)(client.port, client.certificate, client.key.swapcase())
    assert other.request("GET", "/v2")[0] == 401


def test_readiness_needs_no_key(deployment: Deployment) -> None:
    client = deployment.client("")
    for path in ("/healthz", "/v2/health/live", "/v2/health/ready"):
        assert client.request("GET", path)[0] == 200


def test_a_stream_over_http_leaves_token_by_token(deployment: Deployment) -> None:
    client = deployment.client()
    client.stream(8)
    asked = time.monotonic()
    events = client.stream(300)
    first, last = events[0][0] - asked, events[-1][0] - asked
    assert events[-1][1]["finish_reason"] == "length"
    assert len(events) > 30  # not one piece
    assert first < last / 3  # the first came while the others were being made
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(events)]
    assert max(gaps) < last / 2  # nor in two


def test_a_stream_over_grpc_leaves_token_by_token(deployment: Deployment) -> None:
    client = deployment.client()
    asked = time.monotonic()
    came = client.grpc_stream(300)
    assert len(came) > 30
    assert came[0][0] - asked < (came[-1][0] - asked) / 3
    text = "".join(event["text_output"] for _, event in client.stream(300))
    assert "".join(piece for _, piece in came) == text


def test_an_embedding_is_the_same_over_http_and_grpc(deployment: Deployment) -> None:
    client = deployment.client()
    over_http = client.embed("a jitney is a small bus")
    assert len(over_http) == 384
    assert sum(x * x for x in over_http) == pytest.approx(1, abs=1e-3)
    with client.grpc() as connection:
        text = tensor("text", "BYTES", b"a jitney is a small bus", (1, 1))
        answer = connection.infer("embed", [text], headers=client.headers)
    assert answer.as_numpy("sentence_embedding")[0].tolist() == pytest.approx(over_http, abs=1e-5)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/pylm/unload",
        "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/status",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/pylm/trace/setting",
        "/v2/models/pylm/infer/../../../repository/index",
        "/v2/models/..%2f..%2fv2%2frepository%2findex/infer",
        "/metrics",
        "/",
    ],
)
def test_what_no_client_needs_ends_at_the_proxy(deployment: Deployment, path: str) -> None:
    assert deployment.client().request("POST", path, b"{}")[0] == 404


def test_what_no_client_needs_ends_at_the_server_too(deployment: Deployment) -> None:
    for path in ("repository/index", "systemsharedmemory/status", "logging", "trace/setting"):
        status = deployment.run_in(
            "triton-cpu", "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}",
            *(["-d", "{}"] if path == "repository/index" else []),
            f"http://127.0.0.1:8000/v2/{path}",
        )  # fmt: skip
        assert status == "403", path
    client = deployment.client()
    with client.grpc() as connection:
        for call in (
            lambda: connection.get_model_repository_index(headers=client.headers),
            lambda: connection.unload_model("pylm", headers=client.headers),
            lambda: connection.get_system_shared_memory_status(headers=client.headers),
            lambda: connection.update_log_settings({}, headers=client.headers),
        ):
            with pytest.raises(InferenceServerException) as refused:
                call()
            assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


# --------------------------------------------------------------------------- limits


def test_a_large_body_is_refused(deployment: Deployment) -> None:
    client = deployment.client()
    large = b"x" * ((1 << 20) + 1)
    status, _, body = client.request("POST", "/v2/models/pylm/generate", large)
    assert (status, "1m" in json.loads(body)["error"]) == (413, True)
    text = tensor("text", "BYTES", large, (1, 1))
    with client.grpc() as connection, pytest.raises(InferenceServerException) as refused:
        connection.infer("embed", [text], headers=client.headers)
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_a_key_over_its_rate_is_refused_and_others_are_not(deployment: Deployment) -> None:
    limited, other = deployment.client("limited"), deployment.client()
    connection = limited.connect()
    statuses = []
    began = time.monotonic()
    for _ in range(1000):  # 300 at once and 200 a second are allowed
        connection.request("GET", "/v2", headers=limited.headers)
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    took = time.monotonic() - began
    refused = response.getheader("Retry-After") if response.status == 429 else "1"
    connection.close()
    assert set(statuses) == {200, 429}
    assert 300 <= statuses.count(200) <= 300 + 200 * took + 2
    assert refused == "1"
    assert other.request("GET", "/v2")[0] == 200


def test_keys_are_read_again_without_a_restart(deployment: Deployment) -> None:
    client = deployment.client()
    new = type(client)(client.port, client.certificate, "N" * 32)
    assert new.request("GET", "/v2")[0] == 401
    file = client.certificate.parent / "api_keys"
    before = file.read_text(encoding="utf-8")
    try:
        with file.open("a", encoding="utf-8") as keys:
            keys.write(f"new:{new.key}\n")
        deployment.run_in("proxy", "reload-keys")
        wait_for(lambda: new.request("GET", "/v2")[0] == 200, "the new key", 10)
        with file.open("a", encoding="utf-8") as keys:
            keys.write("nonsense\n")
        deployment.run_in("proxy", "reload-keys", check=False)  # refused: the old ones stay
        assert new.request("GET", "/v2")[0] == 200
    finally:
        file.write_text(before, encoding="utf-8")
        deployment.run_in("proxy", "reload-keys")
    wait_for(lambda: new.request("GET", "/v2")[0] == 401, "the key to be gone", 10)


def test_no_key_is_in_a_log(deployment: Deployment) -> None:
    deployment.client().request("GET", "/v2")
    log = deployment.logs("proxy")
    assert '"key":"first"' in log
    for name in ("first", "limited"):
        assert deployment.client(name).key not in log


# --------------------------------------------------------------------------- how it is shut in


def test_only_the_proxy_is_published_and_on_a_network_that_leads_out(
    deployment: Deployment,
) -> None:
    """What `internal` means is the engine's packet filter's affair, which is off here."""
    inner, edge = (f"{deployment.settings['COMPOSE_PROJECT_NAME']}_{n}" for n in ("inner", "edge"))
    for network, internal in ((inner, True), (edge, False)):
        (found,) = json.loads(deployment.engine.docker("network", "inspect", network).stdout)
        assert found["Internal"] is internal
    for service in SERVICES:
        settings = deployment.inspect(service)["NetworkSettings"]
        published = {
            (address["HostIp"], port)
            for port, addresses in settings["Ports"].items()
            for address in addresses or ()
        }
        if service == "proxy":
            assert published == {("127.0.0.1", "8443/tcp"), ("127.0.0.1", "3000/tcp")}
            assert set(settings["Networks"]) == {inner, edge}
        else:
            assert published == set()
            assert set(settings["Networks"]) == {inner}


def test_every_container_runs_without_rights(deployment: Deployment) -> None:
    for service in SERVICES:
        status = deployment.run_in(service, "cat", "/proc/self/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == ["10001"] * 4
        assert int(fields["CapEff"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        for folder in ("/", "/etc", "/opt", "/usr/bin"):
            tried = deployment.run_in(
                service, "sh", "-c", f"touch {folder}/x; echo $?", check=False
            )
            assert tried.strip() != "0", (service, folder)
        host = deployment.inspect(service)["HostConfig"]
        assert host["LogConfig"]["Config"] == {"max-file": "5", "max-size": "10m"}
        assert host["Memory"] > 0
        assert host["PidsLimit"] > 0
    assert "Read-only" in deployment.engine.docker(
        "exec", "--user=0", deployment.container("triton-cpu"), "sh", "-c", "touch /models/x 2>&1",
        check=False,
    ).stdout  # fmt: skip


# --------------------------------------------------------------------------- what is watched


def load(deployment: Deployment, seconds: float) -> None:
    """Traffic for every metric: streams with a common prefix, embeddings, digits by way of rank."""
    client = deployment.client()
    until = time.monotonic() + seconds

    def stream() -> None:
        while time.monotonic() < until:
            client.stream(24)

    def embed() -> None:
        while time.monotonic() < until:
            client.embed("how far is it to the next stop")

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(each) for each in (stream, stream, stream, embed)]:
            done.result()


def test_every_query_of_the_dashboard_has_data(deployment: Deployment) -> None:
    wait_for(
        lambda: len(deployment.query('up{job=~"triton|ready"} == 1')) == 2, "the first scrapes", 60
    )
    load(deployment, 20)
    empty = []
    for title, expression in dashboard_queries(interval="1m", model=".*"):
        series = deployment.query(expression)
        if not [each for each in series if each["value"][1] != "NaN"]:
            empty.append((title, expression))
    assert [title for title, expression in empty if "nv_gpu" not in expression] == [], empty
    assert len(empty) == 3  # of the GPU


def test_prometheus_takes_the_rules_and_every_value_has_data(deployment: Deployment) -> None:
    groups = deployment.ask_prometheus("rules")["groups"]
    health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert health == dict.fromkeys(alerts(), "ok")
    for name, expression in alerts().items():
        if name not in NOT_HERE and "and sum" not in expression:
            assert deployment.query(value_of(expression)), (name, value_of(expression))


def test_alerts_of_load_fire_when_there_is_too_much(deployment: Deployment) -> None:
    """A model with few places, a small cache and a short queue, and one that is slow."""
    client = deployment.client()
    expected = {
        "QueueGrowing": "tight",
        "KvCacheNearlyFull": "tight",
        "PreemptionStorm": "tight",
        "TurningAway": "tight",
        "FirstTokenSlow": "tight",
        "ServerQueueGrowing": "slow",
    }
    seen: dict[str, set[str]] = {name: set() for name in expected}
    enough = threading.Event()
    until = time.monotonic() + 120

    def crowd() -> None:
        while not enough.is_set() and time.monotonic() < until:
            client.stream(200, model="tight", prompt="import os\n")

    def hold_up(connection: grpc_client.InferenceServerClient) -> None:
        number = tensor("x", "FP32", [[1.0]], (1, 1))
        while not enough.is_set() and time.monotonic() < until:
            connection.infer("slow", [number], headers=client.headers)

    with client.grpc() as connection, ThreadPoolExecutor(200) as pool:
        for _ in range(90):
            pool.submit(crowd)
            time.sleep(0.1)
        for _ in range(90):
            pool.submit(hold_up, connection)
            time.sleep(0.02)
        while time.monotonic() < until and not all(seen.values()):
            for name in expected:
                found = deployment.query(alerts()[name])
                seen[name].update(each["metric"].get("model", "") for each in found)
            time.sleep(1)
        enough.set()
    assert seen == {name: {model} for name, model in expected.items()}


# --------------------------------------------------------------------------- what it survives


def restarts(deployment: Deployment) -> int:
    """How often the engine has started the server's container anew."""
    count: int = deployment.inspect("triton-cpu")["RestartCount"]
    return count


def kill_in_server(deployment: Deployment, pattern: str) -> None:
    """Kill the first process of the server's container whose command line has ``pattern``."""
    program = (
        "import os, signal, sys, psutil\n"
        "found = [p for p in psutil.process_iter() if p.pid not in (1, os.getpid())\n"
        "         and sys.argv[1] in ' '.join(p.cmdline())]\n"
        "os.kill(found[0].pid, signal.SIGKILL)\n"
    )
    deployment.run_in("triton-cpu", "/opt/jitney/bin/python", "-c", program, pattern)


def test_a_killed_server_comes_back_and_is_reported(deployment: Deployment) -> None:
    client = deployment.client()
    before = restarts(deployment)
    gone = deployment.query('max_over_time(up{job="triton"}[1m])')
    assert gone[0]["value"][1] == "1"
    kill_in_server(deployment, "bin/tritonserver")
    fired: set[str] = set()
    told: list[tuple[int, str]] = []

    def back() -> bool:
        """Meanwhile: which alerts fire, and what clients are told."""
        for name in ("ServerDown", "NotReady"):
            if deployment.query(alerts()[name]):
                fired.add(name)
        status, headers, _ = client.request("GET", "/v2")
        told.append((status, headers.get("retry-after", "")))
        return restarts(deployment) > before and client.request("GET", "/healthz")[0] == 200

    wait_for(back, "the server to come back", 180, lambda: deployment.logs("triton-cpu")[-3000:])
    assert fired == {"ServerDown", "NotReady"}
    assert (503, "5") in told
    assert {status for status, _ in told} <= {200, 503}
    deployment.wait_healthy("triton-cpu")
    assert deployment.client().stream(8)[-1][1]["finish_reason"] == "length"
    wait_for(lambda: deployment.query(alerts()["Restarted"]), "Restarted to fire", 30)


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


def test_a_stop_lets_streams_end_and_every_container_ends_with_0(deployment: Deployment) -> None:
    client = deployment.client()
    client.stream(8)
    idle = client.grpc()  # an open stream without a request: it must not hold up the end
    idle.start_stream(lambda result, error: None, headers=client.headers)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client.stream, 200) for _ in range(8)]
        time.sleep(0.3)
        began = time.monotonic()
        deployment.compose("stop", timeout_s=120)
        took = time.monotonic() - began
        streams = [each.result() for each in running]
    idle.close()
    for events in streams:
        assert events[-1][1]["finish_reason"] == "length", events[-1]
    ended = {name: deployment.inspect(name)["State"]["ExitCode"] for name in SERVICES}
    assert ended == dict.fromkeys(SERVICES, 0), deployment.logs("triton-cpu")[-3000:]
    assert not any(deployment.inspect(name)["State"]["OOMKilled"] for name in SERVICES)
    assert took < 45
