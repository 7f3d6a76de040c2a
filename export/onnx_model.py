"""A torch module as an ONNX file: traced with dynamic dimensions, and valid by ONNX's own checker.

Owns the file and what is read from it (types and shapes of inputs and outputs). Whether it
computes the same as the module is ``parity``'s question.
"""

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper

from export.errors import CheckError, ExportError
from export.recipe import Recipe

OPSET = 20
# Weights beyond this lie in a file beside the model: a protobuf message ends at 2 GiB.
LARGEST_INLINE_BYTES = 1_500_000_000


@dataclass(frozen=True)
class GraphTensor:
    """An input or output of the graph: its numpy type and its shape, None where it varies."""

    name: str
    type: str
    shape: tuple[int | None, ...]


def export_onnx(
    recipe: Recipe,
    module: torch.nn.Module,
    path: Path,
    *,
    largest_inline: int = LARGEST_INLINE_BYTES,
) -> None:
    """Trace ``module`` and write it to ``path``, large weights beside it.

    ``module`` is the recipe's own, or that in another precision: it has the same inputs and
    outputs. Raises CheckError if the file is invalid.
    """
    batch = recipe.batch.name
    # A size of 1 would be taken for a constant, so that the example has at least 2 where it can,
    # and the batch always: the server knows it as dynamic even if it never exceeds 1.
    largest = {
        each.name: max(2, each.maximum) if each.name == batch else each.maximum
        for each in recipe.dimensions.values()
    }
    sizes = {
        each.name: min(max(2, each.optimum), largest[each.name])
        for each in recipe.dimensions.values()
    }
    dimensions = {
        each.name: torch.export.Dim(each.name, min=each.minimum, max=largest[each.name])
        for each in recipe.dimensions.values()
        if each.minimum < largest[each.name]  # torch's dimensions vary
    }
    shapes = {
        name: {
            index: dimensions[symbol]
            for index, symbol in recipe.dynamic[name].items()
            if symbol in dimensions
        }
        for name in recipe.inputs
    }
    example = {name: torch.from_numpy(array) for name, array in recipe.make_inputs(sizes).items()}
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _with_names(module, recipe.inputs),
                (),
                kwargs=example,
                dynamo=True,
                dynamic_shapes=shapes,
                opset_version=OPSET,
                input_names=list(recipe.inputs),
                output_names=list(recipe.outputs),
                verbose=False,
            )
    except Exception as error:
        raise ExportError(
            f"torch could not trace model {recipe.name!r} with dynamic dimensions "
            f"{', '.join(dimensions)}: {_root_cause(error)}"
        ) from error
    assert program is not None
    weights = sum(each.numel() * each.element_size() for each in module.state_dict().values())
    program.save(path, external_data=weights > largest_inline)
    check_onnx(recipe, path)


class _NamedInputs(torch.nn.Module):
    """A module whose ``forward`` takes any keyword, under a signature that names the inputs.

    The tracer matches dynamic dimensions with the names in the signature.
    """

    def __init__(self, module: torch.nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.module = module

        def forward(**inputs: torch.Tensor) -> object:
            return module(**inputs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _with_names(module: torch.nn.Module, names: Iterable[str]) -> torch.nn.Module:
    parameters = inspect.signature(module.forward).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return _NamedInputs(module, names) if takes_any else module


def check_onnx(recipe: Recipe, path: Path) -> None:
    """ONNX's checker with shape inference, and the names that the recipe promises."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker's own and shape inference's have no common base
        raise CheckError(
            f"the exported graph of {recipe.name!r} is not valid ONNX: {_first_lines(str(error))}. "
            "An output named like a module inside the model is one cause: rename the output"
        ) from error
    inputs, outputs = ports(path)
    for kind, found, expected in (
        ("inputs", inputs, list(recipe.inputs)),
        ("outputs", outputs, list(recipe.outputs)),
    ):
        names = [port.name for port in found]
        if sorted(names) != sorted(expected):
            raise CheckError(
                f"the exported graph of {recipe.name!r} has the {kind} {', '.join(names)}, but "
                f"must have {', '.join(expected)}"
            )


def ports(path: Path) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """The inputs and the outputs of the graph, in its order."""
    graph = onnx.load(str(path), load_external_data=False).graph
    return [_port(each) for each in graph.input], [_port(each) for each in graph.output]


def _port(info: onnx.ValueInfoProto) -> GraphTensor:
    tensor = info.type.tensor_type
    return GraphTensor(
        info.name,
        str(helper.tensor_dtype_to_np_dtype(tensor.elem_type)),
        tuple(
            dimension.dim_value if dimension.HasField("dim_value") else None
            for dimension in tensor.shape.dim
        ),
    )


def _root_cause(error: BaseException) -> str:
    """The first error of the chain: the exporter wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {_first_lines(str(error))}"


def _first_lines(text: str, lines: int = 4) -> str:
    kept = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " ".join(kept[:lines])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what the exporter prints and warns about itself; its errors are exceptions."""
    loggers: list[Any] = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
