"""``/v1/messages``, Anthropic's Messages API: its body as a chat, and its answer. Pure."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from jitney.errors import JitneyError
from msgspec import Meta

from jitney_gateway.answers import JsonObject, Usage
from jitney_gateway.content_blocks import ContentBlock, SequenceContent, turns
from jitney_gateway.formats import reasoning_markers
from jitney_gateway.parsers import Kind
from jitney_gateway.refusals import FieldError, describe_for_messages
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
    TextFormat,
    TextPart,
    Tool,
    WireRecord,
    check_parts,
    joined,
)

_PARTS = {
    "text": ("text",),
    "thinking": ("thinking", "signature?"),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content?", "is_error?"),
}
"""Type of a block -> the fields that it has, besides those that every block may have; those with a
question mark may be absent."""
_FORMATS = {"json_schema": ("schema",)}
_CHOICES = {"auto": (), "any": (), "none": (), "tool": ("name",)}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a block of the answer -> the type of its deltas, and where they have their text."""


class InputBlock(WireRecord, kw_only=True):
    """One block of a message."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextPart] | None = None
    is_error: bool | None = None
    signature: str | None = None
    citations: None = None
    cache_control: dict[str, Any] | None = None


class InputTurn(WireRecord):
    """What somebody said."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class CustomTool(WireRecord):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(WireRecord):
    """Whether tools are called; ``name`` goes with ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireRecord):
    """Whether the model shall reason."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(WireRecord):
    """How much the model shall think, and what its text must be."""

    effort: str | None = None
    format: TextFormat | None = None


