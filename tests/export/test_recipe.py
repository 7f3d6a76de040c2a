"""Descriptions of exports: what is derived from them, and what is wrong with wrong ones."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export.errors import RecipeError
from export.recipe import Dimension, Quality
from export.resolve import from_parts, resolve
from tests.export.tiny import pooled


def test_inputs_and_profiles_have_the_sizes_asked_for() -> None:
    recipe = pooled()
    made = recipe.make_inputs({"batch": 4, "length": 9})
    assert {name: each.shape for name, each in made.items()} == {"tokens": (4, 9), "scale": (4,)}
    assert made["scale"].dtype == np.float32
    assert len(set(made["scale"])) == 4, "repeated rows of real numbers must differ"
    assert recipe.profile("tokens") == ((1, 1), (2, 6), (4, 9))
    assert recipe.profile("scale") == ((1,), (2,), (4,))
    assert recipe.batch.maximum == 4
    sizes = recipe.check_sizes()
    assert {each["batch"] for each in sizes} == {1, 2, 3, 4}
    assert {each["length"] for each in sizes} == {1, 5, 9}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dimension("n", 4, 2, 8), "minimum 4, optimum 2 and maximum 8"),
        (lambda: Dimension("n", 0, 2, 8), "1 <= minimum"),
        (lambda: Dimension("a b", 1, 2, 8), "'a b'"),
        (lambda: Dimension("n", 1, 2, 8, checks=(9,)), "at size 9"),
        (lambda: pooled(name="a/b"), "'a/b'"),
        (lambda: pooled(dynamic={"token": {0: "batch"}}), "did you mean 'tokens'"),
        (
            lambda: pooled(dynamic={"tokens": {0: "batch", 2: "length"}, "scale": {0: "batch"}}),
            "input 'tokens' has no dimension 2",
        ),
        (
            lambda: pooled(dynamic={"tokens": {1: "length"}, "scale": {0: "batch"}}),
            "dimension 0 of input 'tokens' is fixed at [3], but must be dynamic",
        ),
        (
            lambda: pooled(dynamic={"tokens": {0: "batch", 1: "lenght"}, "scale": {0: "batch"}}),
            "did you mean 'length'",
        ),
        (
            lambda: pooled(dynamic={"tokens": {0: "batch"}, "scale": {0: "length"}}),
            "batch and length",
        ),
        (
            lambda: pooled(dynamic={"tokens": {0: "batch", "1": "length"}, "scale": {0: "batch"}}),
            "input 'tokens' has index '1'",
        ),
        (
            lambda: pooled(dynamic={"tokens": {0: "batch", 1: "batch"}, "scale": {0: "batch"}}),
            "dimension 1 of input 'tokens' is called 'batch' like the batch",
        ),
        (
            lambda: pooled(
                dimensions={**pooled().dimensions, "batch": Dimension("batch", 2, 2, 4)}
            ),
            "batch dimension 'batch' has minimum 2, but must have 1",
        ),
        (lambda: pooled(outputs=["scores", "scores"]), "'scores' names two"),
        (lambda: pooled(outputs=["scores", "tokens"]), "'tokens' names two"),
        (
            lambda: Quality("accuracy", {}, "scores", {"int8": 0.9}),
            "labels",
        ),
        (
            lambda: pooled(
                inputs={**pooled().inputs, "scale": torch.ones(3, dtype=torch.bfloat16)}
            ),
            "input 'scale' is of type bfloat16",
        ),
    ],
)
def test_impossible_descriptions(make: Any, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make()
    assert words in str(caught.value)


MODULE = """
import torch
from torch import nn

class Twice(nn.Module):
    def forward(self, image, mask=None):
        return {"doubled": image * 2, "total": image.sum(-1)}

def good():
    return Twice(), torch.rand(2, 3), {"image": {0: "batch"}}

