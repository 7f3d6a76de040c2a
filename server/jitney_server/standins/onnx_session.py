"""One ONNX Runtime session: loading a model file, what it declares, and a run.

Owned by one instance of ``backend/onnxruntime/model.py``. The only module that imports onnxruntime.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
)
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValue as _OrtValue

from jitney_server.standins.batch import Arrays, OnDevice
from jitney_server.standins.onnx_options import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    GraphLevel,
    OnnxOptions,
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
    CUDA: "repair it with: pip uninstall onnxruntime; pip install 'triton-jitney[onnx-gpu]' on "
    "a machine with CUDA and cuDNN; or keep the model on the CPU with instance_group { kind: "
    "KIND_CPU }",
    TENSORRT: "repair it with: pip uninstall onnxruntime; pip install 'triton-jitney[onnx-gpu]' "
    "and TensorRT's libraries; or leave the tensorrt accelerator out",
    OPENVINO: "repair it with: pip uninstall onnxruntime; pip install onnxruntime-openvino; or "
    "leave the openvino accelerator out",
}
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ")
# A node's name may look like a path (torch names nodes after modules) and is kept.
_PATH = re.compile(r"(Name:'[^']*')|(?:[A-Za-z]:)?(?:/[\w.+@-]+){2,}(?::\d+)?")
_ERRORS = 3
"""ONNX Runtime's log level: errors and worse. Its warnings concern the exporter of the model."""


class DeviceTensor:
    """A tensor that stays in the memory it is in: a request's on a GPU, or an output there."""

    def __init__(self, value: Any) -> None:
        """``value`` is an OrtValue."""
        self.value = value

    @classmethod
    def adopt(cls, source: Any, boolean: bool) -> "DeviceTensor":
        """Share the memory of what gives a DLPack capsule, which does not tell ``boolean`` from
        bytes."""
        return cls(onnxruntime.OrtValue(_OrtValue.from_dlpack(source.to_dlpack(), boolean)))

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
    """A loaded model. ``run`` is for one thread at a time, as an instance has only one."""

    def __init__(self, path: Path, options: OnnxOptions, device_id: int | None = None) -> None:
        """``device_id`` is the instance's GPU, None on the CPU.

        Raises CheckpointError or UnsupportedModelError naming the file and the reason, and
        InstallationError if a required execution provider is missing.
        """
        required = [name for name, _ in options.providers]
        _require(required, onnxruntime.get_available_providers())
        self._session = _load(path, _session_options(options), [*options.providers, (CPU, {})])
        _require(required, self._session.get_providers())
        self._session.disable_fallback()
        self._run_options = onnxruntime.RunOptions()
        self._run_options.log_severity_level = _ERRORS
        for key, value in options.run_entries.items():
            self._run_options.add_run_config_entry(key, value)
        self.signature = _signature_of(self._session)
        inputs = (*self.signature.inputs, *self.signature.optional)
        self._text = {i.name for i in inputs if i.data_type == "TYPE_STRING"}
        self._scalars = {i.name for i in inputs if not i.dims}
        self._booleans = {i.name for i in inputs if i.data_type == "TYPE_BOOL"}
        outputs = self.signature.outputs
        self._text_outputs = {i.name for i in outputs if i.data_type == "TYPE_STRING"}
        self._device = ("cpu", 0) if device_id is None else ("cuda", device_id)

    @property
    def providers(self) -> list[str]:
        """What really runs the model, in order of preference."""
        return list(self._session.get_providers())

    def adopt(self, name: str, tensor: Any) -> DeviceTensor:
        """An input of the server's that is in this GPU's memory, without a copy."""
        return DeviceTensor.adopt(tensor, name in self._booleans)

    def run(self, inputs: Arrays, outputs: Sequence[str]) -> list[np.ndarray | OnDevice]:
        """The requested outputs; on the device if an input is. Raises InvalidArgumentError or
        InternalError with a text for the client: the operator that failed and why, no path of this
        or the building machine."""
        feeds = {
            name: self._prepared(name, array) if isinstance(array, np.ndarray) else array
            for name, array in inputs.items()
        }
        try:
            if all(isinstance(array, np.ndarray) for array in feeds.values()):
                made: list[Any] = self._session.run(list(outputs), feeds, self._run_options)
                return made
            return self._run_bound(feeds, outputs)
        except Exception as error:  # onnxruntime's share no base but Exception
            raise _run_error(error) from None

    def _run_bound(self, inputs: Arrays, outputs: Sequence[str]) -> list[np.ndarray | OnDevice]:
        binding = self._session.io_binding()
        for name, array in inputs.items():
            if isinstance(array, DeviceTensor):
                binding.bind_ortvalue_input(name, array.value)
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in outputs:
            device, number = ("cpu", 0) if name in self._text_outputs else self._device
            binding.bind_output(name, device, number)
        binding.synchronize_inputs()
        self._session.run_with_iobinding(binding, self._run_options)
        binding.synchronize_outputs()
        return [
            value.numpy() if name in self._text_outputs else DeviceTensor(value)
            for name, value in zip(outputs, binding.get_outputs(), strict=True)
        ]

    def _prepared(self, name: str, array: np.ndarray) -> np.ndarray:
        if name in self._scalars and array.size == 1:
            array = array.reshape(())
        if name not in self._text:
            return array
        try:
            decoded = [text.decode() for text in array.ravel()]
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"input {name!r} has text that is not valid UTF-8: {error.reason}"
            ) from None
        texts = np.empty(array.shape, np.object_)
        texts.ravel()[:] = decoded
        return texts


