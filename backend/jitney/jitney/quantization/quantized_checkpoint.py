"""Chooses how a checkpoint's weights are read.

``engine.assemble`` hands :func:`weight_format` to the loader, as its ``Quantizer``. It chooses by
the checkpoint, the options and the device:

| stored | on a CPU | on a GPU |
|---|---|---|
| unquantized | quantized if option ``quantization`` says so | the same |
| GGUF | layers of ``four_bits`` and ``eight_bits`` | floats |
| compressed-tensors, plain e4m3 | ``int8`` layers | ``fp8`` layers if possible, else decompressed |
| compressed-tensors, integers of 4 or 8 bits | layers of ``packed_integers`` | decompressed |
| compressed-tensors, all else | decompressed | decompressed |
| GPTQ, AWQ | layers of ``packed_integers`` | refused |
| torchao | torchao | torchao |
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError, UnsupportedModelError, show
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.quantized import WeightFormat
from jitney.execution.support import refuse
from jitney.execution.weights import missing_package
from jitney.quantization import devices
from jitney.quantization.gguf_weights import GgufWeights
from jitney.quantization.quantize import QuantizeWhileLoading, check_option
from jitney.quantization.stored_layers import e4m3_layers, integer_layers
from jitney.quantization.stored_weights import (
    DecompressedWeights,
    E4m3Weights,
    IntegerWeights,
    TorchaoWeights,
)

_log = logging.getLogger(__name__)

METHODS = ("torchao", "compressed-tensors", "gptq", "awq")
"""The methods whose safetensors are read, as ``quantization_config.quant_method`` names them."""


def weight_format(
    checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> WeightFormat | None:
    """How the weights are quantized; None if they are not.

    Raises:
    - UnsupportedModelError for a method, or a form of it, that is not read; for a configuration
      that is no object; for a missing package;
    - CheckpointError for a missing scale;
    - ConfigError for a value of option ``quantization`` that this device or checkpoint excludes.
    """
    kind = config.quantization
    stored = checkpoint.config.get("quantization_config")
    if not stored:
        check_option(kind, dtype, device)
        if kind == "none":
            return None
        return QuantizeWhileLoading(kind, checkpoint, dtype, device)

    model_type = str(checkpoint.config["model_type"])
    _check_object(model_type, "quantization_config", stored)
    method = stored.get("quant_method")
    if kind != "none":
        raise ConfigError.of("quantization", kind, f"'none' for weights quantized by {method}")
    if checkpoint.gguf is not None:
        return GgufWeights.of(checkpoint, checkpoint.gguf, dtype, device)
    if method not in METHODS:
        raise _unknown_method(model_type, method)
    return _stored_weights(
        method=str(method), stored=stored, checkpoint=checkpoint, dtype=dtype, device=device
    )


def _stored_weights(
    method: str,
    stored: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightFormat:
    """How safetensors are read that one of METHODS quantized. ``stored`` is the checkpoint's
    ``quantization_config``.

    If the weights can become layers of ours, they do. Otherwise the method's library reads them, if
    it has one that we use.
    """
    model_type = str(checkpoint.config["model_type"])
    _check_groups_of_layers(model_type, stored)
    if method in ("gptq", "awq"):
        _check_packed(model_type, method, stored, device)

    if method == "compressed-tensors":
        e4m3 = _e4m3_weights(stored, checkpoint, dtype, device)
        if e4m3 is not None:
            return e4m3

    if devices.has_integer_kernels(device):
        layers = integer_layers(method, stored, checkpoint)
        if layers:
            return IntegerWeights(method=method, checkpoint=checkpoint, layers=layers, dtype=dtype)

    # They cannot become layers of ours.
    if method in ("gptq", "awq"):
        raise refuse(model_type, f"{method} quantized none of its linear layers")

    obstacle = missing_package(method)
    if obstacle is not None:
        raise refuse(model_type, f"its weights are quantized by {method}: {obstacle}")
    if method == "torchao":
        return TorchaoWeights(checkpoint, dtype)
    return DecompressedWeights()


def _e4m3_weights(
    stored: Mapping[str, Any], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> WeightFormat | None:
    """How e4m3 is read that becomes layers of ours: ``int8`` ones on a CPU, ``fp8`` ones on a GPU.
    None if the checkpoint has no such layers, or if the device cannot run them."""
    layers = e4m3_layers(stored, checkpoint)
    if not layers:
        return None
    if devices.has_integer_kernels(device):
        # On a CPU, torch takes hundreds of times as long for e4m3 as our kernels for int8, and is
        # no more accurate.
        return IntegerWeights(
            method="compressed-tensors", checkpoint=checkpoint, layers=layers, dtype=dtype
        )
    try:
        check_option("fp8", dtype, device)
    except ConfigError as error:
        _log.info("e4m3 weights are decompressed: %s", error)
        return None
    return E4m3Weights(checkpoint, layers, dtype)


def _check_object(model_type: str, name: str, value: object) -> None:
    """Raise UnsupportedModelError if a field of the configuration is not a JSON object."""
    if not isinstance(value, dict):
        raise refuse(model_type, f"its {name} is {show(value)}, but must be an object")


def _check_groups_of_layers(model_type: str, stored: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError unless ``config_groups`` is an object of objects, and each of the
    tensors that these describe is an object, too. It may be absent."""
    groups_name = "quantization_config.config_groups"
    groups = stored.get("config_groups") or {}
    _check_object(model_type, groups_name, groups)
    for name, group in groups.items():
        _check_object(model_type, f"{groups_name}.{name}", group)
        for part in ("weights", "input_activations"):
            _check_object(model_type, f"{groups_name}.{name}.{part}", group.get(part) or {})


def _check_packed(
    model_type: str, method: str, stored: Mapping[str, Any], device: torch.device
) -> None:
    """Raise UnsupportedModelError for a form of GPTQ or AWQ that is not read."""
    if not devices.has_integer_kernels(device):
        raise refuse(model_type, f"its weights are quantized by {method}, read on a CPU alone")
    allowed = {
        "bits": (4, 8) if method == "gptq" else (4,),
        # AWQ's layout of words. GPTQ has no such field.
        "version": ("gemm", "GEMM", None),
    }
    for field, values in allowed.items():
        found = stored.get(field)
        if found not in values:
            expected = " or ".join(map(str, values))
            reason = f"its quantization_config.{field} is {show(found)}, but must be {expected}"
            raise refuse(model_type, reason)


def _unknown_method(model_type: str, method: object) -> UnsupportedModelError:
    *others, last = METHODS
    return refuse(
        model_type,
        f"its weights are quantized by {show(method)}, and only {', '.join(others)} and {last} are "
        "read; or quantize unquantized ones with the option quantization",
    )