class PromptRequest(WireRecord, kw_only=True):
    """The body of ``/v1/messages/count_tokens``."""

    model: str
    messages: Annotated[list[InputTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextPart] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class MessageRequest(PromptRequest, kw_only=True):
    """The body of ``/v1/messages``."""

    unseen: ClassVar[tuple[str, ...]] = (
        "prompt_logprobs", "n", "logprobs", "stop", "structured_outputs",
    )  # fmt: skip
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """As of a chat."""
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[Literal["user_id"], str | None] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def chat_of_message(body: MessageRequest, known: ModelDescription) -> ChatRequest:
    """The chat that it stands for. Raises FieldError."""
    chat = chat_of_prompt(body, known)
    chat.params = {**body.params, "max_tokens": body.max_tokens}
    if body.stop_sequences is not None:
        chat.params["stop"] = body.stop_sequences
    chat.stream = body.stream
    chat.user = (body.metadata or {}).get("user_id")
    return chat


def chat_of_prompt(body: PromptRequest, known: ModelDescription) -> ChatRequest:
    """Likewise, without what does not change the prompt. Raises FieldError."""
    if body.messages[-1].role == "assistant":
        said = "the last of messages is the assistant's: to go on with it is not supported"
        raise FieldError("messages", said)
    output = body.output_config or OutputConfig()
    if output.format is not None:
        check_parts("output_config.format", output.format, _FORMATS)
    choice = body.tool_choice or ToolChoice("auto")
    check_parts("tool_choice", choice, _CHOICES)
    chat = ChatRequest(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_chosen(choice) if body.tool_choice else None,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=output.format.of_a_chat() if output.format else None,
        reasoning_effort=output.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if body.thinking is not None:
        _set_thinking(chat, body.thinking, known)
    return chat


def _messages(body: PromptRequest) -> list[Message]:
    """The messages of the chat."""
    said: list[Message | tuple[Kind, str | Call]] = []
    for index, turn in enumerate(body.messages):
        said += _read(f"messages[{index}]", turn)
    messages = [*_merged(turns(said))]
    if body.system:
        messages.insert(0, Message(role="system", content=joined(body.system)))
    return messages


def _chosen(choice: ToolChoice) -> Any:
    """As a chat has it."""
    if choice.type == "any":
        return "required"
    if choice.type == "tool":
        return Tool(type="function", function=Function(name=choice.name or ""))
    return choice.type


def _set_thinking(chat: ChatRequest, thinking: Thinking, known: ModelDescription) -> None:
    """By the template's parameter; without it a model either reasons always or never. Raises
    FieldError if the client wants the other."""
    thinks = thinking.type != "disabled"
    if "enable_thinking" in (known.chat_template or ""):
        given = chat.chat_template_kwargs or {}
        chat.chat_template_kwargs = {"enable_thinking": thinks, **given}
        return
    always = reasoning_markers(formats(chat, known).reasoning) is not None
    if thinks != always:
        said = f"thinking is {thinking.type!r}, but model {chat.model!r} has no choice"
        raise FieldError("thinking", said)


def _read(at: str, turn: InputTurn) -> Iterator[Message | tuple[Kind, str | Call]]:
    """Messages, and what the model said before."""
    blocks = turn.content
    if isinstance(blocks, str):
        blocks = [InputBlock(type="text", text=blocks)]
    texts = []
    for index, block in enumerate(blocks):
        check_parts(f"{at}.content[{index}]", block, _PARTS)
        if block.type == "tool_result":
            text = ("Error: " if block.is_error else "") + joined(block.content)
            yield Message(role="tool", content=text, tool_call_id=block.tool_use_id)
        elif block.type == "tool_use":
            called = Called(str(block.name), msgspec.json.encode(block.input).decode())
            yield "call", Call(type="function", id=block.id, function=called)
        elif block.type == "thinking":
            yield "reasoning", str(block.thinking)
        elif turn.role == "assistant":
            yield "text", str(block.text)
        else:
            texts.append(str(block.text))
    if texts:
        yield Message(role="user" if turn.role == "user" else "system", content="\n".join(texts))


def _merged(messages: Iterable[Message]) -> Iterator[Message]:
    """What the user said in several turns is one, as Anthropic has it: many chat templates want
    the roles to alternate."""
    for role, group in groupby(messages, lambda each: each.role):
        if role == "user":
            yield Message(role=role, content="\n".join(str(each.content) for each in group))
        else:
            yield from group


def _tool(tool: CustomTool) -> Tool:
    function = Function(tool.name, tool.description, tool.input_schema, tool.strict)
    return Tool(type="function", function=function)


class MessageAnswer:
    """The answer, and the events of its stream."""

    returns: ClassVar[tuple[str, ...]] = ("return_stop_string",)
    """Inputs of the contract that ask for more outputs."""
    end = b""

    def __init__(self, body: MessageRequest, id_: str, blocks: list[SequenceContent]) -> None:
        """``blocks``: of the only sequence."""
        self.usage = Usage()
        (self._blocks,) = blocks
        self._head = {
            "id": f"msg_{id_}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }
        self._stop_string: str | None = None
        self._begun = False

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step; the events that it makes."""
        self.usage.add(step)
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self.whole()}
        if self._blocks.finish_reason is not None:
            return
        self._stop_string = step.stop_strings[0] if step.stop_strings else None
        for what, block, text in self._blocks.take(step.texts[0], step.finish_reasons[0]):
            event: JsonObject = {"type": f"content_block_{what}", "index": block.index}
            if what == "start":
                event["content_block"] = _content(block)
            elif what == "delta":
                name, key = _DELTAS[block.kind]
                event["delta"] = {"type": name, key: text}
            yield event

    def last(self) -> list[JsonObject]:
        """The last events of a stream."""
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [end, {"type": "message_stop"}]

    def failed(self, error: JitneyError) -> list[JsonObject]:
        """The last event of a stream that ends with an error."""
        return [describe_for_messages(error)[1]]

    def whole(self) -> JsonObject:
        """The answer so far, or once every step was fed."""
        content = [_content(block) for block in self._blocks.all]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage()}

    def _stop(self) -> JsonObject:
        reason = self._blocks.finish_reason
        if self._stop_string is not None:
            reason = "stop_sequence"
        elif reason == "stop":
            called = any(block.kind == "call" for block in self._blocks.all)
            reason = "tool_use" if called else "end_turn"
        elif reason == "length":
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": self._stop_string}

    def _usage(self) -> JsonObject:
        return {
            "input_tokens": self.usage.prompt - self.usage.cached,
            "cache_read_input_tokens": self.usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion,
        }


def _content(block: ContentBlock) -> JsonObject:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    called = msgspec.json.decode(block.text or "{}")
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": called}
