"""Checkpoints whose weights are stored quantized: torchao's and compressed-tensors'.

Linear layers end up as those of ``quantize``. :func:`weight_format`, which
the loader calls, says which way is taken:

- compressed-tensors in e4m3, with a scale per output channel or per tensor and quantized
  activations, is read by a small quantizer of ours (transformers' interface for that), and its
  bytes become ``fp8`` layers as they are. A static scale of the activations is not used:
  one per token is closer.
- every other form of compressed-tensors is decompressed to the model's dtype by that library.
- torchao's tensors are put together by transformers and torchao, and multiply through torchao.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils import is_torchao_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from jitney.config import EngineConfig
from jitney.errors import CheckpointError, ConfigError, show
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.quantized import WeightFormat
from jitney.execution.support import refuse
from jitney.execution.weights import count_bytes, missing_package
from jitney.quantization.e4m3 import ALIGNMENT, DTYPE
from jitney.quantization.eight_bits import Fp8Linear
from jitney.quantization.quantize import QuantizeWhileLoading, check_option
from jitney.quantization.torchao import TorchaoLinear, is_torchao

_log = logging.getLogger(__name__)

METHODS = ("torchao", "compressed-tensors")
_NAME = "jitney_fp8"  # of the quantizer, in transformers' registry
# Scales beside those of weights: of a cache, and static ones of activations.
_SPARE = r"(\.[kv]_scale|put_scale)$"

Way = Literal["fp8", "decompress", "torchao"]


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
    if method not in METHODS:
        raise refuse(
            model_type,
            f"its weights are quantized by {show(method)}, and only {' and '.join(METHODS)} are "
            "read; or quantize unquantized ones with the option quantization",
        )
    if kind != "none":
        raise ConfigError.of("quantization", kind, f"'none' for weights quantized by {method}")
    if method == "compressed-tensors":
        scales = _fp8_scales(stored, checkpoint)
        if scales:
            try:
                check_option("fp8", dtype, device)
                return StoredWeights(method, "fp8", checkpoint, dtype, scales)
            except ConfigError as error:
                _log.info("e4m3 weights are decompressed: %s", error)
    if (obstacle := missing_package(method)) is not None:
        raise refuse(model_type, f"its weights are quantized by {method}: {obstacle}")
    way: Way = "torchao" if method == "torchao" else "decompress"
    return StoredWeights(method, way, checkpoint, dtype, {})


@dataclass(frozen=True)
class StoredWeights:
    """A ``WeightFormat``: how a checkpoint's weights are quantized, and which way it is read."""

    method: str
    """Its ``quant_method``."""
    way: Way
    checkpoint: Checkpoint
    dtype: torch.dtype
    scales: dict[str, list[int]]
    """Way ``fp8``: name of a linear layer -> shape of its weight's scale."""
    in_place = True

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`."""
        return count_bytes(skeleton) if self.way == "decompress" else self.checkpoint.num_bytes

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """Tell transformers, by the configuration that it will load with, which way to read."""
        if self.way == "fp8":
            if _NAME not in AUTO_QUANTIZER_MAPPING:  # which belongs to the process
                register_quantization_config(_NAME)(_Fp8Config)
                register_quantizer(_NAME)(_Fp8Quantizer)
            hf_config.quantization_config = {"quant_method": _NAME, "scales": self.scales}
        elif self.way == "decompress":
            hf_config.quantization_config = {**hf_config.quantization_config, "dequantize": True}
        else:
            is_torchao_available.cache_clear()  # a server imports transformers without it

    def after_reading(self, module: PreTrainedModel) -> None:
        """Replace what was loaded by layers of ours, and take the marks of transformers off."""
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
        # They keep a module from being moved or cast, and its configuration from being written.
        for holder, mark in (
            (module, "hf_quantizer"),
            (module, "quantization_method"),
            (module, "is_quantized"),
            (module.config, "quantization_config"),
            (module.config, "_is_quantized"),
        ):
            vars(holder).pop(mark, None)
        _log.info("the checkpoint is quantized: %s", self)

    def __str__(self) -> str:
        what = {
            "fp8": f"{len(self.scales)} linear layers in e4m3",
            "decompress": "decompressed while loading",
            "torchao": "through torchao",
        }
        return f"{self.method}, {what[self.way]}"


def _fp8_scales(config: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Linear layers that can become e4m3 layers of ours, and the shapes of their scales. Empty if
    that does not hold for all that are quantized. Raises CheckpointError if a scale is missing."""
    entries = checkpoint.tensors
    for name, entry in entries.items():
        if entry.dtype == "F8_E4M3" and f"{name}_scale" not in entries:
            raise CheckpointError(f"{entry.file} lacks {name}_scale")  # or it would count as 1
    if not all(map(_is_plain_fp8, (config.get("config_groups") or {}).values())):
        return {}
    scales = {}
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
        scales[layer] = list(entry.shape)
    return scales


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


class _Fp8Config(QuantizationConfigMixin):
    """What :class:`StoredWeights` hands to :class:`_Fp8Quantizer` through transformers."""

    def __init__(self, scales: dict[str, list[int]], **_: Any) -> None:
        self.quant_method = _NAME  # type: ignore[assignment]
        self.scales = scales


class _Fp8Quantizer(HfQuantizer):
    """Makes room for e4m3 weights and their scales before they are read, so that they are read as
    they are stored. transformers makes it and calls it."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        scales: dict[str, list[int]] = self.quantization_config.scales  # type: ignore[attr-defined]
        model._keys_to_ignore_on_load_unexpected = {_SPARE}  # else it logs a table of them
        for name, shape in scales.items():
            linear: Any = model.get_submodule(name)
            if type(linear) is not nn.Linear:
                raise TypeError(f"{name} is no linear layer")
            weight = torch.empty_like(linear.weight, dtype=DTYPE)
            scale = torch.empty(shape, dtype=torch.float32, device=weight.device)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.weight_scale = nn.Parameter(scale, requires_grad=False)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
