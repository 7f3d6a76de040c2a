"""/v1/responses: the chat that a body stands for, and the events of the answer."""

import json
from typing import Any

import msgspec
import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_gateway.client_fields import name_clients_field
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.parsers import Parser
from jitney_gateway.reasoning_tokens import reasoning_counter
from jitney_gateway.refusals import FieldError, describe
from jitney_gateway.responses_answer import ResponseAnswer
from jitney_gateway.responses_request import ResponseRequest, chat_of_response
from jitney_gateway.server_request import ServerRequest, request_of_chat
from jitney_gateway.wire import JsonObject, decode

from tests.gateway.asked import KNOWN, PARAMS, SCHEMA
from tests.gateway.asked import TOOL as CHAT_TOOL
from tests.gateway.test_answers import CALLING, position, step

TOOL = {"type": "function", **CHAT_TOOL["function"]}  # type: ignore[dict-item]
BODY: dict[str, Any] = {"model": "m", "input": "hi"}
TALK = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
        {"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "stop", "arguments": '{"a":1}'},
    {"type": "function_call_output", "call_id": "1", "output": "done"},
]  # fmt: skip
CHANGES: dict[str, Any] = {
    "model": "other", "input": "ho", "instructions": "Be brief.", "tools": [TOOL],
    "text": {"format": {"type": "json_object"}}, "max_output_tokens": 3, "stream": True,
    "top_logprobs": 2, "include": ["message.output_text.logprobs"], "user": "someone",
    "reasoning": {"effort": "low"}, "safety_identifier": "someone", "prompt_cache_key": "k",
    "service_tier": "flex", "chat_template_kwargs": {"a": 1},
    "structured_outputs": {"regex": "a"},
}  # fmt: skip
# Fields that go with another one, whose effect is on the answer, or whose only value is what is
# done anyway: tested below.
ELSEWHERE = {
    "tool_choice", "parallel_tool_calls", "metadata",
}  # fmt: skip


def ask(body: dict[str, Any], *, strict: bool = False) -> ServerRequest:
    ignored = IgnoredFields(strict=strict)
    data = decode(json.dumps(body).encode(), ResponseRequest, ignored)
    try:
        return request_of_chat(chat_of_response(data, KNOWN), KNOWN, "id")
    except InvalidArgumentError as error:
        raise name_clients_field(error, data) from None


def chat(body: dict[str, Any]) -> Any:
    return json.loads(ask(body).inputs["messages"])  # type: ignore[arg-type]


def params_of(body: dict[str, Any]) -> Any:
    return json.loads(ask(body).inputs["sampling_parameters"])  # type: ignore[arg-type]


def test_each_field_changes_the_request() -> None:
    assert {*ResponseRequest.__struct_fields__} - {"params"} == {*CHANGES, *ELSEWHERE}
    for name, value in CHANGES.items():
        assert ask(BODY | {name: value}) != ask(BODY), name
    for name in PARAMS.keys() - {"max_tokens"}:
        assert params_of(BODY | {name: PARAMS[name]})[name] == PARAMS[name]
    assert params_of(BODY | {"top_logprobs": 2})["logprobs"] == 2
    assert "tools" not in chat(BODY | {"tools": [TOOL], "tool_choice": "none"})
    named = {"type": "function", "name": "stop"}
    for choice in ("required", named):
        forced = params_of(BODY | {"tools": [TOOL], "tool_choice": choice})
        assert "stop" in forced["structured_outputs"]["grammar"]


REFUSED = {"background", "previous_response_id", "conversation", "prompt", "max_tokens", "n"}
IGNORED = {"truncation", "store", "client_metadata"}


@pytest.mark.parametrize("name", sorted({*CHANGES, *ELSEWHERE, *REFUSED, *IGNORED}))
def test_a_wrong_type_or_an_unknown_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(FieldError) as caught:
        ask(BODY | {name: 1.5}, strict=name in IGNORED)
    assert describe(caught.value)[1]["error"]["param"] == name


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0]"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"top_logprobs": 2, "tools": [TOOL]}, "top_logprobs"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        ask(BODY | more)
    assert describe(caught.value)[1]["error"]["param"] == field


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_a_strict_gateway_refuses_what_has_no_effect(more: dict[str, Any], field: str) -> None:
    assert ask(BODY | more)
    with pytest.raises(FieldError) as caught:
        ask(BODY | more, strict=True)
    assert describe(caught.value)[1]["error"]["param"] == field


