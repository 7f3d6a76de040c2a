"""The repository's Python models as modules."""

import types
from collections.abc import Callable
from functools import partial

import pytest

from tests.models.stub import load_model


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
    """``load(model)``: its model.py as a module of its own."""
    return partial(load_model, monkeypatch=monkeypatch)
