"""The quantized weights of a GGUF file, as layers that a CPU's kernels multiply.

Types of 4 bits in groups of 32 become ``Int4Linear``, with scales and minima rounded to bfloat16.
All other types of blocks are rounded once more, to ``Int8Linear``. On a GPU all of the file is read
as floats. Called by ``quantized_checkpoint``.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from jitney.execution.checkpoint import Checkpoint
from jitney.execution.gguf_file import FLOATS, GgufFile
from jitney.execution.quantized import weight_of
from jitney.execution.weights import count_bytes
from jitney.quantization import devices
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.transformers_reading import read_as_stored, remove_quantizer_marks

_log = logging.getLogger(__name__)

Bits = Literal[4, 8]
"""What a weight of a layer gets: 4 bits make it an ``Int4Linear``, 8 an ``Int8Linear``."""

_EMBEDDING = "model.embed_tokens.weight"
_FOUR_BIT_GROUP = 32
"""Inputs that share a scale in all of ``_FOUR_BITS``."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are multiplied as one, for which all must be of one kind."""


class _BlockForm(NamedTuple):
    """How a block of 4-bit values is laid out."""

    size: int
    """Bytes of a block."""
    header: int
    """Bytes before the values."""
    run: int
    """Bytes in a row that hold neighbouring values: first in their low halves, then in their high
    ones."""


_FOUR_BITS = {
    "Q4_0": _BlockForm(size=18, header=2, run=16),
    "Q4_1": _BlockForm(size=20, header=4, run=16),
    "Q4_K": _BlockForm(size=144, header=16, run=32),
}
"""ggml's types of 4 bits in groups of 32."""


@dataclass(frozen=True)
class GgufWeights:
    """A ``WeightFormat``."""

    checkpoint: Checkpoint
    file: GgufFile
    dtype: torch.dtype
    layers: dict[str, Bits]
    """Name of each linear layer that is stored in blocks -> the bits that its weights get. Empty if
    all of the file is read as floats."""
    in_place = True

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, file: GgufFile, dtype: torch.dtype, device: torch.device
    ) -> "GgufWeights":
        """How the file is read on ``device``."""
        if not devices.has_integer_kernels(device):
            return cls(checkpoint, file, dtype, layers={})
        types = {
            name.removesuffix(".weight"): tensor.dtype
            for name, tensor in checkpoint.tensors.items()
            if tensor.dtype not in FLOATS and name != _EMBEDDING
        }
        layers = {layer: _bits_of(layer, types) for layer in types}
        return cls(checkpoint, file, dtype, layers)

    @property
    def packed(self) -> list[str]:
        """See :class:`WeightFormat`, here and below."""
        return [f"{layer}.weight" for layer in self.layers]

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        needed = count_bytes(skeleton)
        for layer, bits in self.layers.items():
            outputs, inputs = self.checkpoint.tensors[f"{layer}.weight"].shape
            as_floats = inputs * self.dtype.itemsize
            needed += outputs * (_row_bytes(inputs, bits) - as_floats)
        head = self._tied_head(skeleton)
        if head is not None:  # it gets bytes, and the embedding keeps its floats
            needed += head.numel()
        return needed

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """Leave the weights of ``layers`` out: they are read from the file afterwards."""
        if self.layers:
            read_as_stored(hf_config, {layer: {} for layer in self.layers})

    @torch.inference_mode()
    def after_reading(self, module: PreTrainedModel) -> None:
        """Make the layers of the file's blocks, and the head of the embedding it is tied to."""
        made_as: Counter[str] = Counter()
        errors: list[float] = []
        for layer, bits in self.layers.items():
            linear: Any = module.get_submodule(layer)
            if bits == 4:
                module.set_submodule(layer, self._four_bit_layer(layer, linear))
                made_as["int4"] += 1
            else:
                rounded = self._round_to_bytes(f"{layer}.weight")
                made = Int8Linear(rounded.q, rounded.scale, linear.bias, self.dtype)
                module.set_submodule(layer, made)
                made_as["int8"] += 1
                errors.append(rounded.error)
        head = self._tied_head(module)
        if head is not None:
            module.set_output_embeddings(Int8Linear.of(head, None))
            made_as["int8"] += 1
        remove_quantizer_marks(module)
        _log_layers(made_as, errors)

    def _four_bit_layer(self, layer: str, linear: nn.Linear) -> Int4Linear:
        name = f"{layer}.weight"
        ggml_type = self.checkpoint.tensors[name].dtype
        q, scale = _unpack_four_bits(self.file.blocks(name), ggml_type)
        return Int4Linear.stored(q, scale, linear.bias, self.dtype)

    def _round_to_bytes(self, name: str) -> "_Rounded":
        """A tensor of blocks in int8, read and rounded part by part."""
        qs: list[Tensor] = []
        scales: list[Tensor] = []
        squared_error = 0.0
        squared_norm = 0.0
        for part in self.file.parts(name):
            q, scale = Int8Linear.quantize_rows(part)
            qs.append(q)
            scales.append(scale)
            squared_error += (q * scale - part).square().sum().item()
            squared_norm += part.square().sum().item()
        error = math.sqrt(squared_error / squared_norm) if squared_norm else 0.0
        return _Rounded(torch.cat(qs), torch.cat(scales).t(), error)

    def _tied_head(self, module: PreTrainedModel) -> Tensor | None:
        """The weight of a head that gets bytes although it is no layer of the file: one that is
        tied to an embedding stored in blocks. None if there is no such head."""
        if not self.layers:  # all is read as floats
            return None
        embedding = self.checkpoint.tensors.get(_EMBEDDING)
        if embedding is None or embedding.dtype in FLOATS:
            return None
        head = module.get_output_embeddings()
        if head.weight is not module.get_input_embeddings().weight:
            return None
        return weight_of(head)


