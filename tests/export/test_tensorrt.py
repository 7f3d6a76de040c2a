"""TensorRT's real parser, profiles and builder, in the edition that needs no GPU to build."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from export import tensorrt_engine, tensorrt_run
from export.errors import CheckError, ExportError, MissingToolError, RecipeError
from export.onnx_model import export_onnx
from export.precision import InPrecision
from export.tensorrt_engine import build_engine, load_tensorrt, profiles_of
from tests.export.tiny import pooled

trt = pytest.importorskip("tensorrt_rtx")
GPU = ("SM86",)


def test_an_engine_is_built_with_progress_and_a_timing_cache(traced: Path, tmp_path: Path) -> None:
    cache = tmp_path / "deeper" / "timings"
    seen: list[str] = []

    class Recorded(Progress):
        def add_task(self, description: str, *rest: Any, **options: Any) -> Any:
            seen.append(description)
            return super().add_task(description, *rest, **options)

    progress = Recorded(console=Console(quiet=True))
    plan = build_engine(
        trt,
        traced,
        profiles_of(pooled()),
        timing_cache=cache,
        progress=progress,
        compute_capabilities=GPU,
    )
    assert len(plan) > 1000
    assert any(each.startswith("TensorRT: ") for each in seen)
    assert progress.finished
    assert cache.stat().st_size > 0
    for content in (cache.read_bytes(), b"no cache at all"):
        cache.write_bytes(content)
        again = build_engine(
            trt, traced, profiles_of(pooled()), timing_cache=cache, compute_capabilities=GPU
        )
        assert len(again) > 1000


def test_the_network_has_the_types_of_the_graph(traced: Path, tmp_path: Path) -> None:
    recipe = pooled()
    half = tmp_path / "half.onnx"
    export_onnx(recipe, InPrecision(recipe.module, torch.float16), half)
    for path, expected in ((traced, False), (half, True)):
        logger = tensorrt_engine._logger(trt)
        builder = tensorrt_engine._builder(trt, logger)
        network, _parser = tensorrt_engine._parse(trt, builder, logger, path)
        types = {
            network.get_layer(index).get_output(0).dtype
            for index in range(network.num_layers)
            if network.get_layer(index).num_outputs
        }
        assert (trt.DataType.HALF in types) is expected
        assert network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


TOKENS = ((1, 1), (2, 6), (4, 9))
SCALE = ((1,), (2,), (4,))


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ({"tokens": TOKENS}, "no shapes for input 'scale'"),
        ({"tokens": TOKENS, "scale": SCALE, "mask": SCALE}, "names 'mask', but the inputs are"),
        (
            {"tokens": ((3, 1), (2, 6), (4, 9)), "scale": SCALE},
            "dimension 0 of input 'tokens' has min 3, opt 2 and max 4",
        ),
        (
            {"tokens": ((1, 1), (2, 10), (4, 9)), "scale": SCALE},
            "dimension 1 of input 'tokens' has min 1, opt 10 and max 9",
        ),
        ({"tokens": ((1,), (2,), (4,)), "scale": SCALE}, "must have 2 dimensions"),
    ],
)
def test_bad_profiles(traced: Path, profiles: Any, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_engine(trt, traced, profiles, compute_capabilities=GPU)
    assert words in str(caught.value)


def test_a_profile_for_a_fixed_dimension() -> None:
    with pytest.raises(RecipeError, match="but the model fixes it at 8"):
        tensorrt_engine._check_shapes("image", (-1, 8), ((1, 8), (2, 8), (4, 9)))


def test_an_unsupported_operator_is_named(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    node = helper.make_node("Det", ["image"], ["made"], name="the_determinant")
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("image", ["batch", 3, 3]), ("made", ["batch"]))
    ]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]),
        str(tmp_path / "model.onnx"),
    )
    shapes = ((1, 3, 3), (2, 3, 3), (4, 3, 3))
    with pytest.raises(CheckError, match=r"refuses 1 operator.*Det.*the_determinant"):
        build_engine(trt, tmp_path / "model.onnx", {"image": shapes}, compute_capabilities=GPU)


def test_a_failed_build_repeats_what_tensorrt_said(traced: Path) -> None:
    """The compute capability of the GPU at hand, where there is none."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU there is something to build for")
    with pytest.raises(ExportError, match=r"TensorRT could not build the engine: .*cuda"):
        build_engine(trt, traced, profiles_of(pooled()), compute_capabilities=["CURRENT"])


def test_what_is_missing_is_said() -> None:
    with pytest.raises(MissingToolError) as caught:
        load_tensorrt("tensorrt_of_nobody")
    text = str(caught.value)
    assert "tensorrt_of_nobody" in text
    assert "docker run" in text
    assert "pip install" in text
    if not torch.cuda.is_available():
        with pytest.raises(MissingToolError, match="torch finds none"):
            tensorrt_run.require_gpu()
