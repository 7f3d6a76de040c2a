"""Run by the Python of outlines' environment: its README's examples, with the model of its pages on
servers in place of a model of this process."""

import json
from enum import Enum
from typing import Any, Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel

ARITHMETIC = """
    ?start: expression
    ?expression: term (("+" | "-") term)*
    ?term: factor (("*" | "/") factor)*
    ?factor: NUMBER | "-" factor | "(" expression ")"
    %import common.NUMBER
"""


class Rating(Enum):
    poor = 1
    fair = 2
    good = 3
    excellent = 4


class ProductReview(BaseModel):
    rating: Rating
    pros: list[str]
    cons: list[str]
    summary: str


def review(model: Any, **more: Any) -> dict[str, Any]:
    found = model("Review: The XPS 13 has great battery life.", ProductReview, **more)
    return ProductReview.model_validate_json(found).model_dump(mode="json")


def main() -> None:
    client = openai.OpenAI(max_retries=0)
    vllm = outlines.from_vllm(client, "lm")
    plain = outlines.from_openai(client, "lm")
    words = Literal["Positive", "Negative", "Neutral"]
    found = {
        "sentiment": vllm("Analyze: 'This product completely changed my life!'", words),
        "temperature": vllm("What's the boiling point of water in Celsius?", int, max_tokens=200),
        "review": review(vllm, max_tokens=2000),
        "regex": vllm("What is the IP address of localhost?", Regex(r"(\d{1,3}\.){3}\d{1,3}")),
        "grammar": vllm("Two and two", CFG(ARITHMETIC), max_tokens=50),
        "stream": "".join(vllm.stream("A greeting", words)),
        "openai": plain("Hello!"),
        "openai, review": review(plain),
        "openai, stream": "".join(plain.stream("Hello!")),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
