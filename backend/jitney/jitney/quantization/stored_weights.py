"""The ways in which a checkpoint's quantized weights are read: one ``WeightFormat`` for each.

``quantized_checkpoint`` chooses among them. GGUF files have their own, in ``gguf_weights``.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_torchao_available

from jitney.execution.checkpoint import Checkpoint
from jitney.execution.weights import count_bytes
from jitney.quantization.eight_bits import Fp8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.packed_integers import make_linear
from jitney.quantization.stored_layers import Layers
from jitney.quantization.torchao import TorchaoLinear, is_torchao
from jitney.quantization.transformers_reading import (
    LayerContents,
    read_as_stored,
    remove_quantizer_marks,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class E4m3Weights:
    """e4m3 of compressed-tensors whose bytes become ``fp8`` layers as they are.

    A static scale of the activations is not used: one for each token is closer.
    """

    checkpoint: Checkpoint
    layers: Layers
    dtype: torch.dtype
    packed = ()
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        return self.checkpoint.num_bytes

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        read_as_stored(hf_config, self.layers)

    def after_reading(self, module: PreTrainedModel) -> None:
        for name in self.layers:
            linear: Any = module.get_submodule(name)
            scale = linear.weight_scale.detach().float().reshape(1, -1)
            made = Fp8Linear(
                weight=linear.weight.detach(),
                scale=scale.expand(1, linear.out_features),
                bias=linear.bias,
                dtype=self.dtype,
            )
            module.set_submodule(name, made)
        remove_quantizer_marks(module)
        _log_method(f"compressed-tensors, {len(self.layers)} linear layers in e4m3")


@dataclass(frozen=True)
class IntegerWeights:
    """Weights that become integer layers of a CPU: what ``packed_integers`` makes of them."""

    method: str
    """The checkpoint's ``quant_method``."""
    checkpoint: Checkpoint
    layers: Layers
    dtype: torch.dtype
    packed = ()
    in_place = True

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.checkpoint.config["quantization_config"]
        return config

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        modules = dict(skeleton.named_modules())
        added = [
            self._added_bytes(contents, modules.get(name)) for name, contents in self.layers.items()
        ]
        return self.checkpoint.num_bytes + sum(added)

    def _added_bytes(self, contents: LayerContents, linear: nn.Module | None) -> int:
        """What a layer takes beyond its packed weight in the file. A layer whose groups have
        scattered inputs becomes one of 8 bits, also if the file has 4."""
        packed = contents.get("qweight") or contents.get("weight_packed")
        may_be_scattered = self._config.get("desc_act") or "weight_g_idx" in contents
        if packed is None or not may_be_scattered or not isinstance(linear, nn.Linear):
            return 0
        stored_bytes = math.prod(packed.shape) * 4  # words of 32 bits
        made_bytes = linear.in_features * linear.out_features
        return max(0, made_bytes - stored_bytes)

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        read_as_stored(hf_config, self.layers)

    def after_reading(self, module: PreTrainedModel) -> None:
        plus_one = self._config.get("checkpoint_format") != "gptq_v2"
        group_sizes = self._group_sizes()
        made_as: Counter[str] = Counter()
        for name in self.layers:
            linear: Any = module.get_submodule(name)
            made = make_linear(
                method=self.method,
                stored={each: tensor.detach() for each, tensor in linear.named_parameters()},
                inputs=linear.in_features,
                dtype=self.dtype,
                plus_one=plus_one,
                group_sizes=group_sizes,
            )
            module.set_submodule(name, made)
            made_as["int4" if isinstance(made, Int4Linear) else "int8"] += 1
        remove_quantizer_marks(module)
        kinds = "; ".join(f"{count} computed as {kind}" for kind, count in made_as.items())
        _log_method(f"{self.method}, {len(self.layers)} linear layers: {kinds}")

    def _group_sizes(self) -> set[int]:
        """The sizes that the checkpoint's configuration names: for all layers, or for some."""
        config = self._config
        sizes = {config.get("group_size")}
        for group in (config.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            sizes.add(weights.get("group_size"))
        return {size for size in sizes if size is not None}


class DecompressedWeights:
    """Weights that the library compressed-tensors decompresses to the model's dtype."""

    packed = ()
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        return count_bytes(skeleton)

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        hf_config.quantization_config = {**hf_config.quantization_config, "dequantize": True}

    def after_reading(self, module: PreTrainedModel) -> None:
        for parent, name, linear in _plain_linears(module):
            setattr(parent, name, _without_additions(linear))
        remove_quantizer_marks(module)
        _log_method("compressed-tensors, decompressed while loading")


@dataclass(frozen=True)
class TorchaoWeights:
    """torchao's tensors, which transformers and torchao put together, and torchao multiplies."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    packed = ()
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        return self.checkpoint.num_bytes

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        # A server may have imported transformers while torchao was not there yet.
        is_torchao_available.cache_clear()

    def after_reading(self, module: PreTrainedModel) -> None:
        for parent, name, linear in _plain_linears(module):
            if is_torchao(linear.weight):
                weight = linear.weight.to(self.dtype)
                setattr(parent, name, TorchaoLinear(weight, linear.bias))
        remove_quantizer_marks(module)
        _log_method("torchao, through torchao")


def _plain_linears(module: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of each linear layer; the layer may be replaced meanwhile."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _without_additions(linear: nn.Linear) -> nn.Linear:
    """The same layer without what a library added to it: its forward may be the library's."""
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
    plain.bias = linear.bias
    return plain


def _log_method(what: str) -> None:
    _log.info("the checkpoint is quantized: %s", what)
