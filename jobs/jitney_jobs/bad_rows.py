"""A bad row as an error file has it: its place, its reason, and what was read."""

from typing import Any

import msgspec

from jitney_jobs.json_lines import encoded
from jitney_jobs.non_finite import NonFinite
from jitney_jobs.rows import RowValues


class BadRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of an error file. ``row`` is the index in the file, ``offset`` where it begins there,
    in bytes without compression; ``input`` the row's values, or its line if it has none."""

    file: str
    row: int
    error: str
    offset: int | None = None
    input: Any = None
    answer: RowValues | None = None
    """Of a line for OpenAI's API: the service's own line, which stands beside the others then, in
    place of ``error``."""

    @property
    def text(self) -> str:
        """For an error that gives an example."""
        return f"row {self.row} of {self.file}: {self.error}"


def error_line(bad: BadRow) -> bytes:
    try:
        given = NonFinite("text").replaced(bad.input)
        return encoded(_shown(bad, bad.error, bad.answer, given)) + b"\n"
    except Exception:  # what JSON cannot hold may be why it is bad
        return encoded(_shown(bad, ascii(bad.error), None, ascii(bad.input))) + b"\n"


def _shown(bad: BadRow, error: str, answer: RowValues | None, given: Any) -> RowValues:
    offset = {} if bad.offset is None else {"offset": bad.offset}
    place = {"file": bad.file, "row": bad.row}
    return {**place, **(answer or {"error": error}), **offset, "input": given}
