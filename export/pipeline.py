"""The steps of one export: trace, check, compare, reduce, build, and write last.

Every target is made and checked in a temporary folder before the first one is written to the
repository, so that a failed check writes nothing and leaves earlier versions as they are.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from export.config_pbtxt import ExportTarget, Precision, config_text
from export.errors import RecipeError
from export.onnx_model import export_onnx, ports
from export.parity import Run, check_parity, check_rows, onnx_run, torch_run
from export.precision import DTYPES, Figure, InPrecision, check_quality, quality_of, to_int8
from export.publish import publish, require_replaceable, require_writable
from export.recipe import Recipe
from export.tensorrt_engine import build_engine, load_tensorrt, profiles_of
from export.tensorrt_run import engine_run, require_gpu


@dataclass(frozen=True)
class CheckedModel:
    """One target, checked but not yet written; ``folder`` becomes its version folder.

    ``difference`` is the largest difference from the torch module.
    """

    target: ExportTarget
    folder: Path
    config: str
    difference: float
    figure: Figure | None
    bytes: int
    seconds: float


def plan(
    name: str, *, onnx: bool, tensorrt: bool, int8: bool, fp16: bool, bf16: bool
) -> list[ExportTarget]:
    """The folders that the command's options ask for; none means ``--onnx``."""
    if bf16 and not tensorrt:
        raise RecipeError("--bf16 is a precision of engines: add --tensorrt")
    if bf16 and fp16:
        raise RecipeError("--fp16 and --bf16 exclude each other")
    targets = []
    if onnx or not (tensorrt or int8 or fp16):
        targets.append(ExportTarget(name, "onnx", "fp32"))
    if int8:
        targets.append(ExportTarget(f"{name}_int8", "onnx", "int8"))
    if fp16 and not tensorrt:
        targets.append(ExportTarget(f"{name}_fp16", "onnx", "fp16"))
    if tensorrt:
        # Without an ONNX model beside it, the engine has the model's name.
        folder = f"{name}_tensorrt" if onnx else name
        precision: Precision = "fp16" if fp16 else "bf16" if bf16 else "fp32"
        suffix = "" if precision == "fp32" else f"_{precision}"
        targets.append(ExportTarget(f"{folder}{suffix}", "tensorrt", precision))
    return targets


def require(targets: Sequence[ExportTarget], repository: Path) -> Any:
    """Check what the targets need, before minutes are spent.

    Returns the TensorRT module if a target needs it. Raises ExportError.
    """
    require_writable(repository)
    if all(target.runtime == "onnx" for target in targets):
        return None
    trt = load_tensorrt()
    require_gpu()
    return trt


def export(
    recipe: Recipe,
    targets: Sequence[ExportTarget],
    repository: Path,
    progress: Progress,
    *,
    timing_cache: Path | None = None,
    overwrite: bool = False,
) -> list[CheckedModel]:
    """Make and check every target, then write all of them. Raises ExportError before writing.

    ``overwrite`` also replaces models that no export has written.
    """
    trt = require(targets, repository)
    for target in targets:
        require_replaceable(repository / target.folder, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="export-") as work:
        made = [
            _make(recipe, target, Path(work) / target.folder, progress, trt, timing_cache)
            for target in targets
        ]
        with _step(progress, f"{recipe.name}: comparing rows alone with rows in a batch"):
            check_rows(recipe)
        for each in made:
            publish(each.folder, each.config, repository / each.target.folder)
    return made


def _make(
    recipe: Recipe,
    target: ExportTarget,
    folder: Path,
    progress: Progress,
    trt: Any,
    timing_cache: Path | None,
) -> CheckedModel:
    """One target in ``folder``, which is new and becomes its version folder."""
    started = time.monotonic()
    folder.mkdir()
    if target.runtime == "onnx":
        path = folder / target.file
        difference, figure = _make_onnx(recipe, target, path, progress)
        inputs, outputs = ports(path)
    else:
        with tempfile.TemporaryDirectory(prefix="export-") as work:
            path = Path(work) / "model.onnx"
            _make_onnx(recipe, target, path, progress)
            inputs, outputs = ports(path)
            plan = build_engine(
                trt, path, profiles_of(recipe), timing_cache=timing_cache, progress=progress
            )
        run = engine_run(trt, plan)
        difference, figure = _judged(recipe, target, run, "TensorRT", progress)
        (folder / target.file).write_bytes(plan)
    return CheckedModel(
        target,
        folder,
        config_text(recipe, target, inputs, outputs),
        difference,
        figure,
        sum(each.stat().st_size for each in folder.iterdir()),
        time.monotonic() - started,
    )


def _make_onnx(
    recipe: Recipe, target: ExportTarget, path: Path, progress: Progress
) -> tuple[float, Figure | None]:
    """The ONNX file of a target, or of the engine to be built from it, checked."""
    label = f"{target.folder}: "
    if target.precision == "int8":
        with tempfile.TemporaryDirectory(prefix="export-") as work:
            source = Path(work) / "model.onnx"
            _traced(recipe, recipe.module, source, progress, label)
            with _step(progress, f"{label}quantizing"):
                example = {name: recipe.example(name) for name in recipe.inputs}
                to_int8(source, path, example)
        return _judged(recipe, target, onnx_run(path), "ONNX Runtime", progress)
    module = recipe.module
    if target.precision in DTYPES:
        module = InPrecision(module, DTYPES[target.precision])
    _traced(recipe, module, path, progress, label)
    if target.precision == "bf16":  # which ONNX Runtime does not compute on a CPU
        return _judged(recipe, target, torch_run(recipe, module), "torch", progress)
    return _judged(recipe, target, onnx_run(path), "ONNX Runtime", progress)


def _judged(
    recipe: Recipe, target: ExportTarget, run: Run, runtime: str, progress: Progress
) -> tuple[float, Figure | None]:
    """The largest difference from the torch module, and the quality of a reduced precision."""
    difference = _compared(recipe, target, run, runtime, progress)
    if target.precision == "fp32":
        return difference, None
    with _step(progress, f"{target.folder}: measuring the quality"):
        figure = check_quality(
            recipe, quality_of(recipe), target.precision, original=torch_run(recipe), reduced=run
        )
    return difference, figure


def _traced(
    recipe: Recipe, module: torch.nn.Module, path: Path, progress: Progress, label: str
) -> None:
    with _step(progress, f"{label}tracing"):
        export_onnx(recipe, module, path)


def _compared(
    recipe: Recipe, target: ExportTarget, run: Run, runtime: str, progress: Progress
) -> float:
    """Run at every combination of sizes; a reduced precision must agree in shapes and types."""
    tolerance = recipe.tolerance if target.precision == "fp32" else None
    task = progress.add_task(
        f"{target.folder}: comparing {runtime} with torch", total=len(recipe.check_sizes())
    )
    worst = 0.0
    for differences in check_parity(recipe, run, runtime=runtime, tolerance=tolerance):
        worst = max(worst, *(each.value for each in differences))
        progress.advance(task)
    return worst


@contextmanager
def _step(progress: Progress, text: str) -> Iterator[None]:
    """A step of unknown length: a moving bar until it is done."""
    task = progress.add_task(text, total=None)
    yield
    progress.update(task, total=1, completed=1)
