"""Requests that the server put into one batch, run as one call of the model.

Owns how inputs are joined and outputs divided; knows neither the server nor what runs the model.
Rows are the elements of dimension 0. Joining copies once, and not at all for one request; dividing
gives views.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jitney.errors import InternalError, InvalidArgumentError, JitneyError

from jitney_server.standins.signature import Signature, TensorInfo, show_dims

_LOG = logging.getLogger(__name__)


class OnDevice(Protocol):
    """A tensor in a GPU's memory: what runs the model knows more of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numpy(self) -> np.ndarray:
        """A copy on the host."""


Arrays = dict[str, "np.ndarray | OnDevice"]
Run = Callable[[Arrays, Sequence[str]], "list[np.ndarray | OnDevice]"]
"""Inputs by name and the names of the requested outputs -> these outputs. Raises JitneyError.

Outputs are on a device only if an input is."""

NUMPY_TYPES: dict[str, type] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
"""The server's types that the stand-ins carry: all but BF16, for which neither the server's stub
nor the native ONNX Runtime backend has an array."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request."""

    inputs: Arrays
    outputs: tuple[str, ...]
    """What it asks for; the others are neither computed for it nor sent."""


@dataclass(frozen=True)
class Batcher:
    """Answers whole batches of one model."""

    run: Run
    signature: Signature
    batching: bool
    """Whether dimension 0 is the batch (``max_batch_size`` above 0)."""
    _outputs: dict[str, TensorInfo] = field(init=False)

    def __post_init__(self) -> None:
        outputs = {info.name: info for info in self.signature.outputs}
        object.__setattr__(self, "_outputs", outputs)

    def execute(self, requests: Sequence[ModelRequest]) -> list[Arrays | JitneyError]:
        """One answer each, in order: the outputs asked for, or what went wrong."""
        if not self.batching:
            return [self._alone(request) for request in requests]
        if len(requests) == 1:
            return self._together(requests)
        answers: dict[int, Arrays | JitneyError] = {}
        for group in _groups(requests):
            made = self._together([requests[index] for index in group])
            answers.update(zip(group, made, strict=True))
        return [answers[index] for index in range(len(requests))]

    def _alone(self, request: ModelRequest) -> Arrays | JitneyError:
        try:
            arrays = self.run(request.inputs, request.outputs)
        except JitneyError as error:
            return error
        return {
            name: array if array.shape or not isinstance(array, np.ndarray) else array.reshape(1)
            for name, array in zip(request.outputs, arrays, strict=True)  # a scalar goes out as [1]
        }

    def _together(self, requests: Sequence[ModelRequest]) -> list[Arrays | JitneyError]:
        """Works whose inputs can be joined."""
        try:
            rows = [_rows(request) for request in requests]
        except InvalidArgumentError as error:
            if len(requests) == 1:
                return [error]
            return [answer for request in requests for answer in self._together([request])]
        total = sum(rows)
        if total == 0:
            return [self._empty(request) for request in requests]
        names = [
            name for name in self._outputs if any(name in request.outputs for request in requests)
        ]
        try:
            arrays = self.run(_joined(requests), names)
        except JitneyError as error:
            if len(requests) == 1:
                return [error]
            _LOG.warning(
                "a batch of %d requests failed; each is run alone: %s", len(requests), error
            )
            return [answer for request in requests for answer in self._together([request])]
        try:
            for name, array in zip(names, arrays, strict=True):
                _check_rows(name, array, total)
        except InternalError as error:
            return [error] * len(requests)
        return _divided(requests, rows, dict(zip(names, arrays, strict=True)))

    def _empty(self, request: ModelRequest) -> Arrays:
        """The answer to a request without rows: no run, because kernels may not survive an empty
        batch. A variable dimension is as long as the input's of the same name, or 0."""
        sizes = {
            symbol: request.inputs[info.name].shape[axis]
            for info in self.signature.inputs
            if info.name in request.inputs
            for axis, symbol in enumerate(info.symbols)
            if symbol is not None
        }
        made: Arrays = {}
        for name in request.outputs:
            info = self._outputs[name]
            symbols = info.symbols or (None,) * len(info.dims)
            dims = [
                dim if dim >= 0 else sizes.get(symbol or "", 0)
                for dim, symbol in zip(info.dims, symbols, strict=True)
            ]
            made[name] = np.empty((0, *dims[1:]), NUMPY_TYPES[info.data_type])
        return made


def _groups(requests: Sequence[ModelRequest]) -> list[list[int]]:
    """Indices of the requests that can be joined. Usually one group: the server puts only requests
    of equal inputs and shapes into a batch, unless the model lets it do otherwise."""
    groups: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
    for index, request in enumerate(requests):
        key = tuple(sorted((name, array.shape[1:]) for name, array in request.inputs.items()))
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _rows(request: ModelRequest) -> int:
    counts = {array.shape[0] if array.shape else 1 for array in request.inputs.values()}
    if len(counts) != 1:
        shapes = ", ".join(f"{name} {show_dims(a.shape)}" for name, a in request.inputs.items())
        raise InvalidArgumentError(
            f"the inputs differ in their number of rows (dimension 0): {shapes or 'there are none'}"
        )
    return counts.pop()


def _joined(requests: Sequence[ModelRequest]) -> Arrays:
    """Tensors of several requests are joined on the host, wherever they are."""
    if len(requests) == 1:
        return requests[0].inputs
    return {
        name: np.concatenate([_on_host(request.inputs[name]) for request in requests])
        for name in requests[0].inputs
    }


def _on_host(array: np.ndarray | OnDevice) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.numpy()


def _check_rows(name: str, array: np.ndarray | OnDevice, rows: int) -> None:
    if array.shape[:1] != (rows,):
        raise InternalError(
            f"the model's output {name!r} has shape {show_dims(array.shape)} for a batch of {rows} "
            f"rows: its first dimension must be {rows}, or the model be served with "
            f"max_batch_size 0"
        )


def _divided(
    requests: Sequence[ModelRequest], rows: Sequence[int], arrays: Arrays
) -> list[Arrays | JitneyError]:
    if len(requests) == 1:
        return [{name: arrays[name] for name in requests[0].outputs}]
    answers: list[Arrays | JitneyError] = []
    start = 0
    for request, count in zip(requests, rows, strict=True):
        end = start + count
        answers.append({name: _on_host(arrays[name])[start:end] for name in request.outputs})
        start += count
    return answers
