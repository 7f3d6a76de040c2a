"""What clients send beside what the gateway knows: it is ignored and named, or it is refused,
because the answer would mean something else."""

import json
from typing import Any

import msgspec
import pytest
from jitney.config import EngineConfig
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.generation import CHAT_APIS
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.pooling_bodies import EmbeddingRequest
from jitney_gateway.refusals import FieldError
from jitney_gateway.server_request import (
    ServerRequest,
    request_of_chat,
    requests_of_completions,
)
from jitney_gateway.wire import CompletionRequest, decode
from jitney_gateway.without_effect import leave_out, leave_out_of_chat

from tests.gateway.asked import CHAT, KNOWN, TOOL, USER

MODEL = msgspec.structs.replace(
    KNOWN,
    chat_template="{{ enable_thinking }} {{ documents }}",
    chat_template_parameters=frozenset(["add_generation_prompt", "enable_thinking"]),
)
FLAT_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
CUSTOM_TOOL = {"name": "stop", "input_schema": {"type": "object"}}
EMPTY_CALL = {"type": "function", "id": "1", "function": {"name": "stop", "arguments": "{}"}}

CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"model": "m", "messages": [USER]},
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "messages": [USER], "max_tokens": 5},
}


def test_a_json_object_may_have_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request, ignored = ask(CHATS, {"response_format": {"type": "json_object", "schema": schema}})
    params = json.loads(request.inputs["sampling_parameters"])  # type: ignore[arg-type]
    assert params["structured_outputs"] == {"json": schema}
    assert ignored == ""


