"""The ``jitney`` command. Entry points of group ``jitney.commands`` name its subcommands.

Each is a function whose parameters are options, or a Typer application of several commands; it
stands in the package that does the work, and imports what is slow when it runs, so that ``--help``
is quick. Every error that Jitney raises on purpose becomes one readable line and exit status 1; a
traceback means a bug of ours.
"""

import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from jitney import __version__
from jitney.engine.quiet import quiet_imports
from jitney.errors import JitneyError

COMMANDS = "jitney.commands"


def main() -> None:
    """Entry point of the ``jitney`` script."""
    quiet_imports()
    try:
        make_app()()
    except JitneyError as error:
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def make_app() -> typer.Typer:
    """The application with every command that is installed."""
    app = typer.Typer(
        help="In-flight batching over a paged KV cache, as a backend of Triton Inference Server.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(_options)
    for point in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name)(command)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"jitney {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
