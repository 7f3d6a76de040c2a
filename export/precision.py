"""Lower precisions, and the measure of each one's quality on real inputs.

int8 is ONNX Runtime's dynamic quantization: weights per channel, activations at run time, so that
no calibration is needed. We compute the scales of the weights, so that the model is the same on
every processor. fp16 and bf16 are the torch module in that type, traced again: tensors that the
module keeps in fp32 stay fp32, which a strongly typed engine needs. Inputs and outputs keep their
types in every precision, so that clients need no change.
"""

import copy
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from export.errors import CheckError, ExportError, RecipeError
from export.onnx_model import LARGEST_INLINE_BYTES
from export.parity import Run, torch_run
from export.recipe import NamedArrays, Quality, Recipe
from export.smoothing import save, smooth

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# A model without real inputs of its own is judged by its example's cosine.
LEAST_COSINE = {"int8": 0.98, "fp16": 0.999, "bf16": 0.99}
SMALLEST_SCALE = 1e-12  # of a column of zeros
# Convolutions stay as they are: quantized at run time they are slower on a CPU than in fp32.
QUANTIZED_OPERATORS = ["MatMul", "Gemm"]


class InPrecision(torch.nn.Module):
    """A module in a half precision, with the inputs and outputs it had."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(dtype)
        self.dtype = dtype

    def forward(self, **inputs: torch.Tensor) -> object:
        lowered = {
            name: each.to(self.dtype) if each.is_floating_point() else each
            for name, each in inputs.items()
        }
        return self._restored(self.module(**lowered))

    def _restored(self, result: object) -> object:
        if isinstance(result, torch.Tensor):
            return result.float() if result.dtype == self.dtype else result
        if isinstance(result, dict):
            return {name: self._restored(each) for name, each in result.items()}
        if isinstance(result, (tuple, list)):
            return tuple(self._restored(each) for each in result)
        return result


@dataclass(frozen=True)
class Figure:
    """A quality, its bound, and what the original has (None for a cosine, which is 1)."""

    metric: str
    value: float
    least: float
    original: float | None

    def __str__(self) -> str:
        beside = "" if self.original is None else f", original {self.original:.4f}"
        return f"{self.metric} {self.value:.4f} (at least {self.least}{beside})"


def to_int8(
    source: Path,
    destination: Path,
    example: NamedArrays,
    *,
    largest_inline: int = LARGEST_INLINE_BYTES,
) -> None:
    """Quantize the products with constant factors in an ONNX file. Changes ``source`` as well."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = onnx.load(str(source))
    _require_products(model.graph)
    # Every product becomes a MatMul, some of them of a transposed weight, whose shape the
    # exporter's notes would contradict.
    ONNXModel(model).replace_gemm_with_matmul()
    del model.graph.value_info[:]
    save(model, source, largest_inline)
    smooth(source, example, largest_inline=largest_inline)
    quantized = source.with_name("quantized.onnx")
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises a preparation that the exporter already did
    try:
        quantize_dynamic(
            source,
            quantized,
            op_types_to_quantize=QUANTIZED_OPERATORS,
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=True,
            extra_options={"MatMulConstBOnly": True},
        )
    except Exception as error:  # the quantizer raises whatever its graph walk meets
        raise ExportError(
            f"ONNX Runtime could not quantize the model: {type(error).__name__}: {error}"
        ) from error
    finally:
        root.setLevel(level)
    model = onnx.load(str(quantized))
    _fit_pairs(model.graph, onnx.load(str(source)).graph)
    save(model, destination, largest_inline)


