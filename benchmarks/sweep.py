"""``jitney bench`` for an image that has neither torch nor the command: ``python -m
benchmarks.sweep --help``."""

import sys

import typer
from jitney.errors import JitneyError
from jitney_measure.bench import bench


def main() -> None:
    """Errors raised on purpose are one line and exit status 1, as with ``jitney``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(bench)
    try:
        app()
    except JitneyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
