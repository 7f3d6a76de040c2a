"""Room in a module for weights that are stored in parts, by way of transformers' interface for
quantized checkpoints. Called by ``checkpoint`` and ``gguf_weights``.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from jitney.execution.support import refuse
from jitney.quantization.e4m3 import DTYPE

_NAME = "jitney_stored"  # of the quantizer, in transformers' registry
# Scales beside those of weights: of a cache, and static ones of activations.
_SPARE = r"(\.[kv]_scale|put_scale)$"

_DTYPES = {
    "I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "F8_E4M3": DTYPE,
    "F16": torch.float32, "BF16": torch.float32, "F32": torch.float32,
}  # fmt: skip
"""Of a layer's stored tensors: as what they are read. Scales are few."""

Room = dict[str, tuple[list[int], str]]
"""Of a layer: last part of a tensor's name -> its shape and stored dtype."""


def make_room(hf_config: PreTrainedConfig, rooms: dict[str, Room]) -> None:
    """Tell transformers, by the configuration that it will load with, which tensors linear layers
    have in place of a weight; by the layers' names."""
    if _NAME not in AUTO_QUANTIZER_MAPPING:  # which belongs to the process
        register_quantization_config(_NAME)(_StoredConfig)
        register_quantizer(_NAME)(_StoredQuantizer)
    hf_config.quantization_config = {"quant_method": _NAME, "rooms": rooms}


def take_marks_off(module: PreTrainedModel) -> None:
    """Those of transformers, which keep a module from being moved or cast, and its configuration
    from being written."""
    for holder, mark in (
        (module, "hf_quantizer"),
        (module, "quantization_method"),
        (module, "is_quantized"),
        (module.config, "quantization_config"),
        (module.config, "_is_quantized"),
    ):
        vars(holder).pop(mark, None)


class _StoredConfig(QuantizationConfigMixin):
    """What :func:`make_room` hands to :class:`_StoredQuantizer` through transformers."""

    def __init__(self, rooms: dict[str, Room], **_: Any) -> None:
        self.quant_method = _NAME  # type: ignore[assignment]
        self.rooms = rooms


class _StoredQuantizer(HfQuantizer):
    """Makes room for weights and their scales before they are read, so that they are read as they
    are stored. transformers makes it and calls it."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        rooms: dict[str, Room] = self.quantization_config.rooms  # type: ignore[attr-defined]
        model._keys_to_ignore_on_load_unexpected = {_SPARE}  # else it logs a table of them
        modules = dict(model.named_modules())
        for name, room in rooms.items():
            linear: Any = modules.get(name)
            if type(linear) is not nn.Linear:
                parts = [part for part in room if part != "bias"] or ["weight"]
                what = f"{name}.{parts[0]} is quantized, and of a {type(linear).__name__}"
                raise refuse(model.config.model_type, f"{what}: only those of a Linear are read so")
            device = linear.weight.device
            linear.register_parameter("weight", None)
            for suffix, (shape, dtype) in room.items():
                if suffix == "bias" and linear.bias is not None:
                    continue
                tensor = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
                setattr(linear, suffix, nn.Parameter(tensor, requires_grad=False))
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