def _fit_pairs(quantized: onnx.GraphProto, source: onnx.GraphProto) -> None:
    """Round the weights of ``source`` again, so that no sum of two products overflows 16 bits.

    A processor with AVX2 and without VNNI multiplies uint8 activations with int8 weights, adds the
    two products of neighbouring rows and clips the sum to 16 bits. Two weights whose absolute
    values sum up to at most 128 stay within: 255 * 128 < 2**15.
    """
    originals = {each.name: each for each in source.initializer}
    written = {each.name: each for each in quantized.initializer}
    for node in quantized.node:
        if node.op_type != "MatMulInteger":
            continue
        name = node.input[1].removesuffix("_quantized")
        weight = numpy_helper.to_array(originals[name])  # [..., inputs, outputs]
        odd = [(0, 0)] * (weight.ndim - 2) + [(0, weight.shape[-2] % 2), (0, 0)]
        sizes = np.pad(np.abs(weight), odd)
        pairs = sizes[..., ::2, :] + sizes[..., 1::2, :]
        largest = pairs.max(axis=tuple(range(weight.ndim - 1)))
        # 127 and not 128: each of the two may be rounded up by a half.
        scale = np.maximum(largest / 127, SMALLEST_SCALE).astype(np.float32)
        rounded = np.rint(weight / scale).astype(np.int8)
        for array, tensor in ((rounded, f"{name}_quantized"), (scale, f"{name}_scale")):
            written[tensor].CopyFrom(numpy_helper.from_array(array, tensor))


def _require_products(graph: onnx.GraphProto) -> None:
    """Raises CheckError if there is nothing to quantize, or the graph would not be valid."""
    kinds = {each.name: each.data_type for each in graph.initializer}
    found = {
        onnx.helper.tensor_dtype_to_np_dtype(kinds[node.input[1]]).name
        for node in graph.node
        if node.op_type in QUANTIZED_OPERATORS and node.input[1] in kinds
    }
    if found != {"float32"}:
        raise CheckError(
            f"int8 quantizes {' and '.join(QUANTIZED_OPERATORS)} with constant fp32 weights alone, "
            f"and the model has {', '.join(sorted(found)) or 'none'} of them"
        )


def quality_of(recipe: Recipe) -> Quality:
    """The recipe's own, or the cosine of its first output of real numbers on its example."""
    if recipe.quality is not None:
        return recipe.quality()
    inputs = {name: recipe.example(name) for name in recipe.inputs}
    for name, array in torch_run(recipe)(inputs).items():
        # The cosine of one number with another is 1, however far they are apart.
        if np.issubdtype(array.dtype, np.floating) and array.size > 1:
            return Quality(metric="cosine", inputs=inputs, output=name, least=LEAST_COSINE)
    raise RecipeError(
        f"no output of model {recipe.name!r} has several real numbers on its example, whose cosine "
        "could judge a lower precision: give more rows, or an export.recipe.Recipe with a quality"
    )


def check_quality(
    recipe: Recipe, quality: Quality, precision: str, *, original: Run, reduced: Run
) -> Figure:
    """The figure of a reduced precision. Raises CheckError below the bound."""
    if precision not in quality.least:
        raise RecipeError(
            f"model {recipe.name!r} states no least {quality.metric} for {precision}, but must: "
            f"it has {', '.join(quality.least)}"
        )
    if quality.output not in recipe.outputs:
        raise RecipeError(
            f"quality is measured on {quality.output!r}, but must be on one of "
            f"{', '.join(recipe.outputs)}"
        )
    expected = original(quality.inputs)[quality.output]
    actual = reduced(quality.inputs)[quality.output]
    least = quality.least[precision]
    if quality.metric == "accuracy":
        assert quality.labels is not None
        figure = Figure(
            "accuracy",
            _accuracy(actual, quality.labels),
            least,
            _accuracy(expected, quality.labels),
        )
    else:
        figure = Figure("cosine", _least_cosine(expected, actual), least, None)
    if not figure.value >= least:
        raise CheckError(
            f"{precision} loses too much: the {figure.metric} of output {quality.output!r} on "
            f"{len(expected)} real inputs is {figure.value:.4f}, but must be at least {least}"
        )
    return figure


def _accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    return float((scores.argmax(axis=-1) == labels).mean())


def _least_cosine(expected: np.ndarray, actual: np.ndarray) -> float:
    """The worst row's cosine, or that of all rows where each is one number.

    NaN if a row has no direction, which no bound accepts.
    """
    rows, others = (each.reshape(len(each), -1).astype(np.float64) for each in (expected, actual))
    if rows.shape[1] == 1:  # numbers of one sign have cosine 1: what counts is their proportion
        rows = rows.T
        others = others.T
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (rows * others).sum(axis=1) / lengths
    return float(cosines.min()) if len(cosines) else math.nan
