"""Outliers moved from activations into weights before int8 quantization, after SmoothQuant
(https://arxiv.org/abs/2211.10438).

A layer normalization leaves a few channels many times larger than the others, and the one scale
that a whole tensor gets at run time is then wasted on them. Each channel is divided by a factor
before the product and its row of the weight multiplied by it: the same function, easier to round.
The factors come from the recipe's example inputs.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from export.recipe import NamedArrays

# How much of a channel's range goes to the weight: 0.5 shares it evenly, 1 moves all of it.
SHARE = 0.6
SMALLEST = 1e-5  # of a range or factor, so that a silent channel divides by no zero


def smooth(path: Path, example: NamedArrays, *, largest_inline: int) -> int:
    """Rewrite the ONNX file at ``path``; returns how many activations were smoothed.

    Only products of a layer normalization with a constant are concerned; a graph without them
    stays as it is.
    """
    model = onnx.load(str(path))
    weights = {each.name: each for each in model.graph.initializer}
    groups = _products(model, weights)
    if not groups:
        return 0
    ranges = _ranges(path, list(groups), example)
    fresh: dict[str, onnx.NodeProto] = {}
    for activation, products in groups.items():
        arrays = [numpy_helper.to_array(weights[each.input[1]]) for each in products]
        weight_range = np.max([np.abs(each).max(axis=1) for each in arrays], axis=0)
        factors = _factors(ranges[activation], weight_range)
        inverse = f"{activation}_smoothing"
        smoothed = f"{activation}_smoothed"
        model.graph.initializer.append(numpy_helper.from_array(1 / factors, inverse))
        fresh[products[0].name] = helper.make_node(
            "Mul", [activation, inverse], [smoothed], name=smoothed
        )
        for product, array in zip(products, arrays, strict=True):
            scaled = numpy_helper.from_array(array * factors[:, None], product.input[1])
            weights[product.input[1]].CopyFrom(scaled)
            product.input[0] = smoothed
    nodes = []
    for node in model.graph.node:
        if node.name in fresh:
            nodes.append(fresh[node.name])
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    save(model, path, largest_inline)
    return len(groups)


def save(model: onnx.ModelProto, path: Path, largest_inline: int) -> None:
    """Write a model whose weights are in memory, in place of what is there."""
    beside = path.with_name(f"{path.name}.data")
    beside.unlink(missing_ok=True)  # or the weights would be appended to it
    size = sum(each.ByteSize() for each in model.graph.initializer)
    external = size > largest_inline
    onnx.save(model, str(path), save_as_external_data=external, location=beside.name)


def _products(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]
) -> dict[str, list[onnx.NodeProto]]:
    """By normalized activation, the products with a weight that no other node uses."""
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    uses: dict[str, int] = {}
    for node in model.graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    groups: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type != "MatMul" or producers.get(node.input[0]) != "LayerNormalization":
            continue
        weight = weights.get(node.input[1])
        if weight is None or weight.data_type != onnx.TensorProto.FLOAT:
            continue  # no other type is quantized
        if len(weight.dims) == 2 and uses[weight.name] == 1:
            groups.setdefault(node.input[0], []).append(node)
    return groups


def _ranges(path: Path, names: list[str], example: NamedArrays) -> dict[str, np.ndarray]:
    """The largest |value| of each channel of some activations on the example."""
    probe = onnx.load(str(path), load_external_data=False)
    for name in names:
        probe.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    probe_path = path.with_name("probe.onnx")  # beside the weights, if they are in a file
    onnx.save(probe, str(probe_path))
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            str(probe_path), options, providers=["CPUExecutionProvider"]
        )
        found = session.run(names, dict(example))
    finally:
        probe_path.unlink()
    return {
        name: np.abs(each).reshape(-1, each.shape[-1]).max(axis=0)
        for name, each in zip(names, found, strict=True)
    }


def _factors(activation: np.ndarray, weight: np.ndarray) -> np.ndarray:
    raw = np.maximum(activation, SMALLEST) ** SHARE / np.maximum(weight, SMALLEST) ** (1 - SHARE)
    return np.maximum(raw / np.median(raw), SMALLEST).astype(np.float32)
