"""Every field of a body changes what the model is asked, is refused by its name, or is ignored and
named."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jitney.sampling_params import NAMES
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.messages_request import MessageRequest
from jitney_gateway.refusals import FieldError
from jitney_gateway.responses_request import ResponseRequest
from jitney_gateway.server_request import (
    ServerRequest,
    request_of_chat,
    request_of_token_ids,
)
from jitney_gateway.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    StreamOptions,
    TokenizeRequest,
    WireRecord,
    decode,
)
from jitney_gateway.without_effect import leave_out_of_chat

from tests.gateway.asked import (
    CHAT,
    KNOWN,
    PARAMS,
    SCHEMA,
    TEXT,
    TOOL,
    USER,
    ask,
    params_of,
    refused,
)

COMMON: dict[str, Any] = {
    **PARAMS,
    "model": "other", "n": 2, "stream": True, "user": "someone", "service_tier": "flex",
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "g",
}  # fmt: skip
ONLY_CHAT: dict[str, Any] = {
    "messages": [{**USER, "content": "ho"}], "max_completion_tokens": 3, "logprobs": True,
    "tools": [TOOL, TOOL], "tool_choice": "none", "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False, "reasoning_effort": "low", "verbosity": "low",
    "safety_identifier": "someone", "prompt_cache_key": "k", "prompt_token_ids": [5, 6],
    "continue_final_message": True,
}  # fmt: skip
# Fields whose effect is on the answer (tests/real_server/test_openai.py, test_answers.py), that go
# with another one, or whose only value is what is done anyway.
ELSEWHERE = {
    "stream_options", "top_logprobs", "parallel_tool_calls", "modalities", "echo", "best_of",
    "thinking_token_budget", "functions", "function_call",
}  # fmt: skip


def test_no_field_is_forgotten() -> None:
    own = {*Generation.__struct_fields__} - {"params"}
    tried = {*COMMON, *ELSEWHERE}
    assert {*ChatRequest.__struct_fields__} - {"params"} <= tried | ONLY_CHAT.keys()
    assert {*CompletionRequest.__struct_fields__} - {"params"} <= tried | {"prompt", "logprobs"}
    assert {*NAMES} - own <= {*PARAMS, "logprobs", "prompt_logprobs"}


@pytest.mark.parametrize("name", COMMON | ONLY_CHAT)
def test_each_field_of_a_chat_changes_the_request(name: str) -> None:
    assert ask(CHAT | {name: (COMMON | ONLY_CHAT)[name]}) != ask(CHAT)


@pytest.mark.parametrize("name", {**COMMON, "prompt": "ho", "logprobs": 2})
def test_each_field_of_a_completion_changes_the_request(name: str) -> None:
    value = {**COMMON, "prompt": "ho", "logprobs": 2}[name]
    assert ask(TEXT | {name: value}) != ask(TEXT)


@pytest.mark.parametrize("name", PARAMS)
def test_sampling_parameters_go_on_as_they_are(name: str) -> None:
    for base in (CHAT, TEXT):
        assert params_of(base | {name: PARAMS[name]})[name] == PARAMS[name]
        old = msgspec.structs.replace(KNOWN, sampling_parameters=frozenset(["max_tokens"]))
        body = decode(json.dumps(CHAT | {name: PARAMS[name]}).encode(), ChatRequest)
        if name != "max_tokens":
            with pytest.raises(FieldError, match=f"{name} is not supported by model 'm'"):
                request_of_chat(body, old, "id")


CHECKED = {*COMMON, *ONLY_CHAT, *ELSEWHERE} - PARAMS.keys()
"""Here; the ranges and types of the others are the model's to check."""


@pytest.mark.parametrize("name", sorted(CHECKED | {"foo", "audio", "functions", "suffix"}))
def test_a_wrong_type_or_an_unknown_name_is_refused_by_name(name: str) -> None:
    field, message = refused(CHAT | {name: 1.5}, strict=True)
    assert field == name
    assert name in message


