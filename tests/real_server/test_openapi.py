"""Random requests made from the gateway's OpenAPI document, by schemathesis: none is a fault of
ours, and every answer has the form that the document says."""

import json
from collections import Counter
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tests.real_server.test_openai import KEY, address, client

__all__ = ["address", "client"]  # fixtures
CHECKS: list[Any] = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
LIMITS = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}
LIMITS |= dict.fromkeys(("/v1/completions", "/v1/messages"), "max_tokens")
"""Endpoints that may fill the context -> the field that keeps them short."""
EXPECTED = {200, 400, 404, 409, 429, 504}
FILES = {"/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"}
LINE = {
    "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}  # fmt: skip
BATCHES = {"/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/cancel"}


@pytest.fixture(scope="module")
def document(address: str) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    return schemathesis.openapi.from_url(f"http://{address}/openapi.json", headers=headers)


@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        pytest.param(GenerationMode.POSITIVE, 10, id="documented bodies", marks=pytest.mark.slow),
        pytest.param(GenerationMode.NEGATIVE, 25, id="other bodies", marks=pytest.mark.slow),
    ],
)
def test_every_answer_is_as_documented(
    document: Any, client: openai.OpenAI, mode: GenerationMode, examples: int
) -> None:
    document.validate()
    seen: Counter[tuple[str, int]] = Counter()

    def upload() -> str:
        return client.files.create(file=("in.jsonl", json.dumps(LINE).encode()), purpose="batch").id

    def create() -> str:
        return client.batches.create(
            input_file_id=upload(), endpoint="/v1/chat/completions", completion_window="24h"
        ).id

    def ask(case: Any) -> None:
        body, limit = case.body, LIMITS.get(case.path)
        if isinstance(body, dict):
            if isinstance(body.get("model"), str):
                body["model"] = "tiny"
            if "messages" in body and mode.is_positive and seen.total() % 2:
                body["messages"] = [{"role": "user", "content": "where"}]  # few made ones fit
            if limit is not None and isinstance(body.get(limit, 0), int):
                body[limit] = min(body.get(limit) or 8, 8)
        if case.path == "/v1/batches" and isinstance(body, dict) and mode.is_positive:
            body |= {"input_file_id": upload(), "completion_window": "24h"}
        if case.path in FILES | BATCHES and "id" in case.path_parameters and seen.total() % 2:
            case.path_parameters["id"] = upload() if case.path in FILES else create()
        answer = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        seen[case.path, answer.status_code] += 1
        assert answer.status_code in EXPECTED, answer.text
        case.validate_response(answer, checks=CHECKS)

    few = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for found in document.get_all_operations():
        operation = found.ok()
        if mode.is_positive or operation.body:  # a GET without parameters has but one form
            few(given(operation.as_strategy(generation_mode=mode))(ask))()
    assert 400 in {status for _, status in seen}
    if mode.is_positive:
        assert {path for path, status in seen if status == 200} >= {
            *LIMITS, *FILES, *BATCHES, "/v1/models",
        }  # fmt: skip
