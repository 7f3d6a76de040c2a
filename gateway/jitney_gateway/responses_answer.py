"""The answer of ``/v1/responses``, OpenAI's Responses API, from a model's steps. Pure."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
from jitney.errors import JitneyError

from jitney_gateway.answers import COMMENT, Usage
from jitney_gateway.chat_answer import chat_logprob
from jitney_gateway.content_blocks import BlockEvent, ContentBlock, SequenceContent
from jitney_gateway.model_steps import Step
from jitney_gateway.pieces import PieceKind
from jitney_gateway.refusals import describe
from jitney_gateway.responses_request import ResponseRequest
from jitney_gateway.wire import JsonObject

_DEFAULTS: JsonObject = {
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {},
    "background": False, "store": False, "truncation": "disabled", "error": None,
    "incomplete_details": None, "usage": None,
}  # fmt: skip
"""The fields of every answer, with the values that they have unless the request or the model's
output sets others."""


class ItemForm(NamedTuple):
    """The form of events and of output items for one kind of content block."""

    event_prefix: str
    """Of an event's type, such as ``output_text`` in ``response.output_text.delta``."""
    part_type: str | None
    """The type of the item's part that has the text. None: the item has it itself."""
    whole_field: str
    """The field of the event ``….done`` that has the whole text."""
    id_prefix: str


_ITEM_FORMS: dict[PieceKind, ItemForm] = {
    "text": ItemForm(
        event_prefix="output_text",
        part_type="output_text",
        whole_field="text",
        id_prefix="msg",
    ),
    "reasoning": ItemForm(
        event_prefix="reasoning_text",
        part_type="reasoning_text",
        whole_field="text",
        id_prefix="rs",
    ),
    "call": ItemForm(
        event_prefix="function_call_arguments",
        part_type=None,
        whole_field="arguments",
        id_prefix="fc",
    ),
}
_ITEM_STATUS = {"open": "in_progress", "complete": "completed", "incomplete": "incomplete"}