def test_an_effort_reaches_a_template_that_reads_it() -> None:
    """With the engine's default options, such as those of a gpt-oss that was just added."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    listed = frozenset(defaults["chat_template_parameters"])
    for template, names in (("{{ reasoning_effort }}", ""), ("{{ a }}", "reasoning_effort")):
        model = msgspec.structs.replace(
            MODEL, chat_template=template, chat_template_parameters=listed
        )
        assert ask(CHATS, {"reasoning_effort": "low"}, model=model)[1] == names


def ask(
    path: str, more: dict[str, Any], *, strict: bool = False, model: ModelDescription = MODEL
) -> tuple[ServerRequest, str]:
    """The request that the gateway makes of a body, and the names of what it ignored."""
    ignored = IgnoredFields(strict=strict)
    api = CHAT_APIS[path]
    body = decode(json.dumps(BODIES[path] | more).encode(), api.body, ignored)
    chat = api.chat_of_body(body, model, ignored)
    leave_out_of_chat(chat, model, ignored, api.names)
    return request_of_chat(chat, model, "id"), ignored.header()


HARMLESS: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"metadata": {"a": 1}}, ""),
    (RESPONSES, {"top_logprobs": 0, "tools": [FLAT_TOOL]}, ""),
    (RESPONSES, {"response_format": {"type": "text"}, "guided_choice": []}, ""),
    (CHATS, {"functions": [TOOL["function"]], "tools": []}, ""),
    (CHATS, {"store": True, "metadata": {"a": "b"}}, "store, metadata"),
    (CHATS, {"store": False, "best_of": 1, "suffix": "", "echo": False}, ""),
    (CHATS, {"continue_final_message": False, "add_special_tokens": False}, ""),
    (CHATS, {"foo": None, "prompt_logprobs": None}, ""),
    (CHATS, {"reasoning_effort": "low", "verbosity": "low"}, "reasoning_effort, verbosity"),
    (CHATS, {"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    (CHATS, {"service_tier": "scale"}, "service_tier"),
    (CHATS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHATS, {"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    (CHATS, {"tools": [TOOL, {"type": "custom", "custom": {"name": "a"}}]}, "tools[]:custom"),
    (CHATS, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
     "chat_template_kwargs.thinking"),
    (CHATS, {"tools": [{**TOOL, "defer_loading": True, "cache_control": {}}]},
     "tools[].defer_loading"),
    (RESPONSES, {"store": True, "truncation": "auto", "reasoning": {"summary": "auto"}},
     "store, truncation, reasoning.summary"),
    (RESPONSES, {"include": ["reasoning.encrypted_content"]},
     "include:reasoning.encrypted_content"),
    (RESPONSES, {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
     "reasoning.effort, text.verbosity"),
    (RESPONSES, {"tools": [FLAT_TOOL, {"type": "web_search"}, {"type": "local_shell"}]},
     "tools[]:web_search, tools[]:local_shell"),
    (RESPONSES, {"client_metadata": {}, "context_management": [], "prompt_cache_retention": "24h"},
     "client_metadata, context_management, prompt_cache_retention"),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    (MESSAGES, {"context_management": {}, "thread": {"id": "a"}, "service_tier": "batch"},
     "context_management, thread, service_tier"),
    (MESSAGES, {"tools": [CUSTOM_TOOL | {"defer_loading": True, "input_examples": []},
                          {"type": "web_search_20250305", "name": "web_search"}]},
     "tools[].defer_loading, tools[].input_examples, tools[]:web_search_20250305"),
    (MESSAGES, {"metadata": {"user_id": "a", "session": "b"}}, "metadata.session"),
]  # fmt: skip
"""Path, fields of a body, and what the header says."""


@pytest.mark.parametrize(("path", "more", "named"), HARMLESS)
def test_what_changes_no_answer_is_ignored_and_named(
    path: str, more: dict[str, Any], named: str
) -> None:
    assert ask(path, more)[1] == named
    if named:
        with pytest.raises(FieldError):
            ask(path, more, strict=True)
    else:
        ask(path, more, strict=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        (CHATS, {"best_of": 2}, "best_of is 2, but must be at most n"),
        (CHATS, {"suffix": "x"}, "suffix is 'x', but this is not supported"),
        (CHATS, {"use_beam_search": True}, "use_beam_search is True"),
        (CHATS, {"documents": [{}]}, "documents is"),
        (CHATS, {"chat_template": "x"}, "the model's own is used"),
        (CHATS, {"function_call": {"name": "a"}}, "function_call goes with functions"),
        (CHATS, {"structured_outputs": {"structural_tag": "a"}}, "structural_tag is 'a'"),
        (CHATS, {"regex": "a+"}, "structured_outputs stands for it"),
        (CHATS, {"tool_choice": {"type": "custom"}}, "but must be function or allowed_tools"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "must be function or allowed_tools"),
        (CHATS, {"json_schema": {"type": "object"}}, "structured_outputs stands for it"),
        (RESPONSES, {"ebnf": "a"}, "structured_outputs stands for it"),
        (RESPONSES, {"guided_json": {"type": "object"}}, "structured_outputs stands for it"),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "text.format stands for it"),
        (MESSAGES, {"guided_regex": "a"}, "output_config.format stands for it"),
        (MESSAGES, {"ebnf": "a"}, "output_config.format stands for it"),
        (MESSAGES, {"response_format": {"type": "json_object"}}, "output_config.format stands for"),
        (CHATS, {"messages": [{"role": "model", "content": "a"}]},
         r"messages\[0\].role is 'model', but must be assistant or developer or function or "
         "system or tool or user"),
        (CHATS, {"modalities": ["text", "audio"]}, r"modalities\[1\] is 'audio', but must be text"),
        (CHATS, {"tool_choice": "any"}, "tool_choice is 'any', but must be auto or none or req"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         r"content\[0\].type is 'input_image', but must be input_text or"),
        (CHATS, {"max_new_tokens": 5}, "max_tokens stands for it"),
        (CHATS, {"response_format": {"type": "text", "schema": {}}}, "goes with the type json_obj"),
        (CHATS, {"prompt_logprobs": 1}, "prompt_logprobs is 1"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "only text is taken"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "send the whole input"),
        (RESPONSES, {"background": True}, "background is True"),
        (RESPONSES, {"continue_final_message": True}, "continue_final_message is True"),
        (RESPONSES, {"n": 2}, "n is 2"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "'item_reference'"),
        (MESSAGES, {"stop": ["x"]}, "stop is"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "'document'"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(
    path: str, more: dict[str, Any], said: str, strict: bool
) -> None:
    with pytest.raises(FieldError, match=said.replace("(", r"\(")):
        ask(path, more, strict=strict)


def test_template_parameters_that_the_template_reads_are_not_ignored() -> None:
    """The model refuses them if its option does not allow them: they would change the prompt."""
    request, named = ask(CHATS, {"chat_template_kwargs": {"documents": []}})
    assert named == ""
    assert b"documents" in request.inputs["messages"]  # type: ignore[operator]
    silent = msgspec.structs.replace(MODEL, chat_template_parameters=None)
    assert ask(CHATS, {"reasoning_effort": "low"}, model=silent)[1] == ""


@pytest.mark.parametrize("strict", [False, True])
def test_a_chats_history_comes_back_as_clients_have_it(strict: bool) -> None:
    """The ``openai`` library's parsed messages, with all that it adds."""
    function = {"name": "stop", "arguments": "{}", "parsed_arguments": {}}
    call = {**EMPTY_CALL, "index": 0, "function": function}
    history = [
        {**USER, "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "parsed": None, "refusal": None, "audio": None,
         "function_call": None, "annotations": [{"type": "url_citation"}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [
            {"type": "text", "text": "done", "cache_control": {}}]},
        {"role": "assistant", "content": None, "provider_specific_fields": {}},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "So"}]},
        USER,
    ]  # fmt: skip
    request, named = ask(CHATS, {"messages": history, "tools": [TOOL]}, strict=strict)
    assert named == "messages[].provider_specific_fields"
    messages = json.loads(request.inputs["messages"])["messages"]  # type: ignore[arg-type]
    called = {**EMPTY_CALL, "function": {"name": "stop", "arguments": {}}}
    assert messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "So"},
        USER,
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_the_items_of_another_server_come_back(strict: bool) -> None:
    """As Codex sends them: with encrypted reasoning, custom tools and searches."""
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"type": "message", "role": "assistant", "phase": "commentary", "status": None, "content": [
            {"type": "output_text", "text": "So:", "annotations": [{"type": "url_citation"}]},
            {"type": "refusal", "refusal": "no"}]},
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
    ]  # fmt: skip
    request, named = ask(RESPONSES, {"input": items}, strict=strict)
    assert named == "input[]:web_search_call"
    called = {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert json.loads(request.inputs["messages"])["messages"] == [  # type: ignore[arg-type]
        USER,
        {"role": "assistant", "content": "So:\nno", "reasoning_content": "Hm.",
         "tool_calls": [{"id": "1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_the_blocks_of_another_server_come_back(strict: bool) -> None:
    """As Claude Code sends them."""
    mark = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi", **mark}]},
        {"role": "assistant", "id": "msg_1", "type": "message", "usage": {}, "content": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "", "signature": "s"},
            {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "2", "content": [
                {"type": "web_search_result", "url": "x"}]},
            {"type": "text", "text": "So:", "citations": [{"type": "char_location"}]},
            {"type": "tool_use", "id": "1", "name": "stop", "input": {}, "caller": {}, **mark}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "is_error": False, **mark, "content": [
                {"type": "text", "text": "done", **mark},
                {"type": "tool_reference", "tool_name": "a"}]}]},
    ]  # fmt: skip
    request, named = ask(MESSAGES, {"messages": turns}, strict=strict)
    assert named == (
        "messages[].content[]:server_tool_use, messages[].content[]:web_search_tool_result, "
        "messages[].content[].content[]:tool_reference"
    )
    called = {**EMPTY_CALL, "function": {"name": "stop", "arguments": {}}}
    assert json.loads(request.inputs["messages"])["messages"] == [  # type: ignore[arg-type]
        USER,
        {"role": "assistant", "content": "So:", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        (CHATS, {"thinking_token_budget": 9}, "thinking_token_budget"),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 20},
            "thinking.budget_tokens",
        ),
    ],
)
def test_a_budget_that_the_model_cannot_keep_is_ignored(
    path: str, more: dict[str, Any], named: str
) -> None:
    """Its markers are texts, which any tokens may spell; or no grammar can bind it."""
    template = "{{ enable_thinking }}</think>"
    ids = {"<think>": 6, "</think>": 7}
    spelt = msgspec.structs.replace(MODEL, chat_template=template)
    known = msgspec.structs.replace(spelt, added_tokens=ids)
    free = known.sampling_parameters - {"structured_outputs"}
    for model in (spelt, msgspec.structs.replace(known, sampling_parameters=free)):
        request, said = ask(path, more, model=model)
        assert said == named
        assert b"structured_outputs" not in request.inputs["sampling_parameters"]  # type: ignore[operator]
        with pytest.raises(FieldError, match=f"{named} is 9, but the reasoning of model 'm'"):
            ask(path, more, model=model, strict=True)
    request, said = ask(path, more, model=known, strict=True)
    assert said == ""
    assert b"[max_tokens=9]" in request.inputs["sampling_parameters"]  # type: ignore[operator]


