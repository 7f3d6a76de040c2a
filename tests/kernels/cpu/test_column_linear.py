"""Products by the tile unit, where there is one, and by vectors: of bfloat16, bytes and 4 bits."""

import pytest
import torch
from jitney.kernels.fused.forms import ACTIVATIONS, Activation, Scaling
from jitney.kernels.fused.trial import relative_error
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from torch.nn import functional

pytest.importorskip("numba")

from jitney.kernels.cpu import column_linear, processor
from jitney.kernels.cpu.column_linear import (
    ColumnLinear,
    ScaledColumns,
    compiled_conversion,
    compiled_product,
    fits_columns,
)
from jitney.kernels.cpu.dot import MOST_BYTE_INPUTS
from jitney.kernels.cpu.processor import may_use_amx
from jitney.kernels.cpu.simd import I4, I8

TOLERANCE = 4e-3


@pytest.fixture(autouse=True, params=["tiles", "vectors"])
def unit(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiles" and not may_use_amx():
        pytest.skip("the processor has no tile unit")
    monkeypatch.setattr(column_linear, "may_use_amx", lambda: request.param == "tiles")


@pytest.mark.parametrize("tag", [I8, I4])
def test_kernels_are_found_in_the_cache(tag) -> None:
    """Not so one whose code holds an address of its process: each load would compile it."""
    for compiled in (compiled_product, compiled_conversion):
        compiled(tag)
        assert compiled.__wrapped__(tag).was_cached


@pytest.mark.parametrize("hidden", ["amx-bf16", "amx-int8"])
def test_a_tile_unit_multiplies_bfloat16_and_bytes(hidden, monkeypatch) -> None:
    """A virtual machine may hide one of the two."""
    monkeypatch.setattr(processor, "host_has", lambda feature: feature != hidden)
    assert not processor.host_has_amx()
    monkeypatch.setattr(processor, "host_has", lambda feature: True)
    assert processor.host_has_amx()


def of_bytes(plain: Int8Linear | Int4Linear, activation: Activation | None = None) -> ColumnLinear:
    return ColumnLinear(plain.weight, plain.bias, activation, plain.scale, plain.input_factors)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (768, 1056)])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 31, 32, 33, 127, 128, 300])
@pytest.mark.parametrize("with_bias", [True, False])
def test_product(shape, rows, with_bias) -> None:
    """Whole tiles and every kind of rest, alone and with a sum."""
    weight, x = normal(*shape) * 0.2, normal(1, rows, shape[1])
    other = normal(1, rows, shape[0], seed=1)
    bias = normal(shape[0], seed=2) if with_bias else None
    right = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    layer = ColumnLinear(weight, bias)
    assert relative_error(layer(x), right) < TOLERANCE
    assert relative_error(layer.plus(x, other), right + other.float()) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(rows, activation) -> None:
    weight, bias, x = normal(192, 64) * 0.3, normal(192, seed=1), normal(1, rows, 64)
    gate, up = functional.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    if activation == "silu":
        right = functional.silu(gate) * up
    else:
        right = functional.gelu(gate, approximate="tanh") * up
    layer = ColumnLinear(weight, bias, activation)
    assert relative_error(layer(x), right) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_activation_without_a_gate(rows, activation) -> None:
    weight = normal(96, 64) * 0.3
    bias = normal(96, seed=1)
    x = normal(1, rows, 64)
    other = normal(1, rows, 96, seed=2)
    plain = functional.linear(x.float(), weight.float(), bias.float())
    layer = ColumnLinear(weight, bias, activation, gated=False)
    assert relative_error(layer(x), ACTIVATIONS[activation](plain)) < TOLERANCE
    right = ACTIVATIONS[activation](plain + other.float())
    assert relative_error(layer.plus(x, other), right) < TOLERANCE


def test_a_factor_on_the_product_alone() -> None:
    weight = normal(64, 64)
    bias = normal(64, seed=1)
    x = normal(1, 5, 64)
    other = normal(1, 5, 64, seed=2)
    plain = functional.linear(x.float(), weight.float(), bias.float())
    got = ColumnLinear(weight, bias).plus(x, other, Scaling(factor=0.22))
    assert relative_error(got, plain * 0.22 + other.float()) < TOLERANCE


