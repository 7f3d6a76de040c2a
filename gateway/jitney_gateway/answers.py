"""From a model's steps to OpenAI's older answers: of ``/v1/chat/completions`` and
``/v1/completions``. Pure.

An answer gets every step and gives the chunks of a stream. At the end it gives the whole, which
says the same as the chunks together.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from jitney.errors import JitneyError

from jitney_gateway.content_blocks import ContentBlock, SequenceContent
from jitney_gateway.refusals import describe
from jitney_gateway.server_client import Step
from jitney_gateway.wire import ChatRequest, CompletionRequest, JsonObject, StreamOptions

_MESSAGE_FIELDS = {"text": ["content"], "reasoning": ["reasoning", "reasoning_content"]}
"""Kind of a block -> the fields of a message that have its text: vLLM has had two names."""
_END_OF_STREAM = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""A comment of server-sent events, which every client skips."""


class Usage:
    """The tokens of one answer."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens that were found in the prefix cache: known with a prompt's last step."""
        self._tokens_of_prompts: dict[int, int] = {}

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(self._tokens_of_prompts.values())

    def add(self, step: Step) -> None:
        """Count a step."""
        # The same number comes with every step of a prompt.
        self._tokens_of_prompts[step.prompt] = step.num_prompt_tokens
        self.completion_tokens += sum(step.num_tokens)
        self.cached_tokens += step.timing.get("cached_prompt_tokens", 0)

    def as_json(self) -> JsonObject:
        """OpenAI's object ``usage``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ModelAnswer(Protocol):
    """An answer of a language model, in the form of one API. ``language.py`` asks no more of it."""

    extra_inputs: ClassVar[tuple[str, ...]]
    """Inputs of the contract by which this form asks the model for more outputs."""
    end_of_stream: ClassVar[bytes]
    """What a stream sends after its last event."""
    sign_of_life: ClassVar[bytes]
    """What a stream sends when there has been nothing to send for a while."""
    usage: Usage

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step. Yields the events that it makes."""

    def closing_events(self) -> list[JsonObject]:
        """The last events of a stream, once every step was fed."""

    def error_events(self, error: JitneyError) -> list[JsonObject]:
        """The last events of a stream that ends with an error."""

    def as_json(self) -> JsonObject:
        """The whole answer, once every step was fed."""


