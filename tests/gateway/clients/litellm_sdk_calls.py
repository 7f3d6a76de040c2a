"""Run by the Python of LiteLLM's environment: its README's example with OpenAI's and Anthropic's
API, messages by way of ``openai/``, and ranks."""

import asyncio
import json
import os
from typing import Any

import litellm
from litellm import completion

HELLO: Any = [{"role": "user", "content": "Hello!"}]


async def messages(model: str, **server: Any) -> list[str]:
    whole = await litellm.anthropic.messages.acreate(
        model=model, messages=HELLO, max_tokens=1024, **server
    )
    stream: Any = await litellm.anthropic.messages.acreate(
        model=model, messages=HELLO, max_tokens=1024, stream=True, **server
    )
    chunks = [chunk if isinstance(chunk, bytes) else b"" async for chunk in stream]
    return [whole["content"][0]["text"], b"".join(chunks).decode()]


def main() -> None:
    key = os.environ["OPENAI_API_KEY"]
    openai: Any = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": key}
    anthropic: Any = {"api_base": os.environ["ANTHROPIC_BASE_URL"], "api_key": key}
    ranks = litellm.rerank(
        model="hosted_vllm/rank", query="a cat", documents=["the bus", "cats"], **openai
    )
    found = {
        "openai": completion(model="openai/lm", messages=HELLO, **openai),
        "anthropic": completion(model="anthropic/lm", messages=HELLO, **anthropic),
    }
    texts: dict[str, Any] = {name: each.choices[0].message.content for name, each in found.items()}
    texts["messages by openai"] = asyncio.run(messages("openai/lm", **openai))
    texts["messages"] = asyncio.run(messages("anthropic/lm", **anthropic))
    texts["ranks"] = [each["index"] for each in ranks.results]
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