def test_capped_logits() -> None:
    weight = normal(64, 64)
    x = normal(1, 5, 64) * 10
    scaling = Scaling(factor=0.5, softcap=20.0)
    right = torch.tanh(functional.linear(x.float(), weight.float()) * 0.5 / 20.0) * 20.0
    got = ScaledColumns(ColumnLinear(weight, None), scaling)(x)
    assert relative_error(got, right) < TOLERANCE
    assert right.abs().max() > 19.9, "which would prove nothing"


def test_activation_at_extremes() -> None:
    """Large gates give themselves times up or nothing, and no NaN."""
    identity = torch.eye(32).bfloat16()
    layer = ColumnLinear(torch.cat([identity, identity]), None, "silu")
    x = torch.tensor([-3e38, -1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4] * 4).bfloat16()
    got = layer(x[None, None])[0, 0, 1:8].float()
    assert got.isfinite().all()
    assert (got[:2].abs() < 1e-25).all()
    assert torch.allclose(got[4:], x[5:8].float() ** 2, rtol=1e-2)


def test_nothing_is_read_or_written_beyond_the_rows() -> None:
    """Neighbours of the input are NaN, and neighbours of a result stay as they were."""
    weight = normal(64, 64)
    padded = torch.full((40, 64), float("nan")).bfloat16()
    padded[3:22] = normal(19, 64)
    layer = ColumnLinear(weight, None)
    assert torch.equal(layer(padded[3:22]), layer(padded[3:22].clone()))
    assert layer(padded[3:22]).isfinite().all()


def test_a_row_is_the_same_in_every_batch() -> None:
    layer = ColumnLinear(normal(64, 1056), normal(64, seed=1))
    x = normal(150, 1056)
    together = layer(x)
    for first, last in ((0, 1), (7, 30), (100, 133)):
        assert torch.equal(layer(x[first:last]), together[first:last])


@pytest.mark.parametrize("shape", [(32, 16), (96, 80), (768, 1056)])
@pytest.mark.parametrize("rows", [1, 6, 7, 33, 130])
@pytest.mark.parametrize("with_bias", [True, False])
def test_product_of_bytes(shape, rows, with_bias) -> None:
    """As the plain layer, whose sums are exact at these sizes; nothing but the last rounding to
    bfloat16 differs."""
    weight, x = normal(*shape) * 0.2, normal(1, rows, shape[1])
    other = normal(1, rows, shape[0], seed=1)
    plain = Int8Linear.quantized_from(weight, normal(shape[0], seed=2) if with_bias else None)
    layer = of_bytes(plain)
    assert relative_error(layer(x), plain(x)) < 1e-3
    assert relative_error(layer.plus(x, other), plain(x).float() + other.float()) < 2 * TOLERANCE
    assert relative_error(layer(x), functional.linear(x, weight, plain.bias)) < 2e-2


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_bytes(activation) -> None:
    plain, x = (
        Int8Linear.quantized_from(normal(192, 64) * 0.3, normal(192, seed=1)),
        normal(1, 40, 64),
    )
    gate, up = plain(x).float().chunk(2, -1)
    right = ACTIVATIONS[activation](gate) * up
    assert relative_error(of_bytes(plain, activation)(x), right) < 1e-2


def test_the_largest_bytes_do_not_clip() -> None:
    """Two of them multiplied and added do not fit into 16 bits."""
    plain = Int8Linear.quantized_from(torch.ones(32, 4096).bfloat16(), None)
    x = torch.ones(3, 4096).bfloat16()
    assert torch.equal(of_bytes(plain)(x), torch.full((3, 32), 4096.0).bfloat16())
    assert torch.equal(of_bytes(plain)(-x), torch.full((3, 32), -4096.0).bfloat16())


