"""Run by the Python of anthropic's environment: the examples of its README and of tools.md."""

import asyncio
import json
from typing import Any

from anthropic import Anthropic, AsyncAnthropic, beta_tool
from pydantic import BaseModel

client = Anthropic(max_retries=0)
LM = "lm"
HELLO: Any = [{"role": "user", "content": "Hello, Claude"}]
SF: Any = [{"role": "user", "content": "What is the weather in SF?"}]


class ContactInfo(BaseModel):
    name: str
    email: str
    demo_requested: bool


@beta_tool
def get_weather(location: str) -> str:
    """Lookup the weather for a given city

    Args:
        location: The city and state, e.g. San Francisco, CA
    Returns:
        A dictionary containing the location, temperature, and weather condition.
    """
    return json.dumps({"location": location, "temperature": "68°F", "condition": "Sunny"})


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def asynchronous() -> str:
    async with AsyncAnthropic(max_retries=0) as asking:
        return text(await asking.messages.create(max_tokens=1024, messages=HELLO, model=LM))


def streamed() -> list[str]:
    stream = client.messages.create(max_tokens=1024, messages=HELLO, model=LM, stream=True)
    return list(dict.fromkeys(event.type for event in stream))


def stream_helper() -> list[str]:
    with client.messages.stream(max_tokens=1024, messages=HELLO, model=LM) as stream:
        parts = list(stream.text_stream)
        return ["".join(parts), text(stream.get_final_message())]


def run_tools(**more: Any) -> list[list[str]]:
    runner = client.beta.messages.tool_runner(
        max_tokens=1024, model=LM, tools=[get_weather], messages=SF, **more
    )
    if more.get("stream"):
        messages = [stream.get_final_message() for stream in runner]
    else:
        messages = list(runner)
    return [[block.type for block in message.content] for message in messages]


def history() -> str:
    """With thinking, cached blocks and a call of before."""
    tool: Any = {**get_weather.to_dict(), "cache_control": {"type": "ephemeral"}}
    first = client.messages.create(
        max_tokens=1024, messages=SF, model=LM, tools=[tool], tool_choice={"type": "any"}
    )
    (call,) = [block for block in first.content if block.type == "tool_use"]
    sunny: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"},
        {"type": "text", "text": "Thanks.", "cache_control": {"type": "ephemeral"}},
    ]
    second = client.messages.create(
        max_tokens=2048,
        messages=[
            *SF,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": sunny},
        ],
        model=LM,
        tools=[tool],
        thinking={"type": "adaptive"},
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    )
    return text(second)


def parsed() -> dict[str, Any]:
    message = client.messages.parse(
        max_tokens=1024, messages=HELLO, model=LM, output_format=ContactInfo
    )
    assert message.parsed_output is not None
    return message.parsed_output.model_dump()


def main() -> None:
    found = {
        "message": text(client.messages.create(max_tokens=1024, messages=HELLO, model=LM)),
        "asynchronous": asyncio.run(asynchronous()),
        "streamed": streamed(),
        "stream helper": stream_helper(),
        "tool runner": run_tools(),
        "tool runner, streamed": run_tools(stream=True),
        "history": history(),
        "parse": parsed(),
        "count": client.messages.count_tokens(messages=HELLO, model=LM).input_tokens,
        "models": [model.id for model in client.models.list()],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
