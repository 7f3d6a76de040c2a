"""What the tests of requests share: bodies, a model, and what the gateway asks it."""

import json
from typing import Any

import pytest
from jitney.sampling_params import NAMES
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.refusals import FieldError, describe
from jitney_gateway.server_request import (
    ServerRequest,
    request_of_chat,
    requests_of_completions,
)
from jitney_gateway.wire import (
    ChatRequest,
    CompletionRequest,
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


def ask(
    body: dict[str, Any], *, strict: bool = False, known: ModelDescription = KNOWN
) -> list[ServerRequest]:
    data = json.dumps(body).encode()
    ignored = IgnoredFields(strict=strict)
    if "prompt" in body:
        return requests_of_completions(decode(data, CompletionRequest, ignored), known, "id")
    chat = decode(data, ChatRequest, ignored)
    leave_out_of_chat(chat, known, ignored)
    return [request_of_chat(chat, known, "id")]


def params_of(body: dict[str, Any], known: ModelDescription = KNOWN) -> dict[str, Any]:
    return json.loads(ask(body, known=known)[0].inputs["sampling_parameters"])  # type: ignore[arg-type]


def refused(body: dict[str, Any], *, strict: bool = False) -> tuple[Any, str]:
    """The error object's field and text."""
    with pytest.raises(FieldError) as caught:
        ask(body, strict=strict)
    status, said = describe(caught.value)
    assert status == 400
    assert said["error"]["type"] == "invalid_request_error"
    return said["error"]["param"], said["error"]["message"]
