"""Chooses how a checkpoint's weights are read.

``engine.assemble`` hands :func:`choose_weight_format` to the loader, as its ``Quantizer``. It
chooses by the checkpoint, the options and the device:

| stored | on a CPU | on a GPU |
|---|---|---|
| unquantized | quantized if option ``quantization`` says so | the same |
| GGUF | layers of ``four_bits`` and ``eight_bits`` | floats |
| compressed-tensors, plain e4m3 | ``int8`` layers | ``fp8`` layers if possible, else decompressed |
| compressed-tensors, integers of 4 or 8 bits | layers of ``packed_integers`` | decompressed |
| compressed-tensors, all else | decompressed | decompressed |
| GPTQ, AWQ | layers of ``packed_integers`` | refused |
| fp8, MXFP4, bitsandbytes, modelopt | ``int8`` layers, and floats for experts | floats |
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
from jitney.execution.support import unservable
from jitney.quantization import dequantized_weights, devices
from jitney.quantization.dequantized_weights import DequantizedWeights
from jitney.quantization.gguf_weights import GgufWeights
from jitney.quantization.packages import missing_package
from jitney.quantization.quantize import QuantizeWhileLoading, check_option
from jitney.quantization.stored_layers import e4m3_layers, integer_layers
from jitney.quantization.weight_formats import (
    DecompressedWeights,
    E4m3Weights,
    IntegerWeights,
    TorchaoWeights,
)

_log = logging.getLogger(__name__)

METHODS = ("torchao", "compressed-tensors", "gptq", "awq", *dequantized_weights.METHODS)
"""The methods whose safetensors are read, as ``quantization_config.quant_method`` names them."""


def choose_weight_format(
    checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> WeightFormat | None:
    """How the weights are quantized; None if they are not.

    Raises:
    - UnsupportedModelError for a method, or a form of it, that is not read; for a configuration
      that is no object; for a missing package;
    - CheckpointError for a missing scale;
    - ConfigError for a value of option ``quantization`` that this device or checkpoint excludes.
    """
    option = config.quantization
    quantization_config = checkpoint.config.get("quantization_config")
    if not quantization_config:
        check_option(option, dtype, device)
        if option == "none":
            return None
        return QuantizeWhileLoading(option, checkpoint, dtype, device)

    model_type = str(checkpoint.config["model_type"])
    _check_object(model_type, "quantization_config", quantization_config)
    method = quantization_config.get("quant_method")
    if option != "none":
        raise ConfigError.of("quantization", option, f"'none' for weights quantized by {method}")
    if checkpoint.gguf is not None:
        return GgufWeights.plan(checkpoint, checkpoint.gguf, dtype, device)
    if method not in METHODS:
        raise _unknown_method(model_type, method)
    if method in dequantized_weights.METHODS:
        return DequantizedWeights.plan(
            method=str(method),
            quantization_config=quantization_config,
            checkpoint=checkpoint,
            dtype=dtype,
            device=device,
        )
    return _format_of_safetensors(
        method=str(method),
        quantization_config=quantization_config,
        checkpoint=checkpoint,
        dtype=dtype,
        device=device,
    )


def _format_of_safetensors(
    method: str,
    quantization_config: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightFormat:
    """How safetensors that one of METHODS quantized are read: see the module's table."""
    model_type = str(checkpoint.config["model_type"])
    _check_groups_of_layers(model_type, quantization_config)
    if quantization_config.get("transform_config"):
        reason = "its quantization_config.transform_config asks for transforms of activations"
        raise unservable(model_type, f"{reason}, which are not computed")
    if method in ("gptq", "awq"):
        if not devices.has_integer_kernels(device):
            reason = f"its weights are quantized by {method}, read on a CPU alone"
            raise unservable(model_type, reason)
        _check_gptq_or_awq(model_type, method, quantization_config)

    # Plain e4m3.
    if method == "compressed-tensors":
        e4m3 = _e4m3_weights(quantization_config, checkpoint, dtype, device)
        if e4m3 is not None:
            return e4m3

    # Integers of 4 or 8 bits: of compressed-tensors on a CPU, and all of GPTQ and AWQ.
    if devices.has_integer_kernels(device):
        layers = integer_layers(method, quantization_config, checkpoint)
        if layers:
            return IntegerWeights(method=method, checkpoint=checkpoint, layers=layers, dtype=dtype)
        if method in ("gptq", "awq"):
            # Without a layer to read, ``layers`` is empty or None. For these methods None means
            # that experts are quantized.
            found = "experts as well" if layers is None else "none of its linear layers"
            raise unservable(model_type, f"{method} quantized {found}")

    # All else is read by the method's own library.
    obstacle = missing_package(method)
    if obstacle is not None:
        raise unservable(model_type, f"its weights are quantized by {method}: {obstacle}")
    if method == "torchao":
        return TorchaoWeights(checkpoint, dtype)
    return DecompressedWeights(checkpoint)


def _e4m3_weights(
    quantization_config: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightFormat | None:
    """How e4m3 that can become layers of ours is read: as ``int8`` ones on a CPU, as ``fp8`` ones
    on a GPU. None if the checkpoint has no such layers, or if the device cannot run them."""
    layers = e4m3_layers(quantization_config, checkpoint)
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
        raise unservable(model_type, f"its {name} is {show(value)}, but must be an object")


def _check_groups_of_layers(model_type: str, quantization_config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError unless ``config_groups`` is an object of objects, and what each
    of these says of weights and activations is an object, too. All may be absent."""
    groups_name = "quantization_config.config_groups"
    groups = quantization_config.get("config_groups") or {}
    _check_object(model_type, groups_name, groups)
    for name, group in groups.items():
        _check_object(model_type, f"{groups_name}.{name}", group)
        for part in ("weights", "input_activations"):
            _check_object(model_type, f"{groups_name}.{name}.{part}", group.get(part) or {})


def _check_gptq_or_awq(
    model_type: str, method: str, quantization_config: Mapping[str, Any]
) -> None:
    """Raise UnsupportedModelError for a form of GPTQ or AWQ that is not read."""
    allowed = {
        "bits": (4, 8) if method == "gptq" else (4,),
        # AWQ's layout of words. GPTQ has no such field.
        "version": ("gemm", "GEMM", None),
    }
    for field, values in allowed.items():
        found = quantization_config.get(field)
        # 4.0 equals 4, but nothing can be shifted by it.
        if found not in values or isinstance(found, float):
            expected = " or ".join(map(str, values))
            reason = f"its quantization_config.{field} is {show(found)}, but must be {expected}"
            raise unservable(model_type, reason)


def _unknown_method(model_type: str, method: object) -> UnsupportedModelError:
    *others, last = METHODS
    return unservable(
        model_type,
        f"its weights are quantized by {show(method)}, and only {', '.join(others)} and {last} are "
        "read; or quantize unquantized ones with the option quantization",
    )
