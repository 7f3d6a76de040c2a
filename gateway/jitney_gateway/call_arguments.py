"""What reads the arguments of a tool call while the model writes them.

The parser makes a reader once it is certain that a text is a call of one of the request's tools.
The reader turns the text into JSON, piece by piece. The pieces are the same text together, however
the model's text was cut. At any time they are the beginning of a JSON object.

There is a reader for each way in which models write arguments: ``json_arguments.py``,
``tagged_arguments.py`` and ``python_arguments.py``.
"""

from typing import Literal, NamedTuple, Protocol


class ReadResult(NamedTuple):
    """What a reader made of a text."""

    size: int
    """Characters at the beginning of the text that the reader is done with. It wants to see the
    rest again, with what comes next."""
    arguments: str
    """The JSON that this adds to the arguments."""
    end: Literal["complete", "cut"] | None = None
    """Complete: the arguments are whole. Cut: they are not, and the rest of the text cannot belong
    to them. None: they go on."""


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str) -> ReadResult:
        """Read more. ``text`` is the rest of the last text (from ``ReadResult.size`` on), and what
        has come since."""

    def finish(self, text: str) -> ReadResult:
        """The model has stopped in the middle of the arguments. ``text`` is the rest of the last
        text. The progress ends with ``cut``."""
