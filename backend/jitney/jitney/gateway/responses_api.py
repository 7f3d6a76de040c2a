"""``/v1/responses``, OpenAI's Responses API: its body as a chat, and its answer. Pure.

Nothing is stored, so what would need it is refused: a client sends the whole input each time.
"""

import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jitney.errors import JitneyError
from jitney.gateway.answers import Body, Usage, chat_logprob
from jitney.gateway.ask import Description, arguments_of, formats
from jitney.gateway.backend import Step
from jitney.gateway.blocks import Block, Blocks, Kind, turns
from jitney.gateway.refusals import FieldError, describe
from jitney.gateway.wire import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Asking,
    Call,
    Called,
    ChatRequest,
    Function,
    JsonSchema,
    Message,
    ResponseFormat,
    Tool,
    WireRecord,
    convert,
)

_NAMES = {
    "text": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "call": ("function_call_arguments", "arguments"),
}
"""Kind of a block -> its name in events, and where they have all of it."""
_SAME = (
    "model", "params", "stream", "structured_outputs", "chat_template_kwargs",
    "parallel_tool_calls", "user", "safety_identifier", "prompt_cache_key", "service_tier",
)  # fmt: skip
"""Fields that a chat has too."""
_ECHOED = (
    "model", "instructions", "max_output_tokens", "top_logprobs", "reasoning", "user",
    "safety_identifier", "prompt_cache_key", "service_tier",
)  # fmt: skip
"""Fields that the answer repeats."""
Status = Literal["in_progress", "completed", "incomplete"]
NoneOf = Annotated[list[Any], Meta(max_length=0)]


class TextPart(WireRecord):
    """A part of a text. What stands beside it in an answer may come back with it."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: NoneOf | None = None
    logprobs: list[Any] | None = None


class InputItem(WireRecord, kw_only=True, tag_field="type"):
    """One item of the input. Those of earlier answers come back with ``id`` and ``status``."""

    id: str | None = None
    status: Status | None = None


class InputMessage(InputItem, kw_only=True, tag="message"):
    """What somebody said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]
    phase: None = None


class ReasoningItem(InputItem, kw_only=True, tag="reasoning"):
    """What the model thought before."""

    content: list[TextPart] | None = None
    summary: NoneOf | None = None
    encrypted_content: None = None


class FunctionCall(InputItem, kw_only=True, tag="function_call"):
    """A call that the model made before."""

    call_id: str
    name: str
    arguments: str


class FunctionOutput(InputItem, kw_only=True, tag="function_call_output"):
    """What came of a call."""

    call_id: str
    output: str | list[TextPart]


Item = InputMessage | ReasoningItem | FunctionCall | FunctionOutput


class FlatFunction(Function, tag_field="type", tag="function"):
    """A tool, or the choice of one."""


