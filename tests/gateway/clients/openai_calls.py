"""Run by the Python of openai's environment: the examples of its README and helpers.md."""

import asyncio
import json
from enum import StrEnum
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(max_retries=0)
LM = "lm"


class Step(BaseModel):
    explanation: str
    output: str


class MathResponse(BaseModel):
    steps: list[Step]
    final_answer: str


class Column(StrEnum):
    id = "id"
    status = "status"


class Operator(StrEnum):
    eq = "="
    gt = ">"


class DynamicValue(BaseModel):
    column_name: str


class Condition(BaseModel):
    column: str
    operator: Operator
    value: str | int | DynamicValue


class Query(BaseModel):
    table_name: Column
    columns: list[Column]
    conditions: list[Condition]


class GetWeather(BaseModel):
    city: str
    country: str


MATH: Any = [
    {"role": "system", "content": "You are a helpful math tutor."},
    {"role": "user", "content": "solve 8x + 31 = 2"},
]
QUERY: Any = [
    {"role": "system", "content": "You are a helpful assistant. Today is August 6, 2024."},
    {"role": "user", "content": "look up all my orders in november of last year"},
]
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get current temperature for a given location.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
        "additionalProperties": False,
    },
    "strict": True,
}


def response() -> str:
    return client.responses.create(
        model=LM,
        instructions="You are a coding assistant that talks like a pirate.",
        input="How do I check if a Python object is an instance of a class?",
    ).output_text


def chat() -> str | None:
    completion = client.chat.completions.create(
        model=LM,
        messages=[
            {"role": "developer", "content": "Talk like a pirate."},
            {"role": "user", "content": "How do I check if a Python object is an instance?"},
        ],
    )
    return completion.choices[0].message.content


async def asynchronous() -> str:
    async with AsyncOpenAI(max_retries=0) as asking:
        answer = await asking.responses.create(
            model=LM, input="Explain disestablishmentarianism to a smart five year old."
        )
        return answer.output_text


def streamed_response() -> list[str]:
    stream = client.responses.create(
        model=LM, input="Write a one-sentence bedtime story about a unicorn.", stream=True
    )
    return list(dict.fromkeys(event.type for event in stream))


def parsed() -> dict[str, Any]:
    completion = client.chat.completions.parse(
        model=LM, messages=MATH, response_format=MathResponse
    )
    found = completion.choices[0].message.parsed
    assert found is not None
    return found.model_dump()


def parsed_tool() -> str:
    completion = client.chat.completions.parse(
        model=LM,
        messages=QUERY,
        tools=[openai.pydantic_function_tool(Query)],
        tool_choice="required",
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Query)
    return call.function.name


def history() -> list[str]:
    """The helper's parsed messages are sent back as they are, with the tool's answer."""
    messages: list[Any] = [*QUERY]
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    more: Any = {"tool_choice": "required"}
    roles = []
    for _ in range(3):
        with client.chat.completions.stream(
            model=LM, messages=messages, tools=tools, **more
        ) as stream:
            for event in stream:
                roles.append(event.type)
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            assert isinstance(call.function.parsed_arguments, GetWeather)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "11 degrees"})
        more = {}
        messages.append({"role": "user", "content": "And tomorrow?"})
    with client.chat.completions.stream(
        model=LM, messages=messages, response_format=MathResponse
    ) as stream:
        for event in stream:
            roles.append(event.type)
        message = stream.get_final_completion().choices[0].message
    assert isinstance(message.parsed, MathResponse)
    messages.append(message)
    client.chat.completions.create(model=LM, messages=messages, tools=tools)
    return sorted(set(roles))


def conversation() -> list[str]:
    """Of responses: the items of an output are part of the next input."""
    items: list[Any] = [{"role": "user", "content": "What is the weather like in Paris today?"}]
    kinds: list[str] = []
    for _ in range(2):
        answer = client.responses.create(
            model=LM, input=items, tools=[WEATHER], store=False,
            include=["reasoning.encrypted_content"],
        )  # fmt: skip
        items += answer.output
        for item in answer.output:
            kinds.append(item.type)
            if item.type == "function_call":
                output = json.dumps({"temperature": 11})
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": output}
                )
    return kinds


def parsed_response() -> dict[str, Any]:
    answer = client.responses.parse(model=LM, input=MATH, text_format=MathResponse)
    assert answer.output_parsed is not None
    return answer.output_parsed.model_dump()


def response_stream_helper() -> dict[str, Any]:
    with client.responses.stream(model=LM, input=MATH, text_format=MathResponse) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    assert answer.output_parsed is not None
    return answer.output_parsed.model_dump()


def refused() -> str:
    try:
        client.chat.completions.create(model="nobody", messages=QUERY)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an unknown model answers")


def main() -> None:
    vectors = client.embeddings.create(model="embed", input=["a cat", "the bus"])
    found = {
        "response": response(),
        "chat": chat(),
        "asynchronous": asyncio.run(asynchronous()),
        "streamed response": streamed_response(),
        "parse": parsed(),
        "parsed tool": parsed_tool(),
        "history": history(),
        "conversation": conversation(),
        "parsed response": parsed_response(),
        "response, stream helper": response_stream_helper(),
        "models": [model.id for model in client.models.list()],
        "vectors": [len(each.embedding) for each in vectors.data],
        "refused": refused(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
