"""The kernels between two products, on awkward widths and numbers of rows, against float64."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.noise import DEVICE, TOLERANCE, noise

pytest.importorskip("triton")

from jitney.kernels.fused.forms import ACTIVATIONS, Misfit, NormForm
from jitney.kernels.gpu.gpu_fuse import InvariantLayerNorm
from jitney.kernels.gpu.norm_kernels import (
    MOST_WIDTH,
    add_norm,
    gate,
    norm_in_place,
    norm_rows,
)

WIDTHS = (1, 7, 64, 80, 257, 4096)


def make_norm(seed: int, width: int, epsilon: float = 1e-5) -> NormForm:
    return NormForm(1.0 + 0.3 * noise(seed, width), epsilon)


def right_norm(x: Tensor, norm: NormForm) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * norm.scale.double()


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 80), (130, 64)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x = noise(0, rows, width, dtype=dtype)
    norm = make_norm(1, width)
    got = norm_rows(x, norm)
    assert got.dtype == dtype
    assert error(got, right_norm(x, norm)) < TOLERANCE[dtype]


def test_rows_of_several_dimensions_that_lie_apart() -> None:
    """As the heads of a query, which are columns of a larger tensor."""
    heads = noise(0, 5, 6, 32)[:, :4]
    norm = make_norm(1, 32)
    assert error(norm_rows(heads, norm), right_norm(heads, norm)) < 1e-6
    columns = noise(2, 5, 64)[:, ::2]
    assert error(norm_rows(columns, norm), right_norm(columns, norm)) < 1e-6


@pytest.mark.parametrize("width", WIDTHS)
def test_any_width(width: int) -> None:
    """A sum, its norm and the norm of what is added, all at once."""
    branch = noise(0, 3, width)
    residual = noise(1, 3, width)
    inner = make_norm(2, width)
    outer = make_norm(3, width)
    out, sums = add_norm(branch, residual, branch_norm=inner, norm=outer)
    right = right_norm(branch, inner) + residual.double()
    assert error(sums, right) < 1e-6
    assert error(out, right_norm(right, outer)) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_forms(dtype: torch.dtype) -> None:
    """Each combination of parts, with rows that lie apart, all or some of them."""
    width = 96
    wide = noise(0, 9, 3 * width, dtype=dtype)
    branch = wide[:, width : 2 * width]
    residual = wide[:, 2 * width :]
    inner = make_norm(2, width)
    outer = make_norm(3, width)
    some = torch.tensor([8, 0, 0, 5], device=DEVICE)
    before = wide.clone()
    for branch_norm, norm, indices in itertools.product((None, inner), (None, outer), (None, some)):
        out, sums = add_norm(branch, residual, branch_norm=branch_norm, norm=norm, indices=indices)
        right = branch.double() if branch_norm is None else right_norm(branch, branch_norm)
        right = right + residual.double()
        right = right if indices is None else right[indices]
        assert error(sums, right) < TOLERANCE[dtype]
        # The norm is that of the rounded sum.
        normed = sums.double() if norm is None else right_norm(sums, norm)
        assert error(out, normed) < TOLERANCE[dtype]
    assert torch.equal(wide, before), "an input was written"


def test_indices_may_lie_apart() -> None:
    x = noise(0, 7, 64)
    zeros = torch.zeros_like(x)
    norm = make_norm(1, 64)
    indices = torch.arange(7, device=DEVICE)[::2]
    out, _ = add_norm(x, zeros, norm=norm, indices=indices)
    assert torch.equal(out, norm_rows(x, norm)[::2])


def test_in_place() -> None:
    width = 48
    whole = noise(0, 3, 2 * width)
    before = whole.clone()
    norm = make_norm(1, width)
    norm_in_place(whole[:, width:], norm)
    assert torch.equal(whole[:, :width], before[:, :width])
    assert error(whole[:, width:], right_norm(before[:, width:], norm)) < 1e-6


@pytest.mark.parametrize("width", [1, 33, 768])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(width: int, bias: bool) -> None:
    original = torch.nn.LayerNorm(width, eps=1e-3, bias=bias).to(DEVICE)
    with torch.no_grad():
        original.weight.copy_(noise(1, width))
        if bias:
            original.bias.copy_(noise(2, width))
    x = noise(0, 2, 3, width) + 5.0
    got = InvariantLayerNorm(original)(x)
    right = original.double()(x.double()).detach()
    assert float((got.double() - right).norm()) <= 1e-5 * float(right.norm()) + 1e-5


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm((2, 32)),
        torch.nn.LayerNorm(MOST_WIDTH + 1),
        torch.nn.LayerNorm(32, elementwise_affine=False),
    ],
    ids=str,
)
def test_layer_norms_that_stay(norm: torch.nn.LayerNorm) -> None:
    with pytest.raises(Misfit):
        InvariantLayerNorm(norm)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation: str, dtype: torch.dtype) -> None:
    function = ACTIVATIONS[activation]
    for rows, width in ((1, 1500), (4, 7), (70, 96)):
        x = 4.0 * noise(0, rows, 2 * width + 3, dtype=dtype)[:, : 2 * width]
        left, right = x.double().chunk(2, -1)
        got = gate(x, activation)
        assert got.shape == (rows, width)
        assert got.dtype == dtype
        assert error(got, function(left) * right) < TOLERANCE[dtype]


def test_gate_of_large_values() -> None:
    """No NaN where an exponential overflows."""
    x = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 3e4] + [1.0] * 5], device=DEVICE)
    for activation in ACTIVATIONS:
        got = gate(x, activation)
        assert torch.equal(got, x[:, :5].clamp_min(0.0)), activation


@pytest.mark.parametrize("width", [80, 4096])
def test_a_row_does_not_depend_on_the_others(width: int) -> None:
    x = noise(0, 33, width)
    residual = noise(1, 33, width)
    norm = make_norm(2, width)
    out, sums = add_norm(x, residual, branch_norm=norm, norm=norm)
    for first, last in ((0, 1), (13, 14), (13, 20), (32, 33)):
        alone, alone_sums = add_norm(
            x[first:last].clone(), residual[first:last].clone(), branch_norm=norm, norm=norm
        )
        assert torch.equal(alone, out[first:last])
        assert torch.equal(alone_sums, sums[first:last])