class TextFormat(WireRecord, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(WireRecord, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(JsonSchema, tag_field="type", tag="json_schema"):
    """JSON that keeps to a schema."""


class TextOptions(WireRecord):
    """What the text must be."""

    format: TextFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(WireRecord):
    """How much the model shall think."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ResponseRequest(Asking, kw_only=True):
    """The body of ``/v1/responses``."""

    unseen: ClassVar[tuple[str, ...]] = (*Asking.unseen, "n", "max_tokens", "logprobs")
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
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
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None


def chat_of_response(body: ResponseRequest, known: Description) -> ChatRequest:
    """The chat that it stands for. Raises FieldError."""
    given = body.input
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    read = []
    for index, item in enumerate(items):
        at = f"input[{index}]"
        read.append(_read(at, convert({"type": "message", **item}, Item, at)))
    messages += turns(read)
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    chosen = body.tool_choice
    chat = ChatRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=bool(body.include) or body.top_logprobs is not None,
        top_logprobs=body.top_logprobs,
        tools=None if body.tools is None else [_tool(each) for each in body.tools],
        tool_choice=_tool(chosen) if isinstance(chosen, FlatFunction) else chosen,
        response_format=_response_format(text.format),
        verbosity=text.verbosity,
        reasoning_effort=reasoning.effort,
        **{name: getattr(body, name) for name in _SAME},
    )
    if chat.logprobs and any(formats(chat, known)):
        field = "include" if body.include else "top_logprobs"
        said = "goes without tools, and with a model that does not reason"
        raise FieldError(field, f"{field} {said}: which tokens are the text's is not known")
    return chat


def _read(at: str, item: Item) -> Message | tuple[Kind, str | Call]:
    """A message, or what the model said before."""
    if isinstance(item, FunctionCall):
        arguments_of(f"{at}.arguments", item.arguments)
        called = Called(name=item.name, arguments=item.arguments)
        return "call", Call(type="function", id=item.call_id, function=called)
    if isinstance(item, ReasoningItem):
        return "reasoning", _joined(item.content or [])
    if isinstance(item, FunctionOutput):
        return Message(role="tool", content=_joined(item.output), tool_call_id=item.call_id)
    text = _joined(item.content)
    return ("text", text) if item.role == "assistant" else Message(role=item.role, content=text)


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(flat: FlatFunction) -> Tool:
    return Tool(type="function", function=Function(**msgspec.structs.asdict(flat)))


def _response_format(wanted: object) -> ResponseFormat | None:
    if isinstance(wanted, SchemaFormat):
        schema = JsonSchema(**msgspec.structs.asdict(wanted))
        return ResponseFormat(type="json_schema", json_schema=schema)
    return ResponseFormat(type="json_object") if isinstance(wanted, ObjectFormat) else None


class ResponseAnswer:
    """The answer, and the events of its stream."""

    returns: ClassVar[tuple[str, ...]] = ()
    """Inputs of the contract that ask for more outputs."""
    end = b""

    def __init__(self, body: ResponseRequest, id_: str, blocks: Blocks) -> None:
        self.usage = Usage()
        self._body = body
        self._blocks = blocks
        self._id = f"resp_{id_}"
        self._created = int(time.time())
        self._number = 0  # of the next event
        self._logprobs: list[Body] = []
        self._untold: list[Body] = []  # those of them that no delta had

    def feed(self, step: Step) -> Iterator[Body]:
        """Take a step; the events that it makes."""
        self.usage.add(step)
        if not self._number:
            yield self._event("created", response=self._response("in_progress"))
            yield self._event("in_progress", response=self._response("in_progress"))
        if self._blocks.finish_reason is None:
            positions = step.logprobs[0] if step.logprobs else []
            self._untold += [chat_logprob(each, self._body.top_logprobs or 0) for each in positions]
            self._logprobs += self._untold[len(self._untold) - len(positions) :]
            for what, block, text in self._blocks.take(step.texts[0], step.finish_reasons[0]):
                yield from self._block_events(what, block, text)

    def _block_events(self, what: str, block: Block, text: str) -> Iterator[Body]:
        name, key = _NAMES[block.kind]
        item: Body = {"output_index": block.index}
        at: Body = {**item, "item_id": self._item(block)["id"]}
        parts = block.kind != "call"
        if parts:
            at["content_index"] = 0
        if what == "start":
            yield self._event("output_item.added", **item, item=self._item(block))
            if parts:
                yield self._event("content_part.added", **at, part=self._part(block))
        if what == "delta" or (what == "stop" and self._untold):
            untold, self._untold = self._untold, []
            told = {"logprobs": untold} if block.kind == "text" else {}
            yield self._event(f"{name}.delta", **at, **told, delta=text)
        if what == "stop":
            whole = {"logprobs": self._logprobs} if block.kind == "text" else {}
            yield self._event(f"{name}.done", **at, **whole, **{key: block.text})
            if parts:
                yield self._event("content_part.done", **at, part=self._part(block))
            yield self._event("output_item.done", **item, item=self._item(block))

    def _event(self, type_: str, **fields: Any) -> Body:
        self._number += 1
        return {"type": f"response.{type_}", "sequence_number": self._number - 1, **fields}

    def _part(self, block: Block) -> Body:
        part: Body = {"type": _NAMES[block.kind][0], "text": block.text}
        if block.kind == "text":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _item(self, block: Block) -> Body:
        status = {None: "in_progress", True: "completed", False: "incomplete"}[block.complete]
        if block.kind == "call":
            called = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": f"fc_{block.id}", "status": status, **called}
        content = [self._part(block)] if block.text else []
        said: Body = {"type": "message", "id": f"msg_{block.id}", "role": "assistant"}
        if block.kind == "reasoning":
            said = {"type": "reasoning", "id": f"rs_{block.id}", "summary": []}
        return {**said, "status": status, "content": content}

    def last(self) -> list[Body]:
        """The last events of a stream."""
        whole = self.whole()
        return [self._event(whole["status"], response=whole)]

    def failed(self, error: JitneyError) -> list[Body]:
        """The last events of a stream that ends with an error."""
        told = describe(error)[1]["error"]
        fields = {name: told[name] for name in ("code", "message", "param")}
        event = {**self._event("error", **fields), "type": "error"}
        fault = {"code": "server_error", "message": told["message"]}
        return [event, self._event("failed", response=self._response("failed", error=fault))]

    def whole(self) -> Body:
        """The answer, once every step was fed."""
        reason = self._blocks.finish_reason
        if reason == "stop":
            return self._response("completed", usage=self._usage())
        why = {"reason": "max_output_tokens" if reason == "length" else reason}
        return self._response("incomplete", usage=self._usage(), incomplete_details=why)

    def _usage(self) -> Body:
        """Which tokens are reasoning is not known, except that there are none."""
        reasons = any(block.kind == "reasoning" for block in self._blocks.all)
        return {
            "input_tokens": self.usage.prompt,
            "input_tokens_details": {"cached_tokens": self.usage.cached},
            "output_tokens": self.usage.completion,
            "output_tokens_details": {"reasoning_tokens": None if reasons else 0},
            "total_tokens": self.usage.prompt + self.usage.completion,
        }

    def _response(self, status: str, **more: Any) -> Body:
        body = self._body
        begun = status != "in_progress"
        response: Body = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "output": [self._item(block) for block in self._blocks.all if begun],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": body.text or {"format": {"type": "text"}},
            "temperature": body.params.get("temperature"),
            "top_p": body.params.get("top_p"),
            "metadata": body.metadata or {},
            "background": False,
            "store": False,
            "truncation": "disabled",
        }
        absent = dict.fromkeys(("error", "incomplete_details", "usage", "previous_response_id"))
        return response | {name: getattr(body, name) for name in _ECHOED} | absent | more
