"""OpenAI's older form of tools, which some clients still send: the fields ``functions`` and
``function_call``. Pure.

A chat in this form becomes one with tools, and its answer gets the older form back. Such an answer
has one call at most.
"""

from collections.abc import Sequence

import msgspec
from jitney.errors import show

from jitney_gateway.refusals import FieldError
from jitney_gateway.wire import (
    Call,
    ChatRequest,
    Function,
    JsonObject,
    Message,
    NamedFunction,
    Tool,
    ToolChoice,
)


def set_tools_of_functions(chat: ChatRequest) -> None:
    """Set the tools of a chat that has functions. Raises FieldError."""
    if not chat.functions:
        if isinstance(chat.function_call, NamedFunction):
            raise FieldError("function_call", "function_call goes with functions")
        return
    if chat.tools or chat.tool_choice is not None:
        raise FieldError("functions", "functions and tools exclude one another")
    chat.tools = [Tool("function", function) for function in chat.functions]
    chat.parallel_tool_calls = False
    if isinstance(chat.function_call, NamedFunction):
        name = chat.function_call.name
        _check_name(name, chat.functions)
        chat.tool_choice = ToolChoice("function", Function(name))
    else:
        chat.tool_choice = chat.function_call


def _check_name(name: str, functions: Sequence[Function]) -> None:
    if name not in [function.name for function in functions]:
        reason = f"function_call.name is {show(name)}, but must be one of functions"
        raise FieldError("function_call.name", reason)


def with_tool_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages of a chat, without the older forms of a call and of its result."""
    newer = []
    id_of_call = None
    for index, message in enumerate(messages):
        if message.function_call is not None:
            id_of_call = f"call_{index}"
            call = Call(type="function", id=id_of_call, function=message.function_call)
            message = msgspec.structs.replace(message, function_call=None, tool_calls=[call])
        elif message.role == "function":
            message = msgspec.structs.replace(message, role="tool", tool_call_id=id_of_call)
        newer.append(message)
    return newer


def in_older_form(message: JsonObject) -> JsonObject:
    """A message of an answer, or a delta of one, with its call in the older form."""
    calls = message.pop("tool_calls", None)
    if calls:
        message["function_call"] = calls[0]["function"]
    return message
