"""torch -> ONNX and the comparison with the original: what passes, and what must not."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from export.config_pbtxt import ExportTarget
from export.errors import CheckError, ExportError, RecipeError
from export.onnx_model import GraphTensor, check_onnx, export_onnx, ports
from export.parity import check_parity, check_rows, compare, onnx_run, torch_run
from export.pipeline import export
from export.recipe import Dimension, Recipe
from tests.export.tiny import pooled, silent


def test_the_export_equals_the_module_at_every_size(traced: Path) -> None:
    recipe = pooled()
    found = list(check_parity(recipe, onnx_run(traced), runtime="ONNX Runtime", tolerance=1e-5))
    assert [each[0].sizes for each in found] == recipe.check_sizes()
    assert {each.output for differences in found for each in differences} == {"scores", "count"}
    assert all(each.value <= 1e-5 for differences in found for each in differences)
    assert ports(traced) == (
        [GraphTensor("tokens", "int64", (None, None)), GraphTensor("scale", "float32", (None,))],
        [GraphTensor("scores", "float32", (None, 4)), GraphTensor("count", "int64", (None, 1))],
    )


def test_a_graph_that_differs_is_caught(traced: Path, tmp_path: Path) -> None:
    model = onnx.load(str(traced))
    (bias,) = (each for each in model.graph.initializer if each.name == "head.bias")
    values = numpy_helper.to_array(bias).copy()
    values[2] += 0.25
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    onnx.save(model, str(tmp_path / "broken.onnx"))
    recipe = pooled()
    check_onnx(recipe, tmp_path / "broken.onnx")  # valid, but wrong
    with pytest.raises(CheckError) as caught:
        list(
            check_parity(
                recipe, onnx_run(tmp_path / "broken.onnx"), runtime="ONNX Runtime", tolerance=1e-4
            )
        )
    text = str(caught.value)
    assert "output 'scores' differs at batch=1, length=1: at index [0, 2]" in text
    assert "a difference of 0.25 where 0.0001 is allowed; 1 of 4 values differ" in text


class FixesItsBatch(nn.Module):
    """Computes with the batch it was traced at."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.reshape(3, -1) * 2


def of(module: nn.Module, **inputs: torch.Tensor) -> Recipe:
    return Recipe(
        name="own",
        module=module.eval(),
        inputs=inputs,
        dynamic={name: {0: "batch"} for name in inputs},
        dimensions={"batch": Dimension("batch", 1, 3, 4)},
        outputs=["made"],
    )


def test_a_module_that_fixes_its_batch_is_refused(tmp_path: Path) -> None:
    recipe = of(FixesItsBatch(), image=torch.rand(3, 4))
    with pytest.raises(ExportError, match=r"could not trace model 'own'.*batch"):
        export_onnx(recipe, recipe.module, tmp_path / "model.onnx")


class Centred(nn.Module):
    """A row minus the mean of its batch."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image - image.mean(0, keepdim=True)


class Similarities(nn.Module):
    """Every row with every other."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image @ image.T


@pytest.mark.parametrize("module", [Centred(), Similarities()])
def test_rows_that_depend_on_their_neighbours_are_refused(
    module: nn.Module, tmp_path: Path
) -> None:
    """Torch and the export agree on them; the server's clients would not."""
    recipe = of(module, image=torch.rand(3, 4))
    with pytest.raises(CheckError, match="output 'made' of a row depends on the rows beside it"):
        export(recipe, [ExportTarget("own", "onnx", "fp32")], tmp_path, silent())
    assert not list(tmp_path.iterdir())
    check_rows(pooled())


def test_a_module_that_fails_at_some_size_is_named() -> None:
    class Refuses(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            if len(image) == 4:
                raise ValueError("too many")
            return image

    recipe = of(Refuses(), image=torch.rand(3, 4))
    with pytest.raises(RecipeError, match=r"itself fails at batch=4: ValueError: too many"):
        list(check_parity(recipe, torch_run(recipe), runtime="torch", tolerance=0.0))


def test_an_output_without_a_batch_is_refused() -> None:
    recipe = of(nn.Flatten(0), input=torch.rand(3, 4))
    with pytest.raises(RecipeError, match="first dimension must be the batch"):
        list(check_parity(recipe, torch_run(recipe), runtime="torch", tolerance=0.0))


def test_more_outputs_than_names(traced: Path) -> None:
    recipe = pooled(outputs=["scores"])
    with pytest.raises(RecipeError, match="returns 2 tensors, but 1 output names"):
        torch_run(recipe)(recipe.make_inputs({"batch": 1, "length": 2}))
    with pytest.raises(CheckError, match="has the outputs scores, count, but must have scores"):
        check_onnx(recipe, traced)


def test_an_invalid_graph_is_refused(traced: Path, tmp_path: Path) -> None:
    model = onnx.load(str(traced))
    model.graph.node[0].input[0] = "nothing_makes_this"
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(CheckError, match=r"not valid ONNX.*nothing_makes_this"):
        check_onnx(pooled(), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("expected", "actual", "words"),
    [
        ([[1.0, 2.0]], [[1.0, 2.01]], "at index [0, 1] torch gives 2.0"),
        ([[1.0, 2.0]], [[1.0, np.nan]], "a difference of inf"),
        ([[1.0, np.inf]], [[1.0, -np.inf]], "a difference of inf"),
        ([[1.0, 2.0]], [[1.0]], "torch gives float32 [1, 2]"),
    ],
)
def test_differences(expected: list[object], actual: list[object], words: str) -> None:
    given = np.array(expected, np.float32), np.array(actual, np.float32)
    with pytest.raises(CheckError) as caught:
        compare("scores", *given, {"batch": 1}, 1e-3, "ONNX Runtime")
    assert words in str(caught.value)


def test_whole_numbers_must_be_equal_and_nan_meet_nan() -> None:
    whole = np.array([[100]]), np.array([[101]])
    with pytest.raises(CheckError, match="0 is allowed"):
        compare("count", *whole, {"batch": 1}, 0.5, "x")
    same = np.array([np.nan, np.inf, 1e9], np.float32)
    assert compare("scores", same, same.copy(), {"batch": 3}, 0.0, "x").value == 0
    large = np.array([1000.0], np.float32), np.array([1000.5], np.float32)
    assert compare("scores", *large, {"batch": 1}, 1e-3, "x").value == pytest.approx(5e-4)


def test_large_weights_lie_beside_the_model(tmp_path: Path) -> None:
    recipe = pooled()
    export_onnx(recipe, recipe.module, tmp_path / "model.onnx", largest_inline=0)
    (beside,) = set(tmp_path.iterdir()) - {tmp_path / "model.onnx"}
    assert beside.stat().st_size > (tmp_path / "model.onnx").stat().st_size / 10
    list(
        check_parity(
            recipe, onnx_run(tmp_path / "model.onnx"), runtime="ONNX Runtime", tolerance=1e-5
        )
    )
    beside.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckError, match="does not load"):
        onnx_run(tmp_path / "model.onnx")
