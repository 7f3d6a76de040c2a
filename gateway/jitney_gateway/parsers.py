"""Divides a language model's text into content, reasoning and tool calls, while it streams.

Pure: text in, pieces out. The gateway makes a parser for each sequence of an answer. The pieces,
joined, do not depend on how the text was cut. What may become a marker is held back, with the space
before it.

The arguments of a call leave as they come, once its head is certain: it names one of the request's
tools, and its arguments have begun. Such a call stays a call. If it is unfinished, or its text goes
on as no arguments can, it ends there, and the client gets its arguments so far.

Any other call, such as one that names an unknown function, is held until it is complete. If it is
malformed or unfinished, it is content, to the letter. A call behind it is still found if it begins
with a marker, with two exceptions:

- A string that is not closed, or in Python a bracket, may hide the calls behind it: they are
  content.
- A call between tags that lacks its last tag ends at that of the next call. The text up to there is
  in its last parameter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

# Unlike `re`, it finds a match of which the text has only the beginning, and it allows a pattern to
# have several groups with one name.
import regex

from jitney_gateway.call_arguments import (
    ArgumentsReader,
    GemmaArguments,
    JsonArguments,
    Progress,
    PythonArguments,
    TaggedArguments,
)
from jitney_gateway.call_body import CallBody, MalformedCallError
from jitney_gateway.formats import TOOL_FORMATS, Reasoning, ToolFormat, find_reasoning

_SPACE = r"\s{0,4}"
"""Chat templates put one or two ends of lines around markers. More space is the model's own."""
_NEVER = r"(?!)"
"""A regular expression that matches nothing."""


PieceKind = Literal["reasoning", "text", "call"]


class Piece(NamedTuple):
    """What a text added: more reasoning, more content, or more of a call."""

    kind: PieceKind
    text: str
    """Of a call: more of its arguments, which are JSON once they are complete."""
    name: str | None = None
    """Of the first piece of a call: its function."""
    completes_call: bool = False
    """The arguments are complete. A call that never gets there was cut."""


