"""Run by the Python of instructor's environment: the example of its README in every mode that it
has for OpenAI's and Anthropic's clients.

Where a mode only asks for JSON in words, a random model must be told what a trained one knows: by
the form of the answer in ``extra_body``, or a response model that every object fits.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import instructor
from anthropic import Anthropic
from instructor import Mode, Partial
from openai import OpenAI
from pydantic import BaseModel

LM = "lm"
JOHN: Any = [{"role": "user", "content": "John is 25 years old"}]
OBJECT = r'\{"name": "[a-z]{1,9}", "age": [1-9]\}'
OPENAI = [
    Mode.FUNCTIONS, Mode.TOOLS, Mode.TOOLS_STRICT, Mode.PARALLEL_TOOLS, Mode.JSON, Mode.JSON_O1,
    Mode.MD_JSON, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
]  # fmt: skip
ANTHROPIC = [
    Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_REASONING_TOOLS, Mode.ANTHROPIC_PARALLEL_TOOLS,
    Mode.ANTHROPIC_JSON, Mode.JSON_SCHEMA,
]  # fmt: skip


class User(BaseModel):
    name: str
    age: int


FORMAT = {"type": "json_schema", "schema": User.model_json_schema()}
IN_WORDS: Any = {
    "openai MD_JSON": {"structured_outputs": {"regex": f"```json\n{OBJECT}\n```"}},
    "anthropic ANTHROPIC_JSON": {"output_config": {"format": FORMAT}},
    "anthropic JSON_SCHEMA": {"output_config": {"format": FORMAT}},
}
"""What such a mode's request gets beside what the mode says. This version of anthropic's client is
too new for the last: instructor then asks in words."""


class Anything(BaseModel):
    name: str = ""
    age: int = 0


def extract(client: Any, api: str, mode: Mode, **more: Any) -> Any:
    model: Any = Anything if mode in (Mode.JSON, Mode.JSON_O1) else User
    if "PARALLEL" in mode.name:
        model = Iterable[User]
    body = IN_WORDS.get(f"{api} {mode.name}")
    if body is not None:
        more["extra_body"] = body
    found = client.chat.completions.create(
        response_model=model, messages=JOHN, max_retries=1, **more
    )
    if isinstance(found, BaseModel):
        return found.model_dump()
    return [user.model_dump() for user in found]


def partial(client: Any) -> Any:
    stream = client.chat.completions.create(
        response_model=Partial[User], messages=JOHN, stream=True
    )
    return list(stream)[-1].model_dump()


def main() -> None:
    openai = OpenAI(max_retries=0)
    anthropic = Anthropic(max_retries=0)
    found: dict[str, Any] = {}
    client = instructor.from_provider(
        f"openai/{LM}", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    found["from_provider"] = extract(client, "openai", Mode.TOOLS)
    for mode in OPENAI:
        client = instructor.from_openai(openai, mode=mode, model=LM)
        found[f"openai {mode.name}"] = extract(client, "openai", mode)
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        client = instructor.from_openai(openai, mode=mode, model=LM)
        found[f"openai {mode.name}, partial"] = partial(client)
    for mode in ANTHROPIC:
        client = instructor.from_anthropic(anthropic, mode=mode, model=LM)
        found[f"anthropic {mode.name}"] = extract(client, "anthropic", mode, max_tokens=1024)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
