"""/v1/messages: the chat that a body stands for, and the events of the answer."""

import json
from typing import Any

import msgspec
import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_gateway.client_fields import name_clients_field
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.messages_answer import MessageAnswer
from jitney_gateway.messages_request import (
    NAMES_OF_MESSAGE,
    CountTokensRequest,
    MessageRequest,
    chat_of_message,
    chat_of_prompt,
)
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.parsers import Parser
from jitney_gateway.refusals import FieldError, StatusError, describe
from jitney_gateway.refusals import describe_for_messages as told
from jitney_gateway.server_request import ServerRequest, request_of_chat
from jitney_gateway.wire import JsonObject, decode
from jitney_gateway.without_effect import leave_out_of_chat

from tests.gateway.asked import KNOWN, PARAMS, SCHEMA
from tests.gateway.asked import TOOL as CHAT_TOOL
from tests.gateway.test_answers import step
from tests.gateway.test_responses import TEXTS

TOOL: Any = {"name": "stop", "input_schema": {"type": "object"}}
USER: Any = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER]}
MARK = {"cache_control": {"type": "ephemeral"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "done"}
TALK: list[Any] = [
    {"role": "user", "content": [
        {"type": "text", "text": "a", **MARK}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "1", "name": "stop", "input": {"a": 1}},
        {"type": "tool_use", "id": "2", "name": "stop", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "done"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
        {"type": "text", "text": "Go on."}]},
]  # fmt: skip
PROMPT: dict[str, Any] = {
    "model": "other", "messages": [USER, USER], "system": "Be brief.", "tools": [TOOL],
    "output_config": {"effort": "low"}, "chat_template_kwargs": {"a": 1},
    "thinking": {"type": "enabled"},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
}  # fmt: skip
CHANGES: dict[str, Any] = {
    **PROMPT, "max_tokens": 3, "stop_sequences": ["x"], "stream": True,
    "metadata": {"user_id": "someone"},
}  # fmt: skip
ELSEWHERE = {"tool_choice", "service_tier"}
THINKS = msgspec.structs.replace(KNOWN, chat_template="{% if enable_thinking %}<think></think>")


def ask(
    body: dict[str, Any], known: ModelDescription = THINKS, *, strict: bool = False
) -> ServerRequest:
    ignored = IgnoredFields(strict=strict)
    data = decode(json.dumps(body).encode(), MessageRequest, ignored)
    try:
        made = chat_of_message(data, known, ignored)
        leave_out_of_chat(made, known, ignored, NAMES_OF_MESSAGE)
        return request_of_chat(made, known, "id")
    except InvalidArgumentError as error:
        raise name_clients_field(error, data) from None


def chat(body: dict[str, Any], known: ModelDescription = THINKS) -> Any:
    return json.loads(ask(body, known).inputs["messages"])  # type: ignore[arg-type]


def params_of(body: dict[str, Any], known: ModelDescription = KNOWN) -> Any:
    return json.loads(ask(body, known).inputs["sampling_parameters"])  # type: ignore[arg-type]


def test_each_field_changes_the_request() -> None:
    assert {*MessageRequest.__struct_fields__} - {"params"} == {*CHANGES, *ELSEWHERE}
    assert {*CountTokensRequest.__struct_fields__} == {*PROMPT, "tool_choice"}
    for name, value in CHANGES.items():
        assert ask(BODY | {name: value}) != ask(BODY), name
    for name in PARAMS.keys() - {"stop", "max_tokens"}:
        assert params_of(BODY | {name: PARAMS[name]})[name] == PARAMS[name]
    assert params_of(BODY | {"stop_sequences": ["x"]})["stop"] == ["x"]


def test_tools_are_chosen() -> None:
    def asked(**choice: Any) -> ServerRequest:
        return ask(BODY | {"tools": [TOOL], "tool_choice": choice}, KNOWN)

    assert chat(BODY | {"tools": [TOOL]}, KNOWN)["tools"] == [CHAT_TOOL]
    assert b'"tools"' not in asked(type="none").inputs["messages"]  # type: ignore[operator]
    assert b"grammar" not in asked(type="auto").inputs["sampling_parameters"]  # type: ignore
    for choice in ({"type": "any"}, {"type": "tool", "name": "stop"}):
        params = json.loads(asked(**choice).inputs["sampling_parameters"])  # type: ignore[arg-type]
        assert "stop" in params["structured_outputs"]["grammar"]
    several = params_of(BODY | {"tools": [TOOL], "tool_choice": {"type": "any"}})
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert params_of(BODY | {"tools": [TOOL], "tool_choice": one}) != several


@pytest.mark.parametrize("name", sorted({*CHANGES, *ELSEWHERE, "container", "stop", "n"}))
def test_a_wrong_type_or_an_unknown_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(FieldError) as caught:
        ask(BODY | {name: 1.5}, strict=True)
    status, body = told(caught.value)
    assert status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert name in body["error"]["message"]


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": []}, "messages"),
        (block(type="image", source={}), "messages[0].content[0].type"),
        (block(type="document"), "messages[0].content[0].type"),
        (block(type="tool_use", id="1", name="stop", input={}), "messages[0].content[0].type"),
        (block(type="thinking", thinking="Hm."), "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}, USER]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "system", "content": [RESULT]}, USER]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (block(type="text"), "messages[0].content[0].text"),
        (block(**{**RESULT, "content": [{"type": "image", "source": {}}]}),
         "messages[0].content[0].content[0].type"),
        ({"tools": [TOOL | {"name": "stop\n"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "a"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        ask(BODY | more)
    assert describe(caught.value)[1]["error"]["param"] == field


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"service_tier": "batch"}, "service_tier"),
    ],
)
def test_a_strict_gateway_refuses_what_has_no_effect(more: dict[str, Any], field: str) -> None:
    assert ask(BODY | more)
    with pytest.raises(FieldError) as caught:
        ask(BODY | more, strict=True)
    assert describe(caught.value)[1]["error"]["param"] == field


def test_an_empty_answer_may_come_back() -> None:
    """Its own answer is a list without blocks if the model ended at once."""
    said = [USER, {"role": "assistant", "content": []}, USER]
    assert [each["role"] for each in chat(BODY | {"messages": said})["messages"]] == ["user"]


def test_a_wrong_type_is_refused_with_the_right_ones() -> None:
    with pytest.raises(FieldError, match="is 'text', but must be json_schema"):
        ask(BODY | {"output_config": {"format": {"type": "text"}}})


def test_the_messages_become_a_chat() -> None:
    calls = [
        {"id": id_, "type": "function", "function": {"name": "stop", "arguments": arguments}}
        for id_, arguments in (("1", {"a": 1}), ("2", {}))
    ]
    system = [{"type": "text", "text": "Be", **MARK}, {"type": "text", "text": "brief."}]
    assert chat(BODY | {"system": system, "messages": TALK, **MARK})["messages"] == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "So:", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: no"},
        {"role": "user", "content": "Go on."},
    ]
    made = params_of(
        BODY | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    )
    assert made["structured_outputs"]["json"]["type"] == "object"
    counted = decode(json.dumps({"model": "m", "messages": TALK}).encode(), CountTokensRequest)
    same = request_of_chat(chat_of_prompt(counted, KNOWN), KNOWN, "").inputs["messages"]
    assert json.loads(same) == chat(BODY | {"messages": TALK})  # type: ignore[arg-type]


def test_turns_of_the_user_that_follow_one_another_are_one() -> None:
    said = [USER, {"role": "user", "content": [{"type": "text", "text": "there"}]}]
    assert chat(BODY | {"messages": said})["messages"] == [{"role": "user", "content": "hi\nthere"}]


def test_thinking_is_what_the_model_can_choose() -> None:
    def asked(kind: str, known: ModelDescription) -> Any:
        return chat(BODY | {"thinking": {"type": kind}}, known).get("chat_template_parameters")

    assert asked("adaptive", THINKS) == {"enable_thinking": True}
    assert asked("disabled", THINKS) == {"enable_thinking": False}
    always = msgspec.structs.replace(KNOWN, reasoning_format="think")
    assert asked("enabled", always) is asked("disabled", KNOWN) is None, "as it does anyway"
    for kind, known in (("enabled", KNOWN), ("disabled", always)):
        assert asked(kind, known) is None, "it has no choice"
        with pytest.raises(FieldError, match=f"thinking is '{kind}', but model 'm'"):
            ask(BODY | {"thinking": {"type": kind}}, known, strict=True)


def test_thinking_has_a_budget() -> None:
    ids = {"<think>": 6, "</think>": 7}
    known = msgspec.structs.replace(KNOWN, reasoning_format="think_opened", added_tokens=ids)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    made = params_of(BODY | {"thinking": thinking, "max_tokens": 2000}, known)
    assert "[max_tokens=1024]" in made["structured_outputs"]["grammar"]
    spelt = msgspec.structs.replace(known, added_tokens={})
    assert params_of(BODY | {"thinking": thinking}, spelt).get("structured_outputs") is None
    with pytest.raises(FieldError, match=r"thinking.budget_tokens is 1024, but the reasoning"):
        ask(BODY | {"thinking": thinking}, spelt, strict=True)


def answer_of(parser: Parser) -> MessageAnswer:
    return MessageAnswer(
        decode(json.dumps(BODY).encode(), MessageRequest), "id", [SequenceContent(parser)]
    )


def joined(events: list[JsonObject]) -> JsonObject:
    """The message that a client makes of a stream; the order of events is checked."""
    names = [event["type"] for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    message: JsonObject = {**events[0]["message"], "content": []}
    text, open_ = "", False
    for name, event in zip(names[1:-2], events[1:-2], strict=True):
        if name == "content_block_start":
            assert not open_
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            text, open_ = "", True
            continue
        assert open_
        whole = message["content"][event["index"]]
        if name == "content_block_delta":
            (text_,) = (event["delta"][key] for key in event["delta"] if key != "type")
            text += text_
        else:
            open_ = False
            key = {"tool_use": "input"}.get(whole["type"], whole["type"])
            whole[key] = json.loads(text) if key == "input" else text
    assert not open_
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


@pytest.mark.parametrize("text", TEXTS)
def test_the_events_make_the_whole_at_every_split(text: str) -> None:
    def content(pieces: list[str]) -> list[JsonObject]:
        answer, events = answer_of(Parser("hermes", "think", [CHAT_TOOL])), []
        for number, piece in enumerate(pieces):
            end = "stop" if number == len(pieces) - 1 else None
            events += list(answer.feed(step(piece, end=end)))
        events += answer.closing_events()
        assert joined(json.loads(json.dumps(events))) == answer.as_json()
        made = answer.as_json()["content"]
        return [{name: each[name] for name in each if name != "id"} for each in made]

    whole = content([text])
    for at in range(1, len(text)):
        assert content([text[:at], text[at:]]) == whole
    assert content(list(text)) == whole
    used = [each["input"] for each in whole if each["type"] == "tool_use"]
    assert used == ([{"at": "é"}] * 2 if "tool_call" in text else [])
    if text.startswith("<think>"):
        assert whole[0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}


@pytest.mark.parametrize(
    ("text", "end", "stop", "wanted"),
    [
        ("a", "stop", None, ("end_turn", None)),
        ("a", "stop", "x", ("stop_sequence", "x")),
        ("a", "length", None, ("max_tokens", None)),
        ("a", "deadline", None, ("deadline", None)),
        (TEXTS[1], "stop", None, ("tool_use", None)),
    ],
)
def test_why_a_message_ended(text: str, end: str, stop: str | None, wanted: Any) -> None:
    answer = answer_of(Parser("hermes", None, [CHAT_TOOL]))
    last = msgspec.structs.replace(step(text, end=end), stop_strings=[stop])
    events = [*answer.feed(step("b")), *answer.feed(last), *answer.closing_events()]
    whole = answer.as_json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == wanted
    assert events[0]["message"]["stop_reason"] is None
    assert whole["usage"] == {
        "input_tokens": 2,
        "cache_read_input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(text) + 1,
    }


def test_errors_are_of_its_form() -> None:
    for error, wanted in (
        (StatusError(401, "no"), "authentication_error"),
        (UnavailableError("the queue is full"), "rate_limit_error"),
        (UnavailableError("no server"), "overloaded_error"),
        (StatusError(405, "no"), "invalid_request_error"),
        (StatusError(413, "no"), "request_too_large"),
    ):
        assert told(error)[1]["error"] == {"type": wanted, "message": str(error)}
    (event,) = answer_of(Parser(None, None)).error_events(UnavailableError("no server"))
    assert event["type"] == "error"


@pytest.mark.parametrize("number", ["1e999", "9" * 5000])
def test_a_call_that_no_client_could_read_is_text(number: str) -> None:
    """In each form of a call; such a message was status 500."""
    for tool_format, text in (
        ("hermes", '<tool_call>{"name": "stop", "arguments": {"at": NUMBER}}</tool_call>'),
        ("qwen_xml", "<function=stop>\n<parameter=at>\nNUMBER\n</parameter>\n</function>"),
        ("pythonic", "[stop(at=NUMBER)]"),
    ):
        said = text.replace("NUMBER", number)
        tool = {"function": {"name": "stop", "parameters": {"properties": {"at": {"type": "n"}}}}}
        answer = answer_of(Parser(tool_format, None, [tool]))
        list(answer.feed(step(said, end="stop")))
        made, *_ = answer.as_json()["content"]
        if tool_format == "hermes":
            # Its arguments had begun: they end before the number.
            assert made["input"] == {}
            assert answer.as_json()["content"][1]["text"] == f"{number}}}}}</tool_call>"
            assert answer.as_json()["stop_reason"] == "end_turn"
        elif tool_format == "qwen_xml":
            assert made["input"] == {"at": number}
        else:
            assert made == {"type": "text", "text": said}


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_is_cut_has_its_input_so_far(size: int) -> None:
    cut = '<tool_call>{"name": "stop", "arguments": {"a": [1, "x"], "b": "ha'
    answer = answer_of(Parser("hermes", None, [CHAT_TOOL]))
    events = []
    for start in range(0, len(cut), size):
        end = "length" if start + size >= len(cut) else None
        events += list(answer.feed(step(cut[start : start + size], end=end)))
    (made,) = answer.as_json()["content"]
    assert made["input"] == {"a": [1, "x"]}
    assert answer.as_json()["stop_reason"] == "max_tokens"
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == '{"a": [1, "x"], "b": "ha'
