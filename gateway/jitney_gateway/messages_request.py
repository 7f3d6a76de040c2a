"""Anthropic's Messages API: the bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and
the chats that they stand for. Pure."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from jitney.errors import show
from msgspec import Meta

from jitney_gateway.answer_formats import formats_of_answer
from jitney_gateway.chat import ARGUMENTS
from jitney_gateway.earlier_turns import AssistantPart, join_assistant_parts, joined_text
from jitney_gateway.field_rules import FieldRules, IgnoredFields, Refused
from jitney_gateway.formats import find_reasoning
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.refusals import FieldError
from jitney_gateway.typed_fields import FieldsOfType, check_fields
from jitney_gateway.wire import (
    CONSTRAINTS_OF_CHATS,
    MAX_MESSAGES,
    MAX_TOOLS,
    OTHER_CONSTRAINTS,
    REFUSED_OF_SAMPLING,
    Call,
    Called,
    ChatRequest,
    Function,
    FunctionName,
    Message,
    TextFormat,
    TextPart,
    Tool,
    ToolChoice,
    WireRecord,
)

NAMES_OF_MESSAGE = {
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    ARGUMENTS: "messages[].content[].input",
}
"""Field of the chat -> its path in the body."""

_FIELDS_OF_BLOCKS = {
    "text": FieldsOfType(required=("text",)),
    "thinking": FieldsOfType(optional=("thinking", "signature")),
    "tool_use": FieldsOfType(required=("id", "name"), optional=("input",)),
    "tool_result": FieldsOfType(required=("tool_use_id",), optional=("content", "is_error")),
}
"""Type of a block of a turn -> its fields."""
_BLOCKS_OF_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""Role of a turn -> the types of its blocks."""
_KNOWN_TYPES = frozenset(
    [*_FIELDS_OF_BLOCKS, "redacted_thinking", "image", "document", "search_result",
     "container_upload"]
)  # fmt: skip
"""Types of blocks that are honoured or refused. The last four are refused: without what they hold,
the prompt would mean something else. Blocks of any other type are ignored: they are left by tools
that only another server has."""
_FIELDS_OF_FORMATS = {"json_schema": FieldsOfType(required=("schema",))}
"""Type of ``output_config.format`` -> its fields."""
_FIELDS_OF_CHOICES = {
    "auto": FieldsOfType(),
    "any": FieldsOfType(),
    "none": FieldsOfType(),
    "tool": FieldsOfType(required=("name",)),
}
"""Type of ``tool_choice`` -> its fields."""


_FORMAT = "output_config.format stands for it"
_CONSTRAINTS = {
    "response_format": Refused(unless=({"type": "text"},), because=_FORMAT),
    **{name: rule._replace(because=_FORMAT) for name, rule in OTHER_CONSTRAINTS.items()},
    **{name: rule._replace(because=_FORMAT) for name, rule in CONSTRAINTS_OF_CHATS.items()},
}


# ------------------------------------------------------------------------------- what clients send


class ResultPart(TextPart):
    """A part of a tool's result."""

    rules: ClassVar = TextPart.rules._replace(
        types=frozenset(["text"]), ignored_types=frozenset(["tool_reference"])
    )


class InputBlock(WireRecord, kw_only=True):
    """One block of a message."""

    rules: ClassVar = FieldRules(
        silent=frozenset(["citations", "caller", "parsed_output", "data"]),
        types=_KNOWN_TYPES,
        comes_back=True,
    )
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    signature: str | None = None


class InputTurn(WireRecord):
    """One turn of the conversation. A client may send the whole message back."""

    rules: ClassVar = FieldRules(
        silent=frozenset(
            ["id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage",
             "container", "context_management"]
        ),
        comes_back=True,
    )  # fmt: skip
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock] | None = None


class CustomTool(WireRecord):
    """A function that the model may call."""

    rules: ClassVar = FieldRules(types=frozenset(["custom"]))
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class ChoiceOfMessage(WireRecord):
    """Whether the answer calls tools. ``name`` goes with the type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireRecord):
    """Whether the model should reason, and with how many tokens at most."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None


