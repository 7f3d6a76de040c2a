"""What a language model's text means in OpenAI's terms, while it streams: content, reasoning and
tool calls. Pure: text in, pieces out. The gateway makes one for each sequence of an answer.

The result does not depend on how the text was cut. Held back is what may be a marker, with the
space before it, and a call until it is complete: what a client gets of a call always parses. A
malformed or unfinished call is content, to the letter; a call after a malformed one is found.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import regex

from jitney_gateway.call_body import MALFORMED, CallBody
from jitney_gateway.formats import OPENED, TOOL_FORMATS, reasoning_markers

_SPACE = r"\s{0,4}"
"""Chat templates put a line's end or two around markers; more is the model's own."""


Kind = Literal["reasoning", "text", "call"]


class Piece(NamedTuple):
    """What was added: more reasoning or text, or a whole call."""

    kind: Kind
    text: str
    """Of a call: its arguments, as JSON."""
    name: str | None = None
    """Of a call: its function."""


class Parser:
    """Parses one answer."""

    def __init__(
        self,
        tool_format: str | None,
        reasoning_format: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """``tool_format``: a key of TOOL_FORMATS, or None if the request has no tools.
        ``reasoning_format``: one of REASONING_FORMATS, or None. ``tools``: the request's; their
        schemas type the values of ``qwen_xml``, which are strings without."""
        functions = [tool["function"] for tool in tools]
        self._schemas = {each["name"]: each.get("parameters") for each in functions}
        begin, end = reasoning_markers(reasoning_format) or ("", "")
        self._thinking = (reasoning_format or "").endswith(OPENED)
        heads = []
        first = [rf"(?P<think>{regex.escape(begin)})"] if begin else []
        if tool_format:
            self._kind, head, bare, self._closing = TOOL_FORMATS[tool_format][:4]
            heads.append(_SPACE + head)
            first += [head, bare] if bare else [head]
        self._head = regex.compile("|".join(heads) or r"(?!)")
        first = [rf"\A\s*{each}" for each in first]
        self._first_head = regex.compile("|".join(first + heads) or r"(?!)")
        self._reasoning_end = regex.compile(_SPACE + regex.escape(end))
        self._held = ""
        self._pieces: list[Piece] = []
        self._first = True  # no content yet, or none since reasoning or a call
        self._said = False  # there was content
        self._body: CallBody | None = None  # of the call that is held
        # Markers to drop here, with space. A model may repeat the marker that ended its prompt.
        self._dropped: tuple[str, ...] | None = (begin,) if self._thinking else None

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the answer; what it adds, in order."""
        self._held += text
        while self._held and self._step():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """The answer has ended: what was held back."""
        if self._dropped is not None:
            self._held = self._held.lstrip()
        self._send(len(self._held))
        return self._take()

    def _take(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _send(self, size: int) -> None:
        """What is held, up to ``size``, is content or reasoning."""
        text = self._held[:size]
        self._held = self._held[size:]
        if text and self._thinking:
            self._pieces.append(Piece("reasoning", text))
        elif text:
            self._first = False
            self._said = True
            self._pieces.append(Piece("text", text))

    def _step(self) -> bool:
        """Go on to the next marker; False if that needs more text."""
        if self._dropped is not None:
            return self._drop(self._dropped)
        if self._body:
            return self._complete(self._body)
        if self._thinking:
            pattern = self._reasoning_end
        else:
            pattern = self._first_head if self._first else self._head
        found = pattern.search(self._held, partial=True)
        self._send(found.start() if found else len(self._held))
        if not found or found.partial:
            return False
        groups = found.groupdict()
        if self._thinking or groups.get("think"):
            self._held = self._held[len(found[0]) :]
            self._thinking = not self._thinking
            self._dropped = ()
        else:
            self._body = CallBody(self._kind, len(found[0]), groups.get("name"))
        return True

    def _drop(self, markers: tuple[str, ...]) -> bool:
        """Space and any of ``markers``. Space between two stretches of content is theirs."""
        text = self._held.lstrip()
        for marker in markers:
            if text.startswith(marker):
                self._held = text.removeprefix(marker)
                return True
        if not text or any(marker.startswith(text) for marker in markers):
            return False
        if self._thinking or not self._said:
            self._held = text
        self._dropped = None
        self._first = True
        return True

    def _complete(self, body: CallBody) -> bool:
        """A call, or what looked like one."""
        try:
            end = body.end(self._held)
            if end is None:
                return False
            called = body.calls(self._held[body.start : end], self._schemas)
        except MALFORMED:
            self._body = None
            self._first = False
            self._send(body.start)
            return True
        self._pieces += [Piece("call", arguments, name) for name, arguments in called]
        self._held = self._held[end:]
        self._body = None
        self._dropped = self._closing
        return True
