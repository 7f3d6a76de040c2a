"""The stand-in for the native ONNX Runtime backend, in the real server, with a folder of tiny
models; some of them the stand-ins must not load."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from jitney_server.server import TritonServer
from tritonclient.utils import InferenceServerException

from tests.real_server.client import counts, wait_until
from tests.server.standins import onnx_models as models
from tests.server.standins.onnx_models import ONE, io, parameter

# An hour: only a full batch leaves before, however late its last request comes.
FULL = "dynamic_batching { max_queue_delay_microseconds: 3600000000 }\n"
TENSORRT = """optimization { execution_accelerators { gpu_execution_accelerator: [ {
  name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } ] } }
"""
SEQUENCES = """max_batch_size: 4
sequence_batching { control_input [ { name: "start" control [
  { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 100 ] } ] } ] }
"""
BAD: dict[str, tuple[Any, str, str]] = {
    # name -> model, config, what the server's reason must match
    "missing": (None, 'backend: "onnxruntime"\n', r"model file .*missing/1/model\.onnx is missing"),
    "corrupt": (b"nonsense" * 20, "", r"corrupt/1/model\.onnx cannot be loaded: .*[Pp]rotobuf"),
    "operator": (models.unknown_operator(), "", r"model\.onnx cannot be loaded: .*Teleport"),
    "dims": (
        models.identity(shape=("n", 3)),
        "max_batch_size: 4\n" + io("input", "x", "TYPE_FP32", "[5]"),
        r"tensor 'x': the configuration has dims \[5\], but the model has \[-1, 3\]",
    ),
    "threads": (
        models.identity(),
        parameter("intra_op_thread_count", "many"),
        r"intra_op_thread_count is 'many', but must be a whole number",
    ),
    "plan": (
        b"no engine",
        'platform: "tensorrt_plan"\n',
        r"TensorRT engine needs an NVIDIA GPU .*backend: onnxruntime.*NVIDIA's container",
    ),
}


def write_good(repository: Path) -> None:
    write = models.write_model
    write(repository, "every_type", models.every_type(), ONE)
    write(repository, "bare", models.two_inputs())
    write(
        repository,
        "platform",
        models.identity(shape=("n", 2)),
        'platform: "onnxruntime_onnx"\nmax_batch_size: 6\ninstance_group [{ kind: KIND_AUTO }]\n'
        + io("input", "x", "TYPE_FP32", "[2]"),
    )
    write(repository, "versions", models.identity(), f"version_policy: {{ all {{}} }}\n{ONE}")
    write(repository, "versions", models.doubled(), filename="../3/model.onnx")
    write(repository, "batched", models.two_inputs(), f"max_batch_size: 10\n{ONE}{FULL}")
    write(repository, "lookup", models.lookup(), f"max_batch_size: 4\n{ONE}{FULL}")
    write(repository, "row_sums", models.row_sums(), ONE)
    write(repository, "flattened", models.flattened(), f"max_batch_size: 8\n{ONE}")
    inputs = (
        'input [{ name: "x" data_type: TYPE_FP32 dims: %s },'
        ' { name: "b" data_type: TYPE_FP32 dims: %s optional: true }]\n'
    )
    write(
        repository,
        "optional",
        models.add_with_default(),
        "max_batch_size: 0\n"
        + ONE
        + inputs % ("[-1, 2]", "[-1, 2]")
        + io("output", "y", "TYPE_FP32", "[-1, 2]"),
    )
    write(
        repository,
        "optional_batched",
        models.add_with_default(),
        "max_batch_size: 8\ndynamic_batching { }\n" + ONE + inputs % ("[2]", "[2]"),
    )
    write(repository, "sequence", models.recurrent_count(), SEQUENCES + ONE)
    tuned = (("intra_op_thread_count", "1"), ("execution_mode", "1"), ("enable_mem_pattern", "0"))
    write(
        repository,
        "tuned",
        models.identity(),
        ONE
        + TENSORRT
        + "".join(parameter(*pair) for pair in tuned)
        + parameter("share_session_between_instances", "true")
        + parameter("intra_op_thread_cuont", "1"),
    )
    write(repository, "threads_1", models.slow(), f"{ONE}{parameter('intra_op_thread_count', '1')}")
    write(repository, "threads_3", models.slow(), f"{ONE}{parameter('intra_op_thread_count', '3')}")


def write_bad(repository: Path) -> None:
    for name, (made, config, _) in BAD.items():
        filename = "model.plan" if name.endswith("plan") else "model.onnx"
        models.write_model(repository, name, made, config + ONE, filename)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_good(repository)
    write_bad(repository)
    with TritonServer(repository, keep_going=True, exit_timeout_s=60) as started:
        yield started
        assert started.stop(), started.last_stop.problem


def infer(
    client: grpc_client.InferenceServerClient,
    model: str,
    outputs: list[str] | None = None,
    **arrays: np.ndarray,
) -> dict[str, np.ndarray]:
    """Outputs by name."""
    inputs = []
    for name, array in arrays.items():
        kind = next(k for k, (_, numpy) in models.TYPES.items() if array.dtype == numpy)
        made = grpc_client.InferInput(name, list(array.shape), kind)
        made.set_data_from_numpy(array)
        inputs.append(made)
    wanted = [grpc_client.InferRequestedOutput(name) for name in outputs or []] or None
    result = client.infer(model, inputs, outputs=wanted, client_timeout=60)
    return {o.name: result.as_numpy(o.name) for o in result.get_response().outputs}


def config_of(client: grpc_client.InferenceServerClient, model: str) -> Any:
    return client.get_model_config(model).config


def floats(*rows: Any) -> np.ndarray:
    return np.array(rows, np.float32)


# ---------------------------------------------------------------- configuration


def test_without_a_config_everything_comes_from_the_model_file(client: Any) -> None:
    config = config_of(client, "bare")
    assert config.backend == "onnxruntime"
    assert config.max_batch_size == 4
    assert config.HasField("dynamic_batching")
    tensors = {t.name: (t.data_type, list(t.dims)) for t in (*config.input, *config.output)}
    assert tensors == {name: (11, [-1]) for name in ("a", "b", "sum", "product")}
    made = infer(client, "bare", a=floats([1, 2, 3]), b=floats([4, 5, 6]))
    np.testing.assert_array_equal(made["sum"], [[5, 7, 9]])
    np.testing.assert_array_equal(made["product"], [[4, 10, 18]])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_says_what_is_wrong(server: TritonServer, name: str) -> None:
    state, reason = server.admin.model_states()[name]
    assert state == "UNAVAILABLE"
    assert re.search(BAD[name][2], reason), reason
    assert "Traceback" not in reason


def test_platform_and_partial_config(client: Any) -> None:
    config = config_of(client, "platform")
    assert config.max_batch_size == 6
    assert [(o.name, list(o.dims)) for o in config.output] == [("y", [2])]
    assert config.HasField("dynamic_batching")
    np.testing.assert_array_equal(infer(client, "platform", x=floats([1, 2]))["y"], [[1, 2]])


def test_each_version_is_its_own_file(client: Any) -> None:
    made = grpc_client.InferInput("x", [1, 1], "FP32")
    made.set_data_from_numpy(floats([3]))
    replies = {v: client.infer("versions", [made], model_version=v) for v in ("1", "3")}
    assert {v: reply.as_numpy("y").item() for v, reply in replies.items()} == {"1": 3, "3": 6}


def test_notes_of_what_is_ignored(server: TritonServer, client: Any) -> None:
    np.testing.assert_array_equal(infer(client, "tuned", x=floats([3]))["y"], [[3]])
    for said in (
        r"tuned_0.*: ONNX Runtime on CPUExecutionProvider",
        r"tuned_0.*: gpu_execution_accelerator tensorrt is for instances on a GPU",
        r"tuned_0.*share_session_between_instances is ignored",
        r"intra_op_thread_cuont is unknown.*did you mean 'intra_op_thread_count'",
    ):
        wait_until(lambda said=said: re.search(said, server.log_tail(5000)))


def test_the_number_of_threads_is_taken(server: TritonServer) -> None:
    """Two more threads in the process of the instance with two more intra-op threads."""
    import psutil

    assert server.pid is not None
    stubs = {
        name: stub
        for stub in psutil.Process(server.pid).children()
        for name in ("threads_1", "threads_3")
        if f"/{name}/" in " ".join(stub.cmdline())
    }
    wait_until(lambda: stubs["threads_3"].num_threads() == stubs["threads_1"].num_threads() + 2)


# ---------------------------------------------------------------- tensors


def test_every_type_comes_back(client: Any) -> None:
    numbers, texts = [[0, 1, 7], [1, 0, 100]], [["", "ü\0x"], ["a" * 1000, "\U0001f68c"]]
    arrays = {name: np.array(numbers).astype(numpy) for name, (_, numpy) in models.TYPES.items()}
    arrays["BYTES"] = np.array([[text.encode() for text in row] for row in texts], object)
    made = infer(client, "every_type", **arrays)
    for name, array in arrays.items():
        assert made[f"{name}_OUT"].dtype == array.dtype
        assert made[f"{name}_OUT"].tolist() == array.tolist()


def test_a_tensor_with_no_dimension_but_the_batch(client: Any) -> None:
    made = infer(client, "row_sums", x=floats([1, 2, 3], [4, 5, 6]))["y"]
    np.testing.assert_array_equal(made, [[6], [15]])


@pytest.mark.parametrize("model", ["optional", "optional_batched"])
def test_an_optional_input(client: Any, model: str) -> None:
    x = floats([1, 2])
    np.testing.assert_array_equal(infer(client, model, x=x)["y"], [[11, 22]])
    np.testing.assert_array_equal(infer(client, model, x=x, b=x)["y"], [[2, 4]])


def test_sequence_controls_are_inputs(server: TritonServer) -> None:
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        seen = []
        for step in range(3):
            made = grpc_client.InferInput("x", [1, 1], "FP32")
            made.set_data_from_numpy(floats([step]))
            reply = client.infer(
                "sequence", [made], sequence_id=7, sequence_start=step == 0, sequence_end=step == 2
            )
            seen.append(reply.as_numpy("y").item())
    assert seen == [100, 1, 2]


# ---------------------------------------------------------------- batches


def at_once(calls: list[Any]) -> list[Any]:
    """Results or exceptions of calls that run at the same time: together they fill a batch."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