@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "bus"}]}, "messages[0].role", "'bus'"),
        ({"messages": [{**USER, "function_call": {}}]}, "messages[0].function_call.name",
         "missing"),
        ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0]", "'image_url'"),
        ({"messages": [USER] * 4097}, "messages", "4096"),
        ({"tools": [TOOL] * 4097}, "tools", "4096"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "goes with tools"),
        ({"top_logprobs": 2}, "top_logprobs", "goes with logprobs"),
        ({"n": 5}, "n", "at most 4"),
        ({"best_of": 2}, "best_of", "best_of is 2, but must be at most n, which is 1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"functions": [{}]}, "functions[0].name", "is missing"),
        ({"modalities": ["audio"]}, "modalities[0]", "'audio'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(more: dict[str, Any], field: str, said: str) -> None:
    assert refused(CHAT | more)[0] == field
    assert said in refused(CHAT | more)[1]


def test_agents_may_have_many_tools() -> None:
    (request,) = ask(CHAT | {"tools": [TOOL] * 1000})
    assert len(json.loads(request.inputs["messages"])["tools"]) == 1000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ('{"n": [1, {"at": 2', {"n": [1, {"at": 2}]}),
        ('{"n": 1, "at": ', {"n": 1}),
        ("{", {}),
        ("[1", {}),
        ("a bus", {}),
        ("1, 2", {}),
        ("[" * 100_000, {}),
    ],
)
def test_a_call_that_was_cut_may_come_back(arguments: str, there: Any) -> None:
    call = {"function": {"name": "stop", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    ignored = IgnoredFields(strict=True)
    body = decode(msgspec.json.encode(CHAT | {"messages": messages}), ChatRequest, ignored)
    leave_out_of_chat(body, KNOWN, ignored)
    sent = json.loads(request_of_chat(body, KNOWN, "id").inputs["messages"])  # type: ignore[arg-type]
    function = sent["messages"][1]["tool_calls"][0]["function"]
    assert function["arguments"] == there
    assert ignored.header() == "messages[].tool_calls[].function.arguments"


def test_a_cut_call_in_the_older_form_is_named() -> None:
    call = {"name": "stop", "arguments": '{"n": 1, "at": '}
    messages = [USER, {"role": "assistant", "function_call": call}]
    ignored = IgnoredFields(strict=True)
    body = decode(msgspec.json.encode(CHAT | {"messages": messages}), ChatRequest, ignored)
    leave_out_of_chat(body, KNOWN, ignored)
    assert ignored.header() == "messages[].function_call.arguments"


@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "goes with stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
        ({"store": True}, "store", "store is True, but"),
        ({"service_tier": "scale"}, "service_tier", "'scale', but must be one of auto"),
        ({"params": {}}, "params", "unknown"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "but must be function"),
    ],
)  # fmt: skip
def test_a_strict_gateway_refuses_what_has_no_effect(
    more: dict[str, Any], field: str, said: str
) -> None:
    assert ask(CHAT | more)
    name, message = refused(CHAT | more, strict=True)
    assert name == field
    assert said in message


@pytest.mark.parametrize("name", ["stop\n", "", "a b", "a" * 129])
def test_a_functions_name_that_no_format_can_write_is_refused(name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    assert refused(CHAT | {"tools": [tool]})[0] == "tools[0].function.name"


def test_token_ids_that_do_not_fit_are_refused() -> None:
    for prompt in ([1 << 31], [[-1]], [[5], [1 << 40]]):
        with pytest.raises(FieldError, match="prompt"):
            decode(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionRequest)
    with pytest.raises(FieldError, match="tokens"):
        decode(json.dumps({"model": "m", "tokens": [1 << 32]}).encode(), DetokenizeRequest)


def test_messages_are_what_chat_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "stop", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None,
         "annotations": []},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip
    sent = json.loads(ask(CHAT | {"messages": messages})[0].inputs["messages"])  # type: ignore
    called = {**call, "function": {"name": "stop", "arguments": {"a": 1}}}
    assert sent == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ],
        "tools": [TOOL],
    }


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    asked = {"echo": True, "logprobs": 2}
    assert params_of(TEXT | asked)["prompt_logprobs"] == 2
    assert params_of(TEXT | asked | {"prompt_logprobs": 1})["prompt_logprobs"] == 1
    assert "prompt_logprobs" not in params_of(TEXT | {"logprobs": 2})
    assert params_of(TEXT | asked | {"max_tokens": 0})["max_tokens"] == 1, "it is left out later"
    assert params_of(TEXT | {"max_tokens": 0})["max_tokens"] == 0, "which the model refuses"
    assert params_of(TEXT | {"prompt_logprobs": 1})["prompt_logprobs"] == 1