class ResponseAnswer:
    """The answer of ``/v1/responses``. Each block of the sequence is an item of its output."""

    extra_inputs: ClassVar[tuple[str, ...]] = ()
    end_of_stream: ClassVar[bytes] = b""
    sign_of_life: ClassVar[bytes] = COMMENT

    def __init__(
        self, body: ResponseRequest, id_: str, sequences: Sequence[SequenceContent]
    ) -> None:
        """``sequences`` has one."""
        self.usage = Usage()
        (self._sequence,) = sequences
        self._top_logprobs = body.top_logprobs or 0
        self._head = _head(body, id_)
        self._num_events = 0
        self._logprobs: list[JsonObject] = []
        self._unsent_logprobs: list[JsonObject] = []
        """Logprobs for which no delta has come yet: a token need not add text."""

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step. Yields the events that it makes."""
        self.usage.add(step)
        yield from self._opening_events()
        if self._sequence.finish_reason is not None:
            return
        for position in step.logprobs_of(0):
            logprob = chat_logprob(position, self._top_logprobs)
            self._unsent_logprobs.append(logprob)
            self._logprobs.append(logprob)
        for event in self._sequence.push(step.texts[0], step.finish_reasons[0]):
            yield from self._events_of_block(event)

    def _opening_events(self) -> Iterator[JsonObject]:
        """The first events of a stream, if they have not been sent."""
        if self._num_events == 0:
            yield self._event("created", response=self._response("in_progress"))
            yield self._event("in_progress", response=self._response("in_progress"))

    def _events_of_block(self, event: BlockEvent) -> Iterator[JsonObject]:
        block = event.block
        match event.what:
            case "start":
                yield self._item_event("added", block)
                if _has_part(block):
                    yield self._part_event("added", block)
            case "delta":
                yield self._delta_event(block, event.text)
            case "stop":
                if self._unsent_logprobs:
                    # The last tokens may add no text, such as the one that ends a sequence.
                    yield self._delta_event(block, "")
                yield self._done_event(block)
                if _has_part(block):
                    yield self._part_event("done", block)
                yield self._item_event("done", block)

    def _item_event(self, what: str, block: ContentBlock) -> JsonObject:
        item = self._item(block)
        return self._event(f"output_item.{what}", output_index=block.index, item=item)

    def _part_event(self, what: str, block: ContentBlock) -> JsonObject:
        return self._event(f"content_part.{what}", **_place_of(block), part=self._part(block))

    def _delta_event(self, block: ContentBlock, text: str) -> JsonObject:
        """More text of a block."""
        fields: JsonObject = {"delta": text}
        if block.kind == "text":
            fields["logprobs"] = self._unsent_logprobs
        self._unsent_logprobs = []
        prefix = _ITEM_FORMS[block.kind].event_prefix
        return self._event(f"{prefix}.delta", **_place_of(block), **fields)

    def _done_event(self, block: ContentBlock) -> JsonObject:
        """The whole text of a block."""
        form = _ITEM_FORMS[block.kind]
        fields: JsonObject = {form.whole_field: block.text}
        if block.kind == "text":
            fields["logprobs"] = self._logprobs
        return self._event(f"{form.event_prefix}.done", **_place_of(block), **fields)

    def _event(self, type_: str, **fields: Any) -> JsonObject:
        """An event whose type has ``response.`` before it."""
        return self._numbered_event(f"response.{type_}", **fields)

    def _numbered_event(self, type_: str, **fields: Any) -> JsonObject:
        """An event with the next number: events must be made in the order in which they are
        sent."""
        number = self._num_events
        self._num_events += 1
        return {"type": type_, "sequence_number": number, **fields}

    def _part(self, block: ContentBlock) -> JsonObject:
        """The part of an item that has its text."""
        part: JsonObject = {"type": _ITEM_FORMS[block.kind].part_type, "text": block.text}
        if block.kind == "text":
            part["annotations"] = []
            # A request for logprobs with tools or reasoning is refused
            # (`responses_request._check_logprobs`). So this block is the only one, and all logprobs
            # are its own.
            part["logprobs"] = self._logprobs if block.text else []
        return part

    def _item(self, block: ContentBlock) -> JsonObject:
        """The item of the output that a block is."""
        item: JsonObject = {"id": _id_of_item(block), "status": _ITEM_STATUS[block.state]}
        if block.kind == "call":
            return {
                **item,
                "type": "function_call",
                "call_id": f"call_{block.id}",
                "name": block.name,
                "arguments": block.text,
            }
        item["content"] = [self._part(block)] if block.text else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": []}
        return {**item, "type": "message", "role": "assistant"}

    def closing_events(self) -> list[JsonObject]:
        """The last event of a stream."""
        whole = self.as_json()
        return [self._event(whole["status"], response=whole)]

    def error_events(self, error: JitneyError) -> list[JsonObject]:
        """The last events of a stream that ends with an error."""
        # Clients expect the first events, too, if the error comes before the model's first step.
        opening = list(self._opening_events())
        described = describe(error).body["error"]
        fields = {name: described[name] for name in ("code", "message", "param")}
        error_event = self._numbered_event("error", **fields)
        blocks = self._sequence.blocks
        if blocks and blocks[-1].state == "open":
            blocks[-1].state = "incomplete"
        fault = {"code": "server_error", "message": described["message"]}
        response = self._response("failed", error=fault)
        return [*opening, error_event, self._event("failed", response=response)]

    def as_json(self) -> JsonObject:
        """The whole answer, once every step was fed."""
        reason = self._sequence.finish_reason
        if reason == "stop":
            return self._response("completed", usage=self._usage())
        why = "max_output_tokens" if reason == "length" else reason
        return self._response("incomplete", usage=self._usage(), incomplete_details={"reason": why})

    def _usage(self) -> JsonObject:
        """``reasoning_tokens`` is 0 if they cannot be counted: clients take no null there."""
        number = 0 if self.usage.reasoning is None else self.usage.reasoning.count
        return {
            "input_tokens": self.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.usage.cached_tokens},
            "output_tokens": self.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": number},
            "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
        }

    def _response(self, status: str, **more: Any) -> JsonObject:
        """The answer as an object, which repeats the request's fields."""
        output = []
        if status != "in_progress":
            output = [self._item(block) for block in self._sequence.blocks]
        return {**self._head, "status": status, "output": output, **more}


def _head(body: ResponseRequest, id_: str) -> JsonObject:
    """The fields of an answer that are known from the request."""
    fields = msgspec.to_builtins(body)
    for name in ("input", "params", "stream"):
        fields.pop(name, None)
    head = {**_DEFAULTS, **body.params, **fields}
    head["id"] = f"resp_{id_}"
    head["object"] = "response"
    head["created_at"] = int(time.time())
    return head


def _has_part(block: ContentBlock) -> bool:
    """Whether the item of a block has its text in a part, which has events of its own."""
    return _ITEM_FORMS[block.kind].part_type is not None


def _place_of(block: ContentBlock) -> JsonObject:
    """The fields of an event that say to what its text belongs."""
    place: JsonObject = {"output_index": block.index, "item_id": _id_of_item(block)}
    if _has_part(block):
        place["content_index"] = 0
    return place


def _id_of_item(block: ContentBlock) -> str:
    return f"{_ITEM_FORMS[block.kind].id_prefix}_{block.id}"
