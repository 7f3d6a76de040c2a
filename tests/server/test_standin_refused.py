"""Models that the stand-ins must not load, in the real server: each says what is wrong with it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jitney.server import TritonServer

from tests.standin import onnx_models as models
from tests.standin.onnx_models import ONE, io, parameter

BAD: dict[str, tuple[Any, str, str]] = {
    # name -> model, config, what the server's reason must match
    "missing": (None, 'backend: "onnxruntime"\n', r"model file .*missing/1/model\.onnx is missing"),
    "corrupt": (b"nonsense" * 20, "", r"corrupt/1/model\.onnx cannot be loaded: .*[Pp]rotobuf"),
    "operator": (models.unknown_operator(), "", r"model\.onnx cannot be loaded: .*Teleport"),
    "bf16": (models.identity("BFLOAT16"), "", r"tensor 'x' is of type tensor\(bfloat16\)"),
    "dims": (
        models.identity(shape=("n", 3)),
        "max_batch_size: 4\n" + io("input", "x", "TYPE_FP32", "[5]"),
        r"tensor 'x': the configuration has dims \[5\], but the model has \[-1, 3\]",
    ),
    "data_type": (
        models.identity(),
        io("output", "y", "TYPE_INT32", "[-1]"),
        r"tensor 'y': the configuration has data_type TYPE_INT32, but the model has TYPE_FP32",
    ),
    "fixed": (
        models.identity(shape=(2, 3)),
        "max_batch_size: 4\n",
        r"max_batch_size is 4, but the model cannot batch: .* 'x' \[2, 3\] is fixed",
    ),
    "no_such": (
        models.identity(),
        "max_batch_size: 4\n" + io("output", "why", "TYPE_FP32", "[-1]"),
        r"the model has no output 'why'",
    ),
    "openvino": (
        models.identity(),
        "optimization { execution_accelerators { cpu_execution_accelerator: "
        '[ { name: "openvino" } ] } }\n',
        r"demands ONNX Runtime's OpenVINOExecutionProvider, .*pip install onnxruntime-openvino",
    ),
    "threads": (
        models.identity(),
        parameter("intra_op_thread_count", "many"),
        r"intra_op_thread_count is 'many', but must be a whole number",
    ),
    "level": (
        models.identity(),
        "optimization { graph { level: 7 } }\n",
        r"optimization\.graph\.level is 7, but must be -1, 0, 1 or 2",
    ),
    "operators": (
        models.identity(),
        'model_operations { op_library_filename: "no_such.so" }\n',
        r"op_library_filename no_such\.so: ",
    ),
    "control": (
        models.recurrent_count(),
        'max_batch_size: 4\nsequence_batching { control_input [ { name: "start" control [ '
        "{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }\n",
        r"control 'start': the configuration has TYPE_INT32, but the model has TYPE_FP32",
    ),
    "no_plan": (None, 'platform: "tensorrt_plan"\n', r"no_plan/1/model\.plan is missing"),
    "plan": (
        b"no engine",
        'platform: "tensorrt_plan"\n',
        r"TensorRT engine needs an NVIDIA GPU .*backend: onnxruntime.*NVIDIA's container",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (made, config, _) in BAD.items():
        filename = "model.plan" if name.endswith("plan") else "model.onnx"
        models.write_model(repository, name, made, config + ONE, filename)
    with TritonServer(repository, keep_going=True, exit_timeout_s=60) as started:
        yield started
        assert started.stop(), started.unclean


@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_says_what_is_wrong(server: TritonServer, name: str) -> None:
    state, reason = server.model_states()[name]
    assert state == "UNAVAILABLE"
    assert re.search(BAD[name][2], reason), reason
    assert "Traceback" not in reason
