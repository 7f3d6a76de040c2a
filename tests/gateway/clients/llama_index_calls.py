"""Run by the Python of llama-index's environment: the examples of the READMEs of OpenAILike and
OpenAILikeEmbedding, and what its pages show of every language model."""

import asyncio
import json
import os
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SERVER: Any = {
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "max_retries": 0,
}
MESSAGES = [
    ChatMessage(role="system", content="You are a pirate with a colorful personality"),
    ChatMessage(role="user", content="What is your name"),
]


class Song(BaseModel):
    """A song with name and artist"""

    name: str
    artist: str


def generate_song(name: str, artist: str) -> Song:
    """Generates a song with provided name and artist."""
    return Song(name=name, artist=artist)


def model(**more: Any) -> OpenAILike:
    return OpenAILike(model="lm", context_window=128000, is_chat_model=True, **SERVER, **more)


def main() -> None:
    plain = model(is_function_calling_model=False)
    calling = model(is_function_calling_model=True)
    formatted = model(is_function_calling_model=True, should_use_structured_outputs=True)
    completing = OpenAILike(model="lm", context_window=128000, is_chat_model=False, **SERVER)
    embedding = OpenAILikeEmbedding(model_name="embed", embed_batch_size=10, **SERVER)
    tool = FunctionTool.from_defaults(fn=generate_song)
    called = calling.predict_and_call(
        [tool], "Pick a random song for me", tool_required=True, allow_parallel_tool_calls=False
    )
    song = calling.as_structured_llm(Song).complete("Generate a song")
    found = {
        "complete": str(plain.complete("Hello World!")),
        "chat": str(plain.chat(MESSAGES).message.content),
        "stream": "".join(part.delta or "" for part in plain.stream_chat(MESSAGES)),
        "completion": [str(completing.complete("Hello World!"))],
        "completion, stream": [part.delta for part in completing.stream_complete("Hello World!")],
        "asynchronous": str(asyncio.run(plain.acomplete("Hello World!"))),
        "called": str(called),
        "structured": song.raw.model_dump(),
        "response_format": formatted.as_structured_llm(Song).complete("A song").raw.model_dump(),
        "query": len(embedding.get_text_embedding("Open-source models")),
        "batch": [len(vector) for vector in embedding.get_text_embedding_batch(["a", "b"])],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
