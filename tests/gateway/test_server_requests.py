"""Every field of a body changes what the model is asked, is refused by its name, or is ignored and
named."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jitney.errors import ConfigError, InvalidArgumentError
from jitney.sampling_params import NAMES, parse_limits
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.messages_request import MessageRequest
from jitney_gateway.refusals import FieldError, describe, name_clients_field
from jitney_gateway.responses_request import ResponseRequest
from jitney_gateway.server_request import (
    ModelDescription,
    ServerRequest,
    _cached_formats,
    request_of_chat,
    request_of_token_ids,
    requests_of_completions,
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

KNOWN = ModelDescription(
    max_model_len=100,
    max_n=4,
    sampling_parameters=frozenset([*NAMES, "structured_outputs"]),
    tool_format="hermes",
)
TOOL = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
CHAT = {"model": "m", "messages": [USER], "tools": [TOOL]}
TEXT = {"model": "m", "prompt": "hi"}
SCHEMA = {"type": "object"}

PARAMS: dict[str, Any] = {
    "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
    "seed": 1, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5,
    "stop": "x", "stop_token_ids": [1], "include_stop_str_in_output": True, "bad_words": ["x"],
    "ignore_eos": True, "logit_bias": {"1": 5.0}, "allowed_token_ids": [1],
    "skip_special_tokens": True, "priority": 1, "deadline_ms": 5.0, "cache_salt": "x",
    "lora_name": "x", "tier": "x",
}  # fmt: skip
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
}  # fmt: skip
# Fields whose effect is on the answer (tests/real_server/test_openai.py, test_answers.py), that go
# with another one, or whose only value is what is done anyway.
ELSEWHERE = {
    "stream_options", "top_logprobs", "parallel_tool_calls", "modalities", "echo", "best_of",
    "thinking_token_budget",
}  # fmt: skip


def ask(body: dict[str, Any], *, strict: bool = False) -> list[ServerRequest]:
    data = json.dumps(body).encode()
    ignored = IgnoredFields(strict=strict)
    if "prompt" in body:
        return requests_of_completions(decode(data, CompletionRequest, ignored), KNOWN, "id")
    chat = decode(data, ChatRequest, ignored)
    leave_out_of_chat(chat, KNOWN, ignored)
    return [request_of_chat(chat, KNOWN, "id")]


def params_of(body: dict[str, Any]) -> dict[str, Any]:
    return json.loads(ask(body)[0].inputs["sampling_parameters"])  # type: ignore[arg-type]


def refused(body: dict[str, Any], *, strict: bool = False) -> tuple[Any, str]:
    """The error object's field and text."""
    with pytest.raises(FieldError) as caught:
        ask(body, strict=strict)
    status, said = describe(caught.value)
    assert status == 400
    assert said["error"]["type"] == "invalid_request_error"
    return said["error"]["param"], said["error"]["message"]


@pytest.mark.parametrize(
    ("service", "tiers", "asked"),
    [
        ("auto", [], {}),
        ("flex", [], {"priority": 10}),
        ("priority", [], {"priority": -10}),
        ("default", ["fast", "slow", "bulk"], {}),
        ("flex", ["fast", "slow", "bulk"], {"tier": "bulk"}),
        ("priority", ["fast", "slow", "bulk"], {"tier": "fast"}),
        ("slow", ["fast", "slow", "bulk"], {"tier": "slow"}),
        ("default", ["fast", "default"], {"tier": "default"}),
    ],
)
def test_a_service_tier_is_a_tier_or_a_priority(
    service: str, tiers: list[str], asked: dict[str, Any]
) -> None:
    known = msgspec.structs.replace(KNOWN, tiers=tiers)

    def params(**more: Any) -> Any:
        body = decode(json.dumps(CHAT | {"service_tier": service} | more).encode(), ChatRequest)
        made = json.loads(request_of_chat(body, known, "id").inputs["sampling_parameters"])  # type: ignore[arg-type]
        return {name: made[name] for name in ("tier", "priority") if name in made}

    assert params() == asked
    assert params(tier="x", priority=3) == {"tier": "x", "priority": 3}
    with pytest.raises(FieldError, match="service_tier is 'scale', but must be one of auto"):
        params(service_tier="scale")


