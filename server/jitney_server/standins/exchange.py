"""Between the server's requests and responses and the plain arrays of :mod:`batch`.

The server's module ``triton_python_backend_utils`` comes in as an argument ``server``, because only
a ``model.py`` may import it.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jitney.errors import CheckpointError, InternalError, JitneyError

from jitney_server.standins.batch import Arrays, ModelRequest, OnDevice

_LOG = logging.getLogger(__name__)
_FAILED = InternalError("the model failed; the server's log says why")


def answer(
    server: Any,
    requests: Sequence[Any],
    execute: Callable[[Sequence[ModelRequest]], list[Arrays | JitneyError]],
    adopt: Callable[[str, Any], OnDevice],
) -> list[Any]:
    """One response for each request. Never raises: what is unforeseen is logged in full and sent
    as an error that tells nothing of this machine; a request that cannot be read, or whose answer
    cannot be sent, fails alone. ``adopt`` makes a tensor of a GPU's memory, given with its name,
    one that ``execute`` understands.
    """
    answers: list[Arrays | JitneyError] = [_FAILED] * len(requests)
    works: dict[int, ModelRequest] = {}
    for index, request in enumerate(requests):
        try:
            works[index] = _work(request, adopt)
        except Exception:
            _LOG.exception("the inputs of a request cannot be read")
    try:
        for index, made in zip(works, execute(list(works.values())), strict=True):
            answers[index] = made
    except Exception:
        _LOG.exception("a batch of %d requests failed", len(works))
    return [_response(server, made) for made in answers]


def _work(request: Any, adopt: Callable[[str, Any], OnDevice]) -> ModelRequest:
    inputs: Arrays = {}
    for tensor in request.inputs():
        name = tensor.name()
        inputs[name] = tensor.as_numpy() if tensor.is_cpu() else adopt(name, tensor)
    return ModelRequest(inputs, tuple(request.requested_output_names()))


def model_path(version_folder: Path, filename: str) -> Path:
    """The file ``filename`` (``default_model_filename``) of a version; a folder of that name has
    ``model.onnx`` inside, with its weights beside it. Raises CheckpointError."""
    path = version_folder / filename
    if path.is_dir():
        path /= "model.onnx"
    if not path.is_file():
        raise CheckpointError(f"the model file {path} is missing")
    return path


def refusal(server: Any, error: JitneyError) -> Exception:
    """``error`` as the exception that makes the server refuse the model."""
    made: Exception = server.TritonModelException(error.client_message)
    return made


def _response(server: Any, made: Arrays | JitneyError) -> Any:
    if isinstance(made, JitneyError):
        code = getattr(server.TritonError, made.server_code)
        return server.InferenceResponse(error=server.TritonError(made.client_message, code))
    try:
        tensors = [
            server.Tensor(name, array)
            if isinstance(array, np.ndarray)
            else server.Tensor.from_dlpack(name, array)
            for name, array in made.items()
        ]
        return server.InferenceResponse(output_tensors=tensors)
    except Exception:
        _LOG.exception("the outputs of a request cannot be sent")
        return _response(server, _FAILED)
