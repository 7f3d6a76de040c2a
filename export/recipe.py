"""What is exported: one frozen description per model, checked when it is made.

Owned by the code that makes it (``recipes/``, or a user's function by way of ``resolve``). The
steps only read it. Everything derived from the sizes of dynamic dimensions is computed here: the
inputs of a check, the profile of an engine, the example that is traced.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jitney.errors import nearest, show

from export.errors import RecipeError

NamedArrays = Mapping[str, np.ndarray]
DimensionSizes = Mapping[str, int]  # by the name of a dynamic dimension

# numpy's name of an element type -> the server's, for all types of inputs and outputs.
SERVER_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
# More combinations of sizes than this are thinned: the first, the last and every few between.
MOST_CHECKS = 24


@dataclass(frozen=True)
class Dimension:
    """A dynamic dimension: its size is anything in [minimum, maximum].

    ``optimum`` is the size an engine is tuned for, ``checks`` are the sizes at which the exported
    model is compared with the original; by default the three others and an odd one between.
    """

    name: str
    minimum: int
    optimum: int
    maximum: int
    checks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise RecipeError(f"dimension name is {show(self.name)}, but must be an identifier")
        if not 1 <= self.minimum <= self.optimum <= self.maximum:
            raise RecipeError(
                f"dimension {self.name!r} has minimum {self.minimum}, optimum {self.optimum} and "
                f"maximum {self.maximum}, but must have 1 <= minimum <= optimum <= maximum"
            )
        for size in self.checks:
            if not self.minimum <= size <= self.maximum:
                raise RecipeError(
                    f"dimension {self.name!r} is to be checked at size {size}, but must be "
                    f"checked in [{self.minimum}, {self.maximum}]"
                )
        if not self.checks:
            odd = min(self.maximum, self.minimum + 2)
            sizes = sorted({self.minimum, odd, self.optimum, self.maximum})
            object.__setattr__(self, "checks", tuple(sizes))


@dataclass(frozen=True)
class Quality:
    """Real inputs, and the figure by which a reduced precision is judged on them.

    ``cosine``: the smallest cosine between a row of ``output`` and the original's row; with one
    number per row, that of all rows together.
    ``accuracy``: the share of rows whose largest value stands at ``labels``.
    ``least`` gives the smallest allowed figure by precision: ``int8``, ``fp16``, ``bf16``.
    """

    metric: Literal["cosine", "accuracy"]
    inputs: NamedArrays
    output: str
    least: Mapping[str, float]
    labels: np.ndarray | None = None

    def __post_init__(self) -> None:
        if (self.labels is None) != (self.metric == "cosine"):
            raise RecipeError("quality needs labels for accuracy, and none for cosine")


@dataclass(frozen=True)
class Recipe:
    """A module and everything that its export needs to know.

    - ``inputs``: example inputs by name, the batch first; real ones are the best.
    - ``dynamic``: by input, {dimension index: name of a dimension}. Index 0 of every input is the
      batch, and its dimension's maximum becomes the server's ``max_batch_size``.
    - ``outputs``: a name for each tensor that the module returns, in order.
    - ``tolerance``: largest allowed |difference| / max(1, |expected|) of a value.
    - ``inputs_at``: inputs at given sizes. By default the example, cut or repeated.
    - ``quality``: made when a reduced precision is asked for. By default the cosine of the first
      output on the example.
    - ``max_queue_delay_us``: how long the server may wait for other requests, in microseconds.
    - ``note``: a line for the terminal, such as the accuracy of what was just trained.
    """

    name: str
    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    dynamic: Mapping[str, Mapping[int, str]]
    dimensions: Mapping[str, Dimension]
    outputs: Sequence[str]
    tolerance: float = 1e-4
    inputs_at: Callable[[DimensionSizes], NamedArrays] | None = None
    quality: Callable[[], Quality] | None = None
    max_queue_delay_us: int = 1000
    note: str = ""

    def __post_init__(self) -> None:
        _check_names(self)
        _check_dynamic(self)

    @property
    def batch(self) -> Dimension:
        """The dimension that the server batches over."""
        return self.dimensions[next(iter(self.dynamic.values()))[0]]

    def check_sizes(self) -> list[DimensionSizes]:
        """The sizes at which the exported model is compared with the original."""
        names = list(self.dimensions)
        combinations = itertools.product(*(self.dimensions[name].checks for name in names))
        every = [dict(zip(names, sizes, strict=True)) for sizes in combinations]
        if len(every) <= MOST_CHECKS:
            return list(every)
        kept = np.unique(np.linspace(0, len(every) - 1, MOST_CHECKS).round().astype(int))
        return [every[index] for index in kept]

    def make_inputs(self, sizes: DimensionSizes) -> dict[str, np.ndarray]:
        """Inputs in which every dynamic dimension has the given size."""
        if self.inputs_at is not None:
            return {name: np.asarray(array) for name, array in self.inputs_at(sizes).items()}
        rng = np.random.default_rng(sum(sizes.values()))
        return {
            name: _resized(self.example(name), self.dynamic[name], sizes, rng)
            for name in self.inputs
        }

    def example(self, name: str) -> np.ndarray:
        """The example of one input as an array."""
        return self.inputs[name].detach().cpu().numpy()

    def shape_at(self, name: str, sizes: DimensionSizes) -> tuple[int, ...]:
        """The shape of an input, batch included, at given sizes."""
        dynamic = self.dynamic[name]
        return tuple(
            sizes[dynamic[index]] if index in dynamic else size
            for index, size in enumerate(self.inputs[name].shape)
        )

    def profile(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The smallest, the tuned-for and the largest shape of an input."""
        dimensions = self.dimensions.values()
        return (
            self.shape_at(name, {each.name: each.minimum for each in dimensions}),
            self.shape_at(name, {each.name: each.optimum for each in dimensions}),
            self.shape_at(name, {each.name: each.maximum for each in dimensions}),
        )