@pytest.mark.parametrize(
    ("service", "allowed", "tier"),
    [
        ("flex", "", "bulk"),
        ("flex", "tiers=fast,slow", "slow"),
        ("flex", "tiers=elsewhere", "bulk"),
        ("priority", "tiers=slow,bulk", "fast"),  # which the model refuses
    ],
)
def test_flex_is_the_lowest_tier_that_a_key_may_ask_for(
    service: str, allowed: str, tier: str
) -> None:
    known = msgspec.structs.replace(KNOWN, tiers=["fast", "slow", "bulk"])
    limits = parse_limits(allowed)
    chat = decode(json.dumps(CHAT | {"service_tier": service}).encode(), ChatRequest)
    text = {"model": "m", "prompt": "a", "service_tier": service}
    completion = decode(json.dumps(text).encode(), CompletionRequest)
    for ask in (
        request_of_chat(chat, known, "id", limits),
        *requests_of_completions(completion, known, "id", limits),
    ):
        assert json.loads(ask.inputs["sampling_parameters"])["tier"] == tier  # type: ignore[arg-type]


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
        ({"messages": [{**USER, "function_call": {}}]}, "messages[0].function_call", "tool_calls"),
        ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0]", "'image_url'"),
        ({"messages": [USER] * 4097}, "messages", "4096"),
        ({"tools": [TOOL] * 129}, "tools", "128"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "goes with tools"),
        ({"top_logprobs": 2}, "top_logprobs", "goes with logprobs"),
        ({"n": 5}, "n", "at most 4"),
        ({"best_of": 2}, "best_of", "best_of is 2, but must be at most n, which is 1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"functions": [{}]}, "functions", "must stand in tools"),
        ({"modalities": ["audio"]}, "modalities[0]", "'audio'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(more: dict[str, Any], field: str, said: str) -> None:
    assert refused(CHAT | more)[0] == field
    assert said in refused(CHAT | more)[1]


def test_a_tool_is_loosened_if_no_grammar_keeps_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)"}}}
    function = {"name": "go", "parameters": schema, "strict": True}
    tools = [
        {**TOOL, "function": {**TOOL["function"], "strict": True}},
        {**TOOL, "function": function},
    ]
    ignored = IgnoredFields()
    body = decode(json.dumps(CHAT | {"tools": tools}).encode(), ChatRequest, ignored)
    leave_out_of_chat(body, KNOWN, ignored)
    assert ignored.header() == "tools[].strict"
    assert [tool.function.strict for tool in body.tools or ()] == [True, None]
    field, message = refused(CHAT | {"tools": tools}, strict=True)
    assert field == "tools[1].strict"
    assert "looks around" in message


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ('{"n": [1, {"at": 2', {"n": [1, {"at": 2}]}),
        ('{"n": 1, "at": ', {"n": 1}),
        ("{", {}),
        ("[1", {}),
        ("a bus", {}),
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


@pytest.mark.parametrize(
    ("more", "structured"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "description": "b", "schema": SCHEMA}}},
         {"json": {"title": "a", "description": "b", **SCHEMA}}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "g"}, {"grammar": "g"}),
    ],
)  # fmt: skip
def test_structured_output_has_one_form(more: dict[str, Any], structured: Any) -> None:
    without_tools = CHAT | {"tools": None} | more
    assert params_of(without_tools).get("structured_outputs") == structured
    if structured is not None:
        body = decode(json.dumps(without_tools).encode(), ChatRequest)
        known = msgspec.structs.replace(KNOWN, sampling_parameters=frozenset(PARAMS))
        with pytest.raises(FieldError, match="is not supported by model 'm'") as caught:
            request_of_chat(body, known, "id")
        assert caught.value.field == next(iter(more)), "by the client's name"


