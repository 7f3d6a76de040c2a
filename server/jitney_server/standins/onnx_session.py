"""One ONNX Runtime session: loading a model file, what it declares, and a run.

Owned by one instance of ``backend/onnxruntime/model.py``. The only module that imports onnxruntime.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from jitney.errors import (
    CheckpointError,
    ConfigError,
    InstallationError,
    InternalError,
    InvalidArgumentError,
    JitneyError,
    LoadError,
    UnsupportedModelError,
    install_extra,
)
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValue as _OrtValue

from jitney_server.standins.batch import BatchArrays, OnDevice
from jitney_server.standins.onnx_options import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    GraphLevel,
    OnnxOptions,
    Provider,
)
from jitney_server.standins.signature import Signature, TensorInfo, data_type_of

TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}
_GRAPH_LEVELS: dict[GraphLevel, Any] = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_REPAIR = {
    CUDA: f"repair it with: pip uninstall onnxruntime; {install_extra('onnx-gpu')}, on "
    "a machine with CUDA and cuDNN; or keep the model on the CPU with instance_group { kind: "
    "KIND_CPU }",
    TENSORRT: f"repair it with: pip uninstall onnxruntime; {install_extra('onnx-gpu')}, "
    "and TensorRT's libraries; or leave the tensorrt accelerator out",
    OPENVINO: "repair it with: pip uninstall onnxruntime; pip install onnxruntime-openvino; or "
    "leave the openvino accelerator out",
}
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ")
"""The beginning of an error's text. The group is the kind of error."""
_NODE_OR_PATH = re.compile(r"(?P<node>Name:'[^']*')|(?:[A-Za-z]:)?(?:/[\w.+@-]+){2,}(?::\d+)?")
"""The name of a node, or a path of a file: one of this machine, or of the machine that built ONNX
Runtime. The name is the first choice, because it may look like a path: torch names nodes after
modules."""
_LOG_ERRORS = 3
"""ONNX Runtime's log level: errors and worse. Its warnings concern the exporter of the model."""


class Device(NamedTuple):
    """Where ONNX Runtime is to put an output."""

    kind: str
    number: int


_HOST = Device("cpu", 0)


class DeviceTensor:
    """A tensor that stays on the GPU: an input that a request has there, or an output."""

    def __init__(self, value: Any) -> None:
        """``value`` is ONNX Runtime's, an OrtValue."""
        self.value = value

    @classmethod
    def adopt(cls, source: Any, is_boolean: bool) -> "DeviceTensor":
        """Share the memory of ``source``, which gives a DLPack capsule. The capsule does not say
        whether its bytes are booleans."""
        value = _OrtValue.from_dlpack(source.to_dlpack(), is_boolean)
        return cls(onnxruntime.OrtValue(value))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape())

    def numpy(self) -> np.ndarray:
        """A copy on the host."""
        array: np.ndarray = self.value.numpy()
        return array

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.value._ortvalue.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.value._ortvalue.__dlpack_device__()
        return int(kind), int(number)


class OnnxSession:
    """A loaded model. One thread at a time may call ``run``: an instance has only one."""

    def __init__(self, path: Path, options: OnnxOptions, device_id: int | None = None) -> None:
        """``device_id`` is the instance's GPU, None on the CPU.

        Raises CheckpointError or UnsupportedModelError naming the file and the reason, and
        InstallationError if a required execution provider is missing.
        """
        required = [provider.name for provider in options.providers]
        _require(required, onnxruntime.get_available_providers())
        providers = [*options.providers, Provider(CPU, {})]
        self._session = _load(path, _session_options(options), providers)
        # A provider whose libraries are missing is left out without an error.
        _require(required, self._session.get_providers())
        self._session.disable_fallback()
        self._run_options = onnxruntime.RunOptions()
        self._run_options.log_severity_level = _LOG_ERRORS
        for key, value in options.run_entries.items():
            self._run_options.add_run_config_entry(key, value)
        self.signature = _signature_of(self._session)
        inputs = (*self.signature.inputs, *self.signature.with_default)
        self._text_inputs = _names_of_type(inputs, "TYPE_STRING")
        self._boolean_inputs = _names_of_type(inputs, "TYPE_BOOL")
        self._scalar_inputs = {info.name for info in inputs if not info.dims}
        self._text_outputs = _names_of_type(self.signature.outputs, "TYPE_STRING")
        self._device = _HOST if device_id is None else Device("cuda", device_id)

    @property
    def providers(self) -> list[str]:
        """What really runs the model, in order of preference."""
        return list(self._session.get_providers())

    def adopt(self, name: str, tensor: Any) -> DeviceTensor:
        """An input in this GPU's memory, from the server's tensor and without a copy."""
        return DeviceTensor.adopt(tensor, is_boolean=name in self._boolean_inputs)

    def run(self, inputs: BatchArrays, outputs: Sequence[str]) -> list[np.ndarray | OnDevice]:
        """The requested outputs; on the device if an input is, unless another input is text.

        Raises InvalidArgumentError or InternalError with a text for the client: the operator that
        failed and why, but no path of a file.
        """
        feeds: BatchArrays = {}
        any_on_device = False
        # ONNX Runtime cannot bind a text as an input. So if an input is text, nothing is bound: the
        # other inputs are copied to the host.
        has_text = not self._text_inputs.isdisjoint(inputs)
        for name, array in inputs.items():
            if has_text and isinstance(array, DeviceTensor):
                array = array.numpy()
            if isinstance(array, np.ndarray):
                feeds[name] = self._prepared(name, array)
            else:
                feeds[name] = array
                any_on_device = True
        try:
            if any_on_device:
                return self._run_on_device(feeds, outputs)
            results: list[Any] = self._session.run(list(outputs), feeds, self._run_options)
            return results
        except Exception as error:  # onnxruntime's errors share no base but Exception
            raise _run_error(error) from None

    def _run_on_device(
        self, inputs: BatchArrays, outputs: Sequence[str]
    ) -> list[np.ndarray | OnDevice]:
        """A run whose inputs and outputs are bound to the memory where they are, without a copy."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            if isinstance(array, DeviceTensor):
                binding.bind_ortvalue_input(name, array.value)
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in outputs:
            # A text can be bound as an output, but only on the host.
            device = _HOST if name in self._text_outputs else self._device
            binding.bind_output(name, device.kind, device.number)
        binding.synchronize_inputs()
        self._session.run_with_iobinding(binding, self._run_options)
        binding.synchronize_outputs()
        results: list[np.ndarray | OnDevice] = []
        for name, value in zip(outputs, binding.get_outputs(), strict=True):
            is_text = name in self._text_outputs
            results.append(value.numpy() if is_text else DeviceTensor(value))
        return results

    def _prepared(self, name: str, array: np.ndarray) -> np.ndarray:
        """An input as ONNX Runtime takes it. The server has scalars as [1] and texts as bytes.
        Raises InvalidArgumentError."""
        if name in self._scalar_inputs and array.size == 1:
            array = array.reshape(())
        if name not in self._text_inputs:
            return array
        try:
            decoded = [text.decode() for text in array.ravel()]
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"input {name!r} has text that is not valid UTF-8: {error.reason}"
            ) from None
        return np.array(decoded, np.object_).reshape(array.shape)


def read_signature(path: Path, op_libraries: Sequence[str] = ()) -> Signature:
    """What the model at ``path`` declares, without optimizing it or making threads."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS
    options.graph_optimization_level = _GRAPH_LEVELS["none"]
    options.intra_op_num_threads = 1
    _register_op_libraries(options, op_libraries)
    return _signature_of(_load(path, options, [Provider(CPU, {})]))


