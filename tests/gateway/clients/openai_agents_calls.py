"""Run by the Python of openai-agents' environment: the examples of its README, by Responses and by
chat completions. Traces, which go elsewhere, are turned off."""

import asyncio
import json
from typing import Any

from agents import (
    Agent,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)
LM = "lm"


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


@function_tool
def get_weather(location: str) -> str:
    """Returns the weather of a city."""
    return f"The weather in {location} is sunny."


def haiku() -> str:
    agent = Agent(name="Assistant", instructions="You are a helpful assistant", model=LM)
    return Runner.run_sync(agent, "Write a haiku about recursion in programming.").final_output


def tools() -> list[str]:
    agent = Agent(
        name="Hello world", instructions="You are a helpful agent.", tools=[get_weather], model=LM
    )
    result = Runner.run_sync(agent, input="What's the weather in Tokyo?")
    return [item.type for item in result.new_items]


def handoffs() -> str:
    spanish = Agent(name="Spanish agent", instructions="You only speak Spanish.", model=LM)
    english = Agent(name="English agent", instructions="You only speak English", model=LM)
    triage = Agent(
        name="Triage agent",
        instructions="Handoff to the appropriate agent based on the language of the request.",
        handoffs=[spanish, english],
        model=LM,
    )
    return Runner.run_sync(triage, input="Hola, ¿cómo estás?").final_output


def structured() -> dict[str, Any]:
    agent = Agent(
        name="Calendar extractor",
        instructions="Extract calendar events from text",
        output_type=CalendarEvent,
        model=LM,
    )
    return Runner.run_sync(agent, "Alice and Bob meet on Friday").final_output.model_dump()


async def session() -> list[str]:
    agent = Agent(
        name="Assistant", instructions="Reply very concisely.", tools=[get_weather], model=LM
    )
    kept = SQLiteSession("conversation_123")
    await Runner.run(agent, "What city is the Golden Gate Bridge in?", session=kept)
    streamed = Runner.run_streamed(agent, "What state is it in?", session=kept)
    kinds = [event.type async for event in streamed.stream_events()]
    return sorted(set(kinds))


def main() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # the one that run_sync takes, too: they share a client
    found = {}
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        found[api] = {
            "haiku": haiku(),
            "tools": tools(),
            "handoffs": handoffs(),
            "structured": structured(),
            "session": loop.run_until_complete(session()),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
