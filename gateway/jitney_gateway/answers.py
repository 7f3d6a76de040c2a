"""From a model's steps to OpenAI's answers: the chunks of a stream, and the whole. Pure.

An answer is fed every step and gives the chunks that it makes; at the end it gives the whole, of
the same deltas.
"""

import time
from collections.abc import Iterator
from typing import Any

from jitney.errors import JitneyError

from jitney_gateway.content_blocks import ContentBlock, SequenceContent
from jitney_gateway.parsers import Kind
from jitney_gateway.refusals import describe
from jitney_gateway.server_client import Step
from jitney_gateway.wire import ChatRequest, CompletionRequest, StreamOptions

JsonObject = dict[str, Any]
_NAMES = {"text": ("content",), "reasoning": ("reasoning", "reasoning_content"), "call": ()}
"""Kind of a block -> where a message has it."""


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

    def body(self) -> JsonObject:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer:
    """The answer to a request for a chat or for completions."""

    returns: tuple[str, ...] = ()
    """Inputs of the contract that ask for more outputs."""
    end = b"data: [DONE]\n\n"
    """Ends a stream."""

    def __init__(
        self, body: ChatRequest | CompletionRequest, id_: str, choices: list[SequenceContent]
    ) -> None:
        """``choices``: ``n`` for each prompt."""
        self.usage = Usage()
        self._choices = choices
        self._chat = isinstance(body, ChatRequest)
        self._options = body.stream_options or StreamOptions()
        self._n = body.n or 1
        self._top = body.top_logprobs if isinstance(body, ChatRequest) else body.logprobs
        id_ = f"{'chatcmpl' if self._chat else 'cmpl'}-{id_}"
        self._head: JsonObject = {"id": id_, "created": int(time.time()), "model": body.model}
        if isinstance(body, ChatRequest) and body.service_tier is not None:
            self._head["service_tier"] = body.service_tier
        self._logprobs: list[JsonObject] = [{} for _ in choices]
        self._begun: set[int] = set()

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step; the chunks that it makes."""
        self.usage.add(step)
        for number, text in enumerate(step.texts):
            index = step.prompt * self._n + number
            choice = self._choices[index]
            if choice.finish_reason is not None:
                continue
            logprobs = self._take_logprobs(index, step.logprobs[number] if step.logprobs else [])
            said = _delta(choice, text, step.finish_reasons[number])
            if said or logprobs or choice.finish_reason:
                yield self._chunk([self._said(index, said, logprobs)])

    def _said(self, index: int, said: JsonObject, logprobs: JsonObject | None) -> JsonObject:
        if not self._chat:
            said = {"text": said.get("content", "")}
        elif index in self._begun:
            said = {"delta": said}
        else:
            self._begun.add(index)
            said = {"delta": {"role": "assistant", "content": "", **said}}
        return self._choice(index, said, logprobs)

    def _choice(self, index: int, said: JsonObject, logprobs: JsonObject | None) -> JsonObject:
        reason = self._choices[index].finish_reason
        if self._chat and reason == "stop" and self._choices[index].of("call"):
            reason = "tool_calls"
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        if self._options.continuous_usage_stats or not choices:
            chunk["usage"] = self.usage.body()
        return chunk

    def last(self) -> list[JsonObject]:
        """The last chunks of a stream: the usage, if it was asked for."""
        return [self._chunk([])] if self._options.include_usage else []

    def failed(self, error: JitneyError) -> list[JsonObject]:
        """The last chunks of a stream that ends with an error."""
        return [describe(error)[1]]

    def whole(self) -> JsonObject:
        """The answer, once every step was fed."""
        choices = []
        for index, blocks in enumerate(self._choices):
            said = (
                {"message": _message(blocks)} if self._chat else {"text": _joined(blocks, "text")}
            )
            choices.append(self._choice(index, said, self._logprobs[index] or None))
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage.body()}

    def _take_logprobs(self, index: int, positions: list[JsonObject]) -> JsonObject | None:
        """Of new tokens; they are added to those of the whole."""
        if not positions:
            return None
        whole = self._logprobs[index]
        if self._chat:
            made = {"content": [chat_logprob(each, self._top or 0) for each in positions]}
        else:
            made = _completion_logprobs(positions, self._top or 0, whole)
        for name, values in made.items():
            whole.setdefault(name, []).extend(values)
        return made


def _completion_logprobs(
    positions: list[JsonObject], top: int, before: JsonObject
) -> dict[str, list[Any]]:
    """In the form of completions: a list for each thing; ``before``: the lists so far."""
    offset = 0
    if before:
        offset = before["text_offset"][-1] + len(before["tokens"][-1])
    made: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for position in positions:
        candidates = list(position.values())
        chosen = candidates[0]
        best = {each["decoded_token"]: each["logprob"] for each in candidates}
        made["tokens"].append(chosen["decoded_token"])
        made["token_logprobs"].append(chosen["logprob"])
        made["top_logprobs"].append(best if top else None)
        made["text_offset"].append(offset)
        offset += len(chosen["decoded_token"])
    return made


def _delta(choice: SequenceContent, text: str, finish_reason: str | None) -> JsonObject:
    """What the next text adds to a message."""
    said: JsonObject = {}
    for what, block, more in choice.take(text, finish_reason):
        if what != "delta":
            continue
        if block.kind == "call":
            index = choice.of("call").index(block)
            said.setdefault("tool_calls", []).append({"index": index, **_call(block)})
        for name in _NAMES[block.kind]:
            said[name] = said.get(name, "") + more
    return said


def _message(choice: SequenceContent) -> JsonObject:
    """The whole."""
    message: JsonObject = {"role": "assistant", "content": _joined(choice, "text"), "refusal": None}
    if reasoning := _joined(choice, "reasoning"):
        message |= dict.fromkeys(_NAMES["reasoning"], reasoning)
    if calls := choice.of("call"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [_call(each) for each in calls]
    return message


def _joined(choice: SequenceContent, kind: Kind) -> str:
    return "".join(block.text for block in choice.of(kind))


def _call(block: ContentBlock) -> JsonObject:
    function = {"name": block.name, "arguments": block.text}
    return {"id": f"call_{block.id}", "type": "function", "function": function}


def chat_logprob(position: JsonObject, top: int) -> JsonObject:
    """One token: the chosen one comes first, and may stand beside the best ``top``."""
    made = []
    for one in position.values():
        text = one["decoded_token"]
        whole = "\ufffd" not in text  # else it is a part of a character
        bytes_ = list(text.encode()) if whole else None
        made.append({"token": text, "logprob": one["logprob"], "bytes": bytes_})
    best = [each for each, one in zip(made, position.values(), strict=True) if one["rank"] <= top]
    return {**made[0], "top_logprobs": best}
