"""The quantized weights of a GGUF file, as layers that a CPU's kernels multiply.

Types of 4 bits in groups of 32 become ``Int4Linear``, with scales and minima rounded to bfloat16;
all other types of blocks are rounded once more, to ``Int8Linear``. Elsewhere than on a CPU all of
the file is read as floats. Called by ``checkpoint``.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from jitney.execution.checkpoint import Checkpoint
from jitney.execution.gguf_file import FLOATS, GgufFile
from jitney.execution.quantized import QuantizedLinear
from jitney.execution.weights import count_bytes
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.rooms import make_room, take_marks_off

_log = logging.getLogger(__name__)

_NIBBLES = {"Q4_0": (18, 2, 16), "Q4_1": (20, 4, 16), "Q4_K": (144, 16, 32)}
"""Types of 4 bits in groups of 32: a block's bytes, those before its nibbles, and how many bytes
in a row hold values that are neighbours, in their low halves and then in their high ones."""
_EMBEDDING = "model.embed_tokens.weight"
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are multiplied as one, for which all must be of one kind."""


@dataclass(frozen=True)
class GgufWeights:
    """A ``WeightFormat``."""

    checkpoint: Checkpoint
    file: GgufFile
    dtype: torch.dtype
    layers: dict[str, bool]
    """Name of each linear layer made of blocks -> whether it gets 4 bits, else 8."""
    in_place = True

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, file: GgufFile, dtype: torch.dtype, device: torch.device
    ) -> "GgufWeights":
        """How the file is read on ``device``."""
        kinds = {
            name.removesuffix(".weight"): each.dtype
            for name, each in checkpoint.tensors.items()
            if each.dtype not in FLOATS and name != _EMBEDDING and device.type == "cpu"
        }
        layers = {}
        for layer in kinds:
            name = layer.rpartition(".")[2]
            parent = layer.removesuffix(name)
            names = next((each for each in _JOINED if name in each), (name,))
            layers[layer] = all(kinds.get(f"{parent}{each}") in _NIBBLES for each in names)
        return cls(checkpoint, file, dtype, layers)

    @property
    def packed(self) -> list[str]:
        """See :class:`WeightFormat`."""
        return [f"{layer}.weight" for layer in self.layers]

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`."""
        needed = count_bytes(skeleton)
        for layer, has_four in self.layers.items():
            outputs, inputs = self.checkpoint.tensors[f"{layer}.weight"].shape
            made = inputs // 2 + inputs // 32 * 4 if has_four else inputs + 4
            needed += outputs * (made - inputs * self.dtype.itemsize)
        head = self._tied_head(skeleton) if self.layers else None
        return needed + (0 if head is None else head.numel())

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """Leave the weights of ``layers`` out."""
        if self.layers:
            make_room(hf_config, {layer: {} for layer in self.layers})

    @torch.inference_mode()
    def after_reading(self, module: PreTrainedModel) -> None:
        """Make them of the file's blocks; and a head, of an embedding's that it is one with."""
        made_as: Counter[str] = Counter()
        off: list[float] = []
        for layer, has_four in self.layers.items():
            linear: Any = module.get_submodule(layer)
            name, rest = f"{layer}.weight", (linear.bias, self.dtype)
            made: QuantizedLinear
            if has_four:
                kind = self.checkpoint.tensors[name].dtype
                made = Int4Linear.stored(*four_bits(self.file.blocks(name), kind), *rest)
            else:
                q, scale, error = self._eight_bits(name)
                made = Int8Linear(q, scale, *rest)
                off.append(error)
            module.set_submodule(layer, made)
            made_as["int4" if has_four else "int8"] += 1
        if self.layers and (weight := self._tied_head(module)) is not None:
            module.set_output_embeddings(Int8Linear.of(weight, None))
            made_as["int8"] += 1
        take_marks_off(module)
        kinds = "; ".join(f"{count} computed as {kind}" for kind, count in sorted(made_as.items()))
        if off:
            kinds += f" (rounding once more changed weights by up to {max(off):.2%} of their norm)"
        _log.info("the checkpoint is quantized: GGUF, %s", kinds or "read as floats")

    def _eight_bits(self, name: str) -> tuple[Tensor, Tensor, float]:
        """int8 [outputs, inputs] and scales [1, outputs] of a tensor, and how far they are from
        it: the norm of the difference over its own."""
        parts, off, whole = [], 0.0, 0.0
        for part in self.file.parts(name):
            q, scale = Int8Linear.quantize_rows(part)
            parts.append((q, scale))
            off += (q * scale - part).square().sum().item()
            whole += part.square().sum().item()
        q, scale = (torch.cat(each) for each in zip(*parts, strict=True))
        return q, scale.t(), (off / whole) ** 0.5 if whole else 0.0

    def _tied_head(self, module: PreTrainedModel) -> Tensor | None:
        """The head's weight, if it is that of an embedding in blocks."""
        head = module.get_output_embeddings()
        tied = head.weight is module.get_input_embeddings().weight
        stored = self.checkpoint.tensors.get(_EMBEDDING)
        in_blocks = stored is not None and stored.dtype not in FLOATS
        return head.weight.detach() if tied and in_blocks else None


def four_bits(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Blocks, uint8 [outputs, bytes], as q, uint8 [outputs, inputs], and scales and leasts,
    bfloat16 [2, outputs, groups]. The types are those of ggml's ``ggml-common.h``."""
    size, begin, width = _NIBBLES[kind]
    blocks = rows.unflatten(1, (-1, size))
    pairs = blocks[..., begin:].unflatten(2, (-1, width))
    q = torch.stack((pairs & 15, pairs >> 4), 3).flatten(1)
    halves = blocks[..., : 2 if kind == "Q4_0" else 4].contiguous().view(torch.float16).float()
    step, least = halves[..., :1], halves[..., 1:]
    if kind == "Q4_0":
        step = step.bfloat16().float()
        least = -8 * step
    elif kind == "Q4_K":  # 6 bits for each of eight groups, those of the last four in two pieces
        low, high, rest = blocks[..., 4:16].split(4, 2)
        scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), 2)
        minima = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), 2)
        step, least = step * scales, -least * minima
    step, least = step.flatten(1), least.flatten(1)
    if kind != "Q4_0":  # what rounding takes from the scale, the least gives back in the middle
        least = least + 7.5 * (step - step.bfloat16().float())
    return q, torch.stack((step, least)).bfloat16()
