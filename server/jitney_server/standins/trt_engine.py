"""One TensorRT engine: loading a plan, what it declares, and a run.

Owned by one instance of ``backend/tensorrt/model.py``. TensorRT itself comes in as an argument, and
so does the GPU's memory (:class:`Memory`), because neither exists on a machine without a GPU. The
run is unproved: it was never tried on a machine with a GPU and TensorRT (``docs/standins.md``).
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jitney.errors import (
    CheckpointError,
    ConfigError,
    InternalError,
    InvalidArgumentError,
    UnsupportedModelError,
)

from jitney_server.standins.batch import NUMPY_TYPES, BatchArrays, OnDevice
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
        """Copy a buffer into ``array``, after all that was put on the stream before, and wait for
        it."""


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
        self._types: dict[str, np.dtype[Any]] = {}
        for info in (*self.signature.inputs, *self.signature.outputs):
            self._types[info.name] = np.dtype(NUMPY_TYPES[info.data_type])

    @property
    def max_batch_size(self) -> int:
        """The largest first dimension that the profile allows; 0 if the model cannot batch."""
        if not self.signature.can_batch:
            return 0
        return min(self._bounds(info.name).most[0] for info in self.signature.inputs)

    def run(self, inputs: BatchArrays, outputs: Sequence[str]) -> list[np.ndarray | OnDevice]:
        """The requested outputs, on the host.

        Raises InvalidArgumentError if a shape is outside the profile, naming the tensor and the
        bounds, and InternalError if the run fails.
        """
        # Kept until the outputs are copied, because the engine reads them until then.
        input_buffers = []
        for name, array in inputs.items():
            input_buffers.append(self._bind_input(name, array))
        results = {}
        # TensorRT wants an address for every output, requested or not.
        for info in self.signature.outputs:
            results[info.name] = self._bind_output(info.name)
        if not self._context.execute_async_v3(self._memory.stream):
            raise InternalError("the TensorRT engine failed; the server's log says why")
        arrays: list[np.ndarray | OnDevice] = []
        for name in outputs:
            result = results[name]
            array = np.empty(result.shape, self._types[name])
            self._memory.take(result.buffer, array)
            arrays.append(array)
        return arrays

    def _bind_input(self, name: str, array: np.ndarray | OnDevice) -> Any:
        """Copy an input to the GPU. Returns its buffer. Raises InvalidArgumentError."""
        if not isinstance(array, np.ndarray):
            array = array.numpy()
        host: np.ndarray = np.ascontiguousarray(array, self._types[name])
        self._check_shape(name, host.shape)
        buffer = self._memory.put(host)
        self._context.set_input_shape(name, host.shape)
        self._context.set_tensor_address(name, self._memory.address(buffer))
        return buffer

    def _bind_output(self, name: str) -> "BoundOutput":
        """Reserve the memory of an output, whose shape is known from those of the inputs. Raises
        InternalError if it is not."""
        shape = tuple(self._context.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise InternalError(
                f"output {name!r} has a shape {show_dims(shape)} that depends on the "
                f"data, which the stand-in does not carry"
            )
        size = max(1, prod(shape) * self._types[name].itemsize)
        buffer = self._memory.reserve(size)
        self._context.set_tensor_address(name, self._memory.address(buffer))
        return BoundOutput(buffer, shape)

    def _bounds(self, name: str) -> "ShapeBounds":
        """The shapes that the profile allows for an input."""
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        return ShapeBounds(tuple(least), tuple(most))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        bounds = self._bounds(name)
        if not bounds.allow(shape):
            raise InvalidArgumentError(
                f"input {name!r} has shape {show_dims(shape)}, but the engine's profile "
                f"{self._profile} allows {show_dims(bounds.least)} to {show_dims(bounds.most)}"
            )


class BoundOutput(NamedTuple):
    """An output of a run: its buffer on the GPU and its shape."""

    buffer: Any
    shape: tuple[int, ...]


class ShapeBounds(NamedTuple):
    """The least and the largest size of each dimension."""

    least: tuple[int, ...]
    most: tuple[int, ...]

    def allow(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape is inside the bounds."""
        if len(shape) != len(self.least):
            return False
        dims = zip(self.least, shape, self.most, strict=True)
        return all(least <= dim <= most for least, dim, most in dims)


def profile_of(config: Config, instance: str) -> int:
    """The optimization profile of the instance of that name: the first one that its group names,
    else 0. Raises ConfigError."""
    # An instance has the name of its group, and numbers behind it. A group without a name may have
    # made any instance, and an instance of the group `g_x` seems to be one of `g` as well. So of
    # the groups that may have made it, the one with the longest name counts.
    groups = []
    for group in config.get("instance_group", []):
        name = str(group.get("name", ""))
        if not name or instance.startswith(f"{name}_"):
            groups.append(group)
    if not groups:
        return 0
    group = max(groups, key=lambda group: len(str(group.get("name", ""))))
    if not group.get("profile"):
        return 0
    value = str(group["profile"][0])
    if not value.isdigit():
        raise ConfigError.of("instance_group.profile", value, "a number")
    return int(value)


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
    """What the engine declares. Raises UnsupportedModelError."""
    inputs = []
    outputs = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.is_shape_inference_io(name):
            raise UnsupportedModelError(f"tensor {name!r} is a shape tensor")
        if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
            raise UnsupportedModelError(f"tensor {name!r} is not in the linear format")
        native = str(engine.get_tensor_dtype(name)).rsplit(".", 1)[-1]  # "DataType.FLOAT"
        shape = tuple(engine.get_tensor_shape(name))
        info = TensorInfo(name, data_type_of(name, native, TYPES), shape)
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            inputs.append(info)
        else:
            outputs.append(info)
    return Signature(tuple(inputs), tuple(outputs))
