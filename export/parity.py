"""Does an exported model compute what the torch module computes?

Compares value by value, at every combination of sizes that the recipe names, and says which output
differs, where and by how much. What runs the exported model is handed in as a function, so that
ONNX Runtime and TensorRT are judged alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.errors import CheckError, ExportError, RecipeError
from export.recipe import DimensionSizes, NamedArrays, Recipe

# Other batch sizes use other kernels, which round the same row differently.
ROW_TOLERANCE = 1e-4
Run = Callable[[NamedArrays], dict[str, np.ndarray]]  # inputs by name -> outputs by name


@dataclass(frozen=True)
class Difference:
    """The largest |difference| / max(1, |expected|) of one output at one combination of sizes."""

    output: str
    sizes: DimensionSizes
    value: float


def flatten(result: Any) -> list[torch.Tensor]:
    """The tensors that a module returned, in order: one, a sequence or a mapping of them."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        tensors: list[torch.Tensor] = []
        for each in result:
            if each is not None:
                tensors += flatten(each)
        return tensors
    raise RecipeError(
        f"the module returned a {type(result).__name__}, but must return tensors: one, or a tuple, "
        "list or dictionary of them"
    )


def torch_run(recipe: Recipe, module: torch.nn.Module | None = None) -> Run:
    """The module itself: the reference for everything exported from it."""
    judged = recipe.module if module is None else module

    def run(inputs: NamedArrays) -> dict[str, np.ndarray]:
        with torch.no_grad():
            result = judged(**{name: torch.from_numpy(each) for name, each in inputs.items()})
        tensors = flatten(result)
        if len(tensors) != len(recipe.outputs):
            raise RecipeError(
                f"model {recipe.name!r} returns {len(tensors)} tensors, but {len(recipe.outputs)} "
                f"output names are given: {', '.join(recipe.outputs)}"
            )
        return {name: tensor.numpy() for name, tensor in zip(recipe.outputs, tensors, strict=True)}

    return run


def onnx_run(path: Path, *, threads: int = 0) -> Run:
    """An ONNX file on ONNX Runtime's CPU provider; 0 threads means one per core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its exceptions derive from Exception alone
        raise CheckError(f"ONNX Runtime does not load the exported model: {error}") from error
    names = [each.name for each in session.get_outputs()]

    def run(inputs: NamedArrays) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    return run


def check_parity(
    recipe: Recipe, run: Run, *, runtime: str, tolerance: float | None
) -> Iterator[list[Difference]]:
    """Compare at each combination of sizes; yields the differences of each.

    Without a tolerance only shapes and types must agree. Raises CheckError if they do not, or if a
    value exceeds the tolerance.
    """
    reference = torch_run(recipe)
    for sizes in recipe.check_sizes():
        inputs = recipe.make_inputs(sizes)
        try:
            expected = reference(inputs)
        except ExportError:
            raise
        except Exception as error:
            raise RecipeError(
                f"model {recipe.name!r} itself fails at {at(sizes)}: {type(error).__name__}: "
                f"{str(error).strip()}; give its dimensions other bounds or checks"
            ) from error
        _check_batch(recipe, sizes, expected)
        try:
            actual = run(inputs)
        except Exception as error:
            raise CheckError(
                f"{runtime} fails at {at(sizes)}, where torch runs: {str(error).strip()}"
            ) from error
        yield [
            compare(name, expected[name], actual[name], sizes, tolerance, runtime)
            for name in recipe.outputs
        ]


def check_rows(recipe: Recipe) -> None:
    """A row's outputs must not depend on the rows beside it: those are other clients' requests.

    Compares rows in a batch with the same rows alone, both in torch. Raises CheckError.
    """
    reference = torch_run(recipe)
    sizes = {each.name: each.optimum for each in recipe.dimensions.values()}
    size = sizes[recipe.batch.name] = max(recipe.batch.checks)
    inputs = recipe.make_inputs(sizes)
    together = reference(inputs)
    tolerance = max(recipe.tolerance, ROW_TOLERANCE)
    for row in sorted({0, size // 2, size - 1}):
        alone = reference({name: each[row : row + 1] for name, each in inputs.items()})
        for name in recipe.outputs:
            beside = together[name][row : row + 1]
            try:
                compare(name, alone[name], beside, sizes, tolerance, "in the batch")
            except CheckError as error:
                raise CheckError(
                    f"output {name!r} of a row depends on the rows beside it, which are other "
                    f"clients' requests in the server: row {row} of {size}, alone and in the "
                    f"batch: {error}"
                ) from error


def compare(
    output: str,
    expected: np.ndarray,
    actual: np.ndarray,
    sizes: DimensionSizes,
    tolerance: float | None,
    runtime: str,
) -> Difference:
    """The largest difference of one output. Whole numbers must be equal, and NaN meet NaN."""
    where = f"output {output!r} differs at {at(sizes)}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        raise CheckError(
            f"{where}: torch gives {expected.dtype} {list(expected.shape)}, {runtime} "
            f"{actual.dtype} {list(actual.shape)}"
        )
    if expected.size == 0:
        return Difference(output, sizes, 0.0)
    wide = expected.astype(np.float64)
    found = actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(found - wide) / np.maximum(1.0, np.abs(wide))
    same = (wide == found) | (np.isnan(wide) & np.isnan(found))
    difference = np.where(same, 0.0, difference)
    # Infinity or NaN on one side only: the difference is infinite.
    difference = np.where(np.isnan(difference), np.inf, difference)
    if tolerance is None:
        allowed = np.inf
    else:
        allowed = tolerance if np.issubdtype(expected.dtype, np.floating) else 0.0
    worst = tuple(int(each) for each in np.unravel_index(difference.argmax(), difference.shape))
    if not difference[worst] <= allowed:
        wrong = int((difference > allowed).sum())
        raise CheckError(
            f"{where}: at index {list(worst)} torch gives {expected[worst]} and {runtime} "
            f"{actual[worst]}, a difference of {difference[worst]:.3g} where {allowed:.3g} is "
            f"allowed; {wrong} of {difference.size} values differ"
        )
    return Difference(output, sizes, float(difference[worst]))


def at(sizes: DimensionSizes) -> str:
    """Sizes for a message."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _check_batch(recipe: Recipe, sizes: DimensionSizes, expected: Mapping[str, np.ndarray]) -> None:
    """The server splits every output along its first dimension, a row per row of the inputs."""
    batch = sizes[recipe.batch.name]
    for name, array in expected.items():
        shape: Sequence[int] = array.shape
        if not shape or shape[0] != batch:
            raise RecipeError(
                f"output {name!r} has shape {list(shape)} at {at(sizes)}, but its first dimension "
                "must be the batch"
            )
