"""ONNX Runtime itself on the CPU, device tensors included; TensorRT played by a fake engine."""

import ctypes
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from jitney.errors import (
    CheckpointError,
    ConfigError,
    InstallationError,
    InternalError,
    InvalidArgumentError,
    LoadError,
    UnsupportedModelError,
)
from jitney_server.standins import onnx_session
from jitney_server.standins.exchange import model_path
from jitney_server.standins.onnx_options import read_options
from jitney_server.standins.onnx_session import DeviceTensor, OnnxSession, read_signature
from jitney_server.standins.trt_engine import TensorRtEngine, profile_of

from tests.server.standins import onnx_models as models


def load(folder: Path, model: Any, config: dict[str, Any] | None = None) -> OnnxSession:
    path = models.write_model(folder, "m", model)
    return OnnxSession(path, read_options(config or {}, None))


def test_what_a_file_declares(tmp_path: Path) -> None:
    path = models.write_model(tmp_path, "m", models.add_with_default())
    signature = read_signature(path)
    assert [(i.name, i.data_type, i.dims, i.symbols) for i in signature.inputs] == [
        ("x", "TYPE_FP32", (-1, 2), ("n", None))
    ]
    assert [i.name for i in signature.with_default] == ["b"]
    assert [i.name for i in signature.outputs] == ["y"]
    assert signature.can_batch


def test_options_reach_the_session(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "optimization": {"graph": {"level": 2}},
        "parameters": {
            "intra_op_thread_count": {"string_value": "1"},
            "execution_mode": {"string_value": "1"},
            "enable_mem_arena": {"string_value": "0"},
            "session.set_denormal_as_zero": {"string_value": "1"},
        },
    }
    made = load(tmp_path, models.identity(), config)._session.get_session_options()
    assert made.intra_op_num_threads == 1
    assert made.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert made.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert made.enable_cpu_mem_arena is False
    assert made.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert made.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_an_operator_library_that_is_missing(tmp_path: Path) -> None:
    """While the configuration is completed as well as at the load."""
    path = models.write_model(tmp_path, "m", models.identity())
    library = str(tmp_path / "ops.so")
    with pytest.raises(LoadError, match=r"op_library_filename .*ops\.so"):
        read_signature(path, [library])
    config = {"model_operations": {"op_library_filename": [library]}}
    with pytest.raises(LoadError, match=r"op_library_filename .*ops\.so"):
        OnnxSession(path, read_options(config, None))


def test_a_session_entry_that_is_refused(tmp_path: Path) -> None:
    config = {"parameters": {"session.x": {"string_value": "y" * 10_000}}}
    with pytest.raises(ConfigError, match=r"parameter session\.x"):
        load(tmp_path, models.identity(), config)


def test_a_provider_that_falls_back_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime-gpu on a machine without CUDA lists the provider and then does not use it."""
    listed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    path = models.write_model(tmp_path, "m", models.identity())
    with pytest.raises(InstallationError, match="which is missing here"):
        OnnxSession(path, read_options({}, 0), 0)


class Source:
    """The server's tensor on a device, here the CPU."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()


def test_device_tensors_stay_where_they_are(tmp_path: Path) -> None:
    """With the CPU as the device: what comes in as DLPack is bound and not copied."""
    session = load(tmp_path, models.two_inputs())
    a = np.array([[1, 2]], np.float32)
    adopted = session.adopt("a", Source(a))
    assert adopted.shape == (1, 2)
    assert adopted.value.data_ptr() == a.ctypes.data
    made = session.run({"a": adopted, "b": np.array([[3, 4]], np.float32)}, ["product", "sum"])
    assert all(isinstance(tensor, DeviceTensor) for tensor in made)
    assert [tensor.numpy().tolist() for tensor in made] == [[[3, 8]], [[4, 6]]]  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.from_dlpack(made[0]), [[3, 8]])  # type: ignore[arg-type]


def test_a_text_beside_a_device_tensor(tmp_path: Path) -> None:
    """ONNX Runtime refuses to bind a text, on any device."""
    session = load(tmp_path, models.labelled())
    adopted = session.adopt("x", Source(np.array([[1, 2]], np.float32)))
    text = np.array([[b"a", b"b"]], object)
    made = session.run({"x": adopted, "text": text}, ["text_out", "y"])
    assert [np.asarray(array).tolist() for array in made] == [[["a", "b"]], [[1, 2]]]


def test_no_path_in_an_error_for_the_client() -> None:
    error = onnx_session._run_error(
        RuntimeError(
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while "
            "running Add node. Name:'/encoder/layer.0/Add' Status Message: "
            "/build/onnxruntime/core/math.h:540 shapes 2 by 3/4\n"
        )
    )
    assert isinstance(error, InternalError)
    assert "/build" not in str(error)
    assert "running Add node. Name:'/encoder/layer.0/Add'" in str(error)
    assert "2 by 3/4" in str(error)


