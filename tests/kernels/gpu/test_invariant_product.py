"""Matrix products of fixed tiles: right, and bitwise the same for a row in every batch."""

import pytest
import torch

from tests.kernels.gpu.noise import DEVICE, TOLERANCE, noise

pytest.importorskip("triton")

from jitney.kernels.gpu.invariant_product import InvariantLinear, invariant_tiles


def make(outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> InvariantLinear:
    weight = noise(1, outputs, inputs, dtype=dtype) / inputs**0.5
    return InvariantLinear(weight, noise(2, outputs, dtype=dtype) if bias else None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 64, 128), (3, 160, 100), (70, 33, 260), (129, 200, 64)]
)
def test_products(rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    linear = make(outputs, inputs, dtype, bias)
    x = noise(0, 1, rows, inputs, dtype=dtype)
    right = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        right += linear.bias.double()
    got = linear(x)
    assert got.shape == right.shape
    assert got.dtype == dtype
    assert float((got.double() - right).norm() / right.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, equal_rows) -> None:
    linear = make(200, 260, dtype, bias=True)
    x = noise(0, 150, 260, dtype=dtype)
    together = linear(x)
    for first, last in ((0, 1), (77, 78), (63, 66), (100, 150), (1, 140)):
        assert torch.equal(linear(x[first:last]), together[first:last])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(linear(x[order]), together[order])


def test_rows_that_begin_anywhere() -> None:
    """An address that is not a multiple of 16 changes no bit, nor do columns that lie apart."""
    linear = make(40, 50, torch.float32, bias=False)
    memory = noise(0, 5 * 50 + 1, dtype=torch.float32)
    x = memory[1:].view(5, 50)
    assert torch.equal(linear(x), linear(x.clone()))
    apart = noise(3, 5, 100, dtype=torch.float32)[:, ::2]
    assert torch.equal(linear(apart), linear(apart.contiguous()))


def test_a_transposed_weight_is_not_copied() -> None:
    weight = noise(1, 48, 24, dtype=torch.float32)
    turned = InvariantLinear(weight.t(), None)
    assert turned.weight.data_ptr() == weight.data_ptr()
    x = noise(0, 9, 48, dtype=torch.float32)
    assert torch.equal(turned(x), InvariantLinear(weight.t().contiguous(), None)(x))


def test_tiles_do_not_ask_for_rows() -> None:
    assert invariant_tiles(4096, torch.bfloat16) != invariant_tiles(128256, torch.bfloat16)
    assert invariant_tiles(4096, torch.float32) == invariant_tiles(128256, torch.float32)
