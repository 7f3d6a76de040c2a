"""From a word on the command line to a recipe: a name of ours, or a user's ``module:function``.

A user's function takes no arguments and returns a ``Recipe``, or just (module, example inputs,
dynamic dimensions); then everything else is derived or has a stated default.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jitney.errors import nearest, show

from export import recipes
from export.errors import RecipeError
from export.parity import flatten
from export.recipe import Dimension, Recipe, check_model_name

# The bounds of a dynamic dimension given only by name; other bounds need a Dimension.
BATCH_OPTIMUM = 4
BATCH_MAXIMUM = 8
HALF = 0.5
DOUBLE = 2
# A float16 number has three digits, and every runtime rounds differently.
HALF_TOLERANCE = 1e-2


def known_recipes() -> list[str]:
    """The names of the recipes that come with the project."""
    return sorted(each.name for each in pkgutil.iter_modules(recipes.__path__))


def resolve(model: str, *, name: str | None = None, max_batch_size: int | None = None) -> Recipe:
    """The recipe of ``model``; ``name`` and ``max_batch_size`` replace its own."""
    if name is not None:
        check_model_name(name)
    module_name, colon, function_name = model.partition(":")
    if colon:
        recipe = _from_function(model, module_name, function_name)
    elif model in known_recipes():
        recipe = importlib.import_module(f"{recipes.__name__}.{model}").recipe()
    else:
        raise RecipeError(
            f"there is no recipe {show(model)}{nearest(model, known_recipes())}; known are "
            f"{', '.join(known_recipes())}, and a model of your own is given as module:function"
        )
    if name is not None:
        recipe = replace(recipe, name=name)
    if max_batch_size is not None:
        recipe = _with_batch(recipe, max_batch_size)
    recipe.module.eval()
    return recipe


def _with_batch(recipe: Recipe, maximum: int) -> Recipe:
    """The recipe with another largest batch; what is checked beyond it is checked at it."""
    if maximum < recipe.batch.minimum:
        raise RecipeError(
            f"max-batch-size is {maximum}, but must be at least {recipe.batch.minimum}"
        )
    batch = recipe.batch
    checks = tuple(sorted({*(min(size, maximum) for size in batch.checks), maximum}))
    optimum = min(batch.optimum, maximum)
    changed = replace(batch, optimum=optimum, maximum=maximum, checks=checks)
    return replace(recipe, dimensions={**recipe.dimensions, batch.name: changed})


def _from_function(model: str, module_name: str, function_name: str) -> Recipe:
    function = _find(model, module_name, function_name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise RecipeError(f"{model} takes arguments, but must take none: {error}") from error
    made = function()
    if isinstance(made, Recipe):
        return made
    if not isinstance(made, tuple) or len(made) != 3:
        raise RecipeError(
            f"{model} returned {show(made) if made is None else 'a ' + type(made).__name__}"
            f"{f' of {len(made)}' if isinstance(made, tuple) else ''}, but must return an "
            "export.recipe.Recipe or (module, example inputs, dynamic dimensions)"
        )
    return from_parts(function_name.rpartition(".")[2], *made, source=model)


def _find(model: str, module_name: str, function_name: str) -> Callable[[], Any]:
    if not all(part.isidentifier() for part in f"{module_name}.{function_name}".split(".")):
        raise RecipeError(f"{show(model)} must be module:function, both by their Python names")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise RecipeError(f"{module_name} cannot be imported: {error}") from error
        raise RecipeError(
            f"there is no module {show(module_name)} (of {model}) in {here} or installed"
        ) from error
    function: Any = module
    for part in function_name.split("."):
        if not hasattr(function, part):
            raise RecipeError(
                f"{module_name} ({getattr(module, '__file__', 'built in')}) has no function "
                f"{show(function_name)}{nearest(part, vars(module))}"
            )
        function = getattr(function, part)
    if not callable(function):
        raise RecipeError(f"{model} is a {type(function).__name__}, but must be a function")
    return function


def from_parts(name: str, module: Any, inputs: Any, dynamic: Any, *, source: str) -> Recipe:
    """A recipe of the three things that a user must know; see docs/export.md for the defaults."""
    if not isinstance(module, torch.nn.Module):
        raise RecipeError(
            f"{source} returned a {type(module).__name__} first, but must return a torch.nn.Module"
        )
    named = _named_inputs(module, inputs, source)
    dimensions: dict[str, Dimension] = {}
    if not isinstance(dynamic, Mapping) or not all(
        isinstance(each, Mapping) for each in dynamic.values()
    ):
        raise RecipeError(
            f"{source} returned {show(dynamic)} third, but must return a dictionary from each "
            'input to its dynamic dimensions, such as {"image": {0: "batch"}}'
        )
    by_input: dict[str, dict[int, str]] = {}
    for input_name, indices in dynamic.items():
        by_input[input_name] = {}
        for index, given in indices.items():
            shape = named[input_name].shape if input_name in named else ()
            size = shape[index] if isinstance(index, int) and 0 <= index < len(shape) else 1
            dimension = _dimension(given, batch=index == 0, size=size)
            before = dimensions.setdefault(dimension.name, dimension)
            if not isinstance(given, str):
                dimensions[dimension.name] = before = dimension
            by_input[input_name][index] = before.name
    result = _first_run(module.eval(), named, source)
    half = any(each.dtype == torch.float16 for each in flatten(result))
    return Recipe(
        name=name,
        module=module,
        inputs=named,
        dynamic=by_input,
        dimensions=dimensions,
        outputs=_output_names(result),
        tolerance=HALF_TOLERANCE if half else Recipe.tolerance,
    )


def _named_inputs(module: torch.nn.Module, inputs: Any, source: str) -> dict[str, torch.Tensor]:
    """Example inputs by the names of ``forward``'s parameters."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    parameters = list(inspect.signature(module.forward).parameters.values())
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    if isinstance(inputs, (tuple, list)):
        if len(inputs) > len(names):
            raise RecipeError(
                f"{source} returned {len(inputs)} example inputs, but forward takes "
                f"{len(names)}: {', '.join(names)}"
            )
        inputs = dict(zip(names, inputs, strict=False))
    if not isinstance(inputs, Mapping):
        raise RecipeError(
            f"{source} returned a {type(inputs).__name__} second, but must return example inputs: "
            "a tensor, a tuple of tensors, or a dictionary of them by name"
        )
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise RecipeError(
                f"example input {name!r} is a {type(tensor).__name__}, but must be a tensor"
            )
        if name not in names and not takes_any:
            raise RecipeError(
                f"example input {name!r} is no parameter of forward{nearest(str(name), names)}; it "
                f"takes {', '.join(names)}"
            )
    return dict(inputs)