@pytest.mark.parametrize("name", ["stop\n", "", "a b", "a" * 129])
def test_a_functions_name_that_no_format_can_write_is_refused(name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    assert refused(CHAT | {"tools": [tool]})[0] == "tools[0].function.name"


def test_tools_need_a_known_format() -> None:
    body = decode(json.dumps(CHAT).encode(), ChatRequest)
    with pytest.raises(FieldError, match="tool_format") as caught:
        request_of_chat(body, msgspec.structs.replace(KNOWN, tool_format=None), "id")
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [("tool_format", "hermse", "'hermes'"), ("reasoning_format", "", "'think_opened'")],
)
def test_an_option_that_names_no_format_is_told_at_the_first_chat(
    option: str, value: str, known: str
) -> None:
    """The engine takes any text."""
    model = msgspec.structs.replace(KNOWN, **{option: value})
    body = decode(json.dumps({"model": "m", "messages": [USER]}).encode(), ChatRequest)
    with pytest.raises(
        ConfigError, match=f"option {option} is '{value}', but must be one of"
    ) as no:
        request_of_chat(body, model, "id")
    assert known in str(no.value)
    status, said = describe(no.value)
    assert status == 500, "no fault of the client's"
    assert option in said["error"]["message"]


def test_a_tool_that_must_be_called_is_a_grammar() -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    for choice in ("required", named):
        grammar = params_of(CHAT | {"tool_choice": choice})["structured_outputs"]["grammar"]
        assert "stop" in grammar
    assert "structured_outputs" not in params_of(CHAT | {"tool_choice": "auto"})
    other = {"type": "function", "function": {"name": "go"}}
    with pytest.raises(InvalidArgumentError, match="tool_choice is"):
        ask(CHAT | {"tool_choice": other})
    both = {"tool_choice": "required", "guided_regex": "a"}
    assert refused(CHAT | both) == (
        "tool_choice",
        "tool_choice and guided_regex exclude one another",
    )
    known = msgspec.structs.replace(KNOWN, sampling_parameters=frozenset(PARAMS))
    body = decode(json.dumps(CHAT | {"tool_choice": "required"}).encode(), ChatRequest)
    with pytest.raises(FieldError, match="tool_choice is not supported"):
        request_of_chat(body, known, "id")


def test_a_response_format_leaves_room_for_calls() -> None:
    wanted = {"response_format": {"type": "json_object"}}
    either = params_of(CHAT | wanted)["structured_outputs"]["grammar"]
    assert "<tool_call>" in either
    assert '"type": "object"' in either
    without = params_of(CHAT | wanted | {"tool_choice": "none"})
    assert without["structured_outputs"] == {"json_object": True}
    for choice in ("required", TOOL):
        forced = params_of(CHAT | {"tool_choice": choice})
        assert params_of(CHAT | wanted | {"tool_choice": choice}) == forced


def test_a_strict_tool_is_a_grammar() -> None:
    strict = json.loads(json.dumps(TOOL))
    strict["function"]["strict"] = True
    body = CHAT | {"tools": [strict]}
    assert "<tool_call>" in params_of(body)["structured_outputs"]["grammar"]
    assert "structured_outputs" not in params_of(body | {"tool_choice": "none"})
    known = msgspec.structs.replace(KNOWN, sampling_parameters=frozenset(PARAMS))
    chat = decode(json.dumps(body).encode(), ChatRequest)
    with pytest.raises(FieldError, match="tools is not supported by model 'm'"):
        request_of_chat(chat, known, "id")
    error = InvalidArgumentError("structured_outputs.grammar is too large")
    for choice in ("auto", None):
        chat = decode(json.dumps(body | {"tool_choice": choice}).encode(), ChatRequest)
        assert str(name_clients_field(error, chat)) == "tools is too large"


