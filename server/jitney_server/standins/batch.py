"""Requests that the server put into one batch, run as one call of the model.

Owns how inputs are joined and outputs divided; knows neither the server nor what runs the model.
Rows are the elements of dimension 0. Inputs are copied once, and not at all for one request; the
outputs of a request are views.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jitney.errors import InternalError, InvalidArgumentError, JitneyError

from jitney_server.standins.signature import Signature, show_dims

_LOG = logging.getLogger(__name__)


class OnDevice(Protocol):
    """A tensor in a GPU's memory. Only what runs the model knows more of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numpy(self) -> np.ndarray:
        """A copy on the host."""


BatchArrays = dict[str, "np.ndarray | OnDevice"]
RunModel = Callable[[BatchArrays, Sequence[str]], "list[np.ndarray | OnDevice]"]
"""Runs the model: takes the inputs by name and the names of the requested outputs, and returns
these outputs. They are on a device only if an input is. Raises JitneyError."""

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

    inputs: BatchArrays
    outputs: tuple[str, ...]
    """The outputs that it asks for. Others are not sent, and not computed for it."""


@dataclass(frozen=True)
class Batcher:
    """Answers whole batches of one model."""

    run: RunModel
    signature: Signature
    batching: bool
    """Whether dimension 0 is the batch (``max_batch_size`` above 0)."""

    def execute(self, requests: Sequence[ModelRequest]) -> list[BatchArrays | JitneyError]:
        """One answer each, in order: the outputs asked for, or what went wrong."""
        if not self.batching:
            return [self._run_without_batch(request) for request in requests]
        if len(requests) == 1:
            return self._run_together(requests)
        answers: dict[int, BatchArrays | JitneyError] = {}
        for group in _groups(requests):
            of_group = self._run_together([requests[index] for index in group])
            answers.update(zip(group, of_group, strict=True))
        return [answers[index] for index in range(len(requests))]

    def _run_without_batch(self, request: ModelRequest) -> BatchArrays | JitneyError:
        """The answer of a model whose tensors have no batch dimension."""
        try:
            outputs = self.run(request.inputs, request.outputs)
        except JitneyError as error:
            return error
        answer: BatchArrays = {}
        for name, output in zip(request.outputs, outputs, strict=True):
            if output.shape == ():
                output = _on_host(output).reshape(1)  # the server has no scalars
            answer[name] = output
        return answer

    def _run_together(self, requests: Sequence[ModelRequest]) -> list[BatchArrays | JitneyError]:
        """The answers of requests whose inputs can be joined. If they fail together, each of them
        is run alone."""
        try:
            rows = [_count_rows(request) for request in requests]
        except InvalidArgumentError as error:
            return self._run_each_alone(requests, error)
        total = sum(rows)
        if total == 0:
            return [self._empty_answer(request) for request in requests]
        requested = {name for request in requests for name in request.outputs}
        names = [info.name for info in self.signature.outputs if info.name in requested]
        try:
            outputs = self.run(_joined(requests), names)
        except JitneyError as error:
            if len(requests) > 1:
                _LOG.warning(
                    "a batch of %d requests failed; each is run alone: %s", len(requests), error
                )
            return self._run_each_alone(requests, error)
        arrays = dict(zip(names, outputs, strict=True))
        try:
            for name, array in arrays.items():
                _check_rows(name, array, total)
        except InternalError as error:
            return [error] * len(requests)
        return _divided(requests, rows, arrays)

    def _run_each_alone(
        self, requests: Sequence[ModelRequest], error: JitneyError
    ) -> list[BatchArrays | JitneyError]:
        """The answers of requests that failed together with ``error``."""
        if len(requests) == 1:
            return [error]
        answers: list[BatchArrays | JitneyError] = []
        for request in requests:
            # If the request fails again, it comes back here as the only one, and is answered with
            # its own error (``len(requests) == 1`` above).
            answers += self._run_together([request])
        return answers

    def _empty_answer(self, request: ModelRequest) -> BatchArrays:
        """The answer to a request without rows. The model is not run: kernels may not survive an
        empty batch. A variable dimension is as long as the one of the same name in an input, or
        0."""
        sizes = self._sizes_of_symbols(request)
        infos = {info.name: info for info in self.signature.outputs}
        answer: BatchArrays = {}
        for name in request.outputs:
            info = infos[name]
            shape = [0]  # the batch, which has no rows
            for axis in range(1, len(info.dims)):
                dim = info.dims[axis]
                symbol = info.symbol(axis)
                if dim < 0:
                    dim = 0 if symbol is None else sizes.get(symbol, 0)
                shape.append(dim)
            answer[name] = np.empty(shape, NUMPY_TYPES[info.data_type])
        return answer

    def _sizes_of_symbols(self, request: ModelRequest) -> dict[str, int]:
        """Name of a variable dimension -> its size in the request's inputs."""
        sizes: dict[str, int] = {}
        for info in self.signature.inputs:
            if info.name not in request.inputs:
                continue
            for axis, size in enumerate(request.inputs[info.name].shape):
                symbol = info.symbol(axis)
                if symbol is not None:
                    sizes[symbol] = size
        return sizes


