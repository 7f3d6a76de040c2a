"""The body of ``/v1/responses``, OpenAI's Responses API, and the chat that it stands for. Pure.

The gateway stores no answers. A field that would need an earlier one is refused: a client sends the
whole input each time.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jitney_gateway.answer_formats import formats_of_answer
from jitney_gateway.chat import ARGUMENTS
from jitney_gateway.earlier_turns import AssistantPart, join_assistant_parts, joined_text
from jitney_gateway.field_rules import FieldRules, Refused
from jitney_gateway.formats import find_reasoning
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.refusals import FieldError
from jitney_gateway.tool_choice import choose_allowed_tools
from jitney_gateway.typed_fields import FieldsOfType, check_fields
from jitney_gateway.wire import (
    CONSTRAINTS_OF_CHATS,
    MAX_MESSAGES,
    MAX_TOOLS,
    REFUSED_OF_SAMPLING,
    AllowedTools,
    Call,
    Called,
    ChatRequest,
    Function,
    Message,
    StructuredChoice,
    TextFormat,
    TextPart,
    Tool,
    ToolChoice,
    WireRecord,
)

NAMES_OF_RESPONSE = {
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    ARGUMENTS: "input[].arguments",
}
"""Field of the chat -> its path in the body."""
_SHARED_WITH_CHATS = (
    "model", "params", "stream", "structured_outputs", "chat_template_kwargs",
    "parallel_tool_calls", "user", "safety_identifier", "prompt_cache_key", "service_tier",
)  # fmt: skip
"""Fields of the body that a chat has too."""
_FIELDS_OF_ITEMS = {
    "message": FieldsOfType(required=("role", "content")),
    "reasoning": FieldsOfType(optional=("content", "summary")),
    "function_call": FieldsOfType(required=("call_id", "name"), optional=("arguments",)),
    "function_call_output": FieldsOfType(required=("call_id",), optional=("output",)),
    "custom_tool_call": FieldsOfType(required=("call_id", "name", "input")),
    "custom_tool_call_output": FieldsOfType(required=("call_id", "output")),
}
"""Type of an item of the input -> its fields."""
_FIELDS_OF_FORMATS = {
    "text": FieldsOfType(),
    "json_object": FieldsOfType(),
    "json_schema": FieldsOfType(required=("name", "schema"), optional=("description", "strict")),
}
"""Type of ``text.format`` -> its fields."""
_FIELDS_OF_CHOICES = {
    "function": FieldsOfType(required=("name",)),
    "allowed_tools": FieldsOfType(required=("mode", "tools")),
}
"""Type of ``tool_choice`` -> its fields."""
_NO_STORE = "answers are not stored here: send the whole input"


# ------------------------------------------------------------------------------- what clients send


class InputItem(WireRecord, kw_only=True):
    """One item of the input. A client sends items of earlier answers back as it got them, and those
    of other servers."""

    rules: ClassVar = FieldRules(
        silent=frozenset(["status", "encrypted_content", "phase", "parsed_arguments", "namespace"]),
        types=frozenset([*_FIELDS_OF_ITEMS, "item_reference"]),
        comes_back=True,
    )
    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[TextPart] | None = None
    id: str | None = None
    summary: list[TextPart] | None = None


class FlatFunction(Function, kw_only=True):
    """A tool, or the choice of one. A chat has the function in an inner object."""

    rules: ClassVar = FieldRules(types=frozenset(["function"]))
    type: Literal["function"]


class FlatToolChoice(WireRecord):
    """The choice of a tool, by its ``name``; or of several, by ``mode`` and ``tools``."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[FlatFunction] | None = None


