"""The quantized weights of a GGUF file, as layers that a CPU's kernels multiply.

A file stores most weights in blocks of quantized values. What becomes of a layer depends on its
type of block:

- ggml's types of 4 bits in groups of 32 become ``Int4Linear``, with scales and minima rounded to
  bfloat16;
- all other types are rounded once more, to ``Int8Linear``.

On a GPU, transformers reads all of the file as floats. Called by ``quantized_checkpoint``.
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
from jitney.quantization import devices, eight_bits, four_bits
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.transformers_reading import read_as_stored, remove_quantizer_marks

_log = logging.getLogger(__name__)

Bits = Literal[4, 8]
"""Bits of a weight in the layer that is made: 4 in an ``Int4Linear``, 8 in an ``Int8Linear``."""

_EMBEDDING = "model.embed_tokens.weight"
_FOUR_BIT_GROUP = 32
"""Inputs that share a scale, in all types of ``_FOUR_BITS``."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that kernels multiply as one, in most models (``kernels.fused`` joins them). They can do
so only if all have the same number of bits."""


class _BlockLayout(NamedTuple):
    """How a block of 4-bit values is laid out: a header, then runs of bytes. A run of n bytes holds
    2 n neighbouring values: the first n in the low halves of its bytes, the next n in the high
    halves."""

    size: int
    """Bytes of a block."""
    header: int
    """Bytes of the header, which holds scales and minima."""
    run: int
    """Bytes of a run."""


_FOUR_BITS = {
    "Q4_0": _BlockLayout(size=18, header=2, run=16),
    "Q4_1": _BlockLayout(size=20, header=4, run=16),
    "Q4_K": _BlockLayout(size=144, header=16, run=32),
}
"""ggml's types of 4 bits in groups of 32."""


@dataclass(frozen=True)
class GgufWeights:
    """A ``WeightFormat``: ``execution.quantized`` explains its methods and attributes."""

    checkpoint: Checkpoint
    file: GgufFile
    dtype: torch.dtype
    layers: dict[str, Bits]
    """Name of each linear layer that is stored in blocks -> the bits of the layer that is made of
    it. Empty if all of the file is read as floats."""
    given_tensors = None
    in_place = True

    @classmethod
    def plan(
        cls, checkpoint: Checkpoint, file: GgufFile, dtype: torch.dtype, device: torch.device
    ) -> "GgufWeights":
        """How the file is read on ``device``."""
        if not devices.has_integer_kernels(device):
            return cls(checkpoint, file, dtype, layers={})
        # All of these are matrices: ``gguf_file`` refuses blocks in any other tensor.
        types = {
            name.removesuffix(".weight"): tensor.dtype
            for name, tensor in checkpoint.tensors.items()
            if tensor.dtype not in FLOATS and name != _EMBEDDING
        }
        layers = {layer: _bits_of(layer, types) for layer in types}
        return cls(checkpoint, file, dtype, layers)

    @property
    def reads_itself(self) -> list[str]:
        """See :class:`WeightFormat`, here and below."""
        return [f"{layer}.weight" for layer in self.layers]

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        # All as floats; then quantized layers in place of the floats that are not read.
        needed = count_bytes(skeleton)
        for layer, bits in self.layers.items():
            outputs, inputs = self.checkpoint.tensors[f"{layer}.weight"].shape
            needed -= outputs * inputs * self.dtype.itemsize
            needed += _layer_bytes(outputs, inputs, bits)
        head = self._tied_head(skeleton)
        if head is not None:
            # An ``Int8Linear`` is made for the head, while the embedding keeps the floats that both
            # shared.
            needed += head.numel()
        return needed

    loaded_bytes = needed_bytes

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """Leave the weights of ``layers`` out: they are read from the file afterwards."""
        if self.layers:
            read_as_stored(hf_config, {layer: {} for layer in self.layers})

    @torch.inference_mode()
    def after_reading(self, module: PreTrainedModel) -> None:
        """Make layers of the file's blocks. A head that is tied to the embedding becomes a layer of
        its own."""
        made_as: Counter[str] = Counter()
        errors: list[float] = []
        for layer, bits in self.layers.items():
            linear: Any = module.get_submodule(layer)
            if bits == 4:
                module.set_submodule(layer, self._four_bit_layer(layer, linear))
                made_as["int4"] += 1
            else:
                rounded = self._round_to_bytes(f"{layer}.weight")
                made = Int8Linear(
                    weight=rounded.q,
                    scale=rounded.scale,
                    bias=linear.bias,
                    dtype=self.dtype,
                )
                module.set_submodule(layer, made)
                made_as["int8"] += 1
                errors.append(rounded.error)
        head = self._tied_head(module)
        if head is not None:
            module.set_output_embeddings(Int8Linear.quantized_from(head, None))
            made_as["int8"] += 1
        remove_quantizer_marks(module)
        _log_layers(made_as, errors)

    def _four_bit_layer(self, layer: str, linear: nn.Linear) -> Int4Linear:
        name = f"{layer}.weight"
        ggml_type = self.checkpoint.tensors[name].dtype
        q, scale_and_least = _unpack_four_bits(self.file.blocks(name), ggml_type)
        return Int4Linear.from_quantized(q, scale_and_least, linear.bias, self.dtype)

    def _round_to_bytes(self, name: str) -> "_Rounded":
        """Read a tensor of blocks and round it to int8, part by part."""
        rounded_parts: list[Tensor] = []
        scales: list[Tensor] = []
        squared_error = 0.0
        squared_norm = 0.0
        for part in self.file.parts(name):
            q, scale = Int8Linear.quantize_rows(part)
            rounded_parts.append(q)
            scales.append(scale)
            squared_error += (q * scale - part).square().sum().item()
            squared_norm += part.square().sum().item()
        error = math.sqrt(squared_error / squared_norm) if squared_norm else 0.0
        return _Rounded(q=torch.cat(rounded_parts), scale=torch.cat(scales).t(), error=error)

    def _tied_head(self, module: PreTrainedModel) -> Tensor | None:
        """The weight of a head that is tied to an embedding stored in blocks. The file has no
        tensor for it, and still an ``Int8Linear`` is made of it. None if there is no such head."""
        if not self.layers:  # all of the file is read as floats
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
    """How many bits a layer is to have. 4 if the file has it in 4 bits, and so all layers that are
    multiplied as one with it; else 8."""
    name = layer.rpartition(".")[2]
    parent = layer.removesuffix(name)
    for joined_name in _joined_with(name):
        if types.get(f"{parent}{joined_name}") not in _FOUR_BITS:
            return 8
    return 4


