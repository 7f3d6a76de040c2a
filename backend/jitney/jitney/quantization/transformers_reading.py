"""Has transformers read a layer's quantized tensors as they are stored.

transformers gives a linear layer one parameter for its weight. A quantized checkpoint has several
tensors in place of the weight: packed integers, scales, zero points. Before a load,
:func:`read_as_stored` tells transformers which layer has which tensors, through transformers' own
interface for quantized checkpoints. transformers then reads them as parameters of the layer, under
the tensors' names. Afterwards ``weight_formats`` makes a layer of ours of these parameters.

``gguf_weights`` reads the tensors itself: it names its layers with no tensors, and transformers
then reads nothing for them.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from jitney.execution.checkpoint import StoredTensor
from jitney.execution.support import unservable
from jitney.quantization.e4m3 import E4M3

_NAME = "jitney_stored"
"""The quantizer's name in transformers' registry."""
_IGNORED = r"(\.k_scale|\.v_scale|input_scale|output_scale)$"
"""Tensors that are not read: scales of a KV cache, and static scales of activations."""

_READ_AS = {
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F8_E4M3": E4M3,
    # Scales are few, and all computations with them are in float32.
    "F16": torch.float32,
    "BF16": torch.float32,
    "F32": torch.float32,
}


LayerContents = dict[str, StoredTensor]
"""The tensors that a linear layer has in place of one weight, by the last part of their names."""


def read_as_stored(hf_config: PreTrainedConfig, layers: dict[str, LayerContents]) -> None:
    """Tell transformers what to read for ``layers``, by their names. ``hf_config`` is the
    configuration that it will load the model with."""
    if _NAME not in AUTO_QUANTIZER_MAPPING:  # the registry belongs to the process
        register_quantization_config(_NAME)(_StoredConfig)
        register_quantizer(_NAME)(_StoredQuantizer)
    hf_config.quantization_config = {"quant_method": _NAME, "layers": layers}


def remove_quantizer_marks(module: PreTrainedModel) -> None:
    """Remove the attributes with which transformers marks a quantized module. With them, it refuses
    to move or cast the module, or to write its configuration."""
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(module).pop(mark, None)
    for mark in ("quantization_config", "_is_quantized"):
        vars(module.config).pop(mark, None)


class _StoredConfig(QuantizationConfigMixin):
    """Carries the layers through transformers to :class:`_StoredQuantizer`."""

    def __init__(self, layers: dict[str, LayerContents], **_: Any) -> None:
        self.quant_method = _NAME  # type: ignore[assignment]
        self.layers = layers


class _StoredQuantizer(HfQuantizer):
    """Gives layers the parameters that the checkpoint has. transformers makes and calls it."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        layers: dict[str, LayerContents] = self.quantization_config.layers  # type: ignore[attr-defined]
        # Without this, transformers logs a table of the tensors that it does not read.
        model._keys_to_ignore_on_load_unexpected = {_IGNORED}
        modules = dict(model.named_modules())
        for name, contents in layers.items():
            linear = modules.get(name)
            if type(linear) is not nn.Linear:
                _refuse_layer(model.config.model_type, name, contents, linear)
            _replace_weight(linear, contents)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _replace_weight(linear: Any, contents: LayerContents) -> None:
    """Give the layer empty parameters for ``contents`` in place of its weight."""
    device = linear.weight.device
    linear.register_parameter("weight", None)
    for name, header in contents.items():
        if name == "bias" and linear.bias is not None:
            # The bias is not quantized, and the layer has its parameter already.
            continue
        tensor = torch.empty(header.shape, dtype=_READ_AS[header.dtype], device=device)
        setattr(linear, name, nn.Parameter(tensor, requires_grad=False))


def _refuse_layer(model_type: str, name: str, contents: LayerContents, found: object) -> None:
    """Raise UnsupportedModelError: the quantized tensors ``contents`` are of something that is no
    linear layer."""
    tensors = [each for each in contents if each != "bias"]
    tensor = tensors[0] if tensors else "weight"
    found_class = type(found).__name__
    raise unservable(
        model_type,
        f"{name}.{tensor} is quantized, but belongs to a {found_class}: only a Linear may be "
        "quantized",
    )
