"""The small model of these tests, traced once: that takes seconds."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from export.onnx_model import export_onnx
from tests.export.tiny import pooled


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pooled()`` in ONNX, in full precision."""
    path = tmp_path_factory.mktemp("traced") / "model.onnx"
    recipe = pooled()
    export_onnx(recipe, recipe.module, path)
    return path


@pytest.fixture
def without_tracing(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of that model take the file."""

    def copy(recipe: Any, module: Any, path: Path) -> None:
        shutil.copy(traced, path)

    monkeypatch.setattr("export.pipeline.export_onnx", copy)