def test_the_widest_layer_of_bytes_does_not_overflow() -> None:
    """The largest bytes times the largest weights still fit into 32 bits. One more would not."""
    inputs = MOST_BYTE_INPUTS // 16 * 16
    weight = torch.full((32, inputs), -128, dtype=torch.int8)
    layer = ColumnLinear(weight, None, scale=torch.ones(32))
    right = torch.full((2, 32), -128.0 * inputs)
    assert relative_error(layer(torch.ones(2, inputs).bfloat16()), right) < TOLERANCE
    assert fits_columns(weight)
    assert not fits_columns(torch.empty(32, inputs + 16, dtype=torch.int8))
    assert fits_columns(torch.empty(32, inputs + 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_a_broken_row_is_not_hidden_and_harms_no_other(kind, strange) -> None:
    layer, x = of_bytes(kind.quantized_from(normal(64, 96), None)), normal(5, 96)
    whole = layer(x)
    x[2, 7] = strange
    x[4] = 0
    got = layer(x)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3]], whole[[0, 1, 3]])
    assert not got[4].any()


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_the_smallest_elements_are_zeros(kind) -> None:
    """127 over them is infinite in float32; the rest of the row counts."""
    plain, x = kind.quantized_from(normal(64, 256) * 0.3, None), normal(2, 256)
    x[:, :128] = 0
    x[1] = 0
    x[:, 5] = 1e-37
    made = of_bytes(plain)(x)
    assert made.isfinite().all()
    assert (made[0] - plain(x)[0]).abs().max() < 0.1
    assert (made[1] == 0).all() or made[1].abs().max() < 1e-30


def test_a_row_of_bytes_is_the_same_in_every_batch() -> None:
    layer, x = of_bytes(Int8Linear.quantized_from(normal(64, 1056), None)), normal(150, 1056)
    together = layer(x)
    for first, last in ((0, 1), (7, 30), (100, 133)):
        assert torch.equal(layer(x[first:last]), together[first:last])


@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (160, 96), (768, 384)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 33, 130])
def test_product_of_four_bits(shape, rows) -> None:
    """In groups of 32, 64 and 128: as the plain layer, but for the order of sums; and a row's bits
    are those of the row alone, which vectors multiply wherever the others go."""
    x, other = normal(rows, shape[1]), normal(rows, shape[0], seed=1)
    plain = Int4Linear.quantized_from(normal(*shape) * 0.2 + 0.3, normal(shape[0], seed=2))
    layer = of_bytes(plain)
    got = layer(x)
    assert relative_error(got, plain(x)) < 1e-3
    assert relative_error(layer.plus(x, other), plain(x).float() + other.float()) < 2 * TOLERANCE
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(layer(x[row : row + 1]), got[row : row + 1])


@pytest.mark.parametrize("rows", [3, 40])
def test_gated_four_bits(rows) -> None:
    plain, x = (
        Int4Linear.quantized_from(normal(192, 128) * 0.3, normal(192, seed=1)),
        normal(rows, 128),
    )
    gate, up = plain(x).float().chunk(2, -1)
    got = of_bytes(plain, "silu")(x)
    assert relative_error(got, functional.silu(gate) * up) < 1e-2


def test_the_largest_of_four_bits_do_not_clip() -> None:
    """Eight products of two fit into 16 bits, and no more."""
    factors = torch.tensor([1.0, 0.0])[:, None, None].expand(2, 32, 32).bfloat16()
    plain = Int4Linear(
        torch.full((32, 2048), 255, dtype=torch.uint8), factors, None, torch.bfloat16
    )
    x = torch.ones(33, 4096).bfloat16()
    for sign in (1, -1):
        right = torch.full((33, 32), sign * 15.0 * 4096).bfloat16()
        assert torch.equal(of_bytes(plain)(sign * x), right)
        assert torch.equal(of_bytes(plain)(sign * x[:1]), right[:1])


