"""Divides a language model's text into content, reasoning and tool calls, while it streams.

Pure: text in, pieces out. The gateway makes a parser for each sequence of an answer. However the
text was cut, the pieces are the same content, reasoning and calls together. What may become a
marker is held back, with the space before it.

A call is *certain* once it names one of the request's tools and its arguments have begun. From then
on its arguments leave as the model writes them, and it stays a call. It ends early if the model
stops, or writes what no arguments can have. Then the client gets the arguments so far.

Any other call, such as one that names an unknown function, is held until it is complete. If it is
malformed or unfinished, all of it is content. A call behind it is still found if it begins with a
marker, with two exceptions:

- Behind a string that is not closed, or in Python a bracket, everything may belong to that string:
  the calls there are content.
- In a format with tags, a call may lack its last tag. Then it ends with the last tag of the next
  call, which becomes a part of its last parameter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Unlike `re`, it finds a match of which the text has only the beginning.
import regex

from jitney_gateway.argument_readers import make_reader
from jitney_gateway.call_arguments import ArgumentsReader, ReadResult
from jitney_gateway.call_body import CallBody, MalformedCallError
from jitney_gateway.call_heads import (
    SPACE_AROUND_MARKER,
    head_pattern,
    head_pattern_at_beginning,
)
from jitney_gateway.formats import TOOL_FORMATS, find_reasoning
from jitney_gateway.pieces import Piece, PieceBuffer

_END_OF_OBJECT = regex.compile(r'(?:\s*+,\s*+"\w+"\s*+:\s*+"[^"\\]*")*\s*+\}')
"""The end of a call's JSON object, behind the arguments: a model may write an id there."""
_NEXT_IN_LIST = {
    "json": regex.compile(r"\s*+(?:(?P<end>,?\s*+\])|,\s*+(?=\{))"),
    "python": regex.compile(r"\s*+(?:(?P<end>,?\s*+\])|,\s*+(?=[A-Za-z_][\w.]{0,127}\s*+\())"),
}
"""Kind of a body -> what divides a call of a list from the next one, or ends the list."""


class _InContent(NamedTuple):
    """The text up to the next head of a call is content."""

    at_beginning: bool
    """Whether no content has come since the answer began, or since the last reasoning or call. Only
    then may reasoning begin, or a call whose head has no marker."""


class _InReasoning(NamedTuple):
    """The text up to the end marker is reasoning."""


class _Skipping(NamedTuple):
    """Space and ``markers`` are dropped: after a call, or after a marker of reasoning."""

    markers: tuple[str, ...]
    following: _InContent | _InReasoning
    """The next state."""


class _InCall(NamedTuple):
    """The text is held until the call is certain or complete."""

    body: CallBody


class _BeforeArguments(NamedTuple):
    """A call of a known tool has come up to its arguments. They have no JSON yet."""

    name: str
    head: str
    """The text of the call so far. It becomes content if no arguments follow."""
    reader: ArgumentsReader
    following: "_BehindArguments"


class _InArguments(NamedTuple):
    """The call is certain, and the text is more of its arguments."""

    reader: ArgumentsReader
    following: "_BehindArguments"
    """The next state."""


class _BehindArguments(NamedTuple):
    """The arguments of a call are complete. The rest of the call is dropped."""

    in_object: bool
    """The arguments stand in a JSON object, which must end."""
    in_list: bool
    """The call stands in a list, which must end, or go on with another call."""


