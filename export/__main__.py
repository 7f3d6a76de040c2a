"""The command ``python -m export``: options in, progress and a table out.

Owns what is printed. Every error that the export raises on purpose is one line and exit status 1; a
traceback means a bug of ours.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer
from jitney.engine.quiet import quiet_imports
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from export.errors import ExportError, MissingToolError

# What every export imports; torch itself imports onnxscript while it traces.
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@app.command()
def export(
    model: Annotated[
        str,
        typer.Argument(
            help="A recipe (`digits`, `minilm`), or `module:function` of your own that returns "
            "(torch module, example inputs, dynamic dimensions)."
        ),
    ],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="ONNX in full precision. The default if nothing is said.")
    ] = False,
    tensorrt: Annotated[
        bool, typer.Option("--tensorrt", help="A TensorRT engine. Needs TensorRT and its GPU.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="ONNX with int8 weights, for CPUs, as NAME_int8.")
    ] = False,
    fp16: Annotated[
        bool,
        typer.Option("--fp16", help="ONNX in fp16, as NAME_fp16; or the engine, with --tensorrt."),
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="The engine in bf16.")] = False,
    out_folder: Annotated[
        Path, typer.Option("--out", help="The model repository to write into.")
    ] = Path("model_repository"),
    name: Annotated[
        str | None, typer.Option(help="Name of the served model. Default: the recipe's.")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="The server's largest batch. Default: the recipe's.", min=1)
    ] = None,
    timing_cache: Annotated[
        Path, typer.Option(help="Where TensorRT keeps the timings of its kernels between builds.")
    ] = Path("~/.cache/jitney/tensorrt-timings"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that no export has written.")
    ] = False,
) -> None:
    """Turn a torch model into one that Triton Inference Server batches by itself.

    The exported model is compared with the original at several batch sizes and lengths; if a check
    fails, nothing is written. docs/export.md says how to export a model of your own.

    Examples:

        python -m export digits
        python -m export minilm --onnx --int8
        python -m export my_models:encoder --out my_repository
    """
    require_libraries()
    from export.pipeline import export as run
    from export.pipeline import plan, require
    from export.resolve import resolve

    options = {"onnx": onnx, "tensorrt": tensorrt, "int8": int8, "fp16": fp16, "bf16": bf16}
    # Making the recipe may train or load a model: refuse before it what can be refused.
    require(plan("NAME", **options), out_folder)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(f"{model}: preparing", total=None)
        recipe = resolve(model, name=name, max_batch_size=max_batch_size)
        progress.update(task, total=1, completed=1)
        made = run(
            recipe,
            plan(recipe.name, **options),
            out_folder,
            progress,
            timing_cache=timing_cache.expanduser(),
            overwrite=overwrite,
        )
    if recipe.note:
        out.print(f"{recipe.name}: {recipe.note}", markup=False)
    table = Table("folder", "MB", "largest difference", "quality", "seconds", box=None)
    for each in made:
        table.add_row(
            escape(str(out_folder / each.target.folder)),
            f"{each.bytes / 1e6:.1f}",
            f"{each.difference:.1e}",
            "full precision" if each.figure is None else str(each.figure),
            f"{each.seconds:.0f}",
        )
    out.print(table)


def require_libraries() -> None:
    """Raises MissingToolError without the extra ``export``. Imports nothing."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingToolError(f"an export needs {', '.join(missing)}: pip install -e '.[export]'")


def main() -> None:
    """Entry point of ``python -m export``."""
    quiet_imports()
    try:
        app(prog_name="python -m export")
    except ExportError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
