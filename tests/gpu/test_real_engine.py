"""TensorRT itself on a GPU: an engine is built, loaded and compared with the torch module.

Run on a machine with an NVIDIA GPU, a CUDA build of torch and TensorRT:
``pytest tests/gpu -m gpu``.
"""

from pathlib import Path

import pytest
import torch

from export.config_pbtxt import ExportTarget
from export.errors import CheckError
from export.parity import check_parity
from export.pipeline import export
from export.recipe import Recipe
from export.resolve import resolve
from export.tensorrt_engine import load_tensorrt
from export.tensorrt_run import engine_run
from tests.export.tiny import pooled, silent

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("tensorrt")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("model", ["pooled", "minilm"])
def test_an_engine_equals_the_module(tmp_path: Path, model: str, precision: str) -> None:
    recipe: Recipe = pooled() if model == "pooled" else resolve(model)
    target = ExportTarget(f"{model}_engine", "tensorrt", precision)  # type: ignore[arg-type]
    cache = tmp_path / "timings"
    (made,) = export(recipe, [target], tmp_path / "out", silent(), timing_cache=cache)
    plan = (tmp_path / "out" / target.folder / "1" / "model.plan").read_bytes()
    assert made.bytes == len(plan)
    assert cache.stat().st_size > 0
    run = engine_run(load_tensorrt(), plan)
    tolerance = recipe.tolerance if precision == "fp32" else None
    found = list(check_parity(recipe, run, runtime="TensorRT", tolerance=tolerance))
    assert len(found) == len(recipe.check_sizes())
    with pytest.raises(CheckError, match="does not admit shape"):
        run(recipe.make_inputs({**recipe.check_sizes()[0], "batch": recipe.batch.maximum + 1}))