def test_requests_share_an_execution_and_each_gets_its_rows(client: Any) -> None:
    before = counts(client, "batched")
    arrays = [np.full((n, 2), n, np.float32) for n in (1, 2, 3, 4)]
    made = at_once([lambda a=a: infer(client, "batched", a=a, b=a + 1) for a in arrays])
    for array, outputs in zip(arrays, made, strict=True):
        np.testing.assert_array_equal(outputs["sum"], 2 * array + 1)
        np.testing.assert_array_equal(outputs["product"], array * (array + 1))
    assert (counts(client, "batched", before[0] + 10) - before).tolist() == [10, 1]


def test_each_request_of_a_batch_gets_the_outputs_it_asked_for(client: Any) -> None:
    a = floats(*[[3]] * 5)
    made = at_once(
        [lambda n=n: infer(client, "batched", [n], a=a, b=a) for n in ("sum", "product")]
    )
    assert [{n: v.ravel().tolist() for n, v in one.items()} for one in made] == [
        {"sum": [6] * 5}, {"product": [9] * 5}
    ]  # fmt: skip


def test_one_bad_request_does_not_fail_the_others(server: TritonServer, client: Any) -> None:
    indices = [[0], [4], [3], [1]]
    made = at_once(
        [lambda i=i: infer(client, "lookup", index=np.array([i], np.int64)) for i in indices]
    )
    for index, answer in zip(indices, made, strict=True):
        if index == [4]:
            assert isinstance(answer, InferenceServerException)
            assert "Gather" in answer.message()
            assert "idx=4" in answer.message()
            assert "/" not in answer.message().replace("[request id: <id_unknown>]", "")
        else:
            first = index[0] * 3
            np.testing.assert_array_equal(answer["y"], [[[first, first + 1, first + 2]]])
    wait_until(lambda: "each is run alone" in server.log_tail(2000))


def test_an_output_without_the_batch_is_named(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"output 'y' has shape \[4\].* 2 rows"):
        infer(client, "flattened", x=floats([1, 2], [3, 4]))
