"""Commands of ``jitney`` in this process: their exit status, and what they say."""

import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from jitney import cli
from typer.testing import CliRunner, Result


class Done(NamedTuple):
    status: int
    error: str
    """What the command failed with, as the user reads it. Empty if it did not."""
    output: str


def run_command(arguments: list[str]) -> Done:
    """A command as the script of ``jitney`` runs it. Raises any exception that would be a traceback
    for the user."""
    output = io.StringIO()
    errors = io.StringIO()
    status = 0
    with (
        mock.patch.object(sys, "argv", ["jitney", *arguments]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    _, _, error = errors.getvalue().rpartition("error: ")
    return Done(status, error if "error: " in errors.getvalue() else "", output.getvalue())


def batch(*words: str | Path) -> Result:
    """`jitney batch` with these words."""
    return CliRunner().invoke(cli.make_app(), ["batch", *map(str, words)])


def run_twice(source: Path, output: Path, *options: str) -> Result:
    map_options = ["--task", "map", "--map", "tests.jobs.job_rows:twice", "--workers", "0"]
    return batch("run", source, output, *map_options, *options)
