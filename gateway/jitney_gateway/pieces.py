"""What a parser makes of a model's text: pieces of content, of reasoning and of tool calls.

``parsers.py`` and ``harmony.py`` have the parsers. ``content_blocks.py`` reads their pieces.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

PieceKind = Literal["reasoning", "text", "call"]


class Piece(NamedTuple):
    """What a text added: more reasoning, more content, or more of a call."""

    kind: PieceKind
    text: str
    """Of a call: more of its arguments, which are JSON once they are complete."""
    name: str | None = None
    """The function that is called, in the first piece of a call."""
    completes_call: bool = False
    """The arguments are complete. A call without such a piece was cut."""


class AnswerParser(Protocol):
    """What an answer asks of the parser of a sequence."""

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the sequence. Returns what it adds, in order."""

    def finish(self) -> list[Piece]:
        """The sequence has ended. Returns what was held back."""


class PieceBuffer:
    """The text of a sequence that is not in a piece yet, and the pieces that have not left yet."""

    def __init__(self) -> None:
        self.held = ""
        """The text that is not in a piece yet."""
        self._pieces: list[Piece] = []

    def push(self, text: str, step: Callable[[], bool]) -> list[Piece]:
        """Add the next text, and take ``step`` after step until one returns False: it needs more
        text. Returns the pieces that the steps made."""
        self.held += text
        has_stepped = True
        while self.held and has_stepped:
            has_stepped = step()
        return self.take_pieces()

    def take(self, size: int) -> str:
        """Take out the first ``size`` characters of the text that is held."""
        text = self.held[:size]
        self.held = self.held[size:]
        return text

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        self._pieces.append(piece)

    def add_to_call(self, text: str, *, completes_call: bool) -> None:
        """Add to the arguments of the last call. If its last piece has not left yet, that one
        grows."""
        name = None
        if self._pieces and self._pieces[-1].kind == "call":
            last = self._pieces.pop()
            text = last.text + text
            name = last.name
        self._pieces.append(Piece("call", text, name, completes_call))

    def take_pieces(self) -> list[Piece]:
        """Take out the pieces."""
        pieces = self._pieces
        self._pieces = []
        return pieces
