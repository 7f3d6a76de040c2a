"""How a checkpoint's weights are read. ``engine.assemble`` hands this to the loader, as its
``Quantizer``.

:func:`weight_format` decides, by the checkpoint, the options and the device:

| stored | on a CPU | on a GPU |
|---|---|---|
| unquantized | option ``quantization``, if it is set | the same |
| GGUF | layers of ``four_bits`` and ``eight_bits`` | floats |
| compressed-tensors, plain e4m3 | ``int8`` layers | ``fp8`` layers, or decompressed |
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


def weight_format(
    checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> WeightFormat | None:
    """How the weights are quantized; None if they are not.

    Raises:
    - UnsupportedModelError for a method, or a form of it, that is not read; for a missing package;
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

    # Anything but an object is no configuration: it is shown as the unknown method.
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if kind != "none":
        raise ConfigError.of("quantization", kind, f"'none' for weights quantized by {method}")
    if checkpoint.gguf is not None:
        return GgufWeights.of(checkpoint, checkpoint.gguf, dtype, device)
    if method not in METHODS:
        raise _unknown_method(checkpoint, method)
    return _stored_weights(str(method), stored, checkpoint, dtype, device)


def _stored_weights(
    method: str,
    stored: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightFormat:
    """How safetensors are read that one of METHODS quantized. ``stored`` is the checkpoint's
    ``quantization_config``.

    The layers of our own come first. What they do not take is left to the method's library, if it
    has one that we use.
    """
    model_type = str(checkpoint.config["model_type"])
    if method in ("gptq", "awq"):
        _check_packed(model_type, method, stored, device)

    if method == "compressed-tensors":
        e4m3 = _e4m3_weights(stored, checkpoint, dtype, device)
        if e4m3 is not None:
            return e4m3

    if devices.has_integer_kernels(device):
        layers = integer_layers(method, stored, checkpoint)
        if layers:
            return IntegerWeights(method, checkpoint, layers, dtype)

    # No layer of ours takes them.
    if method in ("gptq", "awq"):
        raise refuse(model_type, f"none of its layers that {method} quantized is a linear one")

    obstacle = missing_package(method)
    if obstacle is not None:
        raise refuse(model_type, f"its weights are quantized by {method}: {obstacle}")
    if method == "torchao":
        return TorchaoWeights(checkpoint, dtype)
    return DecompressedWeights()


def _e4m3_weights(
    stored: Mapping[str, Any], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> WeightFormat | None:
    """How e4m3 is read that becomes layers of ours: ``int8`` ones on a CPU, ``fp8`` ones elsewhere.
    None if there is none, or if the device cannot run such layers."""
    layers = e4m3_layers(stored, checkpoint)
    if not layers:
        return None
    if devices.has_integer_kernels(device):
        # torch takes hundreds of times as long for e4m3 on a CPU as int8 takes, and is no closer.
        return IntegerWeights("compressed-tensors", checkpoint, layers, dtype)
    try:
        check_option("fp8", dtype, device)
    except ConfigError as error:
        _log.info("e4m3 weights are decompressed: %s", error)
        return None
    return E4m3Weights(checkpoint, layers, dtype)


def _check_packed(
    model_type: str, method: str, stored: Mapping[str, Any], device: torch.device
) -> None:
    """Raise UnsupportedModelError for a form of GPTQ or AWQ that is not read."""
    if not devices.has_integer_kernels(device):
        raise refuse(model_type, f"its weights are quantized by {method}, read on a CPU alone")
    allowed = {
        "bits": (4, 8) if method == "gptq" else (4,),
        "version": ("gemm", "GEMM", None),
    }
    for field, values in allowed.items():
        found = stored.get(field)
        if found not in values:
            expected = " or ".join(map(str, values))
            reason = f"its quantization_config.{field} is {show(found)}, but must be {expected}"
            raise refuse(model_type, reason)


def _unknown_method(checkpoint: Checkpoint, method: object) -> UnsupportedModelError:
    *others, last = METHODS
    return refuse(
        str(checkpoint.config["model_type"]),
        f"its weights are quantized by {show(method)}, and only {', '.join(others)} and {last} are "
        "read; or quantize unquantized ones with the option quantization",
    )
