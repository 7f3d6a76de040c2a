"""Profile `cpu`, run by a real engine: Debian's Prometheus scrapes the server, and every query of
the dashboard and every alert's condition is put to it.
"""

import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from tests.compose.engine.clients import tensor
from tests.compose.engine.deployment import Deployment, wait_for
from tests.compose.engine.tight_models import CROWD_PROMPT, CROWD_TOKENS
from tests.compose.monitoring import (
    FIRED_BY_LOAD,
    alerts,
    dashboard,
    dashboard_queries,
    needs_gpu,
    value_of,
)

QUERIES = list(dashboard_queries(interval="1m", model=".*"))


@pytest.fixture(scope="module")
def loaded(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment under traffic for every metric: streams with a common prefix, one of them at
    the gateway, and embeddings."""
    wait_for(
        lambda: len(deployment.query('up{job=~"triton|ready|gateway|proxy|disks"} == 1')) == 5,
        "the first scrapes",
        60,
    )
    client = deployment.client()
    enough = threading.Event()

    def stream() -> None:
        while not enough.is_set():
            client.stream(24)

    def complete() -> None:
        while not enough.is_set():
            client.complete(24)

    def embed() -> None:
        while not enough.is_set():
            client.embed("how far is it to the next stop")

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(each) for each in (stream, stream, complete, embed)]
        try:
            time.sleep(20)
            yield deployment
        finally:
            enough.set()
        for done in running:
            done.result()


@pytest.mark.parametrize(("title", "expression"), [q for q in QUERIES if not needs_gpu(q[1])])
def test_a_query_of_the_dashboard_has_data(loaded: Deployment, title: str, expression: str) -> None:
    values = [float(each["value"][1]) for each in loaded.query(expression)]
    assert [value for value in values if value == value], title  # not NaN


@pytest.mark.parametrize(("title", "expression"), [q for q in QUERIES if needs_gpu(q[1])])
def test_a_query_about_gpus_is_taken_and_empty(
    loaded: Deployment, title: str, expression: str
) -> None:
    """Prometheus can read it, and the server has no data for it where there is no GPU."""
    assert loaded.query(expression) == []


def test_the_dashboard_can_be_narrowed_to_one_model(loaded: Deployment) -> None:
    (variable,) = dashboard()["templating"]["list"]
    assert variable["query"]["query"] == "label_values(nv_inference_count, model)"
    models = {each["metric"]["model"] for each in loaded.query("nv_inference_count")}
    assert {"pylm", "embed", "minilm", "tight", "slow"} <= models
    for title, expression in dashboard_queries(interval="1m", model="pylm"):
        if "jitney_" in expression:
            assert loaded.query(expression), title


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, of in alerts().items()
        if not (needs_gpu(of) or "jitney_job_" in of or "_tier_" in of)
    ],
)
def test_the_value_that_an_alert_watches_has_data(loaded: Deployment, name: str) -> None:
    """A condition that names what is not there would never hold either. Of one with an `and` each
    metric is looked at, for a machine whose queues are empty does not fulfil it."""
    value = value_of(alerts()[name])
    metrics = re.findall(r"\b(?:jitney|nv)_\w+", value) if " and " in value else [value]
    for each in metrics:
        assert loaded.query(each), each


def test_alerts_of_load_fire_when_there_is_too_much(deployment: Deployment) -> None:
    """A model with few places, a small cache and a short queue, and one that is slow."""
    client = deployment.client()
    seen: dict[str, set[str]] = {name: set() for name in FIRED_BY_LOAD}
    outcomes: Counter[str] = Counter()
    enough = threading.Event()

    def crowd() -> None:
        """One client who asks again whatever has become of the request before."""
        while not enough.is_set():
            try:
                events = client.stream(CROWD_TOKENS, model="tight", prompt=CROWD_PROMPT)
                outcome = "a stream" if len(events) > 1 else str([event for _, event in events])
            except (OSError, http.client.HTTPException) as error:
                outcome = repr(error)
            outcomes[outcome] += 1
            if outcome != "a stream":
                enough.wait(0.2)

    def hold_up(connection: grpc_client.InferenceServerClient) -> None:
        number = tensor("x", "FP32", [[1.0]], (1, 1))
        while not enough.is_set():
            try:
                connection.infer("slow", [number], headers=client.headers)
            except InferenceServerException as error:
                outcomes[f"slow: {error}"] += 1
                enough.wait(0.2)

    def look() -> bool:
        for name in FIRED_BY_LOAD:
            found = deployment.query(alerts()[name])
            seen[name].update(each["metric"].get("model", "") for each in found)
        return all(seen.values())

    def explain() -> str:
        asked = deployment.query('sum by (outcome) (jitney_requests_total{model="tight"})')
        return f"{seen}\nclients: {outcomes}\nserver: {asked}"

    with client.grpc() as connection, ThreadPoolExecutor(180) as pool:
        try:
            for _ in range(90):
                pool.submit(crowd)
                time.sleep(0.1)
            for _ in range(90):
                pool.submit(hold_up, connection)
                time.sleep(0.02)
            wait_for(look, "every alert to fire", 120, explain)  # from when the load is there
        finally:
            enough.set()
    assert seen == {name: {model} for name, model in FIRED_BY_LOAD.items()}