class _InputShape(NamedTuple):
    name: str
    row_shape: tuple[int, ...]


def _groups(requests: Sequence[ModelRequest]) -> list[list[int]]:
    """Indices of requests that can be joined, in groups. Usually there is one: the server puts only
    requests with the same inputs and shapes into a batch, unless the model lets it do otherwise."""
    groups: dict[tuple[_InputShape, ...], list[int]] = {}
    for index, request in enumerate(requests):
        shapes = [_InputShape(name, array.shape[1:]) for name, array in request.inputs.items()]
        groups.setdefault(tuple(sorted(shapes)), []).append(index)
    return list(groups.values())


def _count_rows(request: ModelRequest) -> int:
    """The rows of each input. Raises InvalidArgumentError if their numbers differ."""
    counts = {array.shape[0] if array.shape else 1 for array in request.inputs.values()}
    if len(counts) != 1:
        shapes = [f"{name} {show_dims(array.shape)}" for name, array in request.inputs.items()]
        listed = ", ".join(shapes) or "there are none"
        raise InvalidArgumentError(
            f"the inputs differ in their number of rows (dimension 0): {listed}"
        )
    return counts.pop()


def _joined(requests: Sequence[ModelRequest]) -> BatchArrays:
    """The inputs of all requests as one. Those of several requests are joined on the host, even if
    they are on a device."""
    if len(requests) == 1:
        return requests[0].inputs
    joined: BatchArrays = {}
    for name in requests[0].inputs:
        arrays = [_on_host(request.inputs[name]) for request in requests]
        joined[name] = np.concatenate(arrays)
    return joined


def _on_host(array: np.ndarray | OnDevice) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.numpy()


def _check_rows(name: str, array: np.ndarray | OnDevice, rows: int) -> None:
    """Raises InternalError for an output that cannot be divided among the requests."""
    if array.shape[:1] != (rows,):
        raise InternalError(
            f"the model's output {name!r} has shape {show_dims(array.shape)} for a batch of {rows} "
            f"rows: its first dimension must be {rows}, or the model be served with "
            f"max_batch_size 0"
        )


def _divided(
    requests: Sequence[ModelRequest], rows: Sequence[int], arrays: BatchArrays
) -> list[BatchArrays | JitneyError]:
    """The answer of each request: its rows of the outputs that it asks for."""
    if len(requests) == 1:
        return [{name: arrays[name] for name in requests[0].outputs}]
    answers: list[BatchArrays | JitneyError] = []
    start = 0
    for request, count in zip(requests, rows, strict=True):
        end = start + count
        answers.append({name: _on_host(arrays[name])[start:end] for name in request.outputs})
        start = end
    return answers