class OutputConfig(WireRecord):
    """How much the model should reason, and what its text must be."""

    effort: str | None = None
    format: TextFormat | None = None


class PromptFields(WireRecord, kw_only=True):
    """The fields of a body that make the prompt."""

    model: str
    messages: Annotated[list[InputTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextPart] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChoiceOfMessage | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: TextFormat | None = None
    """The older name of ``output_config.format``."""
    chat_template_kwargs: dict[str, Any] | None = None


class MessageMetadata(WireRecord):
    """Who asks."""

    user_id: str | None = None


class CountTokensRequest(PromptFields, kw_only=True):
    """The body of ``/v1/messages/count_tokens``."""


class MessageRequest(PromptFields, kw_only=True):
    """The body of ``/v1/messages``."""

    rules: ClassVar = FieldRules(
        refused={"best_of": Refused(unless=(1,)), **REFUSED_OF_SAMPLING, **_CONSTRAINTS},
        only={"service_tier": ("auto", "standard_only")},
    )
    refused_params: ClassVar[tuple[str, ...]] = (
        "prompt_logprobs", "n", "logprobs", "stop", "structured_outputs",
    )  # fmt: skip
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """As in ``ChatRequest``."""
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: MessageMetadata | None = None
    service_tier: str | None = None


# ------------------------------------------------------------------------------- body to chat


def chat_of_message(
    body: MessageRequest, model: ModelDescription, ignored: IgnoredFields | None = None
) -> ChatRequest:
    """The chat that the body of ``/v1/messages`` stands for. What has no effect is added to
    ``ignored``. Raises FieldError."""
    chat = chat_of_prompt(body, model, ignored)
    chat.params = {**body.params, "max_tokens": body.max_tokens}
    if body.stop_sequences is not None:
        chat.params["stop"] = body.stop_sequences
    chat.stream = body.stream
    chat.user = None if body.metadata is None else body.metadata.user_id
    return chat


def chat_of_prompt(
    body: PromptFields, model: ModelDescription, ignored: IgnoredFields | None = None
) -> ChatRequest:
    """The chat with the fields that make its prompt; ``/v1/messages/count_tokens`` has no others.
    What has no effect is added to ``ignored``. Raises FieldError."""
    if ignored is None:
        ignored = IgnoredFields()
    output = body.output_config or OutputConfig()
    response_format = None
    if output.format is not None:
        check_fields("output_config.format", output.format, _FIELDS_OF_FORMATS)
        response_format = output.format.as_response_format()
    elif body.output_format is not None:
        check_fields("output_format", body.output_format, _FIELDS_OF_FORMATS)
        response_format = body.output_format.as_response_format()
    choice = body.tool_choice or ChoiceOfMessage("auto")
    check_fields("tool_choice", choice, _FIELDS_OF_CHOICES)
    chat = ChatRequest(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_tool_choice_of_chat(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=response_format,
        reasoning_effort=output.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if body.messages[-1].role == "assistant":
        _continue_last(chat)
    if body.thinking is not None:
        _set_thinking(chat, body.thinking, model, ignored)
    return chat


def _continue_last(chat: ChatRequest) -> None:
    """Let the answer continue the chat's last message, if that is the assistant's and has a text.
    An empty one is left out. Raises FieldError."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "assistant":
        return  # it had no blocks
    if last.tool_calls or (last.reasoning_content and not last.content):
        reason = "only its text can be continued: not a call, nor reasoning"
        raise FieldError("messages", f"messages ends with a message of the assistant: {reason}")
    if last.content:
        chat.continue_final_message = True
    else:
        chat.messages.pop()


def _messages(body: PromptFields) -> list[Message]:
    """The messages of the chat."""
    history: list[Message | AssistantPart] = []
    for index, turn in enumerate(body.messages):
        path = f"messages[{index}]"
        blocks = _checked_blocks(path, turn)
        if turn.role == "assistant":
            history += _parts_of_assistant(blocks)
        else:
            history += _messages_of_turn(turn.role, blocks)
    messages = list(_join_user_messages(join_assistant_parts(history)))
    if body.system:
        messages.insert(0, Message(role="system", content=joined_text(body.system)))
    return messages


def _tool_choice_of_chat(choice: ChoiceOfMessage) -> Any:
    """A choice of tools in the form of a chat."""
    if choice.type == "any":
        return "required"
    if choice.type == "tool":
        return ToolChoice("function", Function(name=choice.name or ""))
    return choice.type


def _set_thinking(
    chat: ChatRequest, thinking: Thinking, model: ModelDescription, ignored: IgnoredFields
) -> None:
    """Let the model reason or not, by the parameter ``enable_thinking`` of its chat template.

    A model whose template has no such parameter always reasons, or never does. Then the client's
    wish is ignored if it differs from that.
    """
    is_wanted = thinking.type != "disabled"
    if is_wanted and chat.continue_final_message:
        reason = "a text that is continued has no reasoning"
        ignored.add("thinking", fault=f"is {thinking.type!r}, but {reason}")
        return
    chat.thinking_token_budget = thinking.budget_tokens
    if "enable_thinking" in (model.chat_template or ""):
        kwargs = chat.chat_template_kwargs or {}
        chat.chat_template_kwargs = {"enable_thinking": is_wanted, **kwargs}
        return
    formats = formats_of_answer(chat, model)
    always_reasons = find_reasoning(formats.reasoning) is not None
    if is_wanted != always_reasons:
        ignored.add(
            "thinking", fault=f"is {thinking.type!r}, but model {chat.model!r} has no choice"
        )


def _checked_blocks(path: str, turn: InputTurn) -> list[InputBlock]:
    """The blocks of a turn, to which ``path`` leads in the body. Raises FieldError for a block that
    lacks a field, and for one that the turn's role cannot have."""
    if isinstance(turn.content, str):
        return [InputBlock(type="text", text=turn.content)]
    # An answer of the model may be empty, and comes back as it was.
    if not turn.content and turn.role != "assistant":
        raise FieldError(f"{path}.content", f"{path}.content is empty")
    types = _BLOCKS_OF_ROLES[turn.role]
    blocks = []
    for index, block in enumerate(turn.content or ()):
        block_path = f"{path}.content[{index}]"
        if block.type == "redacted_thinking":
            continue  # only its maker can read it
        if block.type == "text" and turn.role == "assistant":
            block.text = block.text or ""
        if block.type not in types:
            field = f"{block_path}.type"
            reason = f"must be {' or '.join(types)} in a turn of the {turn.role}"
            raise FieldError(field, f"{field} is {show(block.type)}, but {reason}")
        check_fields(block_path, block, _FIELDS_OF_BLOCKS)
        blocks.append(block)
    return blocks


def _parts_of_assistant(blocks: Iterable[InputBlock]) -> Iterator[AssistantPart]:
    """What the model said in a turn."""
    for block in blocks:
        if block.type == "thinking":
            if block.thinking:  # a server may keep its text to itself
                yield AssistantPart(reasoning=block.thinking)
        elif block.type == "tool_use":
            called = Called(name=str(block.name), arguments=block.input)
            yield AssistantPart(call=Call(type="function", id=block.id, function=called))
        else:
            yield AssistantPart(text=block.text)


def _messages_of_turn(
    role: Literal["user", "system"], blocks: Iterable[InputBlock]
) -> Iterator[Message]:
    """The messages of a turn that is not the model's: results of tools, then one with its text."""
    texts = []
    for block in blocks:
        if block.type == "tool_result":
            yield _tool_message(block)
        else:
            texts.append(str(block.text))
    if texts:
        yield Message(role=role, content="\n".join(texts))


def _tool_message(block: InputBlock) -> Message:
    """The message of a tool's result."""
    text = joined_text(block.content)
    if block.is_error:
        text = f"Error: {text}"
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _join_user_messages(messages: Iterable[Message]) -> Iterator[Message]:
    """Join the user's messages that follow one another. Anthropic's API does so, and many chat
    templates want the roles to alternate."""
    for role, group in groupby(messages, lambda message: message.role):
        if role == "user":
            yield Message(role=role, content="\n".join(str(message.content) for message in group))
        else:
            yield from group


def _tool(tool: CustomTool) -> Tool:
    """The same tool in the form of a chat."""
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)
