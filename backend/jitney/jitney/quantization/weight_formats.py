"""The ways in which a checkpoint's quantized weights are read. Each is a ``WeightFormat``, whose
methods and attributes are explained in ``execution.quantized``.

``quantized_checkpoint`` chooses among them. The one for GGUF files is in ``gguf_weights``.
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

from jitney.errors import CheckpointError
from jitney.execution.checkpoint import Checkpoint, StoredTensor
from jitney.execution.quantized import Holder, QuantizedLinear
from jitney.execution.weights import count_bytes
from jitney.quantization.eight_bits import Fp8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.packed_integers import has_int4_form, make_linear
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
    """e4m3 of compressed-tensors. The stored bytes become ``fp8`` layers as they are.

    If the checkpoint has a static scale for activations, it is not used: a scale for each token is
    more accurate.
    """

    checkpoint: Checkpoint
    layers: Layers
    dtype: torch.dtype
    reads_itself = ()
    given_tensors = None
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        return self.checkpoint.num_bytes

    loaded_bytes = needed_bytes

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
    """Weights of which ``packed_integers`` makes layers of integers, for a CPU."""

    method: str
    """The checkpoint's ``quant_method``."""
    checkpoint: Checkpoint
    layers: Layers
    dtype: torch.dtype
    reads_itself = ()
    given_tensors = None
    in_place = True

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.checkpoint.config["quantization_config"]
        return config

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        needed = self.checkpoint.num_bytes
        modules = dict(skeleton.named_modules())
        for name, contents in self.layers.items():
            linear = modules.get(name)
            # A module that is no nn.Linear is refused later, when the weights are read.
            if isinstance(linear, nn.Linear):
                needed += self._added_bytes(contents, linear)
        return needed

    loaded_bytes = needed_bytes

    def _added_bytes(self, contents: LayerContents, linear: nn.Linear) -> int:
        """How many bytes more the new layer's weight takes than the stored one. 0, unless integers
        of 4 bits must become int8, because of scattered or unusual groups."""
        words = _first_of(contents, "qweight", "weight_packed")
        scales = _first_of(contents, "scales", "weight_scale")
        if words is None or scales is None:
            # The weight is not packed: a byte stays a byte. Or a tensor is missing, and is refused
            # later.
            return 0
        groups = math.prod(scales.shape) // linear.out_features
        may_be_scattered = bool(self._config.get("desc_act")) or "weight_g_idx" in contents
        if has_int4_form(linear.in_features, groups) and not may_be_scattered:
            # Integers of 4 bits stay integers of 4 bits, and no others take more bytes as int8 than
            # they do in words.
            return 0
        word_bytes = math.prod(words.shape) * 4  # words of 32 bits
        int8_bytes = linear.in_features * linear.out_features
        # 0 for integers of 8 bits: their words take as many bytes as int8, or more if padded.
        return max(0, int8_bytes - word_bytes)

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        read_as_stored(hf_config, self.layers)

    def after_reading(self, module: PreTrainedModel) -> None:
        group_sizes = self._group_sizes()
        made_as: Counter[str] = Counter()
        for name in self.layers:
            try:
                made = self._make_linear(module.get_submodule(name), group_sizes)
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from None
            module.set_submodule(name, made)
            made_as["int4" if isinstance(made, Int4Linear) else "int8"] += 1
        remove_quantizer_marks(module)
        kinds = "; ".join(f"{count} computed as {kind}" for kind, count in made_as.items())
        _log_method(f"{self.method}, {len(self.layers)} linear layers: {kinds}")

    def _make_linear(self, linear: Any, group_sizes: set[int]) -> QuantizedLinear:
        """The layer of what was read into the parameters of ``linear``."""
        return make_linear(
            method=self.method,
            tensors={name: tensor.detach() for name, tensor in linear.named_parameters()},
            inputs=linear.in_features,
            dtype=self.dtype,
            bits=self._config.get("bits", 4),
            # GPTQ stores zero points less one. Its second version stores them as they are.
            plus_one=self._config.get("checkpoint_format") != "gptq_v2",
            group_sizes=group_sizes,
        )

    def _group_sizes(self) -> set[int]:
        """The sizes of groups that the checkpoint's configuration names, for all layers or for
        some. Raises CheckpointError for what is no whole number."""
        config = self._config
        stated = [config.get("group_size")]
        for group in (config.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            stated.append(weights.get("group_size"))
        sizes = set()
        for size in stated:
            if size is None:
                continue
            if not isinstance(size, int):
                name = "group_size in quantization_config"
                raise CheckpointError.of(name, size, "a whole number")
            sizes.add(size)
        return sizes


@dataclass(frozen=True)
class DecompressedWeights:
    """Weights of compressed-tensors, which its own library decompresses to the model's dtype."""

    checkpoint: Checkpoint
    reads_itself = ()
    given_tensors = None
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        return count_bytes(skeleton)

    loaded_bytes = needed_bytes

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        hf_config.quantization_config = {**hf_config.quantization_config, "dequantize": True}

    def after_reading(self, module: PreTrainedModel) -> None:
        for holder, linear in _plain_linears(module):
            holder.put(_clean_copy(linear))
        remove_quantizer_marks(module)
        _log_method(
            "compressed-tensors, decompressed while loading: all weights take "
            f"{count_bytes(module):,} bytes, in the files {self.checkpoint.num_bytes:,}"
        )


@dataclass(frozen=True)
class TorchaoWeights:
    """Weights of torchao. transformers and torchao read them as torchao's tensors, and torchao
    multiplies these."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    reads_itself = ()
    given_tensors = None
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        return self.checkpoint.num_bytes

    loaded_bytes = needed_bytes

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        # A server may have imported transformers while torchao was not there yet.
        is_torchao_available.cache_clear()

    def after_reading(self, module: PreTrainedModel) -> None:
        for holder, linear in _plain_linears(module):
            if is_torchao(linear.weight):
                weight = linear.weight.to(self.dtype)
                holder.put(TorchaoLinear(weight, linear.bias))
        remove_quantizer_marks(module)
        _log_method("torchao, through torchao")


def _plain_linears(module: PreTrainedModel) -> Iterator[tuple[Holder, nn.Linear]]:
    """Each linear layer, and where it hangs. The caller may replace the layer at once."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.Linear):
                yield Holder(parent, name), child


def _clean_copy(linear: nn.Linear) -> nn.Linear:
    """A layer with the same weight and bias, and nothing else. The library has added attributes to
    ``linear``, and may have replaced its forward."""
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
    plain.bias = linear.bias
    return plain


def _first_of(contents: LayerContents, *names: str) -> StoredTensor | None:
    """The first of these tensors that a layer has."""
    for name in names:
        if name in contents:
            return contents[name]
    return None


def _log_method(what: str) -> None:
    _log.info("the checkpoint is quantized: %s", what)
