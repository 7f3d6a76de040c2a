"""A TensorRT engine from an ONNX file, through TensorRT's Python API.

Owns the builder's settings: a strongly typed network (the types of the graph are the types of the
engine), one optimization profile per export, a timing cache on disk, progress. ``trt`` is the
module ``tensorrt``, or ``tensorrt_rtx`` which has the same API: it needs no GPU to build, but its
engines are not for the server. Running an engine is ``tensorrt_run``'s part.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from export.errors import CheckError, ExportError, MissingToolError, RecipeError
from export.publish import write_whole
from export.recipe import Recipe

Shape = tuple[int, ...]
Profiles = Mapping[str, tuple[Shape, Shape, Shape]]  # by input: smallest, tuned for, largest

WHERE = (
    "An engine serves only the TensorRT version and the kind of GPU that built it, so build it "
    "where it will run: in NVIDIA's Triton container of the release that serves (for example "
    "`docker run --rm --gpus all -v $PWD:/work -w /work nvcr.io/nvidia/tritonserver:26.07-py3`), "
    "with `pip install '.[export]' tensorrt==VERSION` for the TensorRT version of that release"
)
# Errors of the logger that a message repeats.
KEPT_ERRORS = 3


def load_tensorrt(name: str = "tensorrt") -> Any:
    """The TensorRT module. Raises MissingToolError, with what to install and where to run."""
    try:
        module = importlib.import_module(name)
        if not hasattr(module, "Builder"):
            raise ImportError(f"the module {name} has no Builder")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingToolError(
            f"--tensorrt needs the Python module {name} with its libraries ({error}). {WHERE}"
        ) from error
    return module


def profiles_of(recipe: Recipe) -> Profiles:
    """The optimization profile that a recipe's dimensions describe."""
    made = {}
    for name in recipe.inputs:
        smallest, tuned, largest = recipe.profile(name)
        made[name] = (smallest, tuned, largest)
    return made


def build_engine(
    trt: Any,
    onnx_path: Path,
    profiles: Profiles,
    *,
    timing_cache: Path | None = None,
    progress: Progress | None = None,
    compute_capabilities: Sequence[str] = (),
) -> bytes:
    """The serialized engine of an ONNX file for one profile of its inputs.

    ``compute_capabilities`` (names of ``trt.ComputeCapability``, such as SM86) are what TensorRT
    for RTX builds for; TensorRT itself builds for the GPU at hand. fp32 is fp32: the shortened
    TF32 is switched off, a reduced precision is a decision of the graph.
    """
    logger = _logger(trt)
    builder = _builder(trt, logger)
    # The network borrows the weights that the parser read: `_parser` must live as long as it does.
    network, _parser = _parse(trt, builder, logger, onnx_path)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    if compute_capabilities:
        config.num_compute_capabilities = len(compute_capabilities)
        for position, each in enumerate(compute_capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, each), position)
    _add_profile(builder, network, config, profiles)
    cache = _load_cache(config, timing_cache)
    with _monitored(trt, config, progress) as monitor:
        plan = builder.build_serialized_network(network, config)
    if monitor is not None and monitor.interrupted:
        raise KeyboardInterrupt
    if plan is None:
        raise ExportError(f"TensorRT could not build the engine{logger.said()}")
    if timing_cache is not None and cache is not None:
        write_whole(timing_cache, bytes(cache.serialize()))
    return bytes(plan)


