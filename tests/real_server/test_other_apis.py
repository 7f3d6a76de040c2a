"""``/v1/responses`` and ``/v1/messages`` of ``jitney gateway`` before the real server, asked by the
unmodified clients ``openai`` and ``anthropic``."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from jitney_server.server import TritonServer

from tests.real_server.test_openai import KEY, USER, address, client, plain

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


def test_refusals_of_a_response(client: openai.OpenAI) -> None:
    create = client.responses.create
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"tools": [TOOL]}, "tools"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            create(**{**ASK, **fields})
        assert caught.value.param == param
        assert param in str(caught.value)


# ---------------------------------------------------------------------------- /v1/messages

TALK: Any = {"model": "tiny", "messages": USER, "max_tokens": 12}
GREEDY: Any = {"extra_body": {"temperature": 0, "ignore_eos": True}}
"""The client has no arguments for what newer models of its maker do not take."""
CUSTOM: Any = {"name": "stop", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def claude(address: str, client: openai.OpenAI) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client; ``client`` waits until the gateway is ready."""
    with anthropic.Anthropic(base_url=f"http://{address}", api_key=KEY, max_retries=0) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_what_the_model_says(
    claude: anthropic.Anthropic, server: TritonServer
) -> None:
    message = claude.messages.create(**TALK, **GREEDY)
    wanted = plain(server, messages=json.dumps(USER))
    assert text_of(message) == wanted
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 12
    counted = claude.messages.count_tokens(model="tiny", messages=USER)
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached
    with claude.messages.stream(**TALK, **GREEDY) as stream:
        assert "".join(stream.text_stream) == wanted
        final = stream.get_final_message()
    assert text_of(final) == wanted
    assert final.usage.output_tokens == 12


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic, server: TritonServer) -> None:
    wanted = plain(server, messages=json.dumps(USER))
    stop = wanted[len(wanted) // 2]
    ask: Any = {**TALK, "stop_sequences": ["\U0001f68d", stop], **GREEDY}
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (claude.messages.create(**ask), streamed):
        assert text_of(message) == wanted[: wanted.index(stop)]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_a_tool_is_used_and_its_result_goes_back(claude: anthropic.Anthropic) -> None:
    ask: Any = {**TALK, "model": "narrow", "tools": [CUSTOM], "max_tokens": 100}
    choice: Any = {"type": "tool", "name": "stop"}
    with claude.messages.stream(**ask, tool_choice=choice) as stream:
        message = stream.get_final_message()
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert use.input["at"] in ("north", "south")
    assert message.stop_reason == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "Done."}
    history: Any = [*USER, message.to_param(), {"role": "user", "content": [result]}]
    longer = claude.messages.count_tokens(model="narrow", messages=history, tools=[CUSTOM])
    before = claude.messages.count_tokens(model="narrow", messages=USER, tools=[CUSTOM])
    assert longer.input_tokens > before.input_tokens


def test_refusals_of_a_message(claude: anthropic.Anthropic) -> None:
    create = claude.messages.create
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    for fields, said in (
        ({"messages": [{"role": "user", "content": [image]}]}, "'image'"),
        ({"extra_body": {"top_k": -7}}, "top_k is -7"),
        ({"tools": [CUSTOM]}, "tools cannot be used"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ):  # fmt: skip
        with pytest.raises(anthropic.BadRequestError, match=said) as caught:
            create(**{**TALK, **fields})
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError, match="'nowhere'"):
        create(**{**TALK, "model": "nowhere"})
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="another").messages.create(**TALK)