def _joined_with(name: str) -> tuple[str, ...]:
    """The names of the layers that are multiplied as one with ``name``, itself included."""
    for names in _JOINED:
        if name in names:
            return names
    return (name,)


def _layer_bytes(outputs: int, inputs: int, bits: Bits) -> int:
    """Bytes of the layer that is made."""
    if bits == 8:
        return eight_bits.layer_bytes(outputs, inputs)
    return four_bits.layer_bytes(outputs, inputs, group_size=_FOUR_BIT_GROUP)


def _log_layers(made_as: Counter[str], errors: list[float]) -> None:
    kinds = "; ".join(f"{count} computed as {kind}" for kind, count in sorted(made_as.items()))
    if errors:
        kinds += f" (rounding once more changed weights by up to {max(errors):.2%} of their norm)"
    _log.info("the checkpoint is quantized: GGUF, %s", kinds or "read as floats")


# ------------------------------------------------------------------ blocks of 4 bits


def _unpack_four_bits(rows: Tensor, ggml_type: str) -> tuple[Tensor, Tensor]:
    """Unpack blocks, uint8 [outputs, bytes]. Returns what ``Int4Linear.from_quantized`` takes: q,
    uint8 [outputs, inputs], and scales and least values, bfloat16 [2, outputs, groups].

    The layouts are those of ggml's ``ggml-common.h``.
    """
    layout = _FOUR_BITS[ggml_type]
    blocks = rows.unflatten(1, (-1, layout.size))  # [outputs, blocks, bytes]
    runs = blocks[..., layout.header :].unflatten(2, (-1, layout.run))  # [outputs, blocks, runs, n]
    low_halves = runs & 15
    high_halves = runs >> 4
    # [outputs, blocks, runs, 2, n]: of each run the low halves, then the high halves.
    q = torch.stack((low_halves, high_halves), 3).flatten(1)

    if ggml_type == "Q4_0":
        scale, least = _symmetric_scales(blocks)
    else:
        scale, least = _shifted_scales(blocks, ggml_type)
    return q, torch.stack((scale.flatten(1), least.flatten(1))).bfloat16()


def _symmetric_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values of Q4_0, whose values are ``(q - 8) * scale``: see
    :func:`_shifted_scales`."""
    # Rounded first: then q = 8 still stands for exactly 0.
    scale = _as_float16(blocks[..., :2]).bfloat16().float()
    return scale, -8 * scale


def _shifted_scales(blocks: Tensor, ggml_type: str) -> tuple[Tensor, Tensor]:
    """Scales and least values of Q4_1 and Q4_K. A value is ``q * scale + least``.

    ``blocks`` are uint8 [outputs, blocks, bytes]. Both results are float32 [outputs, blocks,
    groups of a block].
    """
    scale = _as_float16(blocks[..., :2])
    least = _as_float16(blocks[..., 2:4])
    if ggml_type == "Q4_K":
        # These two are of the whole block. Each group has a multiplier for each. Q4_K stores the
        # least value without its sign, as what is subtracted; Q4_1 stores it with the sign.
        scale_multipliers, minimum_multipliers = _six_bit_multipliers(blocks[..., 4:16])
        scale = scale * scale_multipliers
        least = -least * minimum_multipliers

    # The scale will be rounded to bfloat16. If that takes e off the scale, it takes q * e off a
    # value, which is up to 15 * e. Adding 7.5 * e to the least value centres the error: a value is
    # then off by at most 7.5 * e either way.
    rounded_off = scale - scale.bfloat16().float()
    return scale, least + 7.5 * rounded_off


def _as_float16(pairs: Tensor) -> Tensor:
    """Pairs of bytes, each read as one float16, as float32."""
    return pairs.contiguous().view(torch.float16).float()


def _six_bit_multipliers(header: Tensor) -> tuple[Tensor, Tensor]:
    """The multipliers of a Q4_K block, of 6 bits: eight for scales and eight for minima, one for
    each group. ``header`` are the 12 bytes that hold them. For i from 0 to 3:

    =====  ===================================  =================================
    byte   its high bits                        its low bits
    =====  ===================================  =================================
    i      the 2 high bits of scale 4 + i       the 6 bits of scale i
    4 + i  the 2 high bits of minimum 4 + i     the 6 bits of minimum i
    8 + i  the 4 low bits of minimum 4 + i      the 4 low bits of scale 4 + i
    =====  ===================================  =================================
    """
    for_scales, for_minima, low_pieces = header.split(4, 2)
    high_of_scales = (for_scales >> 6) << 4
    high_of_minima = (for_minima >> 6) << 4
    later_scales = high_of_scales | (low_pieces & 15)
    later_minima = high_of_minima | (low_pieces >> 4)
    scales = torch.cat((for_scales & 63, later_scales), 2)
    minima = torch.cat((for_minima & 63, later_minima), 2)
    return scales, minima