class AnswerParser(Protocol):
    """What an answer asks of the parser of a sequence."""

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the sequence. Returns what it adds, in order."""

    def finish(self) -> list[Piece]:
        """The sequence has ended. Returns what was held back."""


class _InContent(NamedTuple):
    """The text up to the next head of a call is content."""

    at_beginning: bool
    """No content has come, or none since the last reasoning or call. Then the begin marker of
    reasoning counts too, and so does a head without a marker."""


class _InReasoning(NamedTuple):
    """The text up to the end marker is reasoning."""


class _Skipping(NamedTuple):
    """Space and markers are dropped: after a call, or after a marker of reasoning."""

    markers: tuple[str, ...]
    """There may be none: then only space is dropped."""
    following: _InContent | _InReasoning
    """The state after this one."""


class _InCall(NamedTuple):
    """The text is held until the call is certain or complete."""

    body: CallBody


class _BehindArguments(NamedTuple):
    """What is around the arguments of a call ends: it is dropped."""

    in_object: bool
    in_list: bool
    """The list may go on with another call."""


class _InArguments(NamedTuple):
    """The text is the arguments of a call."""

    name: str
    head: str
    """The text up to the arguments. Empty once they have begun: only then the call is certain."""
    reader: ArgumentsReader
    following: _BehindArguments
    """The state after this one."""


_END_OF_OBJECT = regex.compile(r'(?:\s*+,\s*+"\w+"\s*+:\s*+"[^"\\]*")*\s*+\}')
"""What may follow the arguments in the JSON object of a call, such as an id."""
_NEXT_IN_LIST = {
    "json": regex.compile(r"\s*+(?:(?P<end>,?\s*+\])|,\s*+(?=\{))"),
    "python": regex.compile(r"\s*+(?:(?P<end>,?\s*+\])|,\s*+(?=[A-Za-z_][\w.]{0,127}\s*+\())"),
}
"""Kind of a body -> what divides a call of a list from the next one, or ends the list."""


class Parser:
    """Parses the text of one sequence. It is in one of six states, which are the classes above."""

    def __init__(
        self,
        tool_format: str | None,
        reasoning_format: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """``tool_format``: a key of TOOL_FORMATS, or None if the request has no tools.
        ``reasoning_format``: a key of REASONING_FORMATS, or None. ``tools``: the request's. The
        format ``qwen_xml`` needs their schemas, to know which values are no strings.
        """
        functions = [tool["function"] for tool in tools]
        self._schemas = {function["name"]: function.get("parameters") for function in functions}
        self._format = None if tool_format is None else TOOL_FORMATS[tool_format]
        reasoning = find_reasoning(reasoning_format)
        self._head = _head_pattern(self._format)
        self._head_at_beginning = _head_pattern_at_beginning(self._format, reasoning)
        self._has_heads = self._format is not None or reasoning is not None
        end = "" if reasoning is None else reasoning.end
        self._reasoning_end = regex.compile(_SPACE + regex.escape(end))
        self._held = ""
        self._pieces: list[Piece] = []
        self._has_content = False
        """Content has come, at any time."""
        self._state: (
            _InContent | _InReasoning | _Skipping | _InCall | _InArguments | _BehindArguments
        )
        self._state = _InContent(at_beginning=True)
        if reasoning is not None and reasoning.is_open:
            # The begin marker ended the prompt; a model may repeat it.
            self._state = _Skipping((reasoning.begin,), following=_InReasoning())

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the sequence. Returns what it adds, in order."""
        self._held += text
        while self._held and self._step():
            pass
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """The sequence has ended. Returns what was held back."""
        if isinstance(self._state, _InArguments):
            self._finish_arguments(self._state)
            # A call that was cut may have text behind it, which is read as after any call.
            pieces = self.push("")
            return pieces + self.finish()
        if isinstance(self._state, _BehindArguments):
            self._held = ""
        if isinstance(self._state, _InCall):
            name = self._state.body.name_in_beginning(self._held, self._schemas)
            if name is not None:
                self._held = ""
                self._pieces.append(Piece("call", "", name))
        state: object = self._state
        if isinstance(state, _Skipping):
            self._held = self._held.lstrip()
            state = state.following
        if isinstance(state, _InReasoning):
            self._send_reasoning(len(self._held))
        else:
            self._send_content(len(self._held))
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _step(self) -> bool:
        """Read to the end of the present state. Returns False if that needs more text."""
        match self._state:
            case _Skipping():
                return self._skip(self._state)
            case _InCall():
                return self._begin_call(self._state.body) or self._complete_call(self._state.body)
            case _InArguments():
                return self._read_arguments(self._state)
            case _BehindArguments():
                return self._end_call(self._state)
            case _InReasoning():
                return self._read_reasoning()
            case _InContent():
                return self._read_content(self._state)

    def _read_reasoning(self) -> bool:
        match = self._reasoning_end.search(self._held, partial=True)
        if match is None:
            self._send_reasoning(len(self._held))
            return False
        self._send_reasoning(match.start())
        if match.partial:
            return False
        self._take(len(match[0]))
        self._state = _Skipping((), following=_InContent(at_beginning=True))
        return True

    def _read_content(self, state: _InContent) -> bool:
        if state.at_beginning and self._has_heads and self._held.isspace():
            return False  # a head may follow; a model may write space without end
        pattern = self._head_at_beginning if state.at_beginning else self._head
        match = pattern.search(self._held, partial=True)
        if match is None:
            self._send_content(len(self._held))
            return False
        self._send_content(match.start())
        if match.partial:
            return False
        size = len(match[0])
        groups = match.groupdict()
        if groups.get("think"):
            self._take(size)
            self._state = _Skipping((), following=_InReasoning())
            return True
        assert self._format is not None
        body = CallBody(
            self._format.body,
            size,
            groups.get("name"),
            is_bare=groups.get("bare") is not None,
        )
        self._state = _InCall(body)
        return True

    def _skip(self, state: _Skipping) -> bool:
        text = self._held.lstrip()
        for marker in state.markers:
            if text.startswith(marker):
                self._held = text.removeprefix(marker)
                return True
        if not text or any(marker.startswith(text) for marker in state.markers):
            return False
        before_reasoning = isinstance(state.following, _InReasoning)
        # Space stays only between earlier content and new content, to divide the two. Before
        # reasoning and before the first content it is dropped.
        if before_reasoning or not self._has_content:
            self._held = text
        self._state = state.following
        return True

    def _begin_call(self, body: CallBody) -> bool:
        """Read the arguments from now on, if the text so far is a call of a known tool."""
        assert self._format is not None
        call = body.find_certain_call(self._held, self._schemas)
        if call is None:
            return False
        reader: ArgumentsReader
        if self._format.body == "json":
            reader = JsonArguments(self._format.markers)
        elif self._format.body == "xml":
            reader = TaggedArguments(self._schemas[call.name])
        elif self._format.body == "gemma":
            reader = GemmaArguments(self._format.markers)
        else:
            reader = PythonArguments()
        self._state = _InArguments(
            name=call.name,
            head=self._take(call.start),
            reader=reader,
            following=_BehindArguments(in_object=call.in_object, in_list=call.in_list),
        )
        return True

    def _read_arguments(self, state: _InArguments) -> bool:
        """Make a piece of more arguments."""
        progress = state.reader.read(self._held)
        read = self._take(progress.size)
        if progress.arguments:
            self._add_to_call(state, progress)
            state = state._replace(head="")
        elif state.head:
            state = state._replace(head=state.head + read)
        self._state = state
        if progress.end == "complete":
            self._state = state.following
        elif progress.end == "cut" and state.head:
            # The arguments never began, so it is not a call.
            self._held = state.head + self._held
            self._state = _InContent(at_beginning=False)
            self._send_content(len(state.head))
        elif progress.end == "cut":
            self._skip_closing_markers()  # what follows is read as after a call
        return progress.end is not None

    def _finish_arguments(self, state: _InArguments) -> None:
        """The sequence has ended in a call, which is cut."""
        progress = state.reader.finish(self._held)
        self._take(progress.size)
        if progress.arguments or state.head:
            self._add_to_call(state, progress)
        self._skip_closing_markers()

    def _add_to_call(self, state: _InArguments, progress: Progress) -> None:
        is_complete = progress.end == "complete"
        if state.head:
            self._pieces.append(Piece("call", progress.arguments, state.name, is_complete))
            return
        text = progress.arguments
        name = None
        if self._pieces and self._pieces[-1].kind == "call":
            # Pieces of one call from one text become one.
            last = self._pieces.pop()
            text = last.text + text
            name = last.name
        self._pieces.append(Piece("call", text, name, is_complete))

    def _end_call(self, state: _BehindArguments) -> bool:
        assert self._format is not None
        if state.in_object:
            pattern = _END_OF_OBJECT
        elif state.in_list:
            pattern = _NEXT_IN_LIST[self._format.body]
        else:
            self._skip_closing_markers()
            return True
        match = pattern.match(self._held, partial=True)
        if match is None:
            # The call itself is complete: that its end is malformed does no harm.
            self._skip_closing_markers()
            return True
        if match.partial:
            return False
        if state.in_object:
            self._take(len(match[0]))
            self._state = state._replace(in_object=False)
        elif match["end"] is not None:
            self._take(len(match[0]))
            self._skip_closing_markers()
        else:
            body = CallBody(self._format.body, len(match[0]), None, is_list_item=True)
            self._state = _InCall(body)
        return True

    def _skip_closing_markers(self) -> None:
        assert self._format is not None
        self._state = _Skipping(self._format.closing, following=_InContent(at_beginning=True))

    def _complete_call(self, body: CallBody) -> bool:
        """Make a piece of a call that is complete."""
        assert self._format is not None
        try:
            end = body.find_end(self._held)
            if end is None:
                return False
            calls = body.parse(self._held[body.start : end], self._schemas)
        except MalformedCallError:
            # It is not a call: its head becomes content. A head without a marker can be the empty
            # text, and would be found for ever: so it does not count here again.
            self._state = _InContent(at_beginning=False)
            self._send_content(body.start)
            return True
        for call in calls:
            self._pieces.append(Piece("call", call.arguments, call.name, completes_call=True))
        self._take(end)
        if body.is_list_item:
            self._state = _BehindArguments(in_object=False, in_list=True)
        else:
            self._skip_closing_markers()
        return True

    def _send_reasoning(self, size: int) -> None:
        """Make a piece of the first ``size`` characters of the text that is held."""
        text = self._take(size)
        if text:
            self._pieces.append(Piece("reasoning", text))

    def _send_content(self, size: int) -> None:
        """The same, of content."""
        text = self._take(size)
        if text:
            self._pieces.append(Piece("text", text))
            self._has_content = True
            self._state = _InContent(at_beginning=False)

    def _take(self, size: int) -> str:
        """The first ``size`` characters of the text that is held, which no longer holds them."""
        text = self._held[:size]
        self._held = self._held[size:]
        return text


def _head_pattern(tool_format: ToolFormat | None) -> regex.Pattern[str]:
    """The head of a call, wherever it stands."""
    if tool_format is None:
        return regex.compile(_NEVER)
    return regex.compile(_SPACE + tool_format.head)


def _head_pattern_at_beginning(
    tool_format: ToolFormat | None, reasoning: Reasoning | None
) -> regex.Pattern[str]:
    """What can begin a call or reasoning where no content has come yet:

    - at the very beginning, after any space: the begin marker of reasoning, a head, or a head
      without a marker;
    - anywhere: a head.
    """
    alternatives = []
    if reasoning is not None:
        alternatives.append(rf"\A\s*+(?P<think>{regex.escape(reasoning.begin)})")
    if tool_format is not None:
        alternatives.append(rf"\A\s*+{tool_format.head}")
        if tool_format.bare_head is not None:
            alternatives.append(rf"\A\s*+(?P<bare>{tool_format.bare_head})")
        alternatives.append(_SPACE + tool_format.head)
    return regex.compile("|".join(alternatives) or _NEVER)
