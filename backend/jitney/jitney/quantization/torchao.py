"""Linear layers whose weights are torchao's tensors: weights in int8 or int4, inputs as they are.

torchao chooses the scales, packs the weights and multiplies. No other module imports it. Made by
``quantize`` (options ``int8`` and ``int4`` on a GPU) and ``weight_formats`` (checkpoints that
torchao wrote).

int8 has one scale for each output channel (torchao keeps a zero beside it). int4 has a scale and a
zero point for each group of inputs. It is packed for torch's own int4 product on a GPU, eight
values to a word of 32 bits.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import QuantizedLinear
from jitney.quantization.four_bits import choose_group_size

TorchaoKind = Literal["int8", "int4"]

# Output channels and inputs of one tile of the packed int4 weight. A tile that a weight does not
# fill is padded.
_TILE_OUTPUTS = 8
_TILE_INPUTS = 1024


class TorchaoLinear(QuantizedLinear):
    """A :class:`QuantizedLinear` of any of torchao's kinds. Its weight knows its own scales, and it
    does not round its inputs, so it has neither ``scale`` nor ``dtype``."""

    weight: Tensor
    """A tensor of torchao's. It reports the shape [out_features, in_features], and a dtype of
    floats."""
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def quantized_from(
        cls, weight: Tensor, bias: Tensor | None, kind: TorchaoKind
    ) -> "TorchaoLinear":
        """Quantize a weight [out_features, in_features] on its device."""
        from torchao.quantization import quantize_

        out_features, in_features = weight.shape
        linear = nn.Linear(in_features, out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        quantize_(linear, _recipe(kind, in_features))
        return cls(linear.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {type(self.weight).__name__}"


def is_torchao(weight: object) -> bool:
    """Whether a weight is one of torchao's tensors. Does not import torchao."""
    if not isinstance(weight, Tensor):
        return False
    return any(base.__name__ == "TorchAOBaseTensor" for base in type(weight).__mro__)


def layer_bytes(out_features: int, in_features: int, kind: TorchaoKind, dtype: torch.dtype) -> int:
    """Bytes that a layer takes on a GPU, of a weight that had ``dtype`` before."""
    if kind == "int8":
        scale_and_zero = torch.float32.itemsize + torch.int8.itemsize
        return out_features * (in_features + scale_and_zero)
    rows = _round_up(out_features, _TILE_OUTPUTS)
    columns = _round_up(in_features, _TILE_INPUTS)
    groups = columns // choose_group_size(in_features)
    weight = rows * columns // 2
    scales_and_zeros = rows * groups * 2 * dtype.itemsize
    return weight + scales_and_zeros


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _recipe(kind: TorchaoKind, in_features: int) -> Any:
    """torchao's configuration for a layer. ``set_inductor_config`` is False because it would change
    options of the whole process."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if kind == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    return Int4WeightOnlyConfig(
        group_size=choose_group_size(in_features),
        set_inductor_config=False,
        int4_packing_format="tile_packed_to_4d",
    )
