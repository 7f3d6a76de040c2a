"""The server's own features, as docs/features.md has them: which requests it gives to a model
together, in which order and which not at all; and versions.

All models but one are recorders: they do nothing and write down when they did it. An execution
appends a line to the log of all models when it starts and one when it ends; in between it waits for
the gates that its rows name: gate n is the file ``gate-n`` beside the log, 0 is none. So a test
decides how long an execution takes, and no clock does.
"""

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.grpc as grpc_client
from jitney_server.server import TritonServer
from tritonclient.utils import InferenceServerException

from tests.real_server.client import make_inputs, metric, settled, wait_until
from tests.server.standins import onnx_models
from tests.server.standins.onnx_models import ONE, io

pytestmark = pytest.mark.slow  # what is shown here is Triton's own work, not this package's

REJECT_S = 2.0
"""How long a request may wait in ``reject``."""
WARM_BATCH = 3
RECORDER = """
import json, os, time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.folder = Path(parameters["folder"]["string_value"])
        self.args = args

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        rows = [row for rows in inputs for row in rows.tolist()]
        self.write("start", rows)
        ends = time.monotonic() + 120
        for _, gate in rows:
            while gate and not (self.folder / f"gate-{gate}").exists():
                if time.monotonic() > ends:
                    raise pb_utils.TritonModelException(f"gate {gate} was not opened")
                time.sleep(0.002)
        self.write("end", rows)
        answers = [x[:, :1] * [1, 0, 0] + [0, len(rows), self.version()] for x in inputs]
        tensors = [pb_utils.Tensor("y", answer.astype("int32")) for answer in answers]
        return [pb_utils.InferenceResponse([each]) for each in tensors]

    def version(self):
        return int(self.args["model_version"])

    def write(self, event, rows):
        line = {"event": event, "values": [value for value, _ in rows]}
        for name in ("model_name", "model_instance_name"):
            line[name] = self.args[name]
        # One write of one short line: instances are processes and share the file.
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, (json.dumps(line) + "\\n").encode())
        os.close(log)
"""
TENSORS = """
input [ { name: "x" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 3 ] } ]
"""
TWO = "instance_group [ { kind: KIND_CPU count: 2 } ]"
# A window longer than any test: only a full or a preferred batch leaves before.
WINDOW = "max_queue_delay_microseconds: 3600000000"
# It needs all the tokens that the server's flag gives.
ALL_TOKENS = """instance_group [ { kind: KIND_CPU count: 1 rate_limiter {
  resources [ { name: "TOKENS" global: true count: 4 } ] } } ]"""
