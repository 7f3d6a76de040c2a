"""Run by the Python of pydantic-ai's environment: the examples of its README (a greeting and the
bank's support agent) and of its page on tools, by each of the three APIs."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext

MODELS = ("openai-chat:lm", "openai-responses:lm", "anthropic:lm")


class DatabaseConn:
    """A database of one customer."""

    @classmethod
    async def customer_name(cls, *, id: int) -> str | None:
        return "John" if id == 123 else None

    @classmethod
    async def customer_balance(cls, *, id: int, include_pending: bool) -> float:
        assert id == 123
        return 123.45 if include_pending else 100.00


@dataclass
class SupportDependencies:
    customer_id: int
    db: DatabaseConn


class SupportOutput(BaseModel):
    support_advice: str = Field(description="Advice returned to the customer")
    block_card: bool = Field(description="Whether to block the customer's card")
    risk: int = Field(description="Risk level of query", ge=0, le=10)


def bank(model: str, output_type: Any) -> Agent[SupportDependencies, Any]:
    agent = Agent(
        model,
        deps_type=SupportDependencies,
        output_type=output_type,
        instructions=(
            "You are a support agent in our bank, give the customer support and judge the risk "
            "level of their query."
        ),
    )

    @agent.instructions
    async def add_customer_name(ctx: RunContext[SupportDependencies]) -> str:
        name = await ctx.deps.db.customer_name(id=ctx.deps.customer_id)
        return f"The customer's name is {name!r}"

    @agent.tool
    async def customer_balance(
        ctx: RunContext[SupportDependencies], include_pending: bool
    ) -> float:
        """Returns the customer's current account balance."""
        return await ctx.deps.db.customer_balance(
            id=ctx.deps.customer_id, include_pending=include_pending
        )

    return agent


def hello(model: str) -> str:
    agent = Agent(model, instructions="Be concise, reply with one sentence.")
    return agent.run_sync('Where does "hello world" come from?').output


def support(model: str, output_type: Any) -> Any:
    dependencies = SupportDependencies(customer_id=123, db=DatabaseConn())
    answer = bank(model, output_type).run_sync("What is my balance?", deps=dependencies)
    kinds = [part.part_kind for message in answer.all_messages() for part in message.parts]
    output = answer.output
    return {"parts": kinds, "output": output if isinstance(output, str) else output.model_dump()}


async def streamed(model: str) -> str:
    agent = Agent(model, instructions="Be concise, reply with one sentence.")
    async with agent.run_stream('Where does "hello world" come from?') as answer:
        return await answer.get_output()


def main() -> None:
    found: dict[str, Any] = {}
    for model in MODELS:
        found[model] = {
            "hello": hello(model),
            "streamed": asyncio.run(streamed(model)),
            "text": support(model, str),
            "tool output": support(model, SupportOutput),
        }
        if not model.startswith("anthropic:"):  # it sends a schema for Anthropic's own models only
            found[model]["native output"] = support(model, NativeOutput(SupportOutput))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