def test_the_newer_limit_wins() -> None:
    for limit in (3, -1):
        request, named = ask(CHATS, {"max_tokens": 9, "max_completion_tokens": limit})
        assert json.loads(request.inputs["sampling_parameters"])["max_tokens"] == limit  # type: ignore[arg-type]
        assert named == "max_tokens"


def test_a_chat_may_come_as_token_ids() -> None:
    request, _ = ask(CHATS, {"messages": [], "prompt_token_ids": [5, 6]})
    assert request.inputs["input_ids"] == [5, 6]
    assert "messages" not in request.inputs


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_the_others_out(mode: str) -> None:
    other = {"type": "function", "function": {"name": "go"}}
    flat = {"type": "function", "name": "go"}
    allowed = {"type": "function", "function": {"name": "stop"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [allowed]}}
    of_chat, _ = ask(CHATS, {"tools": [TOOL, other], "tool_choice": choice})
    flat_choice = {"type": "allowed_tools", "mode": mode, "tools": [
        {"type": "function", "name": "stop"}, {"type": "mcp", "server_label": "a"}]}  # fmt: skip
    of_response, _ = ask(RESPONSES, {"tools": [FLAT_TOOL, flat], "tool_choice": flat_choice})
    for request in (of_chat, of_response):
        assert json.loads(request.inputs["messages"])["tools"] == [TOOL]  # type: ignore[arg-type]
        params = json.loads(request.inputs["sampling_parameters"])  # type: ignore[arg-type]
        assert ("structured_outputs" in params) is (mode == "required")
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "x"}}]  # type: ignore[index]
    with pytest.raises(FieldError, match="is 'x', but must be one of tools"):
        ask(CHATS, {"tools": [TOOL], "tool_choice": choice})
    with pytest.raises(FieldError, match=r"tool_choice.allowed_tools is missing"):
        ask(CHATS, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}})


