"""The repository's Python models without a server: their files, loaded beside a stand-in for the
module that the server's stub provides."""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.backend_utils import Tensor, put_into

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


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


def load_model(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A model's model.py as a module of its own, until ``monkeypatch`` undoes it."""
    server = put_into(types.ModuleType("pb_utils"), Logger, get_input_tensor_by_name)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    path = REPOSITORY / name / "1" / "model.py"
    spec = importlib.util.spec_from_file_location(f"model_of_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
