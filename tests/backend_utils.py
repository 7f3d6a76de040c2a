"""Stand-ins for what the server's module ``triton_python_backend_utils`` has, for models that run
without a server."""

from collections.abc import Sequence
from typing import Any

import numpy as np

FINAL = 1


class TritonModelException(Exception):
    """What the server's calls raise."""


class TritonError:
    """An error of a response: a text and one of the server's codes."""

    (
        UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS,
        CANCELLED,
    ) = range(8)  # fmt: skip

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.text = message
        self.code = code


class Tensor:
    """A named array in the memory of this machine."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    """Tensors, or an error."""

    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


def put_into(module: Any, *more: Any) -> Any:
    """``module`` with all of these, and ``more`` classes and functions."""
    for thing in (TritonModelException, TritonError, Tensor, InferenceResponse, *more):
        setattr(module, thing.__name__, thing)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    return module
