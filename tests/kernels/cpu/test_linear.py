"""Prepacked linear layers against torch's own, and which layers are taken."""

import pytest
import torch
from jitney.kernels.cpu import linear
from jitney.kernels.cpu.linear import PackedLinear, can_pack, prepack_linears
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.fuse import FuseReport
from jitney.kernels.fused.trial import relative_error
from jitney.quantization.eight_bits import Int8Linear
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def packable(dtype: torch.dtype):
    reason = can_pack(dtype)
    return pytest.param(dtype, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))


@pytest.mark.parametrize("dtype", [packable(each) for each in TOLERANCE])
@pytest.mark.parametrize("shape", [(64, 48), (33, 7), (256, 768)])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_form(dtype, shape, rows, with_bias) -> None:
    """The plain product and each epilogue, at other row counts than the one packed for."""
    weight = normal(*shape, dtype=dtype)
    bias = normal(shape[0], dtype=dtype, seed=1) if with_bias else None
    layer = PackedLinear(weight, bias, 32)
    x, other = (
        normal(1, rows, shape[1], dtype=dtype),
        normal(1, rows, shape[0], dtype=dtype, seed=2),
    )
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
    layer = PackedLinear(normal(96, 64), None, 32)
    x = normal(1, 40, 64)
    together = layer(x)
    alone = torch.cat([layer(x[:, i : i + 1]) for i in range(40)], 1)
    assert relative_error(alone, together) < 1e-6


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
    return model


def test_prepack_takes_linears_and_leaves_the_rest() -> None:
    model = tied_model()
    x = normal(3, 32)
    names = ("inner", "conv", "derived", "head", "again")
    before = {name: model[name](x) for name in names}
    embedding = model["embed"].weight.clone()
    report = FuseReport()
    prepack_linears(model, 8, report)
    # inner, which stands in two places, conv and head
    assert (report.swapped, report.reasons) == ({"linear layer": 3}, {})
    assert report.added_bytes == 50 * 32 * 4  # the head's copy beside the embedding
    assert isinstance(model["derived"], Derived)
    assert model["again"] is model["inner"]
    for name in names:
        assert relative_error(model[name](x), before[name]) < TOLERANCE[torch.float32]
    assert torch.equal(model["embed"].weight, embedding)


def test_packed_weights_are_not_kept_twice() -> None:
    model = tied_model()
    prepack_linears(model, 8, FuseReport())
    held = {name for name, _ in model.named_parameters()}
    assert held == {"embed.weight", "derived.weight", "derived.bias"}


def test_what_this_processor_can_pack() -> None:
    """float32 on every x86-64; bfloat16 where oneDNN has it: AVX-512 or AVX-NE-CONVERT."""
    assert can_pack(torch.float32) is None
    assert "float16" in str(can_pack(torch.float16))
    reason = can_pack(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert reason is None
    else:
        assert "this processor has no packed product for torch.bfloat16" in str(reason)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("bf16 path needs AVX-512"), "this processor has no packed product"),
        (AttributeError("no such operator"), "this torch has no such operators"),
    ],
)
def test_what_cannot_be_packed_is_left_with_the_reason(monkeypatch, error, reason) -> None:
    def fail(*arguments):
        raise error

    monkeypatch.setattr(PackedLinear, "__init__", fail)
    model = tied_model()
    report = FuseReport()
    prepack_linears(model, 8, report)
    assert report.swapped["linear layer"] == 0
    assert reason in str(report.reasons)
    assert type(model["inner"]) is nn.Linear


def test_operators_that_compute_something_else_are_not_used(monkeypatch) -> None:
    monkeypatch.setattr(PackedLinear, "plus", lambda self, x, other: self(x))
    assert "wrong results" in str(can_pack(torch.float32))


def test_what_one_dnn_does_not_pack_our_kernels_do(monkeypatch) -> None:
    """GPT-2's transposed layers too."""
    pytest.importorskip("numba")
    from jitney.kernels.cpu.column_linear import ColumnLinear
    from jitney.kernels.cpu.layer_kernels import CpuLayerKernels

    monkeypatch.setattr(linear, "can_pack", lambda dtype: "no such product")
    model = tied_model().bfloat16()
    x, names = normal(3, 32).bfloat16(), ("inner", "conv", "head")
    before = {name: model[name](x) for name in names}
    report = FuseReport()
    prepack_linears(model, 8, report, CpuLayerKernels(torch.bfloat16, 8).linear)
    assert report.swapped == {"linear layer": 3}
    for name in names:
        assert type(model[name]) is ColumnLinear
        assert relative_error(model[name](x), before[name]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("quantized_first", [True, False])
def test_quantized_products_and_others_are_not_fused(quantized_first: bool) -> None:
    """And the reason is the same in either order."""
    pytest.importorskip("numba")
    from jitney.kernels.cpu.layer_kernels import CpuLayerKernels

    plain = nn.Linear(64, 32, bias=False).bfloat16()
    products = [plain, Int8Linear.quantized_from(plain.weight.detach(), None)]
    if quantized_first:
        products.reverse()
    with pytest.raises(Misfit, match="quantized products and others"):
        CpuLayerKernels(torch.bfloat16, 8).linear(products)