@pytest.mark.parametrize("outputs", [8, 80, 1025])
def test_outputs_are_filled_up(outputs) -> None:
    """As of a vocabulary that is no multiple of 32."""
    weight, bias, x = normal(outputs, 96), normal(outputs, seed=1), normal(2, 3, 96)
    other = normal(2, 3, outputs, seed=2)
    right = functional.linear(x.float(), weight.float(), bias.float())
    layer = ColumnLinear(weight, bias)
    assert layer(x).shape == right.shape
    assert relative_error(layer(x), right) < TOLERANCE
    assert relative_error(layer.plus(x, other), right + other.float()) < 2 * TOLERANCE
    for plain in (Int8Linear.quantized_from(weight, bias), Int4Linear.quantized_from(weight, bias)):
        assert relative_error(of_bytes(plain)(x), plain(x)) < 1e-3


def test_a_sum_with_filled_up_outputs_is_rounded_once() -> None:
    """The same bits as with outputs that need no filling."""
    weight, x, other = normal(96, 96), normal(40, 96), normal(40, 96, seed=1)
    whole = ColumnLinear(weight, None).plus(x, other)
    part = ColumnLinear(weight[:80], None).plus(x, other[:, :80])
    assert torch.equal(part, whole[:, :80])


@pytest.mark.parametrize(("planted", "most"), [(1, 0.015), (15, 0.015), (16, 0.6)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_outliers_do_not_coarsen_their_row(planted, most, activation) -> None:
    """Elements a hundred times larger than the rest: what the rest gives is as exact as without
    them, as long as they are few, and the row has the same bits alone."""
    plain, x = Int8Linear.quantized_from(normal(192, 768) * 0.02, None), normal(33, 768, seed=1)
    columns = torch.randperm(768, generator=torch.Generator().manual_seed(2))[:planted]
    x[1::2, columns] = x[1::2, columns].sign() * 100
    weight = plain.dequantized()
    weight[:, columns] = plain.weight[:, columns] = 0
    right = functional.linear(x.float(), weight)
    if activation is not None:
        gate, up = right.chunk(2, -1)
        right = functional.silu(gate) * up
    layer = of_bytes(plain, activation)
    got = layer(x)
    assert relative_error(got[::2], right[::2]) < 0.015
    assert most / 10 < relative_error(got[1::2], right[1::2]) < most
    if activation is None:
        assert relative_error(got, plain(x)) < 3e-3
    for row in (0, 1, 32):
        assert torch.equal(layer(x[row : row + 1]), got[row : row + 1])


def test_what_outliers_give_is_added() -> None:
    """Rows of outliers and zeros alone, at every byte of a unit."""
    plain, x = Int8Linear.quantized_from(normal(96, 80), None), torch.zeros(40, 80).bfloat16()
    for row in range(40):
        x[row, [row, 79 - row]] = torch.tensor([100.0, -1e-3]).bfloat16()
    right = functional.linear(x.float(), plain.dequantized())
    assert relative_error(of_bytes(plain)(x), right) < TOLERANCE
    sparse = normal(5, 80)
    sparse[:, ::4] = 0
    sparse[:, 20:] = 0
    assert relative_error(of_bytes(plain)(sparse), plain(sparse)) < 3e-3


@pytest.mark.parametrize("shrunk", [64, 10_000, 1e9])
def test_columns_of_small_weights_count(shrunk) -> None:
    """Weights far below the others, of inputs as much larger; and a layer that has them is merged
    with one that has not."""
    weight, x = normal(192, 768) * 0.02, normal(33, 768, seed=1)
    weight[:, :50] /= shrunk
    x[:, :50] *= min(shrunk, 10_000)
    layers = [
        Int8Linear.quantized_from(each, None) for each in (weight, weight / 2, normal(64, 768))
    ]
    right = functional.linear(x.float(), weight.float())
    assert relative_error(of_bytes(layers[0])(x), right) < 0.02
    assert relative_error(layers[0](x), right) < 0.02
    merged = Int8Linear.merge(layers[:2])
    assert merged is not None
    assert relative_error(of_bytes(merged)(x)[:, :192], right) < 0.02
    assert relative_error(merged.dequantized()[192:], layers[1].dequantized()) < 1e-6
    with_another = Int8Linear.merge(layers)
    assert with_another is not None
    assert relative_error(with_another.dequantized()[:192], weight) < 0.02
    assert relative_error(with_another.dequantized()[384:], layers[2].dequantized()) < 1e-6