def test_a_budget_beyond_the_limit_needs_no_grammar() -> None:
    ids = {"<think>": 6, "</think>": 7}
    model = msgspec.structs.replace(KNOWN, reasoning_format="think", added_tokens=ids)
    for budget, limit, is_bound in ((5, 6, True), (6, 6, False), (6, -1, True)):
        more = {"thinking_token_budget": budget, "max_tokens": limit}
        body = decode(json.dumps(CHAT | more).encode(), ChatRequest)
        params = request_of_chat(body, model, "id").inputs["sampling_parameters"]
        assert (b"structured_outputs" in params) == is_bound  # type: ignore[operator]


def test_a_budget_ends_reasoning() -> None:
    ids = {"<think>": 6, "</think>": 7}
    known = msgspec.structs.replace(KNOWN, reasoning_format="think_opened", added_tokens=ids)

    def made(known: ModelDescription, **more: Any) -> Any:
        body = decode(json.dumps(CHAT | {"tools": None} | more).encode(), ChatRequest)
        params = json.loads(request_of_chat(body, known, "id").inputs["sampling_parameters"])  # type: ignore
        return params.get("structured_outputs")

    assert "[max_tokens=9]" in made(known, thinking_token_budget=9)["grammar"]
    both = made(known, thinking_token_budget=9, response_format={"type": "json_object"})
    assert "[max_tokens=9]" in both["grammar"]
    assert "%json" in both["grammar"]
    assert made(KNOWN, thinking_token_budget=9) is None, "it does not reason"
    marked = msgspec.structs.replace(known, added_tokens=ids | {"<tool_call>": 8})
    free = made(marked, thinking_token_budget=9, tools=[TOOL])
    assert "<[8]>" in free["grammar"], "the model may still call"


def test_a_model_that_reasons_is_bound_only_afterwards() -> None:
    ids = {"</think>": 7}
    known = msgspec.structs.replace(KNOWN, reasoning_format="think", added_tokens=ids)
    body = decode(json.dumps(CHAT | {"guided_regex": "a"}).encode(), ChatRequest)
    params = json.loads(request_of_chat(body, known, "id").inputs["sampling_parameters"])  # type: ignore
    assert "<[7]>" in params["structured_outputs"]["grammar"]
    assert params["skip_special_tokens"] is False, "the marker must be in the text"


@pytest.mark.parametrize(
    ("reasoning", "tools", "keeps"),
    [(None, None, False), ("none", None, False), ("none", [TOOL], True), ("think", None, True)],
)
def test_only_a_parser_needs_special_tokens(
    reasoning: str | None, tools: list[Any] | None, keeps: bool
) -> None:
    known = msgspec.structs.replace(KNOWN, reasoning_format=reasoning)
    body = decode(json.dumps(CHAT | {"tools": tools}).encode(), ChatRequest)
    params = json.loads(request_of_chat(body, known, "id").inputs["sampling_parameters"])  # type: ignore
    assert params.get("skip_special_tokens", True) is not keeps