class Parser:
    """Parses the text of one sequence. It is in one of seven states, which are the classes
    above."""

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
        self._head = head_pattern(self._format)
        self._head_at_beginning = head_pattern_at_beginning(self._format, reasoning)
        self._has_heads = self._format is not None or reasoning is not None
        end = "" if reasoning is None else reasoning.end
        self._reasoning_end = regex.compile(SPACE_AROUND_MARKER + regex.escape(end))
        self._buffer = PieceBuffer()
        self._has_content = False
        """Content has come, at any time."""
        self._state: (
            _InContent
            | _InReasoning
            | _Skipping
            | _InCall
            | _BeforeArguments
            | _InArguments
            | _BehindArguments
        )
        self._state = _InContent(at_beginning=True)
        if reasoning is not None and reasoning.is_open:
            # The begin marker ended the prompt; a model may repeat it.
            self._state = _Skipping((reasoning.begin,), following=_InReasoning())

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the sequence. Returns what it adds, in order."""
        return self._buffer.push(text, self._step)

    def finish(self) -> list[Piece]:
        """The sequence has ended. Returns what was held back."""
        pieces: list[Piece] = []
        while isinstance(self._state, (_BeforeArguments, _InArguments)):
            self._finish_arguments(self._state)
            # The text behind a call that was cut is read as behind any call: there may be another.
            pieces += self.push("")
        self._finish_state()
        return pieces + self._buffer.take_pieces()

    def _finish_state(self) -> None:
        """Make pieces of the text that is held."""
        buffer = self._buffer
        state = self._state
        if isinstance(state, _Skipping):
            buffer.held = buffer.held.lstrip()
            state = state.following
        match state:
            case _InReasoning():
                self._send_reasoning(len(buffer.held))
            case _InContent():
                self._send_content(len(buffer.held))
            case _BehindArguments():
                buffer.held = ""
            case _InCall(body=body):
                name = body.name_in_beginning(buffer.held, self._schemas)
                if name is None:
                    self._send_content(len(buffer.held))
                else:
                    buffer.held = ""
                    buffer.add(Piece("call", "", name))

    def _step(self) -> bool:
        """Read to the end of the present state. Returns False if that needs more text."""
        match self._state:
            case _Skipping():
                return self._skip(self._state)
            case _InCall(body=body):
                if self._find_arguments(body):
                    return True
                return self._complete_call(body)
            case _BeforeArguments():
                return self._begin_arguments(self._state)
            case _InArguments():
                return self._read_arguments(self._state)
            case _BehindArguments():
                return self._end_call(self._state)
            case _InReasoning():
                return self._read_reasoning()
            case _InContent():
                return self._read_content(self._state)

    # ------------------------------------------------------------------ content and reasoning

    def _read_reasoning(self) -> bool:
        match = self._reasoning_end.search(self._buffer.held, partial=True)
        if match is None:
            self._send_reasoning(len(self._buffer.held))
            return False
        self._send_reasoning(match.start())
        if match.partial:
            return False
        self._buffer.take(len(match[0]))
        self._state = _Skipping((), following=_InContent(at_beginning=True))
        return True

    def _read_content(self, state: _InContent) -> bool:
        held = self._buffer.held
        if state.at_beginning and self._has_heads and held.isspace():
            return False  # a head may follow; a model may write space without end
        pattern = self._head_at_beginning if state.at_beginning else self._head
        match = pattern.search(held, partial=True)
        if match is None:
            self._send_content(len(held))
            return False
        self._send_content(match.start())
        if match.partial:
            return False
        size = len(match[0])  # the text that is held begins with the match now
        groups = match.groupdict()
        if groups.get("think"):
            self._buffer.take(size)
            self._state = _Skipping((), following=_InReasoning())
            return True
        # The head of a call is held, too: it becomes content if the body is malformed.
        assert self._format is not None
        body = CallBody(
            self._format.body,
            start=size,
            name=groups.get("name"),
            is_bare=groups.get("bare") is not None,
        )
        self._state = _InCall(body)
        return True

    def _skip(self, state: _Skipping) -> bool:
        text = self._buffer.held.lstrip()
        for marker in state.markers:
            if text.startswith(marker):
                self._buffer.held = text.removeprefix(marker)
                return True
        may_be_marker = any(marker.startswith(text) for marker in state.markers)
        if may_be_marker or not text:
            return False
        # Space stays only between earlier content and new content, to divide the two. Before
        # reasoning and before the first content it is dropped.
        before_content = isinstance(state.following, _InContent)
        keeps_space = before_content and self._has_content
        if not keeps_space:
            self._buffer.held = text
        self._state = state.following
        return True

    def _send_reasoning(self, size: int) -> None:
        """Make a piece of the first ``size`` characters of the text that is held."""
        text = self._buffer.take(size)
        if text:
            self._buffer.add(Piece("reasoning", text))

    def _send_content(self, size: int) -> None:
        """Make a piece of the first ``size`` characters of the text that is held. If there are any,
        the state becomes that of content which has begun."""
        text = self._buffer.take(size)
        if text:
            self._buffer.add(Piece("text", text))
            self._has_content = True
            self._state = _InContent(at_beginning=False)

    # ------------------------------------------------------------------ calls

    def _find_arguments(self, body: CallBody) -> bool:
        """Read the arguments from now on, if the text so far is a call of a known tool."""
        call = body.find_certain_call(self._buffer.held, self._schemas)
        if call is None:
            return False
        assert self._format is not None
        self._state = _BeforeArguments(
            name=call.name,
            head=self._buffer.take(call.start),
            reader=make_reader(self._format, self._schemas[call.name]),
            following=_BehindArguments(in_object=call.in_object, in_list=call.in_list),
        )
        return True

    def _begin_arguments(self, state: _BeforeArguments) -> bool:
        """Make the first piece of a call, once its arguments have begun."""
        buffer = self._buffer
        progress = state.reader.read(buffer.held)
        head = state.head + buffer.take(progress.size)
        if progress.arguments:
            is_complete = progress.end == "complete"
            buffer.add(Piece("call", progress.arguments, state.name, is_complete))
            return self._go_on(state, progress)
        if progress.end is None:
            self._state = state._replace(head=head)
            return False
        # No arguments follow, so it is not a call. Its head, which may be a head without a marker,
        # must not be found again.
        buffer.held = head + buffer.held
        self._state = _InContent(at_beginning=False)
        self._send_content(len(head))
        return True

    def _read_arguments(self, state: _InArguments) -> bool:
        """Make a piece of more arguments."""
        progress = state.reader.read(self._buffer.held)
        self._buffer.take(progress.size)
        if progress.arguments:
            is_complete = progress.end == "complete"
            self._buffer.add_to_call(progress.arguments, completes_call=is_complete)
        return self._go_on(state, progress)

    def _go_on(self, state: _BeforeArguments | _InArguments, progress: ReadResult) -> bool:
        """Set the state after that progress in the arguments of a call."""
        match progress.end:
            case None:
                self._state = _InArguments(state.reader, state.following)
                return False
            case "complete":
                self._state = state.following
            case "cut":
                self._skip_closing_markers()  # what follows is read as behind a call
        return True

    def _finish_arguments(self, state: _BeforeArguments | _InArguments) -> None:
        """The sequence has ended in the arguments of a call, which is cut."""
        progress = state.reader.finish(self._buffer.held)
        self._buffer.take(progress.size)
        if isinstance(state, _BeforeArguments):
            self._buffer.add(Piece("call", progress.arguments, state.name))
        elif progress.arguments:
            self._buffer.add_to_call(progress.arguments, completes_call=False)
        self._skip_closing_markers()

    def _end_call(self, state: _BehindArguments) -> bool:
        """Drop what follows the arguments."""
        if state.in_object:
            return self._end_object(state)
        if state.in_list:
            return self._end_list_or_go_on()
        self._skip_closing_markers()
        return True

    def _end_object(self, state: _BehindArguments) -> bool:
        """Drop the end of the JSON object that the arguments stand in."""
        match = _END_OF_OBJECT.match(self._buffer.held, partial=True)
        if match is None:
            # The call itself is complete: that its end is malformed does no harm.
            self._skip_closing_markers()
            return True
        if match.partial:
            return False
        self._buffer.take(len(match[0]))
        self._state = state._replace(in_object=False)
        return True

    def _end_list_or_go_on(self) -> bool:
        """Drop the end of a list of calls, or go on with its next call."""
        assert self._format is not None
        match = _NEXT_IN_LIST[self._format.body].match(self._buffer.held, partial=True)
        if match is None:
            self._skip_closing_markers()  # as above
            return True
        if match.partial:
            return False
        size = len(match[0])
        if match["end"] is not None:
            self._buffer.take(size)
            self._skip_closing_markers()
        else:
            body = CallBody(self._format.body, start=size, name=None, is_list_item=True)
            self._state = _InCall(body)
        return True

    def _complete_call(self, body: CallBody) -> bool:
        """Make a piece of a call that was held until it is complete."""
        held = self._buffer.held
        try:
            end = body.find_end(held)
            if end is None:
                return False
            calls = body.parse(held[body.start : end], self._schemas)
        except MalformedCallError:
            # It is not a call: its head becomes content. A head without a marker can be the empty
            # text, and would be found for ever: so it does not count here again.
            self._state = _InContent(at_beginning=False)
            self._send_content(body.start)
            return True
        for call in calls:
            self._buffer.add(Piece("call", call.arguments, call.name, completes_call=True))
        self._buffer.take(end)
        if body.is_list_item:
            self._state = _BehindArguments(in_object=False, in_list=True)
        else:
            self._skip_closing_markers()
        return True

    def _skip_closing_markers(self) -> None:
        assert self._format is not None
        self._state = _Skipping(self._format.closing, following=_InContent(at_beginning=True))