def test_completions_and_embeddings_ignore_the_same_way() -> None:
    ignored = IgnoredFields()
    body: dict[str, Any] = {"model": "m", "prompt": "a", "best_of": 2, "n": 2, "suffix": ""}
    body |= {"foo": 1, "service_tier": "scale", "stream_options": {"include_usage": True}}
    text = decode(json.dumps(body).encode(), CompletionRequest, ignored)
    leave_out(text, MODEL, ignored)
    requests_of_completions(text, MODEL, "id")
    assert ignored.header() == "foo, service_tier, stream_options"
    with pytest.raises(FieldError, match="suffix is 'x'"):
        decode(json.dumps(body | {"suffix": "x"}).encode(), CompletionRequest)
    ignored = IgnoredFields()
    body = {"model": "m", "input": [[1, 2]], "user": "u", "dimensions": 3}
    assert decode(json.dumps(body).encode(), EmbeddingRequest, ignored).dimensions == 3
    assert ignored.header() == "user"


def test_the_header_is_plain_and_short() -> None:
    ignored = IgnoredFields()
    for name in ("a\r\nb", "é" * 100, *map(str, range(40))):
        ignored.add(name)
    header = ignored.header()
    assert header.startswith("a??b, " + "?" * 64 + ", 0, 1, ")
    assert header.endswith(", and 10 more")


def test_many_unknown_fields_take_no_long_time() -> None:
    """Each is looked at once, however many there are."""
    messages = [{**USER, f"foo{index}": 1} for index in range(4000)]
    _, named = ask(CHATS, {"messages": messages})
    assert named.endswith("and 3968 more")


def test_the_schema_of_a_tool_is_its_own() -> None:
    """What stands in an object without a record is left alone."""
    schema = {"type": "object", "cache_control": 1, "properties": {"store": {"foo": None}}}
    function = {"name": "stop", "parameters": schema}
    request, named = ask(CHATS, {**CHAT, "tools": [{"type": "function", "function": function}]})
    assert named == ""
    tools = json.loads(request.inputs["messages"])["tools"]  # type: ignore[arg-type]
    assert tools[0]["function"]["parameters"] == schema


def test_a_field_without_a_name_leaves_a_header_that_can_be_sent() -> None:
    ignored = IgnoredFields()
    ignored.add("user")
    ignored.add("")
    assert ignored.header() == "user, ?"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"temperature": 1e999}', "temperature"),
        ('{"unknown": {"x": [0, -1E+400]}}', "unknown.x[1]"),
        ('{"tools": [{"function": {"parameters": {"maximum": NINES}}}]}',
         "tools[0].function.parameters.maximum"),
    ],
)  # fmt: skip
def test_a_number_that_is_too_large_is_named(body: str, field: str) -> None:
    with pytest.raises(FieldError, match="but must be a number up to") as caught:
        decode(body.replace("NINES", "9" * 5000).encode(), CompletionRequest)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is ")
    assert len(str(caught.value)) < 150
