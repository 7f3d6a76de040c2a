"""A command of ``jitney``, run in this process: its exit status and what it says."""

from typing import NamedTuple

from jitney import cli
from jitney.errors import JitneyError
from typer.testing import CliRunner


class Done(NamedTuple):
    status: int
    error: str
    """What the command says it failed with. Empty if it did not."""
    output: str


def run_command(arguments: list[str]) -> Done:
    """Raises any error that is no JitneyError: a traceback for the user."""
    result = CliRunner().invoke(cli.make_app(), arguments)
    error = result.exception
    if error is None or isinstance(error, SystemExit):
        return Done(result.exit_code, "", result.output)
    if not isinstance(error, JitneyError):
        raise error
    return Done(1, str(error), result.output)
