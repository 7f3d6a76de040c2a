"""Warm-up, version policies, and loading and unloading while requests come."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jitney.server import TritonServer
from tritonclient.utils import InferenceServerException

from tests.server.client import wait_until
from tests.server.features.calls import Caller, Recorder, Reply
from tests.server.features.models import log_folder, recorder_config
from tests.server.features.repository import VERSION_POLICIES, WARM_BATCH, WARM_VALUE

CLIENTS = 4


def test_warm_up_runs_before_the_first_request(server: TritonServer) -> None:
    log = log_folder(server.model_repository, "warm") / "log"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    started = [line["values"] for line in lines if line["event"] == "start"]
    assert started == 2 * [WARM_BATCH * [WARM_VALUE]]  # two rounds of a batch of three


def test_onnx_warm_up_runs_before_the_first_request(caller: Caller) -> None:
    """No test asks it for so many rows, and the server's statistics include warm-up."""
    assert caller.batches("onnx_by_six")[WARM_BATCH] == 2


@pytest.mark.parametrize(
    ("model", "served"), [("latest", [2, 3]), ("specific", [1]), ("all", [1, 2])]
)
def test_version_policy(caller: Caller, model: str, served: list[int]) -> None:
    """The default would serve the highest version alone."""
    for version in VERSION_POLICIES[model][0]:
        if version in served:
            reply = caller.send(model, 1, model_version=str(version)).result()
            assert (reply.value("VERSION"), reply.model_version) == (version, str(version))
        else:
            with pytest.raises(InferenceServerException, match=r"is not at ready state|not found"):
                caller.send(model, 1, model_version=str(version)).result()
    unspecified = caller.send(model, 1).result()
    assert unspecified.value("VERSION") == max(served)


class Traffic:
    """Clients that ask ``swap`` without a pause, and all their replies."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Reply]] = []
        self.errors: list[str] = []
        self.sent = 0

    def versions(self) -> list[float]:
        """The versions that answered, in the order of the answers."""
        ordered = sorted(self.replies, key=lambda pair: pair[1].at)
        return [reply.value("VERSION") for _, reply in ordered]


@contextmanager
def traffic(caller: Caller) -> Iterator[Traffic]:
    """Every request of the traffic must have had exactly its own answer at the end."""
    seen, lock, done = Traffic(), threading.Lock(), threading.Event()

    def client(number: int) -> None:
        value = number
        while not done.is_set():
            value += CLIENTS
            with lock:
                seen.sent += 1
            try:
                reply = caller.send("swap", value).result()
            except InferenceServerException as error:
                with lock:
                    seen.errors.append(str(error))
            else:
                with lock:
                    seen.replies.append((value, reply))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not seen.errors
    assert len(seen.replies) == seen.sent
    assert all(reply.value("VALUE_OUT") == value for value, reply in seen.replies)


@pytest.fixture
def swap(server: TritonServer, caller: Caller) -> Iterator[Path]:
    """The folder of ``swap``; afterwards it is as it was, and loaded."""
    folder = server.model_repository / "swap"
    config = (folder / "config.pbtxt").read_text(encoding="utf-8")
    yield folder
    shutil.rmtree(folder / "2", ignore_errors=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    caller.client.unload_model("swap")  # a load alone would keep the last call's configuration
    caller.client.load_model("swap")


def test_a_new_version_under_load_loses_no_request(caller: Caller, swap: Path) -> None:
    with traffic(caller) as seen:
        wait_until(lambda: len(seen.replies) > 20)
        shutil.copytree(swap / "1", swap / "2")
        caller.client.load_model("swap")
        loaded = len(seen.replies)
        wait_until(lambda: len(seen.replies) > loaded + 20)
    versions = seen.versions()
    assert versions[:20] == 20 * [1]
    assert versions[-10:] == 10 * [2]


def test_a_new_configuration_under_load_loses_no_request(
    caller: Caller, server: TritonServer, swap: Path, recorder: Callable[[str], Recorder]
) -> None:
    log = recorder("swap")
    (swap / "config.pbtxt").write_text(
        recorder_config(server.model_repository, "swap", tag="edited"), encoding="utf-8"
    )
    with traffic(caller) as seen:
        wait_until(lambda: len(seen.replies) > 20)
        caller.client.load_model("swap")
        loaded = len(seen.replies)
        wait_until(lambda: len(seen.replies) > loaded + 20)
    tags = [execution.tag for execution in log.executions()]
    assert tags[0] == ""
    assert tags[-1] == "edited"


def test_a_load_may_bring_its_own_configuration(
    caller: Caller, server: TritonServer, swap: Path, recorder: Callable[[str], Recorder]
) -> None:
    """The call's configuration replaces that of the file until the model is unloaded."""
    log = recorder("swap")
    config = caller.client.get_model_config("swap", as_json=True)["config"]
    config["parameters"]["tag"] = {"string_value": "override"}
    with traffic(caller) as seen:
        wait_until(lambda: len(seen.replies) > 20)
        caller.client.load_model("swap", config=json.dumps(config))
        loaded = len(seen.replies)
        wait_until(lambda: len(seen.replies) > loaded + 20)
    assert log.executions()[-1].tag == "override"
    caller.client.unload_model("swap")
    caller.client.load_model("swap")
    caller.send("swap", -1).result()
    assert log.executions()[-1].tag == ""


def test_an_unload_lets_requests_end_and_refuses_new_ones(
    caller: Caller, swap: Path, recorder: Callable[[str], Recorder]
) -> None:
    log = recorder("swap")
    gate = log.gate()
    running = caller.send("swap", 1, gate)
    log.wait_for(1)
    queued = caller.send_in_order("swap", [2, 3])
    caller.client.unload_model("swap")
    assert not caller.client.is_model_ready("swap")
    with pytest.raises(InferenceServerException, match="swap"):
        caller.send("swap", 4).result()
    time.sleep(0.2)
    assert not running.done()
    log.open(gate)
    assert [future.result().value("VALUE_OUT") for future in [running, *queued]] == [1, 2, 3]
    assert log.order() == [1, 2, 3]


def test_a_load_that_fails_leaves_the_old_model_in_place(
    caller: Caller, server: TritonServer, swap: Path
) -> None:
    good = (swap / "config.pbtxt").read_text(encoding="utf-8")
    (swap / "config.pbtxt").write_text(good.replace("TYPE_INT32", "TYPE_INT33"), encoding="utf-8")
    with traffic(caller) as seen:
        wait_until(lambda: len(seen.replies) > 20)
        with pytest.raises(InferenceServerException, match="swap"):
            caller.client.load_model("swap")
        refused = len(seen.replies)
        wait_until(lambda: len(seen.replies) > refused + 20)
