"""Answers that continue a text of the assistant."""

import json
from typing import Any

import msgspec
import pytest
from jitney_gateway.answer_formats import formats_of_answer
from jitney_gateway.client_fields import name_clients_field
from jitney_gateway.formats import AnswerFormats
from jitney_gateway.generation import CHAT_APIS
from jitney_gateway.refusals import FieldError
from jitney_gateway.server_request import request_of_token_ids
from jitney_gateway.wire import ChatRequest, TokenizeRequest, decode

from tests.gateway.asked import KNOWN, TOOL, USER
from tests.gateway.test_field_rules import CHATS, CUSTOM_TOOL, MESSAGES, ask

SAID = {"role": "assistant", "content": "So:"}
THINKS = msgspec.structs.replace(KNOWN, chat_template="<think></think>", added_tokens={})
HARMONY = msgspec.structs.replace(KNOWN, reasoning_format="harmony", tool_format="harmony")
CONTINUED = {"messages": [USER, SAID], "continue_final_message": True}


def chat_of(path: str, more: dict[str, Any], **options: Any) -> Any:
    return json.loads(ask(path, more, **options)[0].inputs["messages"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHATS, CONTINUED),
        (CHATS, {**CONTINUED, "add_generation_prompt": False}),
        (MESSAGES, {"messages": [USER, SAID]}),
    ],
)
def test_the_last_message_is_continued(path: str, more: dict[str, Any]) -> None:
    chat = chat_of(path, more)
    assert chat == {"messages": [USER, SAID], "continue_final_message": True}


def test_without_the_field_a_chat_gets_a_new_message() -> None:
    assert "continue_final_message" not in chat_of(CHATS, {"messages": [USER, SAID]})


def test_what_is_continued_has_no_reasoning_before_it() -> None:
    """The parser would take the text for reasoning, and a grammar would ask for it."""
    body = decode(json.dumps({"model": "m", "tools": [TOOL], **CONTINUED}).encode(), ChatRequest)
    assert formats_of_answer(body, THINKS) == AnswerFormats("hermes", None)
    more = {**CONTINUED, "response_format": {"type": "json_object"}}
    request, _ = ask(CHATS, more, model=THINKS)
    params = json.loads(request.inputs["sampling_parameters"])  # type: ignore[arg-type]
    assert params["structured_outputs"] == {"json_object": True}


def test_a_wish_for_reasoning_is_named() -> None:
    more = {"messages": [USER, SAID], "thinking": {"type": "enabled"}}
    assert ask(MESSAGES, more)[1] == "thinking"
    with pytest.raises(FieldError, match="a text that is continued has no reasoning"):
        ask(MESSAGES, more, strict=True)


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_message_at_the_end_is_left_out(content: Any) -> None:
    chat = chat_of(MESSAGES, {"messages": [USER, {"role": "assistant", "content": content}]})
    assert chat == {"messages": [USER]}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "1", "name": "stop", "input": {}},
        {"type": "thinking", "thinking": "Hm."},
    ],
)
def test_only_a_text_is_continued(block: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": [block]}
    with pytest.raises(FieldError, match="not a call, nor reasoning"):
        ask(MESSAGES, {"messages": [USER, turn], "tools": [CUSTOM_TOOL]})


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (CHATS, CONTINUED, "continue_final_message"),
        (MESSAGES, {"messages": [USER, SAID]}, "messages"),
    ],
)
def test_a_text_between_headers_is_not_continued(
    path: str, more: dict[str, Any], field: str
) -> None:
    with pytest.raises(FieldError) as caught:
        ask(path, more, model=HARMONY)
    body = {"model": "m", "max_tokens": 5, **more}
    decoded = decode(json.dumps(body).encode(), CHAT_APIS[path].body)
    named = name_clients_field(caught.value, decoded)
    assert str(named) == f"{field}: in the format of model 'm', a text cannot be continued"


def test_its_tokens_can_be_counted() -> None:
    data = json.dumps({"model": "m", **CONTINUED}).encode()
    request = request_of_token_ids(decode(data, TokenizeRequest))
    assert json.loads(request.inputs["messages"])["continue_final_message"] is True  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", 'Here it is:\n```json\n{"a": [1, 2], "b": ', '[{"a": 1},'])
@pytest.mark.parametrize("as_parts", [False, True])
def test_json_that_has_begun_is_not_followed_by_whole_json(text: str, as_parts: bool) -> None:
    content: Any = [{"type": "text", "text": text}] if as_parts else text
    messages = [USER, {"role": "assistant", "content": content}]
    continued = {"messages": messages, "continue_final_message": True}
    schema = {"type": "object"}
    for field, value in (
        ("response_format", {"type": "json_object"}),
        ("guided_json", schema),
        ("structured_outputs", {"json": schema}),
    ):
        with pytest.raises(FieldError, match=rf"^{field}: the answer alone is whole JSON"):
            ask(CHATS, {**continued, field: value})
    output = {"format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(FieldError, match=r"^response_format: the answer alone is whole JSON"):
        ask(MESSAGES, {"messages": messages, "output_config": output})
    ask(CHATS, {**continued, "guided_regex": "a+"})
    ask(CHATS, continued)


def test_a_text_before_json_is_continued() -> None:
    for text in ("Here it is:", 'Like {"a": [1]} it is:'):
        messages = [USER, {"role": "assistant", "content": text}]
        more = {"messages": messages, "continue_final_message": True, "guided_json": {}}
        assert ask(CHATS, more)[0]
