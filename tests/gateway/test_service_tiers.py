"""OpenAI's service tiers become tiers or priorities of the model."""

import json
from typing import Any

import msgspec
import pytest
from jitney.sampling_params import parse_limits
from jitney_gateway.refusals import FieldError
from jitney_gateway.server_request import (
    request_of_chat,
    requests_of_completions,
)
from jitney_gateway.wire import (
    ChatRequest,
    CompletionRequest,
    decode,
)

from tests.gateway.asked import (
    CHAT,
    KNOWN,
)


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