@pytest.mark.parametrize("folder", ["net.onnx", "net", "net-v1.5"])
def test_where_the_model_file_is(tmp_path: Path, folder: str) -> None:
    path = models.write_model(tmp_path, "m", models.identity(), filename=f"{folder}/model.onnx")
    assert model_path(tmp_path / "m/1", folder) == path
    with pytest.raises(CheckpointError, match=r"m/1/model\.onnx is missing"):
        model_path(tmp_path / "m/1", "model.onnx")


@pytest.mark.parametrize("module", ["signature", "batch", "exchange", "onnx_session", "trt_engine"])
def test_importing_is_cheap(module: str) -> None:
    code = f"import sys, jitney_server.standins.{module}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "transformers", "tensorrt", "triton_python_backend_utils"} & set(loaded)


# ---------------------------------------------------------------- TensorRT


class HostMemory:
    """Buffers that are the host's, so that addresses can be read and written."""

    stream = 7

    def put(self, array: np.ndarray) -> Any:
        return bytearray(array.tobytes())

    def reserve(self, size: int) -> Any:
        return bytearray(size)

    def address(self, buffer: Any) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def take(self, buffer: Any, array: np.ndarray) -> None:
        array[...] = np.frombuffer(buffer, array.dtype, array.size).reshape(array.shape)


class FakeEngine:
    """``y = 2 x``: what the stand-in asks of an engine and of its execution context."""

    num_io_tensors, num_optimization_profiles = 2, 1
    dtype = "DataType.FLOAT"

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}
        self.shape = (-1, 2)
        self.succeeds = True

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "x" else "out"

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_format(self, name: str) -> str:
        return "linear"

    def get_tensor_dtype(self, name: str) -> str:
        return self.dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple[tuple[int, ...], ...]:
        return (1, 2), (4, 2), (8, 2)

    def create_execution_context(self) -> "FakeEngine":
        return self

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == HostMemory.stream
        count = int(np.prod(self.shape))
        x, y = ((ctypes.c_float * count).from_address(self.addresses[n]) for n in "xy")
        y[:] = [2 * value for value in x]
        return self.succeeds


def tensorrt(engine: FakeEngine | None) -> Any:
    logger = types.SimpleNamespace(WARNING=1)
    runtime = types.SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    return types.SimpleNamespace(
        Logger=type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None}),
        Runtime=lambda log: runtime,
        init_libnvinfer_plugins=lambda log, namespace: logger,
        TensorFormat=types.SimpleNamespace(LINEAR="linear"),
        TensorIOMode=types.SimpleNamespace(INPUT="in"),
        __version__="10.0",
    )


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return models.write_model(tmp_path, "m", b"plan", filename="model.plan")


def test_an_instance_has_the_profile_of_its_own_group() -> None:
    groups = [{"name": "g", "profile": ["1"]}, {"name": "g_x", "profile": ["2"]}, {"name": "h"}]
    config = {"instance_group": groups}
    assert profile_of(config, "g_0") == 1
    assert profile_of(config, "g_x_0") == 2
    assert profile_of(config, "h_0") == 0
    assert profile_of(config, "other_0") == 0


def test_an_engine_runs_within_its_profile(plan: Path) -> None:
    engine = TensorRtEngine(tensorrt(FakeEngine()), plan, HostMemory())
    assert engine.max_batch_size == 8
    (made,) = engine.run({"x": np.array([[1, 2], [3, 4]], np.float32)}, ["y"])
    np.testing.assert_array_equal(np.asarray(made), [[2, 4], [6, 8]])
    with pytest.raises(InvalidArgumentError, match=r"'x' has shape \[9, 2\].*\[1, 2\] to \[8, 2\]"):
        engine.run({"x": np.zeros((9, 2), np.float32)}, ["y"])


def test_an_engine_that_fails(plan: Path) -> None:
    fake = FakeEngine()
    engine = TensorRtEngine(tensorrt(fake), plan, HostMemory())
    fake.succeeds = False
    with pytest.raises(InternalError, match="the TensorRT engine failed"):
        engine.run({"x": np.zeros((1, 2), np.float32)}, ["y"])


def test_a_plan_of_another_version_and_a_type_that_is_not_carried(plan: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.plan cannot be loaded by TensorRT 10\.0"):
        TensorRtEngine(tensorrt(None), plan, HostMemory())
    fake = FakeEngine()
    fake.dtype = "DataType.BF16"
    with pytest.raises(UnsupportedModelError, match="'x' is of type BF16"):
        TensorRtEngine(tensorrt(fake), plan, HostMemory())