# Name -> the rows of a batch, the lines of the feature and the versions in the folder.
MODELS: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "full": (4, f"dynamic_batching {{ {WINDOW} }}", (1,)),
    "preferred": (8, f"dynamic_batching {{ preferred_batch_size: [ 4 ] {WINDOW} }}", (1,)),
    "ordered": (1, f"dynamic_batching {{ preserve_ordering: true }} {TWO}", (1,)),
    "priorities": (1, "dynamic_batching { priority_levels: 2 default_priority_level: 2 }", (1,)),
    "limited": (1, "dynamic_batching { default_queue_policy { max_queue_size: 2 } }", (1,)),
    "reject": (
        1,
        "dynamic_batching { default_queue_policy { timeout_action: REJECT "
        f"default_timeout_microseconds: {round(REJECT_S * 1e6)} }} }}",
        (1,),
    ),
    "pair": (1, TWO, (1,)),
    "swap": (1, "", (1,)),
    "cached": (1, "response_cache { enable: true }", (1,)),
    "free": (1, "", (1,)),
    "one": (1, ALL_TOKENS, (1,)),
    "other": (1, ALL_TOKENS, (1,)),
    "latest": (1, "version_policy: { latest { num_versions: 2 } }", (1, 2, 3)),
    "specific": (1, "version_policy: { specific { versions: [ 1 ] } }", (1, 2, 3)),
    "all": (1, "version_policy: { all { } }", (1, 2)),
}
FLAGS = (
    "--disable-auto-complete-config",  # saves a short-lived process per model at the start
    "--cache-config=local,size=1048576",
    "--rate-limit=execution_count",
    "--rate-limit-resource=TOKENS:4",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """An open one: its clients load models and register shared memory."""
    repository = tmp_path_factory.mktemp("features") / "repository"
    for name, (rows, lines, versions) in MODELS.items():
        for version in versions:
            folder = repository / name / str(version)
            folder.mkdir(parents=True)
            (folder / "model.py").write_text(RECORDER, encoding="utf-8")
        text = (
            f'backend: "python"\nmax_batch_size: {rows}\n{TENSORS}{lines}\n'
            f'parameters {{ key: "folder" value {{ string_value: "{repository.parent}" }} }}\n'
        )
        text += "" if "instance_group" in lines else ONE
        (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
    tensors = io("input", "x", "TYPE_FP32", "[ -1 ]") + io("output", "y", "TYPE_FP32", "[ -1 ]")
    warm_up = f"""model_warmup [ {{ name: "first" batch_size: {WARM_BATCH} count: 2
      inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: [ 5 ] random_data: true }} }} }} ]"""
    config = f'backend: "onnxruntime"\nmax_batch_size: 8\n{tensors}{ONE}{warm_up}'
    onnx_models.write_model(repository, "doubled", onnx_models.doubled(), config)
    with TritonServer(repository, open_endpoints=True, extra_args=FLAGS) as started:
        yield started
        assert started.stop(), started.last_stop.problem


class Recorder:
    """A model: what is sent to it, its gates, and what it wrote down since this object was made."""

    _gates = itertools.count(1)

    def __init__(self, server: TritonServer, client: Any, name: str) -> None:
        self._server, self._client, self._name = server, client, name
        self._folder = server.model_repository.parent
        self._closed: list[int] = []
        self._past = len(self._lines())

    def _lines(self) -> list[str]:
        path = self._folder / "log"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def events(self, kind: str = "start") -> list[dict[str, Any]]:
        """Every ``start`` or ``end`` of an execution, in order."""
        events = map(json.loads, self._lines()[self._past :])
        return [e for e in events if (e["model_name"], e["event"]) == (self._name, kind)]

    def order(self, kind: str = "start") -> list[int]:
        """All values in the order in which their executions started, or ended."""
        return [value for event in self.events(kind) for value in event["values"]]

    def gate(self) -> int:
        """A new one: a request that names it keeps its execution running."""
        self._closed.append(next(self._gates))
        return self._closed[-1]

    def open_all(self) -> None:
        for gate in self._closed:
            (self._folder / f"gate-{gate}").touch()

    def send(self, value: int, gate: int = 0, **options: Any) -> "Future[list[int]]":
        """Its value, the rows of its execution and the model's version are to come, or the client's
        exception. ``options`` are the client's own: priority, …"""
        future: Future[list[int]] = Future()

        def answer(result: Any, error: Exception | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result.as_numpy("y")[0].tolist())

        inputs = make_inputs(grpc_client, {"x": [[value, gate]]})
        self._client.async_infer(self._name, inputs, answer, client_timeout=60, **options)
        return future

    def send_in_order(self, *values: int, **options: Any) -> "list[Future[list[int]]]":
        """While it is busy: each is in the server's queue before the next one leaves."""
        futures = []
        for value in values:
            before = self.pending()
            futures.append(self.send(value, **options))
            wait_until(lambda before=before: self.pending() == before + 1)
        return futures

    def pending(self) -> float:
        """Requests that the server has and has not begun to execute."""
        url, name = self._server.metrics_url, "nv_inference_pending_request_count"
        return metric(url, name, model=self._name)

    def block(self) -> None:
        """Keep its only instance busy with the request of value 1, until the gates open."""
        self.send(1, self.gate())
        wait_until(lambda: 1 in self.order())


@pytest.fixture
def record(server: TritonServer, client: Any) -> Iterator[Callable[[str], Recorder]]:
    made: list[Recorder] = []

    def start(name: str) -> Recorder:
        made.append(Recorder(server, client, name))
        return made[-1]

    yield start
    for each in made:
        each.open_all()


# ------------------------------------------------------------------ batches, queues, instances


@pytest.mark.parametrize("model", ["full", "preferred"])
def test_requests_share_an_execution(record: Callable[[str], Recorder], model: str) -> None:
    """The window is an hour: only a full or a preferred batch, of 4 rows, leaves before."""
    recorder = record(model)
    futures = [recorder.send(value) for value in range(4)]
    assert [future.result() for future in futures] == [[value, 4, 1] for value in range(4)]
    assert len(recorder.events()) == 1


def test_answers_keep_the_order_of_the_requests(record: Callable[[str], Recorder]) -> None:
    recorder = record("ordered")
    slow = recorder.send(1, recorder.gate())
    wait_until(lambda: recorder.order() == [1])
    fast = recorder.send(2)
    wait_until(lambda: recorder.order("end") == [2])
    time.sleep(0.3)  # more than enough for an answer that nothing holds back
    assert not fast.done()
    recorder.open_all()
    assert [slow.result()[0], fast.result()[0]] == [1, 2]


def test_high_priority_overtakes(record: Callable[[str], Recorder]) -> None:
    recorder = record("priorities")
    recorder.block()
    futures = recorder.send_in_order(2, 3, 4)  # the default level, 2
    futures += recorder.send_in_order(5, 6, priority=1)
    recorder.open_all()
    for future in futures:
        future.result()
    assert recorder.order() == [1, 5, 6, 2, 3, 4]


def test_a_full_queue_refuses(record: Callable[[str], Recorder]) -> None:
    recorder = record("limited")
    recorder.block()
    queued = recorder.send_in_order(2, 3)
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size"):
        recorder.send(4).result()
    recorder.open_all()
    assert [future.result()[0] for future in queued] == recorder.order()[1:] == [2, 3]


def test_a_request_that_waited_too_long_is_rejected(record: Callable[[str], Recorder]) -> None:
    recorder = record("reject")
    recorder.block()
    sent = time.monotonic()
    with pytest.raises(InferenceServerException, match="Request timeout expired"):
        recorder.send(2).result()  # although the model is still busy
    assert time.monotonic() - sent >= REJECT_S
    recorder.open_all()
    assert recorder.send(3).result()[0] == 3
    assert recorder.order() == [1, 3]


def test_two_instances_execute_at_the_same_time(record: Callable[[str], Recorder]) -> None:
    recorder = record("pair")
    gate = recorder.gate()
    futures = [recorder.send(value, gate) for value in (1, 2, 3)]
    wait_until(lambda: len(recorder.events()) == 2)
    wait_until(lambda: recorder.pending() == 1)  # the third waits: there are only two
    assert recorder.events("end") == []
    assert len({event["model_instance_name"] for event in recorder.events()}) == 2
    recorder.open_all()
    assert [future.result()[0] for future in futures] == [1, 2, 3]


def test_a_resource_keeps_two_models_apart(record: Callable[[str], Recorder]) -> None:
    one, other, free = record("one"), record("other"), record("free")
    one.block()
    second = other.send(2)
    time.sleep(0.5)  # it would have been executed by now
    assert other.order() == []
    one.open_all()
    # Once in some hundred times this server's rate limiter does not notice that a waiting instance
    # could execute, until any other request comes.
    while not second.done():
        free.send(0).result()
        time.sleep(0.1)
    assert second.result()[0] == 2
    assert one.order("end") == [1]


def test_equal_requests_are_answered_by_the_cache(record: Callable[[str], Recorder]) -> None:
    recorder = record("cached")
    assert [recorder.send(value).result()[0] for value in (5, 5, 5, 6)] == [5, 5, 5, 6]
    assert recorder.order() == [5, 6]


# ------------------------------------------------------------------ warm-up, versions, loading


def test_warm_up_runs_before_the_first_request(client: Any) -> None:
    """No test asks for so many rows, and the server's statistics include warm-up."""

    def executed() -> int:
        (model,) = client.get_inference_statistics("doubled").model_stats
        found = {batch.batch_size: batch.compute_infer.count for batch in model.batch_stats}
        return found.get(WARM_BATCH, 0)

    assert settled(executed, lambda now: now >= 2) == 2


@pytest.mark.parametrize(
    ("model", "served", "refused"),
    [("latest", [2, 3], [1]), ("specific", [1], [2, 3]), ("all", [1, 2], [])],
)
def test_version_policy(
    record: Callable[[str], Recorder], model: str, served: list[int], refused: list[int]
) -> None:
    """The default would serve the highest version alone."""
    recorder = record(model)
    for version in served:
        assert recorder.send(1, model_version=str(version)).result()[2] == version
    for version in refused:
        with pytest.raises(InferenceServerException, match=r"is not at ready state|not found"):
            recorder.send(1, model_version=str(version)).result()
    assert recorder.send(1).result()[2] == max(served)


def test_a_new_version_under_load_loses_no_request(
    server: TritonServer, client: Any, record: Callable[[str], Recorder]
) -> None:
    recorder, done, folder = record("swap"), threading.Event(), server.model_repository / "swap"
    found: list[list[int]] = [[] for _ in range(4)]
    """The versions that answered each client."""

    def ask(number: int) -> None:
        """Without a pause."""
        for value in itertools.count(number, len(found)):
            if done.is_set():
                break
            answered, _, version = recorder.send(value).result()
            assert answered == value
            found[number].append(version)

    with ThreadPoolExecutor(len(found)) as pool:
        clients = [pool.submit(ask, number) for number in range(len(found))]
        try:
            wait_until(lambda: all(len(versions) > 5 for versions in found))
            shutil.copytree(folder / "1", folder / "2")
            client.load_model("swap")
            wait_until(lambda: all(versions.count(2) > 5 for versions in found))
        finally:
            done.set()
    for each, versions in zip(clients, found, strict=True):
        assert each.exception() is None
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
