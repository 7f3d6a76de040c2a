"""Layers of packed integers: what they weigh, and what is refused."""

import pytest
import torch
from jitney.errors import CheckpointError
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.packed_integers import make_linear

BF16 = torch.bfloat16


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [rows, values] as int32 words, the lowest bits first."""
    parts = values.long().unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return parts.sum(2).to(torch.int32)


def test_zero_points_of_bytes_count() -> None:
    q = torch.randint(-128, 127, (32, 64), dtype=torch.int8)
    zero, scale = torch.full((32, 1), -50, dtype=torch.int8), torch.rand(32, 1) + 0.5
    stored = {"weight": q, "weight_scale": scale, "weight_zero_point": zero}
    made = make_linear("compressed-tensors", stored, 64, BF16)
    assert isinstance(made, Int8Linear)
    wanted = (q.float() + 50) * scale
    assert (made.dequantized() - wanted).abs().max() <= wanted.abs().max() / 250
    same = make_linear("compressed-tensors", {**stored, "weight_zero_point": 0 * zero}, 64, BF16)
    assert isinstance(same, Int8Linear)
    assert torch.equal(same.weight, q)


def gptq(inputs: int, outputs: int, bits: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer of one group, and its weight."""
    q, scale = torch.randint(0, 1 << bits, (inputs, outputs)), torch.rand(1, outputs) + 0.5
    zero = torch.full((1, outputs), 1 << bits - 1)
    stored = {"qweight": words(q.t(), bits).t(), "qzeros": words(zero, bits), "scales": scale}
    return stored, ((q - zero) * scale).t()


def test_8_bits_with_a_scale_for_each_output_are_kept() -> None:
    stored, weight = gptq(256, 32, 8)
    made = make_linear("gptq", stored, 256, BF16, bits=8)
    assert isinstance(made, Int8Linear)
    assert torch.equal(made.dequantized(), weight)


def test_awq_whose_groups_no_kernel_has() -> None:
    """96 inputs: 8 bits instead."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]).argsort()
    q = torch.randint(0, 16, (96, 32))
    scale, zero = torch.rand(1, 32) + 0.5, torch.full((1, 32), 8)
    stored = {
        "qweight": words(q.unflatten(1, (-1, 8))[..., order].flatten(1), 4),
        "qzeros": words(zero, 4),
        "scales": scale,
    }
    weight = ((q - zero) * scale).t()
    made = make_linear("awq", stored, 96, BF16)
    assert isinstance(made, Int8Linear)
    assert (made.dequantized() - weight).abs().max() <= weight.abs().max() / 250


def test_groups_that_do_not_divide_the_inputs() -> None:
    """960 inputs in groups of 128 are eight groups, the last one shorter; not eight of 120."""
    stored = {
        "weight_packed": torch.zeros(32, 120, dtype=torch.int32),
        "weight_scale": torch.ones(32, 8),
    }
    with pytest.raises(CheckpointError, match=r"\[128\], .* 960 inputs into 8 groups"):
        make_linear("compressed-tensors", stored, 960, BF16, group_sizes={128})
    assert (
        make_linear("compressed-tensors", stored, 960, BF16, group_sizes={120}).in_features == 960
    )


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        ([0] * 32 + [2] * 32, "a group in g_idx is 2, but must be from 0 to 1"),
        ([0] * 32 + [-1] * 32, "a group in g_idx is -1, but must be from 0 to 1"),
        ([0] * 32, r"the shape of g_idx is \[32\], but must be \[64\]"),
    ],
)
def test_groups_of_inputs_that_are_not_there(g_idx: list[int], message: str) -> None:
    stored = {
        "qweight": torch.zeros(8, 32, dtype=torch.int32),
        "qzeros": torch.zeros(2, 4, dtype=torch.int32),
        "scales": torch.ones(2, 32),
        "g_idx": torch.tensor(g_idx, dtype=torch.int32),
    }
    with pytest.raises(CheckpointError, match=message):
        make_linear("gptq", stored, 64, BF16)


@pytest.mark.parametrize(
    ("method", "tensors", "message"),
    [
        (
            "gptq",
            {"qweight": (4, 32), "qzeros": (2, 4), "scales": (2, 32)},
            r"the shape of qweight is \[4, 32\], but must be \[8, 32\]",
        ),
        (
            "gptq",
            {"qweight": (8, 32), "qzeros": (2, 3), "scales": (2, 32)},
            r"the shape of qzeros is \[2, 3\], but must be \[2, 4\]",
        ),
        (
            "gptq",
            {"qweight": (8, 32), "qzeros": (2, 4), "scales": (32,)},
            r"the shape of scales is \[32\], but must be of two dimensions",
        ),
        ("gptq", {"qweight": (8, 32), "scales": (2, 32)}, "qzeros is missing"),
        (
            "awq",
            {"qweight": (64, 4), "qzeros": (3, 4), "scales": (2, 32)},
            r"the shape of qzeros is \[3, 4\], but must be \[2, 4\]",
        ),
        (
            "compressed-tensors",
            {"weight_packed": (32, 7), "weight_scale": (32, 2)},
            r"the shape of weight_packed is \[32, 7\], but must be \[32, 8\]",
        ),
        (
            "compressed-tensors",
            {"weight_packed": (32, 8), "weight_scale": (32, 2), "weight_zero_point": (3, 2)},
            r"the shape of weight_zero_point is \[3, 2\], but must be \[4, 2\]",
        ),
    ],
)
def test_tensors_of_wrong_shapes(
    method: str, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    """Of 64 inputs and 32 outputs, in 4 bits and two groups."""
    stored = {}
    for name, shape in tensors.items():
        dtype = torch.float32 if "scale" in name else torch.int32
        stored[name] = torch.ones(shape, dtype=dtype)
    with pytest.raises(CheckpointError, match=message):
        make_linear(method, stored, 64, BF16, group_sizes={32})


def test_bits_are_those_of_the_configuration() -> None:
    stored, _ = gptq(256, 32, 8)
    with pytest.raises(CheckpointError, match=r"qweight is \[64, 32\], but must be \[32, 32\]"):
        make_linear("gptq", stored, 256, BF16, bits=4)