def test_a_chats_field_is_named_as_the_client_knows_it() -> None:
    body = decode(json.dumps(BODY | {"text": CHANGES["text"]}).encode(), ResponseRequest)
    old = msgspec.structs.replace(KNOWN, sampling_parameters=frozenset(["max_tokens"]))
    with pytest.raises(FieldError) as caught:
        request_of_chat(chat_of_response(body, old), old, "id")
    assert str(name_clients_field(caught.value, body)) == "text is not supported by model 'm'"


def test_a_field_without_a_format_is_not_blamed_for_one() -> None:
    more = {"text": {"verbosity": "low"}, "tools": [TOOL], "tool_choice": "required"}
    body = decode(json.dumps(BODY | more).encode(), ResponseRequest)
    error = InvalidArgumentError("structured_outputs.grammar is too large")
    assert str(name_clients_field(error, body)) == "tool_choice is too large"


def test_the_input_becomes_a_chat() -> None:
    called = {"name": "stop", "arguments": {"a": 1}}
    assert chat(BODY | {"instructions": "Go.", "input": TALK, "tools": [TOOL]}) == {
        "messages": [
            {"role": "system", "content": "Go."},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "So:", "reasoning_content": "Hm.",
             "tool_calls": [{"id": "1", "type": "function", "function": called}]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ],
        "tools": [CHAT_TOOL],
    }  # fmt: skip
    schema = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    made = params_of(BODY | {"text": {"format": schema, "verbosity": None}})
    assert made["structured_outputs"] == {"json": {"title": "a", **SCHEMA}}


def answer_of(parser: Parser, **more: Any) -> ResponseAnswer:
    body = decode(json.dumps(BODY | more).encode(), ResponseRequest)
    most = 1 if body.parallel_tool_calls is False else None
    return ResponseAnswer(body, "id", [SequenceContent(parser, most)])