def with_bounds():
    dim = torch.export.Dim
    return Twice(), (torch.rand(2, 3),), {"image": {0: dim("rows", min=1, max=32), 1: "width"}}

def nested():
    class Nested(Twice):
        def forward(self, image): return {"a": None, "b": (image.half(), image)}
    return Nested(), torch.rand(2, 3), {"image": {0: "batch"}}

def text_index(): return Twice(), torch.rand(2, 3), {"image": {"0": "batch"}}
def nothing(): return None
def two(): return Twice(), torch.rand(2, 3)
def no_module(): return "Twice", torch.rand(2, 3), {}
def bad_name(): return Twice(), {"imag": torch.rand(2, 3)}, {}
def too_many(): return Twice(), (torch.rand(2, 3),) * 3, {}
def bad_dynamic(): return Twice(), torch.rand(2, 3), ["batch"]
def bad_dimension(): return Twice(), torch.rand(2, 3), {"image": {0: 5}}
def no_tensor(): return Twice(), {"image": [1.0]}, {"image": {0: "batch"}}
def fails(): return nn.Linear(7, 2), torch.rand(2, 3), {"input": {0: "batch"}}
def wants(argument): return None
number = 3
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_models.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "broken_import.py").write_text("import nowhere_at_all\n", encoding="utf-8")
    (tmp_path / "broken_value.py").write_text("int('x')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_models", "broken_import", "broken_value"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_function_of_ones_own(own_models: Path) -> None:
    recipe = resolve("own_models:good")
    assert recipe.name == "good"
    assert list(recipe.outputs) == ["doubled", "total"]
    assert recipe.dynamic == {"image": {0: "batch"}}
    assert not recipe.module.training
    assert recipe.tolerance == 1e-4
    nested = resolve("own_models:nested")
    assert list(nested.outputs) == ["output_0", "output_1"]
    assert nested.tolerance == 1e-2, "of halves"
    bounded = resolve("own_models:with_bounds", name="twice", max_batch_size=16)
    assert bounded.name == "twice"
    assert bounded.batch == Dimension("rows", 1, 2, 16, checks=bounded.batch.checks)
    assert bounded.batch.checks[-1] == 16
    assert (bounded.dimensions["width"].minimum, bounded.dimensions["width"].maximum) == (1, 6)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("digit", "did you mean 'digits'"),
        ("own_modles:good", "there is no module 'own_modles'"),
        ("broken_import:good", "nowhere_at_all"),
        ("own_models:goood", "did you mean 'good'"),
        (":good", "module:function"),
        ("own_models:", "module:function"),
        ("./own_models.py:good", "module:function"),
        ("..own_models:good", "module:function"),
        ("own_models:text_index", "input 'image' has index '0'"),
        ("own_models:number", "is a int, but must be a function"),
        ("own_models:wants", "must take none"),
        ("own_models:nothing", "returned None, but must return"),
        ("own_models:two", "a tuple of 2, but must return"),
        ("own_models:no_module", "returned a str first"),
        ("own_models:bad_name", "did you mean 'image'"),
        ("own_models:too_many", "3 example inputs, but forward takes 2: image, mask"),
        ("own_models:bad_dynamic", "must return a dictionary"),
        ("own_models:bad_dimension", "a dynamic dimension is 5"),
        ("own_models:no_tensor", "example input 'image' is a list"),
        ("own_models:fails", "fails on its own example inputs"),
    ],
)
def test_what_cannot_be_resolved(own_models: Path, model: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(model)
    assert words in str(caught.value)


def test_a_dimension_by_name_gets_bounds_around_the_example() -> None:
    recipe = from_parts(
        "line", nn.Linear(3, 2), torch.rand(2, 8, 3), {"input": {0: "n", 1: "time"}}, source="x"
    )
    assert recipe.dimensions["n"] == Dimension("n", 1, 4, 8)
    assert recipe.dimensions["time"] == Dimension("time", 4, 8, 16)
    assert list(recipe.outputs) == ["output"]