def _session_options(options: OnnxOptions) -> Any:
    """ONNX Runtime's object for our options."""
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = _LOG_ERRORS
    session_options.graph_optimization_level = _GRAPH_LEVELS[options.graph_level]
    session_options.intra_op_num_threads = options.intra_op_threads
    session_options.inter_op_num_threads = options.inter_op_threads
    if options.parallel:
        session_options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    if options.mem_arena is not None:
        session_options.enable_cpu_mem_arena = options.mem_arena
    if options.mem_pattern is not None:
        session_options.enable_mem_pattern = options.mem_pattern
    for key, value in options.session_entries.items():
        try:
            session_options.add_session_config_entry(key, value)
        except Exception as error:  # onnxruntime's errors share no base but Exception
            raise ConfigError(f"parameter {key}: {_reason(error)}") from None
    _register_op_libraries(session_options, options.op_libraries)
    return session_options


def _register_op_libraries(options: Any, op_libraries: Sequence[str]) -> None:
    for library in op_libraries:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # onnxruntime's errors share no base but Exception
            raise LoadError(f"op_library_filename {library}: {_reason(error)}") from None


def _load(path: Path, options: Any, providers: list[Provider]) -> Any:
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime's errors share no base but Exception
        text = f"the model file {path} cannot be loaded: {_reason(error)}"
        if _kind(error) in ("NOT_IMPLEMENTED", "INVALID_GRAPH"):
            raise UnsupportedModelError(text) from None
        raise CheckpointError(text) from None


def _require(required: Sequence[str], present: Sequence[str]) -> None:
    for name in required:
        if name not in present:
            raise InstallationError(
                f"the model demands ONNX Runtime's {name}, which is missing here (there are "
                f"{', '.join(present)}); {_REPAIR[name]}"
            )


def _signature_of(session: Any) -> Signature:
    return Signature(
        inputs=tuple(map(_info, session.get_inputs())),
        outputs=tuple(map(_info, session.get_outputs())),
        with_default=tuple(map(_info, session.get_overridable_initializers())),
    )


def _info(declared: Any) -> TensorInfo:
    shape = declared.shape
    return TensorInfo(
        name=declared.name,
        data_type=data_type_of(declared.name, declared.type, TYPES),
        dims=tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in shape),
        symbols=tuple(dim if isinstance(dim, str) else None for dim in shape),
    )


def _names_of_type(infos: Iterable[TensorInfo], data_type: str) -> set[str]:
    return {info.name for info in infos if info.data_type == data_type}


def _kind(error: Exception) -> str | None:
    """Such as ``INVALID_ARGUMENT``; None if the error does not tell."""
    match = _PREFIX.match(str(error))
    return None if match is None else match[1]


def _reason(error: Exception) -> str:
    return _PREFIX.sub("", str(error)).strip()


def _node_without_path(match: re.Match[str]) -> str:
    """What stays of a match of _NODE_OR_PATH: the name of a node does, a path does not."""
    return match["node"] or ""


def _run_error(error: Exception) -> JitneyError:
    """An error of a run for the client: in one line, and without paths."""
    without_paths = _NODE_OR_PATH.sub(_node_without_path, _reason(error))
    line = " ".join(without_paths.split())
    text = f"the model failed: {line[:500]}"
    if _kind(error) == "INVALID_ARGUMENT":
        return InvalidArgumentError(text)
    return InternalError(text)
