"""Histories in shapes that no API asks for, and that clients send all the same."""

import json
from typing import Any

import pytest
from jitney_gateway.refusals import FieldError

from tests.gateway.asked import TOOL, USER
from tests.gateway.test_field_rules import CHATS, CUSTOM_TOOL, MESSAGES, RESPONSES, ask

SAID = {"role": "assistant", "content": ""}
CUT = '{"a": 1, "b": "x'
PARTS = [{"type": "text", "text": None}, "So:", {"type": "text", "text": "x"}]


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "stop", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [
        {"function": function, "type": "function", "id": "1"}]}  # fmt: skip


def in_chat(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return CHATS, {"messages": [USER, message, USER], "tools": [TOOL]}


def in_response(item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": [USER, item, USER]}


def in_message(role: str, block: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    turn = {"role": role, "content": [block]}
    return MESSAGES, {"messages": [USER, turn, USER], "tools": [CUSTOM_TOOL]}


def call_of_chat(arguments: Any) -> dict[str, Any]:
    function = {"name": "stop", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


def call_of_response(**more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "1", "name": "stop", **more}


def call_of_message(**more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "1", "name": "stop", **more}


ODD: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any] | None, str]] = {
    "decoded arguments": (in_chat(call_of_chat({"a": 1})), called({"a": 1}), ""),
    "no calls": (in_chat({**SAID, "tool_calls": []}), SAID, ""),
    "calls of other types": (
        in_chat({**SAID, "tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}),
        SAID,
        "messages[].tool_calls[]:custom",
    ),
    "parts": (in_chat({"role": "assistant", "content": PARTS}), {**SAID, "content": "So:\nx"}, ""),
    "structured reasoning": (
        in_chat({**SAID, "reasoning": {"text": "Hm."}, "reasoning_content": ["Hm."]}),
        SAID,
        "messages[].reasoning, messages[].reasoning_content",
    ),
    "decoded arguments of an item": (
        in_response(call_of_response(arguments={"a": 1})),
        called({"a": 1}),
        "",
    ),
    "an item without arguments": (in_response(call_of_response()), called({}), ""),
    "an item without a result": (
        in_response({"type": "function_call_output", "call_id": "1", "output": None}),
        {"role": "tool", "content": "", "tool_call_id": "1"},
        "",
    ),
    "encoded input": (
        in_message("assistant", call_of_message(input='{"a": 1}')),
        called({"a": 1}),
        "",
    ),
    "cut input": (
        in_message("assistant", call_of_message(input=CUT)),
        called({"a": 1}),
        "messages[].content[].input",
    ),
    "a block without input": (in_message("assistant", call_of_message(input=None)), called({}), ""),
    "a block without text": (
        in_message("assistant", {"type": "text", "text": None}),
        SAID,
        "",
    ),
    "a block without reasoning": (
        in_message("assistant", {"type": "thinking", "signature": "s"}),
        None,
        "",
    ),
}
"""Path and body, the message between those of the user (None: there is none), and what the header
says."""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_what_the_model_said_comes_back_in_any_shape(name: str, strict: bool) -> None:
    (path, body), expected, named = ODD[name]
    request, said = ask(path, body, strict=strict)
    assert said == named
    messages = json.loads(request.inputs["messages"])["messages"]  # type: ignore[arg-type]
    if expected is None:
        assert messages == [{"role": "user", "content": "hi\nhi"}]
    else:
        assert messages == [USER, expected, USER]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
    ],
)
def test_what_the_user_says_is_not_left_out(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=r"messages\[0\].content\[0\].text is missing"):
        ask(path, body)
