"""The answer of ``/v1/messages``, Anthropic's Messages API, from a model's steps. Pure."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import msgspec
from jitney.errors import JitneyError

from jitney_gateway.answers import COMMENT, Usage
from jitney_gateway.content_blocks import BlockEvent, ContentBlock, SequenceContent
from jitney_gateway.messages_request import MessageRequest
from jitney_gateway.model_steps import Step
from jitney_gateway.partial_json import complete_members
from jitney_gateway.pieces import PieceKind
from jitney_gateway.refusals import describe_for_messages
from jitney_gateway.wire import JsonObject


class DeltaForm(NamedTuple):
    """The form of a delta event for one kind of content block."""

    type: str
    text_field: str


_DELTA_FORMS: dict[PieceKind, DeltaForm] = {
    "text": DeltaForm("text_delta", text_field="text"),
    "reasoning": DeltaForm("thinking_delta", text_field="thinking"),
    "call": DeltaForm("input_json_delta", text_field="partial_json"),
}


_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageAnswer:
    """The answer of ``/v1/messages``."""

    extra_inputs: ClassVar[tuple[str, ...]] = ("return_stop_string",)
    end_of_stream: ClassVar[bytes] = b""

    def __init__(
        self, body: MessageRequest, id_: str, sequences: Sequence[SequenceContent]
    ) -> None:
        """``sequences`` has one."""
        self.usage = Usage()
        (self._sequence,) = sequences
        self._head = {
            "id": f"msg_{id_}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }
        self._stop_string: str | None = None
        self._has_begun = False

    @property
    def sign_of_life(self) -> bytes:
        """A comment before the stream's first event: clients expect ``message_start`` there."""
        return _PING if self._has_begun else COMMENT

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step. Yields the events that it makes."""
        self.usage.add(step)
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self.as_json()}
        if self._sequence.finish_reason is not None:
            return
        if step.stop_strings:
            self._stop_string = step.stop_strings[0]
        for event in self._sequence.push(step.texts[0], step.finish_reasons[0]):
            yield _event_of_block(event)

    def closing_events(self) -> list[JsonObject]:
        """The last events of a stream."""
        end = {
            "type": "message_delta",
            "delta": self._stop_fields(),
            "usage": self._usage(),
        }
        return [end, {"type": "message_stop"}]

    def error_events(self, error: JitneyError) -> list[JsonObject]:
        """The last event of a stream that ends with an error."""
        return [describe_for_messages(error).body]

    def as_json(self) -> JsonObject:
        """The answer to the steps so far."""
        return {
            **self._head,
            "content": [_content(block) for block in self._sequence.blocks],
            **self._stop_fields(),
            "usage": self._usage(),
        }

    def _stop_fields(self) -> JsonObject:
        """Why the answer ended; null if it has not."""
        reason = self._sequence.finish_reason
        if self._stop_string is not None:
            reason = "stop_sequence"
        elif reason == "stop":
            reason = "tool_use" if self._sequence.has_complete_call() else "end_turn"
        elif reason == "length":
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": self._stop_string}

    def _usage(self) -> JsonObject:
        return {
            "input_tokens": self.usage.prompt_tokens - self.usage.cached_tokens,
            "cache_read_input_tokens": self.usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion_tokens,
        }


def _event_of_block(event: BlockEvent) -> JsonObject:
    block = event.block
    body: JsonObject = {"type": f"content_block_{event.what}", "index": block.index}
    if event.what == "start":
        body["content_block"] = _content(block)
    elif event.what == "delta":
        form = _DELTA_FORMS[block.kind]
        body["delta"] = {"type": form.type, form.text_field: event.text}
    return body


def _content(block: ContentBlock) -> JsonObject:
    """A block as an object of the answer's content."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {
        "type": "tool_use",
        "id": f"toolu_{block.id}",
        "name": block.name,
        "input": _input_of_call(block),
    }


def _input_of_call(block: ContentBlock) -> JsonObject:
    """The arguments of a call. If it was cut, only the complete ones: Anthropic's clients read the
    same from a stream."""
    if block.state == "complete":
        return msgspec.json.decode(block.text, type=JsonObject)
    return complete_members(block.text)
