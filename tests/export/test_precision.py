"""int8 and fp16: that they compute nearly the same, and that losing too much is noticed."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from export.errors import CheckError, RecipeError
from export.onnx_model import export_onnx, ports
from export.parity import Run, check_parity, onnx_run, torch_run
from export.precision import InPrecision, check_quality, quality_of, to_int8
from export.recipe import NamedArrays, Quality, Recipe
from export.resolve import from_parts
from export.smoothing import smooth
from tests.export.emulated import emulated_run
from tests.export.tiny import Pooled, pooled

SLOW = pytest.mark.slow


def example(recipe: Recipe) -> NamedArrays:
    return {name: recipe.example(name) for name in recipe.inputs}


def exported(recipe: Recipe, folder: Path, **options: int) -> Path:
    path = folder / "source" / "model.onnx"
    path.parent.mkdir()
    export_onnx(recipe, recipe.module, path, **options)
    return path


def with_outlier() -> Recipe:
    """A layer normalization with one channel 400 times the others, as trained encoders have."""
    module = Pooled().eval()
    with torch.no_grad():
        module.norm.weight[3] = 400.0
        module.mix.weight[:, 3] /= 400.0
    return pooled(module=module)


def cosine(run: Run, recipe: Recipe) -> float:
    quality = replace(quality_of(recipe), least={"int8": -1.0})
    return check_quality(recipe, quality, "int8", original=torch_run(recipe), reduced=run).value


def int8_run(path: Path) -> Run:
    """Here, or on the processor that `make test-avx2` has emulated: int8 sums differ by it."""
    return emulated_run(path) or onnx_run(path)


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(str(path)).graph.node}


def test_int8_multiplies_whole_numbers_and_stays_close(traced: Path, tmp_path: Path) -> None:
    recipe, source = pooled(), tmp_path / "source.onnx"
    shutil.copy(traced, source)
    plain = ports(source)
    to_int8(source, tmp_path / "model.onnx", example(recipe))
    assert "MatMulInteger" in operators(tmp_path / "model.onnx")
    run = int8_run(tmp_path / "model.onnx")
    list(check_parity(recipe, run, runtime="ONNX Runtime", tolerance=None))
    assert 0.98 < cosine(run, recipe) < 1.0
    assert ports(tmp_path / "model.onnx") == plain, "clients need not know"
    with pytest.raises(CheckError, match="output 'scores' differs"):
        list(check_parity(recipe, run, runtime="ONNX Runtime", tolerance=1e-7))


def test_int8_weights_fit_the_sums_of_a_processor_without_vnni(tmp_path: Path) -> None:
    """It clips a sum of two products to 16 bits, which no test on a machine with VNNI would see."""
    recipe = of(torch.nn.Linear(7, 5), input=torch.rand(3, 7))
    to_int8(exported(recipe, tmp_path), tmp_path / "model.onnx", example(recipe))
    (weight,) = (
        numpy_helper.to_array(each).astype(int)
        for each in onnx.load(str(tmp_path / "model.onnx")).graph.initializer
        if each.name.endswith("_quantized")
    )
    assert weight.shape == (7, 5)
    sums = np.abs(np.vstack([weight, np.zeros((1, 5), int)])).reshape(4, 2, 5).sum(1)
    assert sums.max() <= 128
    assert (sums.max(0) >= 126).all(), "the range is used"
    assert cosine(int8_run(tmp_path / "model.onnx"), recipe) > 0.999


def test_smoothing_changes_nothing_but_the_rounding(tmp_path: Path) -> None:
    recipe = with_outlier()
    source = exported(recipe, tmp_path)
    plain = tmp_path / "plain.onnx"
    plain.write_bytes(source.read_bytes())
    assert smooth(source, example(recipe), largest_inline=2**30) == 1
    found = check_parity(recipe, onnx_run(source), runtime="ONNX Runtime", tolerance=1e-5)
    assert len(list(found)) == len(recipe.check_sizes())
    from onnxruntime.quantization import quantize_dynamic

    for path in (plain, source):
        model = onnx.load(str(path))
        del model.graph.value_info[:]  # the quantizer changes shapes without changing their notes
        onnx.save(model, str(path))
        quantize_dynamic(path, path.with_suffix(".int8"), per_channel=True, reduce_range=True)
    rough, smoothed = (
        cosine(onnx_run(path.with_suffix(".int8")), recipe) for path in (plain, source)
    )
    assert 1 - smoothed < (1 - rough) / 4, (rough, smoothed)


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=SLOW)])
def test_half_precision_keeps_inputs_and_outputs(tmp_path: Path, precision: str) -> None:
    recipe = pooled()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    module = InPrecision(recipe.module, dtype)
    assert recipe.module.head.weight.dtype == torch.float32, "the original is left alone"  # type: ignore[union-attr]
    path = tmp_path / "model.onnx"
    export_onnx(recipe, module, path)
    kinds = {each.data_type for each in onnx.load(str(path)).graph.initializer}
    assert getattr(onnx.TensorProto, {"fp16": "FLOAT16", "bf16": "BFLOAT16"}[precision]) in kinds
    inputs, outputs = ports(path)
    assert [each.type for each in inputs + outputs] == ["int64", "float32", "float32", "int64"]
    run = onnx_run(path) if precision == "fp16" else torch_run(recipe, module)
    list(check_parity(recipe, run, runtime="x", tolerance=None))
    figure = check_quality(
        recipe, quality_of(recipe), precision, original=torch_run(recipe), reduced=run
    )
    assert figure.least <= figure.value < 1.0


def test_a_quality_below_its_bound_is_an_error(tmp_path: Path) -> None:
    recipe = pooled()
    expected = torch_run(recipe)(example(recipe))

    def distorted(inputs: NamedArrays) -> dict[str, np.ndarray]:
        made = torch_run(recipe)(inputs)
        made["scores"] = made["scores"] + np.abs(made["scores"]).max() * np.eye(3, 4)
        return made

    for precision in ("int8", "fp16"):
        with pytest.raises(CheckError, match=f"{precision} loses too much: the cosine of output"):
            check_quality(
                recipe,
                quality_of(recipe),
                precision,
                original=torch_run(recipe),
                reduced=distorted,
            )
    labels = expected["scores"].argmax(-1)
    labels[0] = (labels[0] + 1) % 4
    quality = Quality("accuracy", example(recipe), "scores", {"int8": 0.9}, labels)
    with pytest.raises(CheckError, match=r"is 0\.6667, but must be at least 0\.9"):
        check_quality(
            recipe, quality, "int8", original=torch_run(recipe), reduced=torch_run(recipe)
        )
    zeros = {"scores": np.zeros((3, 4), np.float32)}
    with pytest.raises(CheckError, match="is nan"):
        check_quality(
            recipe,
            quality_of(recipe),
            "int8",
            original=torch_run(recipe),
            reduced=lambda inputs: zeros,
        )


def test_a_quality_needs_a_bound_and_an_output() -> None:
    recipe = pooled()
    run = torch_run(recipe)
    quality = quality_of(recipe)
    with pytest.raises(RecipeError, match="states no least cosine for int8"):
        check_quality(
            recipe, replace(quality, least={"fp16": 0.9}), "int8", original=run, reduced=run
        )
    with pytest.raises(RecipeError, match="measured on 'score', but must be on one of scores"):
        check_quality(recipe, replace(quality, output="score"), "int8", original=run, reduced=run)


def of(module: torch.nn.Module, **inputs: torch.Tensor) -> Recipe:
    return from_parts("own", module, inputs, {name: {0: "batch"} for name in inputs}, source="own")


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float64, marks=SLOW)])
def test_int8_of_what_is_not_fp32_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Nothing in it would be whole numbers, whatever the folder's name says."""
    module = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 4)).to(dtype)
    recipe = of(module, input=torch.rand(3, 6, dtype=dtype))
    source = exported(recipe, tmp_path)
    with pytest.raises(CheckError, match=rf"alone, and the model has {str(dtype)[6:]}"):
        to_int8(source, tmp_path / "model.onnx", example(recipe))


def test_int8_of_a_model_without_products_is_refused(tmp_path: Path) -> None:
    recipe = of(torch.nn.ReLU(), input=torch.rand(3, 6))
    source = exported(recipe, tmp_path)
    with pytest.raises(CheckError, match="the model has none of them"):
        to_int8(source, tmp_path / "model.onnx", example(recipe))
