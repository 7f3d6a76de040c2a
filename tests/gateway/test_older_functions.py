"""OpenAI's older form of tools: ``functions`` and ``function_call``, in both directions."""

import json
from typing import Any

import msgspec
import pytest
from jitney_gateway.app import make_app
from jitney_gateway.keys import FixedKeys
from jitney_gateway.model_steps import Step
from starlette.testclient import TestClient

from tests.gateway.test_answers import step
from tests.gateway.test_http import Answering

FUNCTION = {"name": "stop", "parameters": {"type": "object"}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "functions": [FUNCTION]}
CALL = '<tool_call>\n{"name": "stop", "arguments": {"at": "é"}}\n</tool_call>'


class Calling(Answering):
    """In place of a server: a model that calls a function, twice."""

    def __init__(self) -> None:
        self.asked: Any = None

    async def generate(self, asks: Any, headers: Any) -> Any:
        (self.asked,) = asks
        text = f"So: {CALL}{CALL}"
        middle = text.index("é")
        yield step(text[:middle])
        last: Step = step(text[middle:], end="stop")
        yield last


def answer(**more: Any) -> tuple[Any, Any]:
    """The response's JSON, or its events; and the request to the model."""
    server: Any = Calling()
    client = TestClient(make_app(server, FixedKeys({})))
    response = client.post("/v1/chat/completions", json=CHAT | more)
    if not more.get("stream"):
        return response.json(), server.asked
    events = response.text.split("\n\n")[:-2]
    return [json.loads(event.removeprefix("data: ")) for event in events], server.asked


def test_an_answer_has_one_call_in_the_older_form() -> None:
    said, asked = answer()
    choice = said["choices"][0]
    call = {"name": "stop", "arguments": '{"at": "é"}'}
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == call
    assert "tool_calls" not in choice["message"]
    assert json.loads(asked.inputs["messages"])["tools"] == [
        {"type": "function", "function": FUNCTION}
    ]


def test_a_stream_has_one_call_in_the_older_form() -> None:
    chunks, _ = answer(stream=True)
    assert "tool_calls" not in json.dumps(chunks)
    calls = [chunk["choices"][0]["delta"].get("function_call") for chunk in chunks]
    calls = [call for call in calls if call]
    assert calls[0]["name"] == "stop"
    assert all("name" not in call for call in calls[1:])
    assert "".join(call["arguments"] for call in calls) == '{"at": "é"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("choice", "is_forced"), [("auto", False), ("none", False), ({"name": "stop"}, True)]
)
def test_a_function_call_is_a_choice_of_tools(choice: Any, is_forced: bool) -> None:
    _, asked = answer(function_call=choice)
    assert (b"structured_outputs" in asked.inputs["sampling_parameters"]) == is_forced
    assert (b"tools" in asked.inputs["messages"]) == (choice != "none")


def test_a_history_in_the_older_form_is_calls_and_results() -> None:
    call = {"name": "stop", "arguments": '{"at": 1}'}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "stop", "content": "done"},
    ]
    _, asked = answer(messages=history)
    messages = json.loads(asked.inputs["messages"])["messages"]
    (made,) = messages[1]["tool_calls"]
    assert made["function"] == {"name": "stop", "arguments": {"at": 1}}
    assert messages[2] == {
        "role": "tool",
        "name": "stop",
        "content": "done",
        "tool_call_id": made["id"],
    }
    assert "function_call" not in messages[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [{"type": "function", "function": FUNCTION}]}, "functions and tools exclude"),
        ({"function_call": {"name": "go"}}, "function_call.name is 'go', but must be one of"),
        ({"functions": None, "function_call": {"name": "stop"}}, "function_call goes with"),
    ],
)
def test_what_contradicts_itself_is_refused(more: dict[str, Any], said: str) -> None:
    error = answer(**more)[0]["error"]
    assert error["message"].startswith(said)
    assert error["param"] == said.split(maxsplit=1)[0]


def test_a_client_that_has_no_functions_gets_tool_calls() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    said, _ = answer(functions=None, tools=tools)
    message = said["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2
    assert "function_call" not in message
    assert msgspec.json.encode(message)
