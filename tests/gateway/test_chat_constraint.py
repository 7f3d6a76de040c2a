"""What the answer to a chat must be: what the client says, calls of tools, or either."""

import json
import re
from typing import Any

import msgspec
import pytest
from jitney.errors import ConfigError, InvalidArgumentError
from jitney_gateway.answer_formats import _cached_formats
from jitney_gateway.client_fields import name_clients_field
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.formats import TOOL_FORMATS
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.refusals import FieldError, describe
from jitney_gateway.server_request import (
    request_of_chat,
)
from jitney_gateway.wire import (
    ChatRequest,
    decode,
)
from jitney_gateway.without_effect import leave_out_of_chat

from tests.gateway.asked import (
    CHAT,
    KNOWN,
    PARAMS,
    SCHEMA,
    TOOL,
    USER,
    ask,
    params_of,
    refused,
)


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


@pytest.mark.parametrize("given", [{}, {"json": {}, "regex": "a"}, {"json_object": False}])
def test_structured_outputs_are_one(given: dict[str, Any]) -> None:
    """With a model that reasons, too, whose answer is constrained after its reasoning."""
    for known in (KNOWN, msgspec.structs.replace(KNOWN, reasoning_format="think")):
        body = decode(json.dumps(CHAT | {"structured_outputs": given}).encode(), ChatRequest)
        with pytest.raises(FieldError, match="exactly one of json, json_object, regex") as caught:
            request_of_chat(body, known, "id")
        assert caught.value.field == "structured_outputs"


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


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_budget_ends_the_reasoning_of_gpt_oss(tools: Any) -> None:
    markers = TOOL_FORMATS["harmony"].markers
    known = msgspec.structs.replace(
        KNOWN,
        tool_format="harmony",
        reasoning_format="harmony",
        added_tokens={marker: number for number, marker in enumerate(markers)},
    )
    ignored = IgnoredFields(strict=True)
    more = {"thinking_token_budget": 9, "tools": tools}
    body = decode(json.dumps(CHAT | more).encode(), ChatRequest, ignored)
    leave_out_of_chat(body, known, ignored)
    params = json.loads(request_of_chat(body, known, "id").inputs["sampling_parameters"])  # type: ignore
    grammar = params["structured_outputs"]["grammar"]
    assert "[max_tokens=9]" in grammar
    assert ("functions.stop" in grammar) == (tools is not None), "the model may still call"


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


def test_only_markers_are_named_as_tokens() -> None:
    ids = {"<tool_call>": 7, "name": 8, "\n": 9}
    known = msgspec.structs.replace(KNOWN, tool_format="hermes", added_tokens=ids)
    body = decode(json.dumps(CHAT | {"tool_choice": "required"}).encode(), ChatRequest)
    params = json.loads(request_of_chat(body, known, "id").inputs["sampling_parameters"])  # type: ignore
    assert set(re.findall(r"<\[\d+]>", params["structured_outputs"]["grammar"])) == {"<[7]>"}