class _Envelope:
    """What stands around the choices, in chunks and in the whole."""

    def __init__(
        self,
        id_: str,
        body: ChatRequest | CompletionRequest,
        usage: Usage,
        *,
        chunk_object: str,
        whole_object: str,
    ) -> None:
        self._head: JsonObject = {"id": id_, "created": int(time.time()), "model": body.model}
        if isinstance(body, ChatRequest) and body.service_tier is not None:
            self._head["service_tier"] = body.service_tier
        self._usage = usage
        self._options = body.stream_options or StreamOptions()
        self._chunk_object = chunk_object
        self._whole_object = whole_object

    def chunk(self, choice: JsonObject) -> JsonObject:
        """A chunk of a stream."""
        chunk = {**self._head, "object": self._chunk_object, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage.as_json()
        return chunk

    def closing_chunks(self) -> list[JsonObject]:
        """A chunk with the usage alone, if the client asks for one."""
        if not self._options.include_usage:
            return []
        usage = self._usage.as_json()
        return [{**self._head, "object": self._chunk_object, "choices": [], "usage": usage}]

    def whole(self, choices: list[JsonObject]) -> JsonObject:
        """The whole answer."""
        usage = self._usage.as_json()
        return {**self._head, "object": self._whole_object, "choices": choices, "usage": usage}


# ------------------------------------------------------------------------------- chats


class ChatAnswer:
    """The answer of ``/v1/chat/completions``."""

    extra_inputs: ClassVar[tuple[str, ...]] = ()
    end_of_stream: ClassVar[bytes] = _END_OF_STREAM
    sign_of_life: ClassVar[bytes] = COMMENT

    def __init__(self, body: ChatRequest, id_: str, sequences: Sequence[SequenceContent]) -> None:
        self.usage = Usage()
        self._sequences = sequences
        self._envelope = _Envelope(
            f"chatcmpl-{id_}",
            body,
            self.usage,
            chunk_object="chat.completion.chunk",
            whole_object="chat.completion",
        )
        self._top_logprobs = body.top_logprobs or 0
        self._logprobs: list[list[JsonObject]] = [[] for _ in sequences]
        self._begun: set[int] = set()
        """Indices of the choices that have had a chunk."""

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step. Yields a chunk for each choice that it adds to."""
        self.usage.add(step)
        for index, text in enumerate(step.texts):
            sequence = self._sequences[index]
            if sequence.finish_reason is not None:
                continue
            logprobs = []
            for position in step.logprobs_of(index):
                logprobs.append(chat_logprob(position, self._top_logprobs))
            self._logprobs[index] += logprobs
            delta = _push(sequence, text, step.finish_reasons[index])
            has_ended = sequence.finish_reason is not None
            if delta or logprobs or has_ended:
                yield self._envelope.chunk(self._chunk_choice(index, delta, logprobs))

    def _chunk_choice(
        self, index: int, delta: JsonObject, logprobs: list[JsonObject]
    ) -> JsonObject:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": "", **delta}
        return self._choice(index, {"delta": delta}, logprobs)

    def _choice(self, index: int, content: JsonObject, logprobs: list[JsonObject]) -> JsonObject:
        sequence = self._sequences[index]
        reason = sequence.finish_reason
        if reason == "stop" and sequence.has_complete_call():
            reason = "tool_calls"
        return {
            "index": index,
            **content,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": reason,
        }

    def closing_events(self) -> list[JsonObject]:
        """The last chunk of a stream: the usage, if it was asked for."""
        return self._envelope.closing_chunks()

    def error_events(self, error: JitneyError) -> list[JsonObject]:
        """The last chunk of a stream that ends with an error."""
        return [describe(error).body]

    def as_json(self) -> JsonObject:
        """The whole answer, once every step was fed."""
        choices = []
        for index, sequence in enumerate(self._sequences):
            message = {"message": _message(sequence)}
            choices.append(self._choice(index, message, self._logprobs[index]))
        return self._envelope.whole(choices)


def _push(sequence: SequenceContent, text: str, finish_reason: str | None) -> JsonObject:
    """Push the next text of a sequence. Returns what it adds to the message."""
    delta: JsonObject = {}
    for event in sequence.push(text, finish_reason):
        if event.what != "delta":
            continue
        if event.block.kind == "call":
            last_index = len(sequence.calls()) - 1
            is_first = len(event.block.pieces) == 1
            call = _tool_call(event.block) if is_first else _more_arguments(event.text)
            delta.setdefault("tool_calls", []).append({"index": last_index, **call})
            continue
        for field in _MESSAGE_FIELDS[event.block.kind]:
            delta[field] = delta.get(field, "") + event.text
    return delta


def _message(sequence: SequenceContent) -> JsonObject:
    """The whole message of a choice."""
    text = sequence.joined_text("text")
    message: JsonObject = {"role": "assistant", "content": text, "refusal": None}
    reasoning = sequence.joined_text("reasoning")
    if reasoning:
        message |= dict.fromkeys(_MESSAGE_FIELDS["reasoning"], reasoning)
    calls = sequence.calls()
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [_tool_call(block) for block in calls]
    return message


def _tool_call(block: ContentBlock) -> JsonObject:
    function = {"name": block.name, "arguments": block.text}
    return {"id": f"call_{block.id}", "type": "function", "function": function}


def _more_arguments(text: str) -> JsonObject:
    """What a later delta of a call has: the other fields came with the first."""
    return {"function": {"arguments": text}}


def chat_logprob(position: JsonObject, top: int) -> JsonObject:
    """The logprobs of one token, in a chat's form.

    ``position`` has the candidates for the token, as docs/contract.md has them: the chosen one is
    first, and may be outside of the best ``top``.
    """
    entries = []
    best = []
    for candidate in position.values():
        text = candidate["decoded_token"]
        # A token with U+FFFD is a part of a character, whose bytes are not known here.
        is_whole_text = "\ufffd" not in text
        entry = {
            "token": text,
            "logprob": candidate["logprob"],
            "bytes": list(text.encode()) if is_whole_text else None,
        }
        entries.append(entry)
        if candidate["rank"] <= top:
            best.append(entry)
    return {**entries[0], "top_logprobs": best}


# ------------------------------------------------------------------------------- completions


class CompletionAnswer:
    """The answer of ``/v1/completions``."""

    extra_inputs: ClassVar[tuple[str, ...]] = ()
    end_of_stream: ClassVar[bytes] = _END_OF_STREAM
    sign_of_life: ClassVar[bytes] = COMMENT

    def __init__(
        self, body: CompletionRequest, id_: str, sequences: Sequence[SequenceContent]
    ) -> None:
        """``sequences``: ``n`` for each prompt, in the order of the prompts."""
        self.usage = Usage()
        self._sequences = sequences
        self._n = body.n or 1
        self._envelope = _Envelope(
            f"cmpl-{id_}",
            body,
            self.usage,
            chunk_object="text_completion",
            whole_object="text_completion",
        )
        self._logprobs = [_CompletionLogprobs(body.logprobs or 0) for _ in sequences]

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step. Yields a chunk for each choice that it adds to."""
        self.usage.add(step)
        for number, text in enumerate(step.texts):
            index = step.prompt * self._n + number
            sequence = self._sequences[index]
            if sequence.finish_reason is not None:
                continue
            logprobs = None
            new_logprobs = step.logprobs_of(number)
            if new_logprobs:
                logprobs = self._logprobs[index].add(new_logprobs)
            events = sequence.push(text, step.finish_reasons[number])
            added = "".join(event.text for event in events if event.what == "delta")
            has_ended = sequence.finish_reason is not None
            if added or logprobs or has_ended:
                yield self._envelope.chunk(self._choice(index, added, logprobs))

    def _choice(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        reason = self._sequences[index].finish_reason
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def closing_events(self) -> list[JsonObject]:
        """The last chunk of a stream: the usage, if it was asked for."""
        return self._envelope.closing_chunks()

    def error_events(self, error: JitneyError) -> list[JsonObject]:
        """The last chunk of a stream that ends with an error."""
        return [describe(error).body]

    def as_json(self) -> JsonObject:
        """The whole answer, once every step was fed."""
        choices = []
        for index, sequence in enumerate(self._sequences):
            text = sequence.joined_text("text")
            choices.append(self._choice(index, text, self._logprobs[index].whole()))
        return self._envelope.whole(choices)


class _CompletionLogprobs:
    """The logprobs of one sequence in the form of completions: a list for each thing."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._next_offset = 0
        """Characters of the sequence's text so far."""
        self._whole = self._empty()

    @staticmethod
    def _empty() -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, positions: Sequence[JsonObject]) -> JsonObject:
        """Take the logprobs of new tokens. Returns their lists alone."""
        new = self._empty()
        for position in positions:
            candidates = list(position.values())
            chosen = candidates[0]
            best = None
            if self._top > 0:
                best = {entry["decoded_token"]: entry["logprob"] for entry in candidates}
            new["tokens"].append(chosen["decoded_token"])
            new["token_logprobs"].append(chosen["logprob"])
            new["top_logprobs"].append(best)
            new["text_offset"].append(self._next_offset)
            self._next_offset += len(chosen["decoded_token"])
        for name, values in new.items():
            self._whole[name] += values
        return new

    def whole(self) -> JsonObject | None:
        """The lists of all tokens; None if there are no logprobs."""
        return self._whole if self._whole["tokens"] else None
