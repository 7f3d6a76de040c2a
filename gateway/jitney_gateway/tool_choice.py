"""The choice of some of a chat's tools, ``allowed_tools``. Pure."""

from collections.abc import Sequence

from jitney.errors import show

from jitney_gateway.refusals import FieldError
from jitney_gateway.wire import AllowedTools, ChatRequest, Tool, ToolChoice

_TYPES = ("function", "allowed_tools")


def check_tool_choice(choice: ToolChoice) -> None:
    """Check that a choice has the one field that goes with its type. Raises FieldError."""
    if choice.type not in _TYPES:
        bound = " or ".join(_TYPES)
        reason = f"tool_choice.type is {show(choice.type)}, but must be {bound}"
        raise FieldError("tool_choice.type", reason)
    own = choice.function if choice.type == "function" else choice.allowed_tools
    if own is None:
        field = f"tool_choice.{choice.type}"
        raise FieldError(field, f"{field} is missing")


def choose_allowed_tools(chat: ChatRequest) -> None:
    """If the chat's ``tool_choice`` names allowed tools, take all others out of the chat. Raises
    FieldError for a tool that the chat does not have."""
    choice = chat.tool_choice
    if not isinstance(choice, ToolChoice):
        return
    check_tool_choice(choice)
    if choice.allowed_tools is None:
        return
    chat.tools = _allowed(chat.tools or (), choice.allowed_tools)
    chat.tool_choice = choice.allowed_tools.mode


def _allowed(tools: Sequence[Tool], allowed: AllowedTools) -> list[Tool]:
    known = {tool.function.name for tool in tools}
    names = set()
    for index, tool in enumerate(allowed.tools):
        name = tool.function.name
        if name not in known:
            field = f"tool_choice.allowed_tools.tools[{index}]"
            raise FieldError(field, f"{field} is {show(name)}, but must be one of tools")
        names.add(name)
    return [tool for tool in tools if tool.function.name in names]
