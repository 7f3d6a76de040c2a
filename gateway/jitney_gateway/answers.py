"""From a model's steps to OpenAI's older answers: of ``/v1/chat/completions`` and
``/v1/completions``. Pure.

An answer gets every step and gives the chunks of a stream. At the end it gives the whole, which
says the same as the chunks together.
"""

import codecs
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
from jitney.errors import JitneyError

from jitney_gateway.content_blocks import ContentBlock, SequenceContent
from jitney_gateway.reasoning_tokens import ReasoningCounter
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
        self.reasoning: ReasoningCounter | None = None
        """Set for an answer whose reasoning can be counted."""
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
        if self.reasoning is not None:
            (text,) = step.texts  # there is a counter for one sequence only
            self.reasoning.add(step.output_ids, text)

    def as_json(self) -> JsonObject:
        """OpenAI's object ``usage``."""
        usage: JsonObject = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning.count}
        return usage


class ModelAnswer(Protocol):
    """An answer of a language model, in the form of one API. ``language.py`` asks no more of it."""

    extra_inputs: ClassVar[tuple[str, ...]]
    """Inputs of the contract by which this form asks the model for more outputs."""
    end_of_stream: ClassVar[bytes]
    """What a stream sends after its last event."""
    usage: Usage

    @property
    def sign_of_life(self) -> bytes:
        """What a stream sends when there has been nothing to send for a while."""

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
            _add_entry(delta.setdefault("tool_calls", []), {"index": last_index, **call})
            continue
        for field in _MESSAGE_FIELDS[event.block.kind]:
            delta[field] = delta.get(field, "") + event.text
    return delta


def _add_entry(entries: list[JsonObject], entry: JsonObject) -> None:
    """Add an entry of a call. Clients take each entry of their first chunk for another call, so a
    chunk has one for each."""
    if entries and entries[-1]["index"] == entry["index"]:
        entries[-1]["function"]["arguments"] += entry["function"]["arguments"]
    else:
        entries.append(entry)


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
        entry = {
            "token": candidate["decoded_token"],
            "logprob": candidate["logprob"],
            "bytes": list(_bytes_of(candidate)),
        }
        entries.append(entry)
        if candidate["rank"] <= top:
            best.append(entry)
    return {**entries[0], "top_logprobs": best}


def _bytes_of(candidate: JsonObject) -> bytes:
    """The bytes of a token. A part of a character comes with its own."""
    if "bytes" in candidate:
        return bytes(candidate["bytes"])
    return candidate["decoded_token"].encode()


# ------------------------------------------------------------------------------- completions


class PromptEcho(NamedTuple):
    """A prompt that comes before the texts that the model made of it."""

    text: str = ""
    first_token: str = ""
    """Its text. It is needed for logprobs: the model tells those of the tokens behind it."""