class TextOptions(WireRecord):
    """What the text of the answer must be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(WireRecord):
    """How much the model should reason."""

    effort: str | None = None


class ResponseRequest(WireRecord, kw_only=True):
    """The body of ``/v1/responses``."""

    rules: ClassVar = FieldRules(
        refused={
            **REFUSED_OF_SAMPLING,
            **CONSTRAINTS_OF_CHATS,
            "response_format": Refused(
                unless=({"type": "text"},), because="text.format stands for it"
            ),
            "best_of": Refused(unless=(1,)),
            "previous_response_id": Refused(because=_NO_STORE),
            "conversation": Refused(because=_NO_STORE),
            "prompt": Refused(because="the prompt must stand in input"),
            "background": Refused(unless=(False,)),
            "continue_final_message": Refused(unless=(False,)),
        },
        only={"store": (False,), "truncation": ("disabled",)},
        items={"include": ("message.output_text.logprobs",)},
    )
    refused_params: ClassVar[tuple[str, ...]] = ("prompt_logprobs", "n", "max_tokens", "logprobs")
    model: str
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """As in ``ChatRequest``."""
    stream: bool | None = None
    structured_outputs: StructuredChoice | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: Annotated[list[FlatFunction], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ------------------------------------------------------------------------------- body to chat


def chat_of_response(body: ResponseRequest, model: ModelDescription) -> ChatRequest:
    """The chat that the body stands for. Raises FieldError."""
    text = body.text or TextOptions()
    reasoning = body.reasoning or ReasoningOptions()
    response_format = None
    if text.format is not None:
        check_fields("text.format", text.format, _FIELDS_OF_FORMATS)
        response_format = text.format.as_response_format()
    tool_choice: Any = body.tool_choice
    if isinstance(tool_choice, FlatToolChoice):
        tool_choice = _tool_choice_of_chat(tool_choice)
    shared = {name: getattr(body, name) for name in _SHARED_WITH_CHATS}
    chat = ChatRequest(
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=bool(body.include) or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs or None,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=tool_choice,
        response_format=response_format,
        verbosity=text.verbosity,
        reasoning_effort=reasoning.effort,
        **shared,
    )
    choose_allowed_tools(chat)
    if chat.logprobs:
        _check_logprobs(body, chat, model)
    return chat


def _tool_choice_of_chat(choice: FlatToolChoice) -> ToolChoice:
    """The same choice in the form of a chat, with the fields of its type. Raises FieldError."""
    check_fields("tool_choice", choice, _FIELDS_OF_CHOICES)
    if choice.type == "function":
        return ToolChoice("function", Function(name=choice.name or ""))
    tools = [_tool(tool) for tool in choice.tools or ()]
    return ToolChoice("allowed_tools", None, AllowedTools(choice.mode or "auto", tools))


def _check_logprobs(body: ResponseRequest, chat: ChatRequest, model: ModelDescription) -> None:
    """Refuse logprobs where tokens may be reasoning or calls: in this API they are those of the
    text alone. Raises FieldError."""
    formats = formats_of_answer(chat, model)
    if formats.tool is None and find_reasoning(formats.reasoning) is None:
        return
    field = "include" if body.include else "top_logprobs"
    reason = "goes without tools, and with a model that does not reason"
    raise FieldError(field, f"{field} {reason}: which tokens are the text's is not known")


def _messages(body: ResponseRequest) -> list[Message]:
    """The messages of the chat."""
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    history: list[Message | AssistantPart] = []
    for index, item in enumerate(items):
        history += _messages_or_parts(f"input[{index}]", item)
    messages = list(join_assistant_parts(history))
    if body.instructions:
        messages.insert(0, Message(role="system", content=body.instructions))
    return messages


def _messages_or_parts(path: str, item: InputItem) -> Sequence[Message | AssistantPart]:
    """What an item of the input stands for: a message, or a part of one of the assistant. Empty for
    an item without content. ``path`` leads to the item in the body."""
    item = msgspec.structs.replace(item, type=item.type or "message")
    if item.role == "assistant" and item.content is None:
        item = msgspec.structs.replace(item, content="")
    check_fields(path, item, _FIELDS_OF_ITEMS)
    if item.type == "function_call":
        return [_call(item, item.arguments)]
    if item.type == "custom_tool_call":
        return [_call(item, msgspec.json.encode({"input": item.input}).decode())]
    if item.type in ("function_call_output", "custom_tool_call_output"):
        text = joined_text(item.output)
        return [Message(role="tool", content=text, tool_call_id=item.call_id)]
    if item.type == "reasoning":
        # It may be empty or a summary: some servers do not send what their models think.
        text = joined_text(item.content) or joined_text(item.summary)
        return [AssistantPart(reasoning=text)] if text else []
    text = joined_text(item.content)
    assert item.role is not None  # `check_fields` has seen it
    if item.role == "assistant":
        return [AssistantPart(text=text)]
    return [Message(role=item.role, content=text)]


def _call(item: InputItem, arguments: str | dict[str, Any] | None) -> AssistantPart:
    """A call that the model made. ``arguments``: an object, or its JSON."""
    called = Called(name=str(item.name), arguments=arguments)
    return AssistantPart(call=Call(type="function", id=item.call_id, function=called))


def _tool(flat: FlatFunction) -> Tool:
    """The same tool in the form of a chat."""
    function = Function(
        name=flat.name,
        description=flat.description,
        parameters=flat.parameters,
        strict=flat.strict,
    )
    return Tool(type="function", function=function)
