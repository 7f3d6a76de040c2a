"""Warm-up, version policies, and loading while requests come."""

import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from tests.server.client import settled, wait_until
from tests.server.features.calls import Caller
from tests.server.features.repository import WARM_BATCH

CLIENTS = 4


def test_warm_up_runs_before_the_first_request(caller: Caller) -> None:
    """No test asks for so many rows, and the server's statistics include warm-up."""

    def executed() -> int:
        (model,) = caller.client.get_inference_statistics("doubled").model_stats
        found = {batch.batch_size: batch.compute_infer.count for batch in model.batch_stats}
        return found.get(WARM_BATCH, 0)

    assert settled(executed, lambda now: now >= 2) == 2


@pytest.mark.parametrize(
    ("model", "served", "refused"),
    [("latest", [2, 3], [1]), ("specific", [1], [2, 3]), ("all", [1, 2], [])],
)
def test_version_policy(caller: Caller, model: str, served: list[int], refused: list[int]) -> None:
    """The default would serve the highest version alone."""
    for version in served:
        reply = caller.send(model, 1, model_version=str(version)).result()
        assert reply.value("VERSION") == version
    for version in refused:
        with pytest.raises(InferenceServerException, match=r"is not at ready state|not found"):
            caller.send(model, 1, model_version=str(version)).result()
    assert caller.send(model, 1).result().value("VERSION") == max(served)


def test_a_new_version_under_load_loses_no_request(caller: Caller) -> None:
    folder, log, done = caller.repository / "swap", caller.log("swap"), threading.Event()

    found: list[list[float]] = [[] for _ in range(CLIENTS)]
    """The versions that answered each client."""

    def ask(number: int) -> None:
        """Without a pause."""
        for value in itertools.count(number, CLIENTS):
            if done.is_set():
                break
            reply = caller.send("swap", value).result()
            assert reply.value() == value
            found[number].append(reply.value("VERSION"))

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            wait_until(lambda: len(log.order()) > 20 and all(found))
            shutil.copytree(folder / "1", folder / "2")
            caller.client.load_model("swap")
            wait_until(lambda: all(2 in versions for versions in found))
            loaded = len(log.order())
            wait_until(lambda: len(log.order()) > loaded + 20)
        finally:
            done.set()
    for client, versions in zip(clients, found, strict=True):
        assert client.exception() is None
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
