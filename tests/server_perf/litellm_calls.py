"""Run by the Python of LiteLLM's environment: calls a gateway by way of it, and prints what came.

python litellm_calls.py http://HOST:PORT KEY
"""

import asyncio
import json
import sys
from typing import Any

import litellm

BASE, KEY = sys.argv[1:]
CHAT: Any = {"messages": [{"role": "user", "content": "Add two numbers."}], "max_tokens": 16}
OPENAI: Any = {"api_base": f"{BASE}/v1", "api_key": KEY, "max_retries": 0, "temperature": 0}
ANTHROPIC: Any = {"model": "anthropic/pylm", "api_base": BASE, "api_key": KEY, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"at": {"enum": ["north", "south"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS: Any = {
    "tools": [{"type": "function", "function": {"name": "stop", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "max_tokens": 64,
}
JSON: Any = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
    },
}


def text(answer: Any) -> str:
    return answer.choices[0].message.content


def calls(answer: Any) -> list[list[Any]]:
    made = answer.choices[0].message.tool_calls
    return [[call.function.name, json.loads(call.function.arguments)] for call in made]


def joined(chunks: Any) -> dict[str, Any]:
    """A stream, put together by LiteLLM itself."""
    whole = litellm.stream_chunk_builder(list(chunks))
    return {"text": text(whole), "tokens": whole.usage.completion_tokens}


def refused() -> list[Any]:
    try:
        litellm.completion(model="openai/nobody", **CHAT | OPENAI)
    except litellm.NotFoundError as error:
        return [error.status_code, str(error)]
    raise AssertionError("an unknown model answers")


def main() -> None:
    chat = {"model": "openai/pylm", **CHAT, **OPENAI}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    answer = litellm.completion(**chat)
    response = litellm.responses(
        model="openai/pylm", input=CHAT["messages"][0]["content"], max_output_tokens=16, **OPENAI
    )
    stop: Any = {"stop": ["context"], "extra_body": {"include_stop_str_in_output": True}}
    prompt = {"model": "text-completion-openai/pylm", "prompt": "def add(a, b):", "max_tokens": 16}
    texts = ["where the bus stops", "a cat"]
    vectors = litellm.embedding(
        model="openai/embed", input=texts, api_base=f"{BASE}/v1", api_key=KEY
    )
    ranks = litellm.rerank(
        model="hosted_vllm/rank", query="a cat", documents=["the bus", "cats"],
        api_base=f"{BASE}/v1", api_key=KEY,
    )  # fmt: skip
    message = litellm.anthropic.messages.acreate(**CHAT | ANTHROPIC)
    found = {
        "chat": {"text": text(answer), "tokens": answer.usage.completion_tokens},
        "chat, streamed": joined(litellm.completion(**chat, **stream)),
        "stop": text(litellm.completion(**chat, **stop)),
        "tools": calls(litellm.completion(**chat | TOOLS)),
        "JSON": json.loads(text(litellm.completion(**chat, **JSON))),
        "refused": refused(),
        "response": response.output[0].content[0].text,
        "completion": litellm.text_completion(**prompt, **OPENAI).choices[0].text,
        "vectors": [each["embedding"] for each in vectors.data],
        "ranks": [[each["index"], each["relevance_score"]] for each in ranks.results],
        "Anthropic": {"text": text(litellm.completion(**CHAT | ANTHROPIC))},
        "Anthropic, streamed": joined(litellm.completion(**CHAT | ANTHROPIC, stream=True)),
        "Anthropic, tools": calls(litellm.completion(**CHAT | ANTHROPIC | TOOLS)),
        "Anthropic, JSON": json.loads(
            text(litellm.completion(**CHAT | ANTHROPIC | JSON | {"max_tokens": 64}))
        ),
        "message": asyncio.run(message)["content"][0]["text"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