def _logger(trt: Any) -> Any:
    """A logger that keeps errors for our messages instead of printing them."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message.strip())

        def said(self) -> str:
            return f": {'; '.join(self.errors[:KEPT_ERRORS])}" if self.errors else ""

    return Logger()


def _builder(trt: Any, logger: Any) -> Any:
    try:
        return trt.Builder(logger)
    except (TypeError, RuntimeError) as error:  # pybind11's word for a null pointer
        raise MissingToolError(
            f"TensorRT {trt.__version__} finds no NVIDIA GPU with a fitting driver, which its "
            f"builder needs{logger.said()}. {WHERE}"
        ) from error


def _parse(trt: Any, builder: Any, logger: Any, path: Path) -> tuple[Any, Any]:
    # From TensorRT 11 on there is no other kind of network, and perhaps no flag for this one.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        told = "; ".join(_parser_error(each) for each in errors[:KEPT_ERRORS])
        raise CheckError(
            f"TensorRT's parser refuses {len(errors)} operator(s) of the model: {told}. Serve the "
            "ONNX model instead, where ONNX Runtime takes what TensorRT does not know"
        )
    return network, parser


def _parser_error(error: Any) -> str:
    operator = error.node_operator() if hasattr(error, "node_operator") else ""
    node = error.node_name() if hasattr(error, "node_name") else ""
    where = " ".join(each for each in (operator, f"({node})" if node else "") if each)
    return f"{where}: {error.desc().strip()}" if where else error.desc().strip()


def _add_profile(builder: Any, network: Any, config: Any, profiles: Profiles) -> None:
    profile = builder.create_optimization_profile()
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    names = [each.name for each in inputs]
    for name in profiles:
        if name not in names:
            raise RecipeError(f"the profile names {name!r}, but the inputs are {', '.join(names)}")
    for each in inputs:
        if each.name not in profiles:
            raise RecipeError(f"the profile has no shapes for input {each.name!r}, but must")
        shapes = profiles[each.name]
        _check_shapes(each.name, tuple(each.shape), shapes)
        try:
            profile.set_shape(each.name, *shapes)
        except (ValueError, RuntimeError) as error:
            raise RecipeError(
                f"TensorRT refuses the profile of input {each.name!r}, {shapes}: {error}"
            ) from error
    if config.add_optimization_profile(profile) < 0:
        raise RecipeError(f"TensorRT refuses the profile {dict(profiles)}")


def _check_shapes(name: str, graph: Shape, shapes: Sequence[Shape]) -> None:
    smallest, tuned, largest = shapes
    for word, shape in (("min", smallest), ("opt", tuned), ("max", largest)):
        if len(shape) != len(graph):
            raise RecipeError(
                f"the profile's {word} shape of input {name!r} is {list(shape)}, but must have "
                f"{len(graph)} dimensions"
            )
    for index, size in enumerate(graph):
        low = smallest[index]
        middle = tuned[index]
        high = largest[index]
        where = f"dimension {index} of input {name!r}"
        if not 1 <= low <= middle <= high:
            raise RecipeError(
                f"the profile of {where} has min {low}, opt {middle} and max {high}, but must have "
                "1 <= min <= opt <= max"
            )
        if size != -1 and not low == middle == high == size:
            raise RecipeError(
                f"the profile of {where} has min {low}, opt {middle} and max {high}, but the model "
                f"fixes it at {size}"
            )


def _load_cache(config: Any, path: Path | None) -> Any:
    """The timing cache of earlier builds; an unreadable or foreign one is started anew."""
    if path is None:
        return None
    stored = path.read_bytes() if path.exists() else b""
    for content in (stored, b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, False):
            return cache
    return None


@contextlib.contextmanager
def _monitored(trt: Any, config: Any, progress: Progress | None) -> Iterator[Any]:
    """The builder's phases as bars, one per running phase; Ctrl-C ends the build between steps."""
    if progress is None:
        yield None
        return
    bars: Progress = progress

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.tasks: dict[str, TaskID] = {}
            self.interrupted = False

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self.tasks[name] = bars.add_task(f"TensorRT: {name}", total=steps)

        def step_complete(self, name: str, step: int) -> bool:
            try:
                bars.update(self.tasks[name], completed=step + 1)
            except KeyboardInterrupt:
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, name: str) -> None:
            bars.remove_task(self.tasks.pop(name))

    monitor = Monitor()
    config.progress_monitor = monitor
    try:
        yield monitor
    finally:
        for task in monitor.tasks.values():
            bars.remove_task(task)
