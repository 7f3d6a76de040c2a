"""Checkpoints whose weights are stored quantized: torchao's, compressed-tensors', GPTQ's, AWQ's and
GGUF files (see ``gguf_weights``).

Linear layers end up as those of ``quantize``. :func:`weight_format`, which
the loader calls, says which way is taken:

- compressed-tensors in e4m3, with a scale per output channel or per tensor and quantized
  activations, is read by a small quantizer of ours (transformers' interface for that), and its
  bytes become ``fp8`` layers as they are, on a CPU ``int8`` ones. A static scale of the activations
  is not used: one per token is closer.
- on a CPU, integers of 4 and 8 bits of compressed-tensors, GPTQ and AWQ are read by the same
  quantizer, and become the layers of ``packed``.
- every other form of compressed-tensors is decompressed to the model's dtype by that library.
- torchao's tensors are put together by transformers and torchao, and multiply through torchao.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_torchao_available

from jitney.config import EngineConfig
from jitney.errors import CheckpointError, ConfigError, show
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.quantized import WeightFormat
from jitney.execution.support import refuse
from jitney.execution.weights import count_bytes, missing_package
from jitney.quantization.e4m3 import ALIGNMENT, DTYPE
from jitney.quantization.eight_bits import Fp8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.gguf_weights import GgufWeights
from jitney.quantization.packed import make_linear
from jitney.quantization.quantize import QuantizeWhileLoading, check_option
from jitney.quantization.rooms import Room, make_room, take_marks_off
from jitney.quantization.torchao import TorchaoLinear, is_torchao

_log = logging.getLogger(__name__)

METHODS = ("torchao", "compressed-tensors", "gptq", "awq")
Way = Literal["fp8", "integers", "decompress", "torchao"]


def weight_format(
    checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> WeightFormat | None:
    """An ``execution.quantized.Quantizer``: weights that are stored quantized, or that option
    ``quantization`` says to quantize.

    Raises UnsupportedModelError, naming what is read, for every other method and for a package that
    is missing, CheckpointError for a scale that is, and ConfigError for an impossible option.
    """
    kind = config.quantization
    stored = checkpoint.config.get("quantization_config")
    if not stored:
        check_option(kind, dtype, device)
        return QuantizeWhileLoading(kind, checkpoint, dtype, device) if kind != "none" else None
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    model_type = str(checkpoint.config["model_type"])
    if kind != "none":
        raise ConfigError.of("quantization", kind, f"'none' for weights quantized by {method}")
    if checkpoint.gguf is not None:
        return GgufWeights.of(checkpoint, checkpoint.gguf, dtype, device)
    if method not in METHODS:
        raise refuse(
            model_type,
            f"its weights are quantized by {show(method)}, and only {', '.join(METHODS[:-1])} and "
            f"{METHODS[-1]} are read; or quantize unquantized ones with the option quantization",
        )
    if method in ("gptq", "awq"):
        _check_packed(model_type, method, stored, device)
    if method == "compressed-tensors":
        rooms = _fp8_rooms(stored, checkpoint)
        if rooms:
            try:
                check_option("fp8", dtype, device)
                way: Way = "fp8" if _multiplies_e4m3(device) else "integers"
                return StoredWeights(method, way, checkpoint, dtype, rooms)
            except ConfigError as error:
                _log.info("e4m3 weights are decompressed: %s", error)
    if device.type == "cpu" and (rooms := _integer_rooms(method, stored, checkpoint)):
        return StoredWeights(method, "integers", checkpoint, dtype, rooms)
    if method in ("gptq", "awq"):
        raise refuse(model_type, f"none of its layers that {method} quantized is a linear one")
    if (obstacle := missing_package(method)) is not None:
        raise refuse(model_type, f"its weights are quantized by {method}: {obstacle}")
    way = "torchao" if method == "torchao" else "decompress"
    return StoredWeights(method, way, checkpoint, dtype, {})


@dataclass(frozen=True)
class StoredWeights:
    """A ``WeightFormat``: how a checkpoint's weights are quantized, and which way it is read."""

    method: str
    """Its ``quant_method``."""
    way: Way
    checkpoint: Checkpoint
    dtype: torch.dtype
    rooms: dict[str, Room]
    """Ways ``fp8`` and ``integers``, by a linear layer's name."""
    packed = ()
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`."""
        if self.way == "decompress":
            return count_bytes(skeleton)
        config, more = self.checkpoint.config["quantization_config"], 0
        modules = dict(skeleton.named_modules())
        for layer, room in self.rooms.items():
            words = room.get("qweight") or room.get("weight_packed")
            linear = modules.get(layer)
            scattered = config.get("desc_act") or "weight_g_idx" in room
            if words and scattered and isinstance(linear, nn.Linear):  # 8 bits are made of them
                more += max(0, linear.in_features * linear.out_features - 4 * math.prod(words[0]))
        return self.checkpoint.num_bytes + more

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """Tell transformers, by the configuration that it will load with, which way to read."""
        if self.rooms:
            make_room(hf_config, self.rooms)
        elif self.way == "decompress":
            hf_config.quantization_config = {**hf_config.quantization_config, "dequantize": True}
        else:
            is_torchao_available.cache_clear()  # a server imports transformers without it

    def after_reading(self, module: PreTrainedModel) -> None:
        """Replace what was loaded by layers of ours, and take the marks of transformers off."""
        config = self.checkpoint.config["quantization_config"]
        version = config.get("checkpoint_format")
        parts = [
            group.get("weights") or {} for group in (config.get("config_groups") or {}).values()
        ]
        sizes = {part.get("group_size") for part in (config, *parts)} - {None}
        made_as: Counter[str] = Counter()
        for key in self.rooms if self.way == "integers" else ():
            linear: Any = module.get_submodule(key)
            stored = {name: each.detach() for name, each in linear.named_parameters()}
            plus_one, inputs = version != "gptq_v2", linear.in_features
            made = make_linear(
                self.method, stored, inputs, self.dtype, plus_one=plus_one, sizes=sizes
            )
            module.set_submodule(key, made)
            made_as["int4" if isinstance(made, Int4Linear) else "int8"] += 1
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):
                if not isinstance(child, nn.Linear):
                    continue
                weight = child.weight
                if weight.dtype == DTYPE:
                    scale: Any = child.weight_scale
                    scale = scale.detach().float().reshape(1, -1).expand(1, child.out_features)
                    ours = Fp8Linear(weight.detach(), scale, child.bias, self.dtype)
                    setattr(parent, name, ours)
                elif is_torchao(weight):
                    setattr(parent, name, TorchaoLinear(weight.to(self.dtype), child.bias))
                elif self.way == "decompress":  # its forward may be the library's
                    setattr(parent, name, _plain(child))
        take_marks_off(module)
        kinds = "; ".join(f"{count} computed as {kind}" for kind, count in made_as.items())
        _log.info("the checkpoint is quantized: %s%s", self, kinds and f": {kinds}")

    def __str__(self) -> str:
        what = {
            "fp8": f"{len(self.rooms)} linear layers in e4m3",
            "integers": f"{len(self.rooms)} linear layers",
            "decompress": "decompressed while loading",
            "torchao": "through torchao",
        }
        return f"{self.method}, {what[self.way]}"


def _multiplies_e4m3(device: torch.device) -> bool:
    """Whether layers stay e4m3: torch takes hundreds of times as long for them on a CPU as
    int8 takes, and is no closer."""
    return device.type != "cpu"


def _check_packed(
    model_type: str, method: str, config: Mapping[str, Any], device: torch.device
) -> None:
    """Raise UnsupportedModelError for a form of GPTQ or AWQ that is not read."""
    if device.type != "cpu":
        raise refuse(model_type, f"its weights are quantized by {method}, read on a CPU alone")
    allowed = {"bits": (4, 8) if method == "gptq" else (4,), "version": ("gemm", "GEMM", None)}
    for field, values in allowed.items():
        if (found := config.get(field)) not in values:
            texts = " or ".join(map(str, values))
            reason = f"its quantization_config.{field} is {show(found)}, but must be {texts}"
            raise refuse(model_type, reason)


def _integer_rooms(
    method: str, config: Mapping[str, Any], checkpoint: Checkpoint
) -> dict[str, Room]:
    """Linear layers of integers that ``packed`` reads. Empty if some are of another kind."""
    groups = (config.get("config_groups") or {}).values()
    if method == "torchao" or not all(_is_integer(each, config.get("format")) for each in groups):
        return {}
    entries, rooms = checkpoint.tensors, dict[str, Room]()
    for name, entry in entries.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("qweight", "weight_packed") or (kind, entry.dtype) == ("weight", "I8"):
            rooms[layer] = {}
    for name, entry in entries.items():
        layer, _, kind = name.rpartition(".")
        if layer in rooms:
            rooms[layer][kind] = entry.shape, entry.dtype
    return {} if any(".experts." in layer for layer in rooms) else rooms


def _is_integer(group: Any, form: str | None) -> bool:
    """Whether a group of layers of compressed-tensors, in the checkpoint's ``form`` unless it has
    one of its own, has integers that ``packed`` reads."""
    weights, form = group.get("weights") or {}, group.get("format") or form
    ways = {
        "pack-quantized": ((4, 8), ("channel", "group")),
        "int-quantized": ((8,), ("tensor", "channel")),
    }
    bits, strategies = ways.get(str(form), ((), ()))
    good = weights.get("type") == "int" and weights.get("num_bits") in bits
    return good and weights.get("strategy") in strategies


def _fp8_rooms(config: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Room]:
    """Linear layers that can become e4m3 layers of ours. Empty if that does not hold for all
    that are quantized. Raises CheckpointError if a scale is missing."""
    entries = checkpoint.tensors
    for name, entry in entries.items():
        if entry.dtype == "F8_E4M3" and f"{name}_scale" not in entries:
            raise CheckpointError(f"{entry.file} lacks {name}_scale")  # or it would count as 1
    if not all(map(_is_plain_fp8, (config.get("config_groups") or {}).values())):
        return {}
    rooms = dict[str, Room]()
    for name, entry in entries.items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight_scale":
            continue
        weight = entries.get(f"{layer}.weight")
        if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
            return {}
        out_features, in_features = weight.shape
        if entry.shape not in ([], [1], [1, 1], [out_features], [out_features, 1]):
            return {}  # a scale per block or group
        # Experts are merged into one tensor, which is no linear layer.
        if ".experts." in layer or out_features % ALIGNMENT or in_features % ALIGNMENT:
            return {}
        rooms[layer] = {
            "weight": (weight.shape, weight.dtype), "weight_scale": (entry.shape, entry.dtype)
        }  # fmt: skip
    return rooms


def _is_plain_fp8(group: Any) -> bool:
    """Whether a group of layers has symmetric 8-bit floats in weights and activations."""
    parts = [group.get(name) for name in ("weights", "input_activations")]
    return all(
        part and part.get("type") == "float" and part.get("num_bits") == 8
        and part.get("symmetric", True)
        for part in parts
    )  # fmt: skip


def _plain(linear: Any) -> nn.Linear:
    """The same layer without what a library hung on to it."""
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
    plain.bias = linear.bias
    return plain
