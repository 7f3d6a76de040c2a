"""``/v1/responses`` and ``/v1/messages`` of ``jitney gateway`` before the real server, asked by the
unmodified clients ``openai`` and ``anthropic``."""

import json
from typing import Any

import openai
import pytest
from jitney.server.server import TritonServer

from tests.server.test_openai import USER, address, client, plain

__all__ = ["address", "client"]  # fixtures
ASK: Any = {"model": "tiny", "input": USER[0]["content"], "temperature": 0}
ENDLESS: Any = {"extra_body": {"ignore_eos": True}}
SCHEMA: Any = {
    "type": "object",
    "properties": {"at": {"enum": ["north", "south"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "stop", "parameters": SCHEMA, "strict": True}


def test_a_response_is_what_the_model_says(client: openai.OpenAI, server: TritonServer) -> None:
    answer = client.responses.create(**ASK, max_output_tokens=12, **ENDLESS)
    assert answer.output_text == plain(server, messages=json.dumps(USER))
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12


def test_a_stream_of_a_response_makes_the_same(client: openai.OpenAI, server: TritonServer) -> None:
    chunks = client.responses.create(**ASK, max_output_tokens=12, stream=True, **ENDLESS)
    events = list(chunks)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain(server, messages=json.dumps(USER))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text
    form: Any = {"format": {"type": "json_schema", "name": "t", "schema": SCHEMA}}
    with client.responses.stream(**ASK, text=form) as stream:
        final = stream.get_final_response()
    assert json.loads(final.output_text)["at"] in ("north", "south")
    assert final.status == "completed"


def test_a_tool_is_called_and_its_output_goes_back(client: openai.OpenAI) -> None:
    ask: Any = {**ASK, "model": "narrow", "tools": [TOOL], "tool_choice": "required"}
    with client.responses.stream(**ask) as stream:
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert call.name == "stop"
    assert json.loads(call.arguments)["at"] in ("north", "south")
    history: list[Any] = [USER[0], *final.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "Done."})
    ask |= {"input": history, "tool_choice": "none", "max_output_tokens": 4}
    longer = client.responses.create(**ask)
    assert longer.usage is not None
    assert final.usage is not None
    assert longer.usage.input_tokens > final.usage.input_tokens


def test_the_fields_of_a_response_change_it(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        extra = {"ignore_eos": True, "seed": 7, **fields.pop("extra_body", {})}
        fields = {**ASK, "temperature": 1.0, "max_output_tokens": 12, **fields}
        return client.responses.create(**fields, extra_body=extra).output_text

    base = text()
    assert text() == base
    for fields in (
        {"temperature": 0}, {"max_output_tokens": 5}, {"top_p": 0.01}, {"instructions": "Stop."},
        {"input": "the bus"}, {"text": {"format": {"type": "json_object"}}},
        {"extra_body": {"top_k": 1}}, {"extra_body": {"seed": 8}},
        {"extra_body": {"structured_outputs": {"choice": ["yes"]}}},
    ):  # fmt: skip
        assert text(**fields) != base, fields
    answer = client.responses.create(
        **ASK, max_output_tokens=3, top_logprobs=2, metadata={"a": "b"}, **ENDLESS
    )
    assert answer.metadata == {"a": "b"}
    (item,) = answer.output
    assert item.type == "message"
    logprobs = item.content[0].logprobs  # type: ignore[union-attr]
    assert [len(each.top_logprobs) for each in logprobs or []] == [2] * 3


def test_refusals_of_a_response(client: openai.OpenAI) -> None:
    create = client.responses.create
    for fields, param in (
        ({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"), ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"tools": [TOOL]}, "tools"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            create(**{**ASK, **fields})
        assert caught.value.param == param
        assert param in str(caught.value)
