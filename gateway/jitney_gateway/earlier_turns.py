"""What was said earlier in a chat, in the two APIs that send it in parts. Pure.

``/v1/responses`` sends items and ``/v1/messages`` turns of blocks: ``responses_request.py`` and
``messages_request.py`` make messages and assistant parts of them, which are joined here.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jitney_gateway.wire import Call, Message, TextPart


class AssistantPart(NamedTuple):
    """A part of what the model said earlier in a chat. One of the fields is set."""

    reasoning: str | None = None
    text: str | None = None
    call: Call | None = None


def join_assistant_parts(history: Iterable[Message | AssistantPart]) -> Iterator[Message]:
    """The messages of a chat: parts that follow one another become one message of the
    assistant."""
    parts: list[AssistantPart] = []
    for entry in history:
        if isinstance(entry, AssistantPart):
            parts.append(entry)
            continue
        if parts:
            yield _assistant_message(parts)
            parts = []
        yield entry
    if parts:
        yield _assistant_message(parts)


def _assistant_message(parts: Iterable[AssistantPart]) -> Message:
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[Call] = []
    for part in parts:
        if part.reasoning is not None:
            reasoning.append(part.reasoning)
        if part.text is not None:
            texts.append(part.text)
        if part.call is not None:
            calls.append(part.call)
    return Message(
        role="assistant",
        content="\n".join(texts),
        reasoning_content="\n".join(reasoning) or None,
        tool_calls=calls or None,
    )


def joined_text(content: str | Sequence[TextPart] | None) -> str:
    """The text of a content that may come in parts; the parts become lines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)
