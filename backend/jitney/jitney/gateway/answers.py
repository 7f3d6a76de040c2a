"""From a model's steps to OpenAI's answers: the chunks of a stream, and the whole. Pure.

An answer is fed every step and gives the chunks that it makes; at the end it gives the whole, of
the same deltas.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from jitney.errors import JitneyError
from jitney.gateway.backend import Step
from jitney.gateway.parsers import CallDelta, Parser
from jitney.gateway.refusals import describe
from jitney.gateway.wire import ChatRequest, CompletionRequest, StreamOptions

Body = dict[str, Any]


class Usage:
    """Tokens of one answer."""

    def __init__(self) -> None:
        self.completion = 0
        self.cached = 0
        """Prompt tokens that were found in the cache; known at the end."""
        self._prompts: dict[int, int] = {}

    @property
    def prompt(self) -> int:
        """Of all prompts."""
        return sum(self._prompts.values())

    def add(self, step: Step) -> None:
        self._prompts[step.prompt] = step.num_prompt_tokens
        self.completion += sum(step.num_tokens)
        self.cached += step.timing.get("cached_prompt_tokens", 0)

    def body(self) -> Body:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Choice:
    """One sequence: what it has said so far, in pieces."""

    def __init__(self, parser: Parser, most_calls: int | None = None, echo: str = "") -> None:
        """``echo`` goes before its text; calls beyond ``most_calls`` are left out."""
        self._parser = parser
        self._most_calls = most_calls
        self._echo = echo
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[Body] = []
        self.finish_reason: str | None = None

    def take(self, text: str, finish_reason: str | None) -> Body:
        """The delta of the next text; ``finish_reason`` ends the sequence."""
        deltas = self._parser.push(self._echo + text)
        self._echo = ""
        if finish_reason is not None:
            deltas += self._parser.finish()
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = [call for delta in deltas for call in delta.calls[: self._most_calls]]
        calls = [call for call in calls if call.index != self._most_calls]
        self.content.append(content)
        self.reasoning.append(reasoning)
        said: Body = {"content": content} if content else {}
        if reasoning:
            said |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            said["tool_calls"] = [self._call(call) for call in calls]
        called = finish_reason == "stop" and self.calls
        self.finish_reason = "tool_calls" if called else finish_reason
        return said

    def _call(self, delta: CallDelta) -> Body:
        function = {"arguments": delta.arguments}
        if delta.index == len(self.calls):
            function = {"name": str(delta.name), **function}
            id_ = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            self.calls.append({**id_, "function": function})
            return {"index": delta.index, **id_, "function": dict(function)}
        self.calls[delta.index]["function"]["arguments"] += delta.arguments
        return {"index": delta.index, "function": function}

    def message(self) -> Body:
        """The whole, of a chat."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        message: Body = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        return message


class Answer:
    """The answer to a request for a chat or for completions."""

    end = b"data: [DONE]\n\n"
    """Ends a stream."""

    def __init__(
        self, body: ChatRequest | CompletionRequest, id_: str, choices: list[Choice]
    ) -> None:
        """``choices``: ``n`` for each prompt."""
        self.usage = Usage()
        self._choices = choices
        self._chat = isinstance(body, ChatRequest)
        self._options = body.stream_options or StreamOptions()
        self._n = body.n or 1
        self._top = body.top_logprobs if isinstance(body, ChatRequest) else body.logprobs
        self._head: Body = {"id": id_, "created": int(time.time()), "model": body.model}
        if isinstance(body, ChatRequest) and body.service_tier is not None:
            self._head["service_tier"] = body.service_tier
        self._logprobs: list[Body] = [{} for _ in choices]
        self._begun: set[int] = set()

    def feed(self, step: Step) -> Iterator[Body]:
        """Take a step; the chunks that it makes."""
        self.usage.add(step)
        for number, text in enumerate(step.texts):
            index = step.prompt * self._n + number
            choice = self._choices[index]
            if choice.finish_reason is not None:
                continue
            logprobs = self._take_logprobs(index, step.logprobs[number] if step.logprobs else [])
            said = choice.take(text, step.finish_reasons[number])
            if said or logprobs or choice.finish_reason:
                yield self._chunk([self._said(index, said, logprobs)])

    def _said(self, index: int, said: Body, logprobs: Body | None) -> Body:
        if not self._chat:
            said = {"text": said.get("content", "")}
        elif index in self._begun:
            said = {"delta": said}
        else:
            self._begun.add(index)
            said = {"delta": {"role": "assistant", "content": "", **said}}
        reason = self._choices[index].finish_reason
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[Body]) -> Body:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        if self._options.continuous_usage_stats or not choices:
            chunk["usage"] = self.usage.body()
        return chunk

    def last(self) -> list[Body]:
        """The last chunks of a stream: the usage, if it was asked for."""
        return [self._chunk([])] if self._options.include_usage else []

    def failed(self, error: JitneyError) -> list[Body]:
        """The last chunks of a stream that ends with an error."""
        return [describe(error)[1]]

    def whole(self) -> Body:
        """The answer, once every step was fed."""
        choices = []
        for index, choice in enumerate(self._choices):
            said: Body = {"text": "".join(choice.content)}
            if self._chat:
                said = {"message": choice.message()}
            reason, logprobs = choice.finish_reason, self._logprobs[index] or None
            choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": reason})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage.body()}

    def _take_logprobs(self, index: int, positions: list[Body]) -> Body | None:
        """Of new tokens, and to those of the whole."""
        if not positions:
            return None
        whole, made = self._logprobs[index], dict[str, list[Any]]()
        if self._chat:
            made["content"] = [chat_logprob(each, self._top or 0) for each in positions]
        else:
            best = [list(position.values()) for position in positions]
            tokens = [each[0]["decoded_token"] for each in best]
            tops = [{one["decoded_token"]: one["logprob"] for one in each} for each in best]
            offset = sum(map(len, whole.get("tokens", [])))
            made |= {
                "tokens": tokens,
                "token_logprobs": [each[0]["logprob"] for each in best],
                "top_logprobs": [top if self._top else None for top in tops],
                "text_offset": [offset + len("".join(tokens[:i])) for i in range(len(tokens))],
            }
        for name, values in made.items():
            whole[name] = whole.get(name, []) + values
        return made


def chat_logprob(position: Body, top: int) -> Body:
    """One token: the chosen one comes first, and may stand beside the best ``top``."""
    made = []
    for one in position.values():
        text = one["decoded_token"]
        whole = "\ufffd" not in text  # else it is a part of a character
        bytes_ = list(text.encode()) if whole else None
        made.append({"token": text, "logprob": one["logprob"], "bytes": bytes_})
    best = [each for each, one in zip(made, position.values(), strict=True) if one["rank"] <= top]
    return {**made[0], "top_logprobs": best}