class _Rounded(NamedTuple):
    """A tensor in int8."""

    q: Tensor
    """int8 [outputs, inputs]"""
    scale: Tensor
    """float32 [1, outputs]"""
    error: float
    """Norm of the difference over the norm of the tensor."""


def _bits_of(layer: str, types: dict[str, str]) -> Bits:
    """4 if a layer, and all that are multiplied as one with it, have 4 bits in the file."""
    name = layer.rpartition(".")[2]
    parent = layer.removesuffix(name)
    joined = next((names for names in _JOINED if name in names), (name,))
    have_four = all(types.get(f"{parent}{each}") in _FOUR_BITS for each in joined)
    return 4 if have_four else 8


def _row_bytes(inputs: int, bits: Bits) -> int:
    """What the weights and scales of one output take."""
    if bits == 8:
        scale = 4
        return inputs + scale
    groups = inputs // _FOUR_BIT_GROUP
    scale_and_least = 2 * torch.bfloat16.itemsize
    return inputs // 2 + groups * scale_and_least


def _log_layers(made_as: Counter[str], errors: list[float]) -> None:
    kinds = "; ".join(f"{count} computed as {kind}" for kind, count in sorted(made_as.items()))
    if errors:
        kinds += f" (rounding once more changed weights by up to {max(errors):.2%} of their norm)"
    _log.info("the checkpoint is quantized: GGUF, %s", kinds or "read as floats")


# ------------------------------------------------------------------ blocks of 4 bits


def _unpack_four_bits(rows: Tensor, ggml_type: str) -> tuple[Tensor, Tensor]:
    """Blocks, uint8 [outputs, bytes], as what ``Int4Linear.stored`` takes: q, uint8 [outputs,
    inputs], and scales and least values, bfloat16 [2, outputs, groups]. The types are those of
    ggml's ``ggml-common.h``."""
    layout = _FOUR_BITS[ggml_type]
    blocks = rows.unflatten(1, (-1, layout.size))
    runs = blocks[..., layout.header :].unflatten(2, (-1, layout.run))
    q = torch.stack((runs & 15, runs >> 4), 3).flatten(1)

    step, least = _scales(blocks, ggml_type)
    return q, torch.stack((step.flatten(1), least.flatten(1))).bfloat16()


def _scales(blocks: Tensor, ggml_type: str) -> tuple[Tensor, Tensor]:
    """Step and least of each group of uint8 [outputs, blocks, bytes]: float32 [outputs, blocks,
    groups of a block]. A value is ``q * step + least``."""
    step = _float16(blocks[..., :2])
    if ggml_type == "Q4_0":  # values are from -8 to 7 steps
        step = step.bfloat16().float()
        return step, -8 * step

    least = _float16(blocks[..., 2:4])
    if ggml_type == "Q4_K":
        scales, minima = _six_bits(blocks[..., 4:16])
        step = step * scales
        least = -least * minima
    # The step will be rounded to bfloat16. Move the least value so that the middle of the range,
    # q = 7.5, stays where it is.
    lost = step - step.bfloat16().float()
    return step, least + 7.5 * lost


def _float16(pairs: Tensor) -> Tensor:
    """Pairs of bytes as float32."""
    return pairs.contiguous().view(torch.float16).float()


def _six_bits(header: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight groups, 6 bits each, from the 12 bytes of ``Q4_K``.

    Those of the first four groups are the low 6 bits of bytes 0 to 7. Those of the last four are in
    two pieces: their low 4 bits in bytes 8 to 11, their high 2 bits above those of the first four.
    """
    first_scales, first_minima, last = header.split(4, 2)
    last_scales = (last & 15) | (first_scales >> 6 << 4)
    last_minima = (last >> 4) | (first_minima >> 6 << 4)
    scales = torch.cat((first_scales & 63, last_scales), 2)
    minima = torch.cat((first_minima & 63, last_minima), 2)
    return scales, minima