def read_signature(path: Path, op_libraries: Sequence[str] = ()) -> Signature:
    """What the model at ``path`` declares, without optimizing it or making threads."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS
    options.graph_optimization_level = _GRAPH_LEVELS["none"]
    options.intra_op_num_threads = 1
    _register(options, op_libraries)
    return _signature_of(_load(path, options, [(CPU, {})]))


def _session_options(options: OnnxOptions) -> Any:
    made = onnxruntime.SessionOptions()
    made.log_severity_level = _ERRORS
    made.graph_optimization_level = _GRAPH_LEVELS[options.graph_level]
    made.intra_op_num_threads = options.intra_op_threads
    made.inter_op_num_threads = options.inter_op_threads
    if options.parallel:
        made.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    if options.mem_arena is not None:
        made.enable_cpu_mem_arena = options.mem_arena
    if options.mem_pattern is not None:
        made.enable_mem_pattern = options.mem_pattern
    for key, value in options.session_entries.items():
        try:
            made.add_session_config_entry(key, value)
        except Exception as error:  # onnxruntime's share no base but Exception
            raise ConfigError(f"parameter {key}: {_reason(error)}") from None
    _register(made, options.op_libraries)
    return made


def _register(options: Any, op_libraries: Sequence[str]) -> None:
    for library in op_libraries:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # onnxruntime's share no base but Exception
            raise LoadError(f"op_library_filename {library}: {_reason(error)}") from None


def _load(path: Path, options: Any, providers: list[Any]) -> Any:
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime's share no base but Exception
        unsupported = _kind(error) in ("NOT_IMPLEMENTED", "INVALID_GRAPH")
        made = UnsupportedModelError if unsupported else CheckpointError
        raise made(f"the model file {path} cannot be loaded: {_reason(error)}") from None


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
        optional=tuple(map(_info, session.get_overridable_initializers())),
    )


def _info(declared: Any) -> TensorInfo:
    shape = declared.shape
    return TensorInfo(
        declared.name,
        data_type_of(declared.name, declared.type, TYPES),
        tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in shape),
        tuple(dim if isinstance(dim, str) else None for dim in shape),
    )


def _kind(error: Exception) -> str:
    match = _PREFIX.match(str(error))
    return match[1] if match else ""


def _reason(error: Exception) -> str:
    return _PREFIX.sub("", str(error)).strip()


def _run_error(error: Exception) -> JitneyError:
    text = " ".join(_PATH.sub(lambda match: match[1] or "", _reason(error)).split())
    made = InvalidArgumentError if _kind(error) == "INVALID_ARGUMENT" else InternalError
    return made(f"the model failed: {text[:500]}")
