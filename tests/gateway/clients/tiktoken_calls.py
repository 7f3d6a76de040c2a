"""Run by the Python of langchain-openai's environment: OpenAIEmbeddings as its README has it, which
sends token ids of OpenAI's own models."""

import json

from langchain_openai import OpenAIEmbeddings
from openai import BadRequestError


def refused(embed: OpenAIEmbeddings) -> str:
    try:
        embed.embed_query("\N{SNOWMAN} \N{HOT BEVERAGE} disestablishmentarianism")
    except BadRequestError as error:
        return error.message
    raise AssertionError("ids that the model has not are taken")


def main() -> None:
    embed = OpenAIEmbeddings(model="embed", max_retries=0)
    found = {"vector": len(embed.embed_query("The meaning of life is 42")), "refused": ""}
    found["refused"] = refused(embed)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