def test_large_template_parameters_are_not_kept() -> None:
    """The model has yet to refuse them."""
    _cached_formats.cache_clear()
    for text in ("small", "large" * 1000):
        ask(CHAT | {"chat_template_kwargs": {"a": text}})
        assert _cached_formats.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("said", "fields", "wanted"),
    [
        ("logprobs is 1000, but", {"top_logprobs": 1000}, "top_logprobs is 1000, but"),
        ("max_tokens is 0", {"max_completion_tokens": 0}, "max_completion_tokens is 0"),
        ("max_tokens is 0", {"max_tokens": 0}, None),
        ("cache_salt is", {"prompt_cache_key": "a"}, "prompt_cache_key is"),
        ("cache_salt is", {"prompt_cache_key": "a", "cache_salt": "b"}, None),
        ("priority is", {"service_tier": "auto", "priority": -2000}, None),
        (
            "chat_template_parameters has 'reasoning_effort', but only these are allowed: a, b",
            {"reasoning_effort": "a"},
            "reasoning_effort is not supported: the model's chat template takes only these "
            "parameters: a, b",
        ),
        (
            "chat_template_parameters has 'verbosity', but only these are allowed: none",
            {"reasoning_effort": "a", "verbosity": "b"},
            "verbosity is not supported: the model's chat template takes only these "
            "parameters: none",
        ),
        (
            "chat_template_parameters has 'foo', but",
            {"reasoning_effort": "a", "chat_template_kwargs": {"foo": 1}},
            "chat_template_kwargs has 'foo', but",
        ),
        (
            "chat_template_parameters has 'verbosity-x', but",
            {"verbosity": "b", "chat_template_kwargs": {"verbosity-x": 1}},
            "chat_template_kwargs has 'verbosity-x', but",
        ),
        (
            "chat_template_parameters.reasoning_effort is",  # the client's kwargs win
            {"reasoning_effort": "a", "chat_template_kwargs": {"reasoning_effort": 1}},
            "chat_template_kwargs.reasoning_effort is",
        ),
        (
            "structured_outputs.json: #/a",
            {"response_format": {"type": "json_object"}, "tool_choice": "auto"},
            "response_format: #/a",
        ),
        (
            "structured_outputs.grammar is",  # what a model that reasons is sent
            {"response_format": {"type": "json_object"}},
            "response_format is",
        ),
        ("structured_outputs: at", {"guided_regex": "a"}, "guided_regex: at"),
        (
            "structured_outputs.regex is",
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs.regex is",
        ),
        (
            "structured_outputs.grammar is",  # what a model that reasons is sent
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs is",
        ),
        (
            "structured_outputs.grammar is",
            {"response_format": {"type": "text"}, "tool_choice": "required"},
            "tool_choice is",
        ),
        ("The model", {"top_logprobs": 1}, None),
    ],
)
def test_a_models_refusal_names_the_clients_field(
    said: str, fields: dict[str, Any], wanted: str | None
) -> None:
    body = decode(json.dumps(CHAT | fields).encode(), ChatRequest)
    found = name_clients_field(InvalidArgumentError(said), body)
    assert str(found) == (wanted or said)
    if wanted:
        assert describe(found)[1]["error"]["param"] == re.split("[. :]", wanted)[0]


def test_token_ids_that_do_not_fit_are_refused() -> None:
    for prompt in ([1 << 31], [[-1]], [[5], [1 << 40]]):
        with pytest.raises(FieldError, match="prompt"):
            decode(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionRequest)
    with pytest.raises(FieldError, match="tokens"):
        decode(json.dumps({"model": "m", "tokens": [1 << 32]}).encode(), DetokenizeRequest)


def test_only_markers_are_named_as_tokens() -> None:
    ids = {"<tool_call>": 7, "name": 8, "\n": 9}
    known = msgspec.structs.replace(KNOWN, tool_format="hermes", added_tokens=ids)
    body = decode(json.dumps(CHAT | {"tool_choice": "required"}).encode(), ChatRequest)
    params = json.loads(request_of_chat(body, known, "id").inputs["sampling_parameters"])  # type: ignore
    assert set(re.findall(r"<\[\d+]>", params["structured_outputs"]["grammar"])) == {"<[7]>"}


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

    assert asked(prompt="a").inputs == {"text_input": b"a", "task": b"tokenize"}
    chat = asked(messages=[USER], tools=[TOOL], add_generation_prompt=False)
    assert json.loads(chat.inputs["messages"])["tools"] == [TOOL]  # type: ignore[arg-type]
    for body in ({}, {"prompt": "a", "messages": [USER]}, {"prompt": "a", "tools": [TOOL]}):
        with pytest.raises(FieldError):
            asked(**body)


@pytest.mark.parametrize("given", [{}, {"json": {}, "regex": "a"}, {"json_object": False}])
def test_structured_outputs_are_one(given: dict[str, Any]) -> None:
    """With a model that reasons, too, whose answer is constrained after its reasoning."""
    for known in (KNOWN, msgspec.structs.replace(KNOWN, reasoning_format="think")):
        body = decode(json.dumps(CHAT | {"structured_outputs": given}).encode(), ChatRequest)
        with pytest.raises(FieldError, match="exactly one of json, json_object, regex") as caught:
            request_of_chat(body, known, "id")
        assert caught.value.field == "structured_outputs"


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