def test_a_chat_without_a_limit_gets_what_the_context_holds() -> None:
    assert params_of(CHAT)["max_tokens"] == -1
    assert "max_tokens" not in params_of(TEXT)


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", [{"text_input": b"a"}]),
        (["a", "b"], [{"text_input": b"a"}, {"text_input": b"b"}]),
        ([1, 2], [{"input_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"input_ids": [1]}, {"input_ids": [2, 3]}]),
    ],
)
def test_prompts_of_completions(prompt: Any, inputs: list[dict[str, Any]]) -> None:
    asked = ask(TEXT | {"prompt": prompt})
    assert [each.inputs | want for each, want in zip(asked, inputs, strict=True)] == [
        each.inputs for each in asked
    ]


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], ["a"] * 257, [[]], [[], [1]]])
def test_prompts_that_are_refused(prompt: Any) -> None:
    assert refused(TEXT | {"prompt": prompt})[0] == "prompt"


def test_bodies_that_are_no_objects_are_refused() -> None:
    for data in (b"", b"{", b"[]", b"\xff", b'{"model": "\xff"}', b"[" * 100_000):
        with pytest.raises(FieldError):
            decode(data, ChatRequest)


def test_tokenize_takes_a_prompt_or_a_chat() -> None:
    def asked(**body: Any) -> ServerRequest:
        return request_of_token_ids(
            decode(json.dumps({"model": "m", **body}).encode(), TokenizeRequest)
        )

    for more in ({}, {"continue_final_message": False}):
        assert asked(prompt="a", **more).inputs == {"text_input": b"a", "task": b"tokenize"}
    chat = asked(messages=[USER], tools=[TOOL], add_generation_prompt=False)
    assert json.loads(chat.inputs["messages"])["tools"] == [TOOL]  # type: ignore[arg-type]
    for body in ({}, {"prompt": "a", "messages": [USER]}, {"prompt": "a", "tools": [TOOL]}):
        with pytest.raises(FieldError):
            asked(**body)


@pytest.mark.parametrize("name", ["foo-bar", "a b", "", "a`b", "a\nb"])
def test_any_unknown_name_is_told(name: str) -> None:
    assert refused(CHAT | {name: 1}, strict=True)[0] == (name or None)


def records(of: type[WireRecord]) -> Iterator[type[WireRecord]]:
    for each in of.__subclasses__():
        yield each
        yield from records(each)


def test_null_stands_for_an_absent_field_everywhere() -> None:
    found = {*records(WireRecord)}
    assert {StreamOptions, ResponseRequest, MessageRequest} <= found
    for record in found:
        for field in msgspec.structs.fields(record):
            if not field.required and field.name != "params":
                assert msgspec.convert(None, field.type) is None, (record, field.name)
                assert field.default is None


def test_what_a_client_leaves_unset_is_as_the_checkpoint_states() -> None:
    known = msgspec.structs.replace(KNOWN, sampling_defaults={"temperature": 0.6, "top_k": 20})
    for body in (CHAT, TEXT):
        params = params_of({**body, "top_k": 5}, known)
        assert (params["temperature"], params["top_k"]) == (0.6, 5)
        assert params_of({**body, "temperature": None}, known)["temperature"] == 0.6


def test_the_template_for_tools_tells_the_format_of_calls() -> None:
    """A checkpoint may have one of its own for chats with tools."""
    call = r"""{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": <object>}" }}"""
    plain = msgspec.structs.replace(KNOWN, tool_format=None, chat_template="{{ messages }}")
    with pytest.raises(FieldError, match="tells no format of calls"):
        ask(CHAT, known=plain)
    ask(CHAT, known=msgspec.structs.replace(plain, tool_template=call))