def _dimension(given: Any, *, batch: bool, size: int) -> Dimension:
    """Ours as it is, torch's with its bounds, or a name with bounds around the example's size."""
    if isinstance(given, Dimension):
        return given
    if isinstance(given, str):
        if batch:
            return Dimension(given, 1, BATCH_OPTIMUM, BATCH_MAXIMUM)
        return Dimension(given, max(1, int(size * HALF)), max(1, size), max(1, size * DOUBLE))
    bounds = getattr(given, "min", None), getattr(given, "max", None)
    if isinstance(given, torch.export.Dim) and isinstance(bounds[1], int) and bounds[1] < 2**31:
        smallest = max(1, bounds[0] or 1)
        return Dimension(given.__name__, smallest, min(max(size, smallest), bounds[1]), bounds[1])
    raise RecipeError(
        f"a dynamic dimension is {show(given)}, but must be a name, an export.recipe.Dimension, or "
        "a torch.export.Dim with a maximum"
    )


def _first_run(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], source: str) -> Any:
    """What the module returns for its example."""
    try:
        with torch.no_grad():
            return module(**inputs)
    except Exception as error:
        raise RecipeError(
            f"the module of {source} fails on its own example inputs: "
            f"{type(error).__name__}: {error}"
        ) from error


def _output_names(result: Any) -> list[str]:
    """The keys of a returned dictionary; else ``output``, or ``output_0`` and so on."""
    if isinstance(result, Mapping) and all(map(torch.is_tensor, result.values())):
        return [str(name) for name in result]
    count = len(flatten(result))
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
