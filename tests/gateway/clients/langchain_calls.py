"""Run by the Python of langchain-openai's environment: the examples of the docstrings of ChatOpenAI
and OpenAIEmbeddings."""

import asyncio
import json
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

LM = "lm"
MESSAGES: Any = [
    ("system", "You are a helpful translator. Translate the user sentence to French."),
    ("human", "I love programming."),
]


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: str = Field(..., description="The city and state, e.g. San Francisco, CA")


class GetPopulation(BaseModel):
    """Get the current population in a given location"""

    location: str = Field(..., description="The city and state, e.g. San Francisco, CA")


class Joke(BaseModel):
    """Joke to tell user."""

    setup: str = Field(description="The setup of the joke")
    punchline: str = Field(description="The punchline to the joke")
    rating: int | None = Field(description="How funny the joke is, from 1 to 10")


def call_tools(llm: ChatOpenAI, **more: Any) -> list[str]:
    """The call, and the chat with the tool's answer."""
    bound = llm.bind_tools([GetWeather, GetPopulation], **more)
    asked: Any = [("human", "Which city is hotter today and which is bigger: LA or NY?")]
    answer = bound.invoke([*asked], tool_choice="required")
    messages = [*asked, answer]
    for call in answer.tool_calls:
        messages.append(ToolMessage("70 degrees", tool_call_id=call["id"]))
    llm.bind_tools([GetWeather, GetPopulation]).invoke(messages)
    return [call["name"] for call in answer.tool_calls]


def joined(llm: ChatOpenAI) -> dict[str, Any]:
    chunks = list(llm.stream(MESSAGES))
    full = chunks[0]
    for chunk in chunks[1:]:
        full += chunk
    return {"text": full.text, "usage": full.usage_metadata}


def structured(llm: ChatOpenAI) -> dict[str, Any]:
    found = {}
    for method in ("json_schema", "function_calling"):
        joke = llm.with_structured_output(Joke, method=method).invoke("Tell me a joke about cats")
        found[method] = joke.model_dump()
    loose = llm.with_structured_output(None, method="json_mode")
    found["json_mode"] = loose.invoke("Tell me a joke about cats, in JSON")
    return found


async def asynchronous(llm: ChatOpenAI) -> list[str]:
    answers = await llm.abatch([MESSAGES, MESSAGES])
    return [answer.text for answer in answers]


def main() -> None:
    llm = ChatOpenAI(model=LM, temperature=0, max_tokens=None, timeout=None, max_retries=0)
    random = ChatOpenAI(model=LM, max_retries=0)
    responses = ChatOpenAI(model=LM, max_retries=0, use_responses_api=True)
    embed = OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, max_retries=0)
    found = {
        "chat": random.invoke(MESSAGES).text,
        "greedy": llm.invoke(MESSAGES).text,
        "responses": responses.invoke(MESSAGES).text,
        "stream": joined(random),
        "responses, stream": joined(responses),
        "asynchronous": asyncio.run(asynchronous(random)),
        "tools": call_tools(random),
        "strict tools": call_tools(random, strict=True),
        "responses, tools": call_tools(responses),
        "structured": structured(random),
        "responses, structured": structured(responses),
        "logprobs": random.bind(logprobs=True).invoke(MESSAGES).response_metadata["logprobs"]
        is not None,
        "completion": [OpenAI(model=LM, max_retries=0).invoke("The meaning of life is")],
        "query": len(embed.embed_query("The meaning of life is 42")),
        "documents": [len(vector) for vector in embed.embed_documents(["hello", "goodbye"])],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
