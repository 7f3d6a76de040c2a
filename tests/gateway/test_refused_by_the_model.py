"""What a model refuses is told by the name that the field has in the client's body."""

import json
import re
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney_gateway.client_fields import name_clients_field
from jitney_gateway.refusals import describe
from jitney_gateway.wire import (
    ChatRequest,
    decode,
)

from tests.gateway.asked import (
    CHAT,
)


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
        (
            "structured_outputs.grammar is",
            {"tools": None, "functions": [{"name": "stop"}], "function_call": {"name": "stop"}},
            "function_call is",
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