class CompletionAnswer:
    """The answer of ``/v1/completions``."""

    extra_inputs: ClassVar[tuple[str, ...]] = ()
    end_of_stream: ClassVar[bytes] = _END_OF_STREAM
    sign_of_life: ClassVar[bytes] = COMMENT

    def __init__(
        self,
        body: CompletionRequest,
        id_: str,
        sequences: Sequence[SequenceContent],
        echoes: Sequence[PromptEcho] = (),
    ) -> None:
        """``sequences``: ``n`` for each prompt, in the order of the prompts. ``echoes``: one for
        each prompt, if they are asked for. The sequences have their texts."""
        self.usage = Usage()
        self._sequences = sequences
        self._echoes = echoes
        self._wants_logprobs = body.logprobs is not None
        self._has_output = not body.is_echo_alone
        self._wants_prompt_logprobs = "prompt_logprobs" in body.params
        self._prompt_logprobs: dict[int, list[JsonObject | None]] = {}
        """Index of a prompt -> those of its tokens."""
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
        if not self._has_output:
            step = _without_output(step)
        self.usage.add(step)
        if step.prompt_logprobs is not None:
            self._prompt_logprobs[step.prompt] = step.prompt_logprobs
        for number, text in enumerate(step.texts):
            index = step.prompt * self._n + number
            sequence = self._sequences[index]
            if sequence.finish_reason is not None:
                continue
            logprobs = self._add_logprobs(index, step, number)
            events = sequence.push(text, step.finish_reasons[number])
            added = "".join(event.text for event in events if event.what == "delta")
            has_ended = sequence.finish_reason is not None
            if added or logprobs or has_ended:
                chosen = self._choice(index, added, logprobs)
                if step.prompt_logprobs is None:
                    chosen.pop("prompt_logprobs", None)
                yield self._envelope.chunk(chosen)

    def _add_logprobs(self, index: int, step: Step, number: int) -> JsonObject | None:
        """Take the logprobs that a step has for the choice ``index``, which is sequence ``number``
        of its prompt. Returns their lists; None if there are none."""
        new = step.logprobs_of(number)
        if self._echoes and self._wants_logprobs and step.prompt_logprobs is not None:
            echo = self._echoes[step.prompt]
            return self._logprobs[index].add_prompt(echo, step.prompt_logprobs, new)
        return self._logprobs[index].add(new) if new else None

    def _choice(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        reason = self._sequences[index].finish_reason
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs.get(index // self._n)
        return choice

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


def _without_output(step: Step) -> Step:
    """The step of a prompt whose new token nobody asked for."""
    number = len(step.texts)
    return msgspec.structs.replace(
        step,
        texts=[""] * number,
        num_tokens=[0] * number,
        logprobs=None,
        finish_reasons=[None if reason is None else "length" for reason in step.finish_reasons],
    )


class _CompletionLogprobs:
    """The logprobs of one sequence in the form of completions: a list for each thing."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._next_offset = 0
        """Characters of the sequence's text so far."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        """Tells which characters are whole: a token may be a part of one."""
        self._whole = self._empty()

    @staticmethod
    def _empty() -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(
        self,
        echo: PromptEcho,
        positions: Sequence[JsonObject | None],
        new_positions: Sequence[JsonObject],
    ) -> JsonObject:
        """Take the logprobs of a prompt, and those of the first new tokens. Returns their lists."""
        first = self._empty()
        first["tokens"].append(echo.first_token)
        first["token_logprobs"].append(None)
        first["top_logprobs"].append(None)
        first["text_offset"].append(0)
        if echo.text.startswith(echo.first_token):  # else the tokenizer put it before the text
            self._next_offset = len(echo.first_token)
        self._append(first)
        others = [position for position in positions[1:] if position is not None]
        new = self.add([*others, *new_positions])
        return {name: first[name] + new[name] for name in first}

    def add(self, positions: Sequence[JsonObject]) -> JsonObject:
        """Take the logprobs of new tokens. Returns their lists alone."""
        new = self._empty()
        for position in positions:
            candidates = list(position.values())
            chosen = candidates[0]
            new["tokens"].append(chosen["decoded_token"])
            new["token_logprobs"].append(chosen["logprob"])
            new["top_logprobs"].append(_best_by_text(candidates) if self._top > 0 else None)
            new["text_offset"].append(self._next_offset)
            self._next_offset += len(self._utf8.decode(_bytes_of(chosen)))
        self._append(new)
        return new

    def _append(self, lists: JsonObject) -> None:
        for name, values in lists.items():
            self._whole[name] += values

    def whole(self) -> JsonObject | None:
        """The lists of all tokens; None if there are no logprobs."""
        return self._whole if self._whole["tokens"] else None


def _best_by_text(candidates: Sequence[JsonObject]) -> dict[str, float]:
    """Text of a token -> its logprob: the best one, where several tokens have the same text."""
    best: dict[str, float] = {}
    for candidate in candidates:
        text = candidate["decoded_token"]
        best[text] = max(candidate["logprob"], best.get(text, -math.inf))
    return best
