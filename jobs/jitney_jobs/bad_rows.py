"""A bad row as an error file has it: its place, its reason, and what was read."""

from typing import Any

import msgspec

from jitney_jobs.json_lines import encoded
from jitney_jobs.non_finite import NonFinite
from jitney_jobs.rows import RowValues


class BadRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of an error file. ``row`` is the row's index in the file, ``offset`` where it begins
    there, in bytes without compression. ``input`` has the row's values, or what was read if it has
    none."""

    file: str
    row: int
    error: str
    offset: int | None = None
    input: Any = None
    answer: RowValues | None = None
    """Only of a line for OpenAI's API: the fields of the line that the service would write. They
    stand in place of ``error``."""

    @property
    def text(self) -> str:
        """The row and why it is bad, as an example in an error."""
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