def _resized(
    example: np.ndarray, dynamic: Mapping[int, str], sizes: DimensionSizes, rng: np.random.Generator
) -> np.ndarray:
    """The example cut or repeated; real numbers get noise, so that repeated rows differ."""
    array = example
    for index, name in dynamic.items():
        array = np.take(array, np.arange(sizes[name]) % example.shape[index], axis=index)
    if np.issubdtype(array.dtype, np.floating) and array.shape != example.shape:
        array = array + 0.1 * example.std() * rng.standard_normal(array.shape)
    return np.ascontiguousarray(array, dtype=example.dtype)


def check_model_name(name: str) -> None:
    """Raises RecipeError for what cannot be a folder's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise RecipeError(
            f"model name is {show(name)}, but must be a folder's name: letters, digits, '_', '.' "
            "and '-'"
        )


def _check_names(recipe: Recipe) -> None:
    check_model_name(recipe.name)
    if not recipe.inputs:
        raise RecipeError(f"model {recipe.name!r} has no example inputs, but must have one or more")
    for kind, names in (("input", list(recipe.inputs)), ("output", list(recipe.outputs))):
        for name in names:
            if not isinstance(name, str) or not name.isidentifier():
                raise RecipeError(f"{kind} name is {show(name)}, but must be an identifier")
    every = [*recipe.inputs, *recipe.outputs]
    for name in every:
        if every.count(name) > 1:
            raise RecipeError(f"{name!r} names two inputs or outputs, but must name one")
    for name, tensor in recipe.inputs.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in SERVER_TYPES:
            raise RecipeError(
                f"input {name!r} is of type {kind}, but must be one of {', '.join(SERVER_TYPES)}: "
                "cast inside the module"
            )


def _check_dynamic(recipe: Recipe) -> None:
    """Every dynamic dimension exists, and index 0 of every input is the one batch."""
    for name in recipe.dynamic:
        if name not in recipe.inputs:
            raise RecipeError(
                f"dynamic dimensions are given for {name!r}, which is no input"
                f"{nearest(name, recipe.inputs)}; the inputs are {', '.join(recipe.inputs)}"
            )
    batches = set()
    for name, tensor in recipe.inputs.items():
        dynamic = recipe.dynamic.get(name, {})
        for index, dimension in dynamic.items():
            if not isinstance(index, int):
                raise RecipeError(
                    f"a dynamic dimension of input {name!r} has index {show(index)}, but must have "
                    "a whole number"
                )
            if not 0 <= index < tensor.ndim:
                raise RecipeError(
                    f"input {name!r} has no dimension {index}: its example has {tensor.ndim} "
                    f"(shape {list(tensor.shape)}), so that it must be in [0, {tensor.ndim - 1}]"
                )
            if dimension not in recipe.dimensions:
                raise RecipeError(
                    f"dimension {index} of input {name!r} is called {dimension!r}, which is not "
                    f"described{nearest(dimension, recipe.dimensions)}"
                )
        if 0 not in dynamic:
            raise RecipeError(
                f"dimension 0 of input {name!r} is fixed at {list(tensor.shape)[:1]}, but must be "
                "dynamic: it is the batch, which the server changes from call to call"
            )
        batches.add(dynamic[0])
    if len(batches) > 1:
        raise RecipeError(
            f"dimension 0 is called {' and '.join(sorted(batches))}, but must have one name: it is "
            "the batch of every input"
        )
    if recipe.batch.minimum != 1:
        raise RecipeError(
            f"batch dimension {recipe.batch.name!r} has minimum {recipe.batch.minimum}, but must "
            "have 1: the server runs a request without companions alone"
        )
    for name in recipe.inputs:
        for index, dimension in recipe.dynamic[name].items():
            if index > 0 and dimension == recipe.batch.name:
                raise RecipeError(
                    f"dimension {index} of input {name!r} is called {dimension!r} like the batch, "
                    "but must have another name: the server joins requests along dimension 0 alone"
                )
    used = {each for dynamic in recipe.dynamic.values() for each in dynamic.values()}
    for dimension in recipe.dimensions:
        if dimension not in used:
            raise RecipeError(f"dimension {dimension!r} is described, but no input has it")
