"""``/v1/responses``, OpenAI's Responses API: its body as a chat, and its answer. Pure.

Nothing is stored, so what would need it is refused: a client sends the whole input each time.
"""

import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from jitney.errors import JitneyError
from msgspec import Meta

from jitney_gateway.answers import JsonObject, Usage, chat_logprob
from jitney_gateway.chat import arguments_of
from jitney_gateway.content_blocks import ContentBlock, SequenceContent, turns
from jitney_gateway.formats import reasoning_markers
from jitney_gateway.parsers import Kind
from jitney_gateway.refusals import FieldError, describe
from jitney_gateway.server_client import Step
from jitney_gateway.server_request import ModelDescription, formats
from jitney_gateway.wire import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Call,
    Called,
    ChatRequest,
    Function,
    Message,
    StructuredChoice,
    TextFormat,
    TextPart,
    Tool,
    WireRecord,
    check_parts,
    joined,
)

_NAMES = {
    "text": ("output_text", "text", "msg"),
    "reasoning": ("reasoning_text", "text", "rs"),
    "call": ("function_call_arguments", "arguments", "fc"),
}
"""Kind of a block -> its name in events, where they have all of it, and what its id begins with."""
_SAME = (
    "model", "params", "stream", "structured_outputs", "chat_template_kwargs",
    "parallel_tool_calls", "user", "safety_identifier", "prompt_cache_key", "service_tier",
)  # fmt: skip
"""Fields that a chat has too."""
_DEFAULTS: JsonObject = {
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {},
    "background": False, "store": False, "truncation": "disabled", "error": None,
    "incomplete_details": None, "usage": None,
}  # fmt: skip
"""What an answer says if its request or its end do not say otherwise."""
_PARTS = {
    "message": ("role", "content"),
    "reasoning": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Type of an item -> the fields that it has, besides those that every item may have."""
_FORMATS = {
    "text": (),
    "json_object": (),
    "json_schema": ("name", "schema", "description?", "strict?"),
}
"""Likewise of ``text.format``; those with a question mark may be absent."""


class InputItem(WireRecord, kw_only=True):
    """One item of the input. Fields that change nothing, and those that must be null, are of items
    of earlier answers."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    summary: Annotated[list[Any], Meta(max_length=0)] | None = None
    encrypted_content: None = None
    phase: None = None


class FlatFunction(Function, kw_only=True):
    """A tool, or the choice of one."""

    type: Literal["function"]


class TextOptions(WireRecord):
    """What the text must be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(WireRecord):
    """How much the model shall think."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ResponseRequest(WireRecord, kw_only=True):
    """The body of ``/v1/responses``."""

    unseen: ClassVar[tuple[str, ...]] = ("prompt_logprobs", "n", "max_tokens", "logprobs")
    model: str
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """As of a chat."""
    stream: bool | None = None
    structured_outputs: StructuredChoice | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: Annotated[list[FlatFunction], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None


def chat_of_response(body: ResponseRequest, known: ModelDescription) -> ChatRequest:
    """The chat that it stands for. Raises FieldError."""
    text = body.text or TextOptions()
    reasoning = body.reasoning or ReasoningOptions()
    if text.format is not None:
        check_parts("text.format", text.format, _FORMATS)
    chosen = body.tool_choice
    chat = ChatRequest(
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=bool(body.include) or body.top_logprobs is not None,
        top_logprobs=body.top_logprobs,
        tools=[_tool(each) for each in body.tools or ()],
        tool_choice=_tool(chosen) if isinstance(chosen, FlatFunction) else chosen,
        response_format=text.format.of_a_chat() if text.format else None,
        verbosity=text.verbosity,
        reasoning_effort=reasoning.effort,
        **{name: getattr(body, name) for name in _SAME},
    )
    used = formats(chat, known)
    if chat.logprobs and (used.tool or reasoning_markers(used.reasoning)):
        field = "include" if body.include else "top_logprobs"
        said = "goes without tools, and with a model that does not reason"
        raise FieldError(field, f"{field} {said}: which tokens are the text's is not known")
    return chat


def _messages(body: ResponseRequest) -> list[Message]:
    """The messages of the chat."""
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    messages = [*turns(_read(f"input[{i}]", item) for i, item in enumerate(items))]
    if body.instructions:
        messages.insert(0, Message(role="system", content=body.instructions))
    return messages


def _read(at: str, item: InputItem) -> Message | tuple[Kind, str | Call]:
    """A message, or what the model said before."""
    item.type = item.type or "message"
    check_parts(at, item, _PARTS)
    if item.type == "function_call":
        arguments_of(f"{at}.arguments", str(item.arguments))
        called = Called(name=str(item.name), arguments=str(item.arguments))
        return "call", Call(type="function", id=item.call_id, function=called)
    if item.type == "function_call_output":
        return Message(role="tool", content=joined(item.output), tool_call_id=item.call_id)
    if item.type == "reasoning":
        return "reasoning", joined(item.content)
    if item.role is None or item.role == "assistant":
        return "text", joined(item.content)
    return Message(role=item.role, content=joined(item.content))


def _tool(flat: FlatFunction) -> Tool:
    given = {name: getattr(flat, name) for name in Function.__struct_fields__}
    return Tool(type="function", function=Function(**given))


class ResponseAnswer:
    """The answer, and the events of its stream."""

    returns: ClassVar[tuple[str, ...]] = ()
    """Inputs of the contract that ask for more outputs."""
    end = b""

    def __init__(self, body: ResponseRequest, id_: str, blocks: list[SequenceContent]) -> None:
        """``blocks``: of the only sequence."""
        self.usage = Usage()
        self._body = body
        (self._blocks,) = blocks
        asked = {**body.params, **msgspec.to_builtins(body)}
        given = {name: asked[name] for name in asked if name not in ("input", "params", "stream")}
        head = {"id": f"resp_{id_}", "object": "response", "created_at": int(time.time())}
        self._head: JsonObject = {**_DEFAULTS, **given, **head}
        self._number = 0  # of the next event
        self._logprobs: list[JsonObject] = []
        self._untold: list[JsonObject] = []  # those of them that no delta had

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step; the events that it makes."""
        self.usage.add(step)
        if not self._number:
            yield self._event("created", response=self._response("in_progress"))
            yield self._event("in_progress", response=self._response("in_progress"))
        if self._blocks.finish_reason is None:
            top = self._body.top_logprobs or 0
            for position in step.logprobs[0] if step.logprobs else ():
                logprob = chat_logprob(position, top)
                self._untold.append(logprob)
                self._logprobs.append(logprob)
            for what, block, text in self._blocks.take(step.texts[0], step.finish_reasons[0]):
                yield from self._block_events(what, block, text)

    def _block_events(self, what: str, block: ContentBlock, text: str) -> Iterator[JsonObject]:
        name, key, prefix = _NAMES[block.kind]
        item: JsonObject = {"output_index": block.index}
        at: JsonObject = {**item, "item_id": f"{prefix}_{block.id}"}
        parts = block.kind != "call"
        if parts:
            at["content_index"] = 0
        if what == "start":
            yield self._event("output_item.added", **item, item=self._item(block))
            if parts:
                yield self._event("content_part.added", **at, part=self._part(block))
        if what == "delta" or (what == "stop" and self._untold):
            told = {"logprobs": self._untold} if block.kind == "text" else {}
            self._untold = []
            yield self._event(f"{name}.delta", **at, **told, delta=text)
        if what == "stop":
            whole = {"logprobs": self._logprobs} if block.kind == "text" else {}
            yield self._event(f"{name}.done", **at, **whole, **{key: block.text})
            if parts:
                yield self._event("content_part.done", **at, part=self._part(block))
            yield self._event("output_item.done", **item, item=self._item(block))

    def _event(self, type_: str, **fields: Any) -> JsonObject:
        self._number += 1
        return {"type": f"response.{type_}", "sequence_number": self._number - 1, **fields}

    def _part(self, block: ContentBlock) -> JsonObject:
        part: JsonObject = {"type": _NAMES[block.kind][0], "text": block.text}
        if block.kind == "text":
            part |= {"annotations": [], "logprobs": self._logprobs if block.text else []}
        return part

    def _item(self, block: ContentBlock) -> JsonObject:
        status = {None: "in_progress", True: "completed", False: "incomplete"}[block.complete]
        item: JsonObject = {"id": f"{_NAMES[block.kind][2]}_{block.id}", "status": status}
        if block.kind == "call":
            called = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **called}
        item["content"] = [self._part(block)] if block.text else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": []}
        return {**item, "type": "message", "role": "assistant"}

    def last(self) -> list[JsonObject]:
        """The last events of a stream."""
        whole = self.whole()
        return [self._event(whole["status"], response=whole)]

    def failed(self, error: JitneyError) -> list[JsonObject]:
        """The last events of a stream that ends with an error."""
        told = describe(error)[1]["error"]
        fields = {name: told[name] for name in ("code", "message", "param")}
        event = {**self._event("error", **fields), "type": "error"}
        for block in self._blocks.all[-1:]:
            block.complete = bool(block.complete)  # it may be open
        fault = {"code": "server_error", "message": told["message"]}
        return [event, self._event("failed", response=self._response("failed", error=fault))]

    def whole(self) -> JsonObject:
        """The answer, once every step was fed."""
        reason = self._blocks.finish_reason
        if reason == "stop":
            return self._response("completed", usage=self._usage())
        why = {"reason": "max_output_tokens" if reason == "length" else reason}
        return self._response("incomplete", usage=self._usage(), incomplete_details=why)

    def _usage(self) -> JsonObject:
        """Which tokens are reasoning is not known, except that there are none."""
        reasons = any(block.kind == "reasoning" for block in self._blocks.all)
        return {
            "input_tokens": self.usage.prompt,
            "input_tokens_details": {"cached_tokens": self.usage.cached},
            "output_tokens": self.usage.completion,
            "output_tokens_details": {"reasoning_tokens": None if reasons else 0},
            "total_tokens": self.usage.prompt + self.usage.completion,
        }

    def _response(self, status: str, **more: Any) -> JsonObject:
        """Repeats the request's fields."""
        blocks = self._blocks.all if status != "in_progress" else []
        output = [self._item(block) for block in blocks]
        return {**self._head, "status": status, "output": output, **more}
