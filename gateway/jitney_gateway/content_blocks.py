"""The content of an answer's sequence, as a list of blocks.

A content block is a stretch of reasoning, a stretch of text, or a tool call; they stand in the
order in which the model wrote them. All APIs of language models make their answers of content
blocks. Pure.
"""

import secrets
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from jitney_gateway.pieces import AnswerParser, Piece, PieceKind


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block of a sequence."""

    kind: PieceKind
    index: int
    """In the sequence's list of blocks."""
    id: str
    name: str | None = None
    """Of a call: its function."""
    pieces: list[str] = []
    state: Literal["open", "complete", "incomplete"] = "open"
    """Incomplete: a limit or an error has ended the sequence in this block, or it is a call whose
    arguments were not written to their end."""

    @property
    def text(self) -> str:
        """The whole text. Of a call: its arguments, which are JSON if it is complete."""
        return "".join(self.pieces)


class BlockEvent(NamedTuple):
    """A block begins, gets more text or ends."""

    what: Literal["start", "delta", "stop"]
    block: ContentBlock
    text: str = ""
    """What a delta adds."""


class SequenceContent:
    """The blocks of one sequence, which grow with its text."""

    def __init__(self, parser: AnswerParser, most_calls: int | None = None, echo: str = "") -> None:
        """Calls beyond ``most_calls`` are left out. ``echo`` goes before the text."""
        self._parser = parser
        self._most_calls = most_calls
        self._echo = echo
        self.blocks: list[ContentBlock] = []
        self.finish_reason: str | None = None
        self._leaves_call_out = False
        """Whether the last call is one too many."""

    def calls(self) -> list[ContentBlock]:
        """The blocks that are calls."""
        return [block for block in self.blocks if block.kind == "call"]

    def has_complete_call(self) -> bool:
        """Whether a client can make one of the calls."""
        return any(block.state == "complete" for block in self.calls())

    def joined_text(self, kind: PieceKind) -> str:
        """The text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def push(self, text: str, finish_reason: str | None) -> Iterator[BlockEvent]:
        """Take the next text of the sequence; a ``finish_reason`` ends the sequence.

        Yields what that changes. A caller must take all events, because the sequence changes with
        each. It must use an event before it takes the next one: the event's block may have grown by
        then.
        """
        pieces = self._parser.push(self._echo + text)
        self._echo = ""
        if finish_reason is not None:
            pieces += self._parser.finish()
        for piece in pieces:
            if piece.name is not None:  # a call begins
                num_calls = len(self.calls())
                self._leaves_call_out = num_calls == self._most_calls
            if piece.kind == "call" and self._leaves_call_out:
                continue
            if self._begins_block(piece):
                yield from self._close_last("complete")
                yield self._open(piece.kind, piece.name)
            block = self.blocks[-1]
            block.pieces.append(piece.text)
            if piece.completes_call:
                block.state = "complete"
            yield BlockEvent("delta", block, piece.text)
        self.finish_reason = finish_reason
        if finish_reason is not None:
            yield from self._close_last("complete" if finish_reason == "stop" else "incomplete")

    def _begins_block(self, piece: Piece) -> bool:
        """Whether the next piece is not part of the last block."""
        if piece.name is not None or not self.blocks:
            return True
        return self.blocks[-1].kind != piece.kind

    def _open(self, kind: PieceKind, name: str | None) -> BlockEvent:
        id_ = secrets.token_hex(12)
        block = ContentBlock(kind=kind, index=len(self.blocks), id=id_, name=name)
        self.blocks.append(block)
        return BlockEvent("start", block)

    def _close_last(self, state: Literal["complete", "incomplete"]) -> Iterator[BlockEvent]:
        if not self.blocks:
            return
        block = self.blocks[-1]
        # A call that has all its arguments is complete already, whatever ends the sequence.
        if block.state == "open":
            block.state = "incomplete" if block.kind == "call" else state
        yield BlockEvent("stop", block)
