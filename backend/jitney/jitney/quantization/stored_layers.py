"""Finds the quantized linear layers of a checkpoint that can become layers of ours, and the tensors
they are stored in. It looks at names, shapes and dtypes alone. Called by ``quantized_checkpoint``.
"""

from collections.abc import Mapping
from typing import Any

from jitney.errors import CheckpointError
from jitney.execution.checkpoint import Checkpoint
from jitney.quantization.e4m3 import SIZE_STEP
from jitney.quantization.transformers_reading import LayerContents

Layers = dict[str, LayerContents]
"""Name of a layer -> the tensors that it is stored in."""


# ------------------------------------------------------------------ integers


def integer_layers(method: str, config: Mapping[str, Any], checkpoint: Checkpoint) -> Layers | None:
    """The layers whose integers ``packed_integers`` reads; empty if the checkpoint has none. None
    if there are quantized layers that it cannot read."""
    if method == "torchao":
        return None
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        if not all(_has_readable_integers(group, config.get("format")) for group in groups):
            return None

    # A layer is recognised by its weight. Its other tensors may come before the weight: they are
    # collected afterwards.
    layers: Layers = {}
    for name, header in checkpoint.tensors.items():
        layer_name, _, tensor_name = name.rpartition(".")
        is_packed = tensor_name in ("qweight", "weight_packed")
        is_int8 = tensor_name == "weight" and header.dtype == "I8"
        if is_packed or is_int8:
            layers[layer_name] = {}
    # transformers merges experts into one tensor while it loads them, and that is no linear layer.
    if any(".experts." in layer_name for layer_name in layers):
        return None

    for name, header in checkpoint.tensors.items():
        layer_name, _, tensor_name = name.rpartition(".")
        if layer_name in layers:
            layers[layer_name][tensor_name] = header
    return layers


def _has_readable_integers(group: Any, checkpoint_format: str | None) -> bool:
    """Whether ``packed_integers`` reads the integers of a group of layers of compressed-tensors."""
    weights = group.get("weights") or {}
    if weights.get("type") != "int":
        return False
    bits = weights.get("num_bits")
    strategy = weights.get("strategy")
    # A group's own format goes before the checkpoint's.
    stored_as = group.get("format") or checkpoint_format
    if stored_as == "pack-quantized":
        return bits in (4, 8) and strategy in ("channel", "group")
    if stored_as == "int-quantized":
        return bits == 8 and strategy in ("tensor", "channel")
    return False


# ------------------------------------------------------------------ e4m3


def e4m3_layers(config: Mapping[str, Any], checkpoint: Checkpoint) -> Layers | None:
    """The layers that can become e4m3 layers of ours; empty if the checkpoint has none. None if
    there are quantized layers that cannot.

    Raises CheckpointError if a scale is missing.
    """
    _check_scales(checkpoint)
    groups = (config.get("config_groups") or {}).values()
    if not all(_is_plain_e4m3(group) for group in groups):
        return None

    layers: Layers = {}
    for name in checkpoint.tensors:
        layer_name, _, tensor_name = name.rpartition(".")
        if tensor_name != "weight_scale":
            continue
        contents = _e4m3_contents(layer_name, checkpoint)
        if contents is None:
            return None
        layers[layer_name] = contents
    return layers


def _check_scales(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a weight has no scale. A library would take it for 1."""
    for name, entry in checkpoint.tensors.items():
        # What belongs to a weight may be e4m3 as well, such as the scales of NVFP4.
        is_weight = not name.endswith(("_scale", "_zero_point"))
        if is_weight and entry.dtype == "F8_E4M3" and f"{name}_scale" not in checkpoint.tensors:
            raise CheckpointError(f"{entry.file} lacks {name}_scale")


def _is_plain_e4m3(group: Any) -> bool:
    """Whether a group of layers has symmetric 8-bit floats in weights and activations."""
    for name in ("weights", "input_activations"):
        part = group.get(name)
        if not part or not part.get("symmetric", True):
            return False
        if part.get("type") != "float" or part.get("num_bits") != 8:
            return False
    return True


def _e4m3_contents(layer: str, checkpoint: Checkpoint) -> LayerContents | None:
    """The two tensors of a layer, or None if they do not make an e4m3 layer of ours."""
    scale = checkpoint.tensors[f"{layer}.weight_scale"]
    weight = checkpoint.tensors.get(f"{layer}.weight")
    if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        return None
    if ".experts." in layer:  # see ``integer_layers``
        return None

    outputs, inputs = weight.shape
    one_scale = scale.shape in ([], [1], [1, 1])
    scale_per_output = scale.shape in ([outputs], [outputs, 1])
    if not one_scale and not scale_per_output:
        # There is one for each block or group.
        return None
    if outputs % SIZE_STEP or inputs % SIZE_STEP:
        return None
    return {"weight": weight, "weight_scale": scale}
