"""One TensorRT engine: loading a plan, what it declares, and a run.

Owned by one instance of ``backend/tensorrt/model.py``. TensorRT itself comes in as an argument, and
so does the GPU's memory (:class:`Memory`), because neither exists on a machine without a GPU. The
run is unproved: no machine with a GPU and TensorRT has seen it (``docs/standins.md``).
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jitney.errors import (
    CheckpointError,
    ConfigError,
    InternalError,
    InvalidArgumentError,
    UnsupportedModelError,
)

from jitney_server.standins.batch import NUMPY_TYPES, Arrays, OnDevice
from jitney_server.standins.signature import Config, Signature, TensorInfo, data_type_of, show_dims

TYPES = {
    "FLOAT": "TYPE_FP32",
    "HALF": "TYPE_FP16",
    "INT8": "TYPE_INT8",
    "UINT8": "TYPE_UINT8",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "BOOL": "TYPE_BOOL",
}


class Memory(Protocol):
    """Buffers on the instance's GPU, and the stream on which copies and runs are ordered."""

    stream: int

    def put(self, array: np.ndarray) -> Any:
        """A buffer with a copy of ``array``, which is contiguous."""

    def reserve(self, size: int) -> Any:
        """A buffer of ``size`` bytes."""

    def address(self, buffer: Any) -> int:
        """Where ``buffer`` starts on the GPU."""

    def take(self, buffer: Any, array: np.ndarray) -> None:
        """Copy a buffer into ``array`` and wait for all that was asked for before."""


class TensorRtEngine:
    """A deserialized engine with one execution context, for one thread at a time."""

    def __init__(self, trt: Any, path: Path, memory: Memory, profile: int = 0) -> None:
        """Raises CheckpointError if the plan is not one of this TensorRT and GPU, and
        UnsupportedModelError for tensors that cannot be carried."""
        self._trt = trt
        self._memory = memory
        self._profile = profile
        self._engine = _deserialize(trt, path)
        self.signature = _signature_of(trt, self._engine)
        if not 0 <= profile < self._engine.num_optimization_profiles:
            count = self._engine.num_optimization_profiles
            raise ConfigError.of("instance_group.profile", profile, f"below {count}")
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise CheckpointError(f"{path}: no execution context; is the GPU's memory full?")
        if profile:
            self._context.set_optimization_profile_async(profile, memory.stream)
        self._types = {
            info.name: NUMPY_TYPES[info.data_type]
            for info in (*self.signature.inputs, *self.signature.outputs)
        }

    @property
    def max_batch_size(self) -> int:
        """The largest first dimension that the profile allows; 0 if the model cannot batch."""
        if not self.signature.can_batch:
            return 0
        return min(self._bounds(info.name)[1][0] for info in self.signature.inputs)

    def run(self, inputs: Arrays, outputs: Sequence[str]) -> list[np.ndarray | OnDevice]:
        """The requested outputs, on the host. Raises InvalidArgumentError if a shape is outside the
        profile, naming the tensor and the bounds, and InternalError if the run fails."""
        held = []  # buffers live until the outputs are here
        for name, array in inputs.items():
            host: np.ndarray = np.ascontiguousarray(
                array if isinstance(array, np.ndarray) else array.numpy(), self._types[name]
            )
            self._check_shape(name, host.shape)
            buffer = self._memory.put(host)
            held.append(buffer)
            self._context.set_input_shape(name, host.shape)
            self._context.set_tensor_address(name, self._memory.address(buffer))
        made = {}
        for info in self.signature.outputs:  # TensorRT wants an address for each of them
            shape = tuple(self._context.get_tensor_shape(info.name))
            if any(dim < 0 for dim in shape):
                raise InternalError(
                    f"output {info.name!r} has a shape {show_dims(shape)} that depends on the "
                    f"data, which the stand-in does not carry"
                )
            size = max(1, prod(shape) * np.dtype(self._types[info.name]).itemsize)
            buffer = self._memory.reserve(size)
            self._context.set_tensor_address(info.name, self._memory.address(buffer))
            made[info.name] = (buffer, shape)
        if not self._context.execute_async_v3(self._memory.stream):
            raise InternalError("the TensorRT engine failed; the server's log says why")
        answers: list[np.ndarray | OnDevice] = []
        for name in outputs:
            buffer, shape = made[name]
            array = np.empty(shape, self._types[name])
            self._memory.take(buffer, array)
            answers.append(array)
        return answers

    def _bounds(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        return tuple(least), tuple(most)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        least, most = self._bounds(name)
        fits = len(shape) == len(least) and all(
            low <= dim <= high for low, dim, high in zip(least, shape, most, strict=True)
        )
        if not fits:
            raise InvalidArgumentError(
                f"input {name!r} has shape {show_dims(shape)}, but the engine's profile "
                f"{self._profile} allows {show_dims(least)} to {show_dims(most)}"
            )


def profile_of(config: Config, instance: str) -> int:
    """The optimization profile of an instance: the first one its group names, else 0."""
    for group in config.get("instance_group", []):
        if group.get("profile") and instance.startswith(str(group.get("name", ""))):
            value = str(group["profile"][0])
            if not value.isdigit():
                raise ConfigError.of("instance_group.profile", value, "a number")
            return int(value)
    return 0


def _deserialize(trt: Any, path: Path) -> Any:
    logger = trt.Logger(trt.Logger.WARNING)
    trt.init_libnvinfer_plugins(logger, "")
    engine = trt.Runtime(logger).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise CheckpointError(
            f"the model file {path} cannot be loaded by TensorRT {trt.__version__}: a plan runs on "
            f"the TensorRT version and the kind of GPU that it was built with; build it here with "
            f"python -m export … --tensorrt"
        )
    return engine


def _signature_of(trt: Any, engine: Any) -> Signature:
    tensors: dict[bool, list[TensorInfo]] = {True: [], False: []}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.is_shape_inference_io(name):
            raise UnsupportedModelError(f"tensor {name!r} is a shape tensor")
        if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
            raise UnsupportedModelError(f"tensor {name!r} is not in the linear format")
        native = str(engine.get_tensor_dtype(name)).rsplit(".", 1)[-1]
        shape = tuple(engine.get_tensor_shape(name))
        info = TensorInfo(name, data_type_of(name, native, TYPES), shape)
        tensors[engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT].append(info)
    return Signature(tuple(tensors[True]), tuple(tensors[False]))
