"""Run by the Python of guidance's environment: its README's examples, with the models that it has
for servers: OpenAI's, and vLLM's, which takes every grammar."""

import json
import os
from typing import Any

import guidance
from guidance import assistant, gen, select, system, user
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, Field

SERVER: Any = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}


class BloodPressure(BaseModel):
    systolic: int = Field(gt=300, le=400)
    diastolic: int = Field(gt=0, le=20)
    location: str = Field(max_length=50)


def ask(lm: Any) -> Any:
    with system():
        lm += "You are a language model"
    with user():
        lm += "What is the capital of Sweden? Answer with the fewest possible words."
    return lm


def main() -> None:
    plain = ask(OpenAI("lm", echo=False, **SERVER))
    vllm = ask(VLLMModel("lm", echo=False, **SERVER))
    with assistant():
        free = plain + gen("lm_response")
        pressure = plain + guidance.json(name="bp", schema=BloodPressure)
        chosen = vllm + select(["Stockholm", "Oslo"], name="model_selection")
        digits = vllm + gen("lm_age", regex=r"\d+", temperature=0.8, max_tokens=20)
        object_ = vllm + guidance.json(name="bp", schema=BloodPressure)
    found = {
        "free": free["lm_response"],
        "json": json.loads(pressure["bp"]),
        "select": chosen["model_selection"],
        "regex": digits["lm_age"],
        "vllm, json": json.loads(object_["bp"]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
