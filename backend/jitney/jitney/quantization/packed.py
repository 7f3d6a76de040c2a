"""Linear layers that a CPU's kernels multiply, of integers as GPTQ, AWQ and compressed-tensors pack
them in checkpoints.

Those of 4 bits in groups of 32, 64 or whole 128s of neighbouring inputs become ``Int4Linear`` as
they are, but for scales rounded to bfloat16; of 8 bits with one scale for each output
``Int8Linear``. All else (8 bits in groups, groups of scattered inputs, e4m3) is rounded once more,
to 8 bits for each output. Called by ``checkpoint``.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from jitney.errors import CheckpointError, show
from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import GROUPS, Int4Linear

Tensors = dict[str, Tensor]
"""A layer's, by the last part of their names."""
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Where an output's bits stand in a word."""


_Grouped = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q [outputs, inputs] as uint8; scales and zeros [outputs, groups], of ``(q - zero) * scale``; each
input's group, if those of a group are not neighbours."""


def make_linear(
    method: str,
    stored: Tensors,
    inputs: int,
    dtype: torch.dtype,
    *,
    plus_one: bool = False,
    sizes: Collection[int] = (),
) -> QuantizedLinear:
    """A layer of ``inputs``; ``plus_one``: GPTQ's zeros are stored less one; ``sizes``: what groups
    the checkpoint says that it has. Raises CheckpointError if none of these fits."""
    bias, weight, scale = (stored.get(name) for name in ("bias", "weight", "weight_scale"))
    if weight is not None:
        assert scale is not None
        scale = scale.float().reshape(1, -1).expand(1, len(weight))
        zero = stored.get("weight_zero_point")
        if weight.dtype == torch.int8 and (zero is None or not zero.any()):
            return Int8Linear(weight, scale, bias, dtype)
        whole = weight.float() - (0 if zero is None else zero.float().reshape(-1, 1))
        return _eight_bits(whole * scale.t(), bias, dtype)
    if "weight_packed" in stored:
        q, scale, zero, index = _compressed(stored, inputs)
    elif method == "awq":
        q, scale, zero, index = _awq(stored)
    else:
        q, scale, zero, index = _gptq(stored, inputs, plus_one)
    groups = scale.shape[1]
    size = inputs // groups
    if index is None and groups > 1 and (size * groups != inputs or size not in sizes):
        raise CheckpointError(
            f"group_size of the quantized weights is {show(sorted(sizes))}, which makes no "
            f"{groups} groups of {inputs} inputs, but must divide them"
        )
    shifted = q.float() - zero if groups == 1 and index is None else None
    if shifted is not None and q.max() >= 16 and shifted.min() >= -128 and shifted.max() <= 127:
        return Int8Linear(shifted.to(torch.int8).contiguous(), scale.float().t(), bias, dtype)
    if index is None and q.max() < 16 and (size in GROUPS or size % GROUPS[0] == 0):
        steps = scale.bfloat16().float()
        factors = torch.stack((steps, -steps * zero)).bfloat16()
        factors = factors.repeat_interleave(-(-size // GROUPS[0]), 2)
        return Int4Linear.stored(q, factors, bias, dtype)
    index = torch.arange(inputs) // size if index is None else index.long()
    return _eight_bits((q.float() - zero[:, index]) * scale.float()[:, index], bias, dtype)


def _eight_bits(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear:
    q, scale = Int8Linear.quantize_rows(weight.contiguous())
    return Int8Linear(q, scale.t(), bias, dtype)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] as uint8 [rows, values], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def _awq(stored: Tensors) -> _Grouped:
    """[inputs, outputs / 8] words, the outputs of each in an order of their own."""
    q, zero = (
        _unpack(stored[name], 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).t()
        for name in ("qweight", "qzeros")
    )
    return q, stored["scales"].t(), zero.float(), None


def _gptq(stored: Tensors, inputs: int, plus_one: bool) -> _Grouped:
    """[inputs / 8 or 4, outputs] words."""
    bits = 32 * len(stored["qweight"]) // inputs
    scale, index = stored["scales"].t(), stored.get("g_idx")
    zero = _unpack(stored["qzeros"], bits).t().float() + plus_one
    return _unpack(stored["qweight"].t(), bits), scale, zero, _scattered(index, scale)


def _compressed(stored: Tensors, inputs: int) -> _Grouped:
    """[outputs, inputs / 8 or 4] words, the last ones filled up, of which half is zero's."""
    words, scale = stored["weight_packed"], stored["weight_scale"]
    bits = 8 if words.shape[1] * 4 >= inputs else 4
    zero = torch.full(scale.shape, float(1 << bits - 1))
    if (packed := stored.get("weight_zero_point")) is not None:
        zero = _unpack(packed.t(), bits)[:, : len(scale)].t().float()
    index = _scattered(stored.get("weight_g_idx"), scale)
    return _unpack(words, bits)[:, :inputs], scale, zero, index


def _scattered(index: Tensor | None, scale: Tensor) -> Tensor | None:
    """None if the groups' inputs follow one another."""
    if index is None:
        return None
    size = len(index) // scale.shape[1]
    return None if torch.equal(index.long(), torch.arange(len(index)) // size) else index
