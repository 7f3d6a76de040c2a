"""An answer as a list of blocks, in the order in which the model wrote them: stretches of reasoning
and of text, and calls. Pure. The answers of all endpoints of language models are made of them.
"""

import secrets
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Literal

import msgspec

from jitney_gateway.parsers import Kind, Parser
from jitney_gateway.wire import Call, Message


class ContentBlock(msgspec.Struct, kw_only=True):
    """One of them."""

    kind: Kind
    index: int
    """In the answer."""
    id: str
    name: str | None = None
    """Of a call."""
    pieces: list[str] = []
    complete: bool | None = None
    """None: open. False: the answer ended in it before the model did."""

    @property
    def text(self) -> str:
        """All of it. Of a call: its arguments, as JSON."""
        return "".join(self.pieces)


Event = tuple[Literal["start", "delta", "stop"], ContentBlock, str]
"""A block begins, gets more text, ends."""


class SequenceContent:
    """One sequence."""

    def __init__(self, parser: Parser, most_calls: int | None = None, echo: str = "") -> None:
        """Calls beyond ``most_calls`` are left out. ``echo`` goes before the text."""
        self._parser = parser
        self._most_calls = most_calls
        self._echo = echo
        self.all: list[ContentBlock] = []
        self.finish_reason: str | None = None

    def of(self, kind: Kind) -> list[ContentBlock]:
        """Those of a kind."""
        return [block for block in self.all if block.kind == kind]

    def take(self, text: str, finish_reason: str | None) -> Iterator[Event]:
        """What the next text adds; ``finish_reason`` ends the sequence."""
        pieces = self._parser.push(self._echo + text)
        self._echo = ""
        if finish_reason is not None:
            pieces += self._parser.finish()
        for kind, more, name in pieces:
            if kind == "call" and len(self.of("call")) == self._most_calls:
                continue
            if not self.all or self.all[-1].kind != kind or kind == "call":
                yield from self._close(True)
                id_ = secrets.token_hex(12)
                self.all.append(ContentBlock(kind=kind, index=len(self.all), id=id_, name=name))
                yield "start", self.all[-1], ""
            self.all[-1].pieces.append(more)
            yield "delta", self.all[-1], more
        self.finish_reason = finish_reason
        if finish_reason is not None:
            yield from self._close(finish_reason == "stop")

    def _close(self, complete: bool) -> Iterator[Event]:
        if self.all:
            self.all[-1].complete = complete or self.all[-1].kind == "call"
            yield "stop", self.all[-1], ""


def turns(said: Iterable[Message | tuple[Kind, str | Call]]) -> Iterator[Message]:
    """The messages of a chat. What the model said at a stretch, in blocks, is one."""
    for _, group in groupby(said, lambda each: isinstance(each, Message)):
        of: dict[Kind, list[Any]] = {"reasoning": [], "text": [], "call": []}
        for each in group:
            if isinstance(each, Message):
                yield each
            else:
                of[each[0]].append(each[1])
        if not any(of.values()):
            continue
        yield Message(
            role="assistant",
            content="\n".join(of["text"]),
            reasoning_content="\n".join(of["reasoning"]) or None,
            tool_calls=of["call"] or None,
        )