def joined(events: list[JsonObject]) -> list[JsonObject]:
    """The output that a client makes of a stream's deltas; the order of events is checked."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    items: list[JsonObject] = []
    for name, event in zip(names[2:-1], events[2:-1], strict=True):
        if name == "output_item.added":
            assert not items or items[-1]["done"]
            assert event["output_index"] == len(items)
            items.append({"item": event["item"], "text": "", "logprobs": [], "done": False})
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["item"]["id"]) == item["item"]["id"]
        assert not item["done"]
        if name.endswith(".delta"):
            item["text"] += event["delta"]
            item["logprobs"] += event.get("logprobs", [])
        elif name.startswith(("output_text.", "reasoning_text.", "function_call_arguments.")):
            assert event.get("text", event.get("arguments")) == item["text"]
            assert event.get("logprobs", []) == item["logprobs"]
        elif name == "output_item.done":
            assert event["item"]["id"] == item["item"]["id"]
            item |= {"item": event["item"], "done": True}
    made = []
    for item in items:
        assert item["done"]
        whole = item["item"]
        told = whole["content"][0] if "content" in whole else {"text": whole["arguments"]}
        assert told["text"] == item["text"]
        assert told.get("logprobs", []) == item["logprobs"]
        made.append(whole)
    return made


def fed(answer: ResponseAnswer, pieces: list[str], end: str = "stop") -> list[JsonObject]:
    events = []
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        events += list(answer.feed(step(piece, end=end if last else None)))
    return events + answer.closing_events()


def plain(output: list[JsonObject]) -> list[JsonObject]:
    """Without ids, which are drawn."""
    return [{name: item[name] for name in item if name not in ("id", "call_id")} for item in output]


TEXTS = ["Hello, wörld", CALLING + " Bye.", "<think>Hm.</think>\n\nYes. " + CALLING]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("end", ["stop", "length"])
def test_the_events_make_the_whole_at_every_split(text: str, end: str) -> None:
    def output(pieces: list[str]) -> list[JsonObject]:
        answer = answer_of(Parser("hermes", "think", [CHAT_TOOL]))
        events = fed(answer, pieces, end)
        assert joined(events) == answer.as_json()["output"] == events[-1]["response"]["output"]
        final = "response.completed" if end == "stop" else "response.incomplete"
        assert events[-1]["type"] == final
        return plain(answer.as_json()["output"])

    whole = output([text])
    for at in range(1, len(text)):
        assert output([text[:at], text[at:]]) == whole
    assert output(list(text)) == whole
    if "tool_call" in text:
        calls = [item for item in whole if item["type"] == "function_call"]
        assert [json.loads(call["arguments"]) for call in calls] == [{"at": "é"}] * 2
        assert {call["status"] for call in calls} == {"completed"}
    if text.startswith("<think>"):
        assert whole[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    statuses = [item["status"] for item in whole if item["type"] == "message"]
    assert whole[-1]["type"] != "message" or (statuses[-1] == "completed") == (end == "stop")


def test_a_call_that_is_cut_is_incomplete() -> None:
    cut = '<tool_call>{"name": "stop", "arguments": {"at": "the bus'

    def output(pieces: list[str]) -> list[JsonObject]:
        answer = answer_of(Parser("hermes", None, [CHAT_TOOL]))
        assert joined(fed(answer, pieces, "length")) == answer.as_json()["output"]
        return plain(answer.as_json()["output"])

    for at in range(1, len(cut)):
        (item,) = output([cut[:at], cut[at:]])
        assert item == {
            "type": "function_call",
            "status": "incomplete",
            "name": "stop",
            "arguments": '{"at": "the bus',
        }


def test_the_whole_answer() -> None:
    answer = answer_of(Parser("hermes", None, [CHAT_TOOL]), metadata={"a": "b"}, temperature=0.5,
                       parallel_tool_calls=False, tools=[TOOL])  # fmt: skip
    fed(answer, [CALLING])
    whole = json.loads(msgspec.json.encode(answer.as_json()))
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "message"]
    assert whole["status"] == "completed"
    assert whole["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": len(CALLING),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(CALLING) + 3,
    }
    for name, value in {
        "metadata": {"a": "b"}, "store": False, "tools": [TOOL], "temperature": 0.5,
        "parallel_tool_calls": False, "tool_choice": "auto", "truncation": "disabled",
    }.items():  # fmt: skip
        assert whole[name] == value
    answer = answer_of(Parser(None, "think"))
    fed(answer, ["<think>Hm"], "length")
    assert answer.as_json()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer.as_json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    counter = reasoning_counter("think", {"<think>": 6, "</think>": 7})
    assert counter is not None
    counter.add([6, 1, 2], "")
    answer.usage.reasoning = counter
    assert answer.as_json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_logprobs_come_with_the_text() -> None:
    a, none, b = (position((n, text, -0.1, 1)) for n, text in enumerate(("a", "", "b")))
    answer = answer_of(Parser(None, None), top_logprobs=1)
    events = [*answer.feed(step("a", logprobs=[[a]])), *answer.feed(step("", logprobs=[[none]]))]
    events += [*answer.feed(step("b", logprobs=[[b]])), *answer.feed(step("", logprobs=[[none]],
               end="stop")), *answer.closing_events()]  # fmt: skip
    (item,) = joined(events)
    tokens = [each["token"] for each in item["content"][0]["logprobs"]]
    assert tokens == ["a", "", "b", ""]
    assert item["content"][0]["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.1


def test_a_stream_that_fails_says_so() -> None:
    answer = answer_of(Parser(None, None))
    events = list(answer.feed(step("ab"))) + answer.error_events(UnavailableError("no server"))
    error, failed = events[-2:]
    assert (error["type"], error["message"]) == ("error", "no server")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "no server"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "ab"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))


def test_a_stream_that_fails_before_its_first_step_begins_like_any_other() -> None:
    """openai's client takes no other first event."""
    events = answer_of(Parser(None, None)).error_events(UnavailableError("no server"))
    types = [event["type"] for event in events]
    assert types == ["response.created", "response.in_progress", "error", "response.failed"]
    assert [each["sequence_number"] for each in events] == list(range(4))


def test_what_was_open_when_it_failed_is_incomplete() -> None:
    answer = answer_of(Parser(None, None))
    list(answer.feed(step("abc")))
    failed = answer.error_events(UnavailableError("no server"))[-1]["response"]
    assert failed["status"] == "failed"
    assert [item["status"] for item in failed["output"]] == ["incomplete"]
