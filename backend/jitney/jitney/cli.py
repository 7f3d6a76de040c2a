"""The ``jitney`` command. Entry points of group ``jitney.commands`` name its subcommands.

Each is a function whose parameters are options, or a Typer application of several commands. It
stands in the package that does the work, and imports what is slow when it runs, so that ``--help``
is quick. Other distributions may add commands; one that cannot be imported costs a warning.

Every error that Jitney raises on purpose becomes one readable line and its exit status, mostly 1; a
traceback means a bug of ours.
"""

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

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
        _print_to_stderr("[bold red]error:[/]", str(error))
        sys.exit(int(error.exit_status))


def make_app() -> typer.Typer:
    """The application with every command that is installed and can be imported."""
    app = typer.Typer(
        help="In-flight batching over a paged KV cache, as a backend of Triton Inference Server.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(_options)
    for point in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
        command = _load_command(point)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        elif command is not None:
            app.command(point.name)(command)
    return app


def _load_command(point: EntryPoint) -> Any:
    """What an entry point names. None: it cannot be imported, and a warning says so."""
    try:
        return point.load()
    except Exception as error:  # another distribution's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        text = f"the command {point.name} ({point.value}) is left out: {reason}"
        _print_to_stderr("[yellow]warning:[/]", text)
        return None


def _print_to_stderr(markup: str, text: str) -> None:
    # Without ``emoji=False`` rich would replace codes in the text, such as ``:b:``.
    console = Console(stderr=True, highlight=False, emoji=False)
    console.print(f"{markup} {escape(text)}", soft_wrap=True)


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
    """The options before a subcommand. Typer handles ``--version`` by itself, before this is
    called, so nothing is left to do."""


if __name__ == "__main__":
    main()
