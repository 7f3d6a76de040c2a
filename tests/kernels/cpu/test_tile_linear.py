"""Products on the tile unit, where there is one."""

import pytest
import torch
from jitney.kernels.fused.trial import relative_error
from torch.nn import functional

pytest.importorskip("numba")

from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.products import may_use_amx
from jitney.kernels.cpu.tile_linear import TileLinear, compile_product

pytestmark = pytest.mark.skipif(not may_use_amx(), reason="the processor has no tile unit")

TOLERANCE = 4e-3


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return compile_product(torch.bfloat16)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (768, 1056)])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 31, 32, 33, 127, 128, 300])
@pytest.mark.parametrize("with_bias", [True, False])
def test_product(kernel, shape, rows, with_bias) -> None:
    """Whole tiles and every kind of rest, alone and with a sum."""
    weight, x = normal(*shape) * 0.2, normal(1, rows, shape[1])
    other = normal(1, rows, shape[0], seed=1)
    bias = normal(shape[0], seed=2) if with_bias else None
    right = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    layer = TileLinear(weight, bias, kernel)
    assert relative_error(layer(x), right) < TOLERANCE
    assert relative_error(layer.plus(x, other), right + other.float()) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(kernel, rows, activation) -> None:
    weight, bias, x = normal(192, 64) * 0.3, normal(192, seed=1), normal(1, rows, 64)
    gate, up = functional.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    if activation == "silu":
        right = functional.silu(gate) * up
    else:
        right = functional.gelu(gate, approximate="tanh") * up
    layer = TileLinear(weight, bias, kernel, activation)
    assert relative_error(layer(x), right) < TOLERANCE


def test_activation_at_extremes(kernel) -> None:
    """Large gates give themselves times up or nothing, and no NaN."""
    identity = torch.eye(32).bfloat16()
    layer = TileLinear(torch.cat([identity, identity]), None, kernel, "silu")
    x = torch.tensor([-3e38, -1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4] * 4).bfloat16()
    got = layer(x[None, None])[0, 0, 1:8].float()
    assert got.isfinite().all()
    assert (got[:2].abs() < 1e-25).all()
    assert torch.allclose(got[4:], x[5:8].float() ** 2, rtol=1e-2)


def test_nothing_is_read_or_written_beyond_the_rows(kernel) -> None:
    """Neighbours of the input are NaN, and neighbours of a result stay as they were."""
    weight = normal(64, 64)
    padded = torch.full((40, 64), float("nan")).bfloat16()
    padded[3:22] = normal(19, 64)
    layer = TileLinear(weight, None, kernel)
    assert torch.equal(layer(padded[3:22]), layer(padded[3:22].clone()))
    assert layer(padded[3:22]).isfinite().all()


def test_a_row_is_the_same_in_every_batch(kernel) -> None:
    layer = TileLinear(normal(64, 96), normal(64, seed=1), kernel)
    x = normal(150, 96)
    together = layer(x)
    for first, last in ((0, 1), (7, 30), (100, 133)):
        assert torch.equal(layer(x[first:last]), together[first:last])
