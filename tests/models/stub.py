"""The repository's Python models without a server: their files, loaded beside a stand-in for the
module that the server's stub provides."""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


class TritonModelException(Exception):
    """What a model raises and what inner calls raise."""


class TritonError:
    """An error of a response."""

    INVALID_ARG, UNAVAILABLE, INTERNAL = range(3)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.text = message
        self.code = code


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name = name
        self.array = array

    def as_numpy(self) -> np.ndarray:
        return self.array


class InferenceResponse:
    """Tensors by name, or an error."""

    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self.tensors = {tensor.name: tensor.array for tensor in output_tensors or []}
        self.error = error


class Request:
    """Input arrays by name, and the sequence that it is part of."""

    def __init__(self, sequence: int | str = 0, **tensors: np.ndarray) -> None:
        self.tensors = tensors
        self.sequence = sequence

    def correlation_id(self) -> int | str:
        return self.sequence


class Logger:
    """Forgets what it is told."""

    @staticmethod
    def log_error(text: str) -> None:
        assert text


def get_input_tensor_by_name(request: Request, name: str) -> Tensor:
    return Tensor(name, request.tensors[name])


def make_module() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    for thing in (
        TritonModelException, TritonError, Tensor, InferenceResponse, Logger,
        get_input_tensor_by_name,
    ):  # fmt: skip
        setattr(module, thing.__name__, thing)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    return module


def load_model(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A model's model.py as a module of its own, until ``monkeypatch`` undoes it."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", make_module())
    path = REPOSITORY / name / "1" / "model.py"
    spec = importlib.util.spec_from_file_location(f"model_of_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
