"""Prepacked linear layers against torch's own, and which layers are taken."""

import pytest
import torch
from jitney.execution.linear import (
    PACKED_DTYPES,
    PackedLinear,
    can_pack,
    known_activation,
    prepack_linears,
    relative_error,
)
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("shape", [(64, 48), (33, 7), (256, 768)])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_form(dtype, shape, rows, with_bias) -> None:
    """The plain product and each epilogue, at other row counts than the one packed for."""
    weight = draw(*shape, dtype=dtype)
    bias = draw(shape[0], dtype=dtype, seed=1) if with_bias else None
    layer = PackedLinear(weight, bias, 32)
    x, other = draw(1, rows, shape[1], dtype=dtype), draw(1, rows, shape[0], dtype=dtype, seed=2)
    plain = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    pairs = [
        (layer(x), plain),
        (layer.times(x, other), plain * other.float()),
        (layer.plus(x, other), plain + other.float()),
        (layer.activated(x, "silu"), functional.silu(plain)),
        (layer.activated(x, "gelu"), functional.gelu(plain)),
        (layer.activated(x, "gelu_tanh"), functional.gelu(plain, approximate="tanh")),
        (layer.activated(x, "relu"), functional.relu(plain)),
    ]
    for got, right in pairs:
        assert got.dtype == dtype
        assert got.shape == right.shape
        assert relative_error(got, right) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_its_neighbours_in_f32() -> None:
    """Within rounding: the same row alone and among others."""
    layer = PackedLinear(draw(96, 64), None, 32)
    x = draw(1, 40, 64)
    together = layer(x)
    alone = torch.cat([layer(x[:, i : i + 1]) for i in range(40)], 1)
    assert relative_error(alone, together) < 1e-6


def test_which_activation() -> None:
    assert known_activation(nn.SiLU()) == "silu"
    assert known_activation(nn.GELU()) == "gelu"
    assert known_activation(nn.GELU(approximate="tanh")) == "gelu_tanh"
    assert known_activation(nn.ReLU()) == "relu"
    assert known_activation(nn.Tanh()) is None


class Derived(nn.Linear):
    """Does something else: must be left alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1.0


def tied_model() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(50, 32),
            "inner": nn.Linear(32, 32),
            "conv": Conv1D(24, 32),
            "derived": Derived(32, 32),
            "head": nn.Linear(32, 50, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight
    model["again"] = model["inner"]
    return model.bfloat16()


def test_prepack_takes_linears_and_leaves_the_rest() -> None:
    model = tied_model()
    x = draw(3, 32, dtype=torch.bfloat16)
    names = ("inner", "conv", "derived", "head", "again")
    before = {name: model[name](x) for name in names}
    embedding = model["embed"].weight.clone()
    report = prepack_linears(model, 8)
    assert report.packed == 3  # inner, which stands in two places, conv and head
    assert report.reason is None
    assert report.added_bytes == 50 * 32 * 2  # the head's copy beside the embedding
    assert isinstance(model["derived"], Derived)
    assert model["again"] is model["inner"]
    for name in names:
        assert relative_error(model[name](x), before[name]) < TOLERANCE[torch.bfloat16]
    assert torch.equal(model["embed"].weight, embedding)


def test_packed_weights_are_not_kept_twice() -> None:
    model = tied_model()
    prepack_linears(model, 8)
    held = {name for name, _ in model.named_parameters()}
    assert held == {"embed.weight", "derived.weight", "derived.bias"}


def test_what_cannot_be_packed_says_why(monkeypatch) -> None:
    assert can_pack(torch.float32) is None
    assert "float16" in str(can_pack(torch.float16))
    model = tied_model()

    def wrong(self, x, other):
        return PackedLinear.forward(self, x)

    monkeypatch.setattr(PackedLinear, "plus", wrong)
    report = prepack_linears(model, 8)
    assert report.packed == 0
    assert "other results" in str(report.reason)
    assert type(model["inner"]) is nn.Linear


def test_missing_operators_are_no_error(monkeypatch) -> None:
    def missing(*arguments):
        raise AttributeError("no such operator")

    monkeypatch.setattr(PackedLinear, "__init__", missing)
    assert "no such operators" in str(can_pack(torch.bfloat16))
