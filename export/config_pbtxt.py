"""The server's configuration of an exported model.

Inputs and outputs are read from the exported graph, not from the recipe, so that the configuration
fits the model. The same text works with and without a GPU: ``KIND_AUTO`` uses a GPU if there is
one, and the accelerator block applies only to GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from export.errors import CheckError
from export.onnx_model import GraphTensor
from export.publish import MARK
from export.recipe import SERVER_TYPES, Recipe

Runtime = Literal["onnx", "tensorrt"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
ENGINE_CACHE = "/tmp/onnxruntime_tensorrt_cache"


@dataclass(frozen=True)
class ExportTarget:
    """One folder to write: which model, for which runtime, in which precision."""

    folder: str
    runtime: Runtime
    precision: Precision

    @property
    def file(self) -> str:
        """The model's file in its version folder."""
        return "model.plan" if self.runtime == "tensorrt" else "model.onnx"


def config_text(
    recipe: Recipe,
    target: ExportTarget,
    inputs: Sequence[GraphTensor],
    outputs: Sequence[GraphTensor],
) -> str:
    """``config.pbtxt`` of one target."""
    kind = 'platform: "tensorrt_plan"' if target.runtime == "tensorrt" else 'backend: "onnxruntime"'
    lines = [
        f"{MARK} (docs/export.md); precision {target.precision}.",
        f'name: "{target.folder}"',
        kind,
        f'default_model_filename: "{target.file}"',
        f"max_batch_size: {recipe.batch.maximum}",
        *_ports("input", inputs),
        *_ports("output", outputs),
        "dynamic_batching {",
        f"  max_queue_delay_microseconds: {recipe.max_queue_delay_us}",
        "}",
        *_instances(target),
        *_accelerator(recipe, target),
        *_warmup(recipe),
    ]
    return "\n".join(lines) + "\n"


def _ports(kind: str, ports: Sequence[GraphTensor]) -> Iterator[str]:
    yield f"{kind} ["
    for position, port in enumerate(ports):
        if port.type not in SERVER_TYPES:
            raise CheckError(
                f"{kind} {port.name!r} is of type {port.type}, but must be one of "
                f"{', '.join(SERVER_TYPES)}: cast inside the module"
            )
        if not port.shape or port.shape[0] is not None:
            raise CheckError(
                f"{kind} {port.name!r} has shape {list(port.shape)} in the exported graph, but its "
                "first dimension must be the batch"
            )
        # The server has no scalars: a row of rank 0 becomes a row of one value.
        row = [-1 if size is None else size for size in port.shape[1:]]
        yield "  {"
        yield f'    name: "{port.name}"'
        yield f"    data_type: {SERVER_TYPES[port.type]}"
        if row:
            yield f"    dims: {row}"
        else:
            yield "    dims: [ 1 ]"
            yield "    reshape: { shape: [ ] }"
        yield "  }" + ("," if position + 1 < len(ports) else "")
    yield "]"


def _instances(target: ExportTarget) -> Iterator[str]:
    yield "instance_group ["
    yield "  {"
    yield "    count: 1"
    # ONNX Runtime multiplies dynamically quantized int8 fast on the CPU alone.
    yield f"    kind: {'KIND_CPU' if target.precision == 'int8' else 'KIND_AUTO'}"
    yield "  }"
    yield "]"


def _accelerator(recipe: Recipe, target: ExportTarget) -> Iterator[str]:
    """TensorRT inside ONNX Runtime, where the instance has a GPU. Its engines are kept on disk."""
    if target.runtime != "onnx" or target.precision == "int8":
        return
    parameters = {
        "precision_mode": "FP16" if target.precision == "fp16" else "FP32",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": f"{ENGINE_CACHE}/{target.folder}",
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": ENGINE_CACHE,
    }
    for position, word in enumerate(("min", "opt", "max")):
        shapes = (
            f"{name}:{'x'.join(map(str, recipe.profile(name)[position]))}" for name in recipe.inputs
        )
        parameters[f"trt_profile_{word}_shapes"] = ",".join(shapes)
    yield "optimization {"
    yield "  execution_accelerators {"
    yield "    gpu_execution_accelerator : [ {"
    yield '      name : "tensorrt"'
    for key, value in parameters.items():
        yield f'      parameters {{ key: "{key}" value: "{value}" }}'
    yield "    } ]"
    yield "  }"
    yield "}"


def _warmup(recipe: Recipe) -> Iterator[str]:
    """A batch of one and a full batch run before the model is ready, so that no request is slow
    because it is the first.

    Whole numbers are zeros, because random ones may not be valid indices.
    """
    optimum = {each.name: each.optimum for each in recipe.dimensions.values()}
    yield "model_warmup ["
    for position, batch in enumerate(sorted({1, recipe.batch.maximum})):
        yield "  {" if position == 0 else "  },\n  {"
        yield f'    name: "batch_of_{batch}"'
        yield f"    batch_size: {batch}"
        for name in recipe.inputs:
            kind = str(recipe.example(name).dtype)
            row = list(recipe.shape_at(name, optimum)[1:]) or [1]
            content = "random_data" if kind.startswith("float") else "zero_data"
            yield "    inputs {"
            yield f'      key: "{name}"'
            yield f"      value {{ data_type: {SERVER_TYPES[kind]} dims: {row} {content}: true }}"
            yield "    }"
    yield "  }"
    yield "]"
