"""A command of ``jitney`` as its script runs it, but in this process: its exit status, and what it
says."""

import contextlib
import io
import sys
from typing import NamedTuple
from unittest import mock

from jitney import cli


class Done(NamedTuple):
    status: int
    error: str
    """What the command failed with, as the user reads it. Empty if it did not."""
    output: str


def run_command(arguments: list[str]) -> Done:
    """Raises any exception that would be a traceback for the user."""
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
