"""Between the server's requests and responses and the plain arrays of :mod:`batch`.

The server's module ``triton_python_backend_utils`` comes in as the argument ``pb_utils``, because
only a ``model.py`` may import it.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jitney.errors import CheckpointError, InternalError, JitneyError

from jitney_server.standins.batch import BatchArrays, ModelRequest, OnDevice

_LOG = logging.getLogger(__name__)
_FAILED = InternalError("the model failed; the server's log says why")
"""What a client is told of an error that nobody foresaw. It tells nothing of this machine."""

ToDeviceTensor = Callable[[str, Any], OnDevice]
"""Takes the name of an input and the server's tensor for it, which is in a GPU's memory. Returns it
in the form in which the model's runtime takes it."""


def answer(
    pb_utils: Any,
    requests: Sequence[Any],
    execute: Callable[[Sequence[ModelRequest]], list[BatchArrays | JitneyError]],
    to_device_tensor: ToDeviceTensor,
) -> list[Any]:
    """One response for each request.

    Never raises: an error that nobody foresaw is logged in full. A request that cannot be read
    fails alone, and so does one whose answer cannot be sent.
    """
    results: list[BatchArrays | JitneyError] = [_FAILED] * len(requests)
    readable: dict[int, ModelRequest] = {}
    for index, request in enumerate(requests):
        try:
            readable[index] = _model_request(request, to_device_tensor)
        except Exception:
            _LOG.exception("the inputs of a request cannot be read")
    try:
        executed = execute(list(readable.values()))
        for index, result in zip(readable, executed, strict=True):
            if isinstance(result, JitneyError):
                # An error keeps the frames that it came through, and these hold the requests.
                # Without them the server's tensors are freed at once.
                result = result.detached()
            results[index] = result
    except Exception:
        _LOG.exception("a batch of %d requests failed", len(readable))
    return [_response(pb_utils, result) for result in results]


def _model_request(request: Any, to_device_tensor: ToDeviceTensor) -> ModelRequest:
    inputs: BatchArrays = {}
    for tensor in request.inputs():
        name = tensor.name()
        if tensor.is_cpu():
            inputs[name] = tensor.as_numpy()
        else:
            inputs[name] = to_device_tensor(name, tensor)
    return ModelRequest(inputs, tuple(request.requested_output_names()))


def _response(pb_utils: Any, result: BatchArrays | JitneyError) -> Any:
    if isinstance(result, JitneyError):
        code = getattr(pb_utils.TritonError, result.server_code)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(result.client_message, code))
    try:
        tensors = [_tensor(pb_utils, name, array) for name, array in result.items()]
        return pb_utils.InferenceResponse(output_tensors=tensors)
    except Exception:
        _LOG.exception("the outputs of a request cannot be sent")
        return _response(pb_utils, _FAILED)


def _tensor(pb_utils: Any, name: str, array: np.ndarray | OnDevice) -> Any:
    if isinstance(array, np.ndarray):
        return pb_utils.Tensor(name, array)
    return pb_utils.Tensor.from_dlpack(name, array)


def model_path(version_folder: Path, filename: str) -> Path:
    """The model's file in the folder of a version; ``filename`` is the configuration's
    ``default_model_filename``. If that is a folder, the file is ``model.onnx`` in it, with its
    weights beside it. Raises CheckpointError."""
    path = version_folder / filename
    if path.is_dir():
        path /= "model.onnx"
    if not path.is_file():
        raise CheckpointError(f"the model file {path} is missing")
    return path


def refusal(pb_utils: Any, error: JitneyError) -> Exception:
    """``error`` as the exception that makes the server refuse the model."""
    exception: Exception = pb_utils.TritonModelException(error.client_message)
    return exception
