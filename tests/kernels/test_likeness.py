"""Decoder layers that are alike are tried once; what differs in anything is tried by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jitney.kernels.fused import trial
from jitney.kernels.fused.fuse import fuse
from jitney.kernels.fused.likeness import likeness
from torch import nn

from tests.kernels.test_fuse import CpuLayerKernels, load_model, make_config
from tests.tiny_models import MAX_LENGTH, make_checkpoint, make_model
from tests.tiny_models import make_config as tiny_config


def layers(number: int = 2) -> list[Any]:
    return list(make_model(tiny_config("llama", num_hidden_layers=number)).model.layers)


def test_layers_with_other_weights_are_alike() -> None:
    first, second = layers()
    cos_sin = (torch.ones(1, 2, 4), torch.zeros(1, 2, 4))
    given = {"position_embeddings": cos_sin, "use_cache": False}
    assert likeness(first, given) == likeness(second, dict(given))


def another_attribute(layer: Any) -> None:
    layer.self_attn.scaling = 0.5


def another_forward(layer: Any) -> None:
    layer.mlp.forward = lambda x: 2 * x


def a_hook(layer: Any) -> None:
    layer.self_attn.register_forward_hook(lambda module, args, output: output)


def another_class(layer: Any) -> None:
    layer.mlp.act_fn = nn.ReLU()


def another_shape(layer: Any) -> None:
    layer.mlp.up_proj = nn.Linear(64, 112, bias=False)


def another_dtype(layer: Any) -> None:
    layer.mlp.up_proj.bfloat16()


@pytest.mark.parametrize(
    "change",
    [another_attribute, another_forward, a_hook, another_class, another_shape, another_dtype],
)
def test_whatever_differs_is_seen(change: Callable[[Any], None]) -> None:
    first, second = layers()
    change(second)
    assert likeness(first, {}) != likeness(second, {})


def test_arguments_count() -> None:
    """Equal tensors may still come from different modules."""
    first, second = layers()
    given = {"position_embeddings": (torch.ones(2),)}
    other = {"position_embeddings": (torch.ones(2),)}
    assert likeness(first, given) != likeness(second, other)
    assert likeness(first, {"scale": 1.0}) != likeness(second, {"scale": 2.0})


@pytest.mark.parametrize(("odd", "tried"), [(None, 1), (2, 2)])
def test_trials_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: int | None, tried: int
) -> None:
    """One of four layers, or one and the odd one; all are fused."""
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=4)
    config = make_config({"model": str(folder), "device": "cpu", "dtype": "float32"})
    module = load_model(config).module
    if odd is not None:
        module.model.layers[odd].self_attn.odd = True
    scales = []
    check = trial.Checker.check

    def count(self: Any, *args: Any, **more: Any) -> None:
        scales.append(more.get("scales", args[3] if len(args) > 3 else None))
        check(self, *args, **more)

    monkeypatch.setattr(trial.Checker, "check", count)
    report = fuse(module, CpuLayerKernels(torch.float32, 8), MAX_LENGTH)
    assert report.swapped["layer"] == 4
    assert scales.count(trial.LAYER_SCALES) == tried
    assert scales.count(trial.MODULE_SCALES) == 2 * tried
