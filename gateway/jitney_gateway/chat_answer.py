"""The answer of ``/v1/chat/completions`` from a model's steps. Pure."""

from collections.abc import Iterator, Sequence

from jitney_gateway.answers import ChoicesAnswer, Usage, bytes_of
from jitney_gateway.content_blocks import BlockEvent, ContentBlock, SequenceContent
from jitney_gateway.model_steps import Step
from jitney_gateway.older_functions import in_older_form
from jitney_gateway.wire import ChatRequest, JsonObject

_MESSAGE_FIELDS = {"text": ["content"], "reasoning": ["reasoning", "reasoning_content"]}
"""Kind of a block -> the fields of a message that have its text: vLLM has had two names."""


def chat_answer(body: ChatRequest, id_: str, sequences: Sequence[SequenceContent]) -> ChoicesAnswer:
    """The answer of ``/v1/chat/completions``, with a choice for each sequence."""
    return ChoicesAnswer(
        ChatChoices(body, sequences),
        body,
        f"chatcmpl-{id_}",
        chunk_object="chat.completion.chunk",
        whole_object="chat.completion",
    )


class ChatChoices:
    """The choices of a chat: each has a message."""

    def __init__(self, body: ChatRequest, sequences: Sequence[SequenceContent]) -> None:
        self.usage = Usage()
        self._sequences = sequences
        self._has_functions = bool(body.functions)
        """Whether the client expects calls in the older form."""
        self._top_logprobs = body.top_logprobs or 0
        self._logprobs: list[list[JsonObject]] = [[] for _ in sequences]
        self._begun: set[int] = set()
        """Indices of the choices that a stream has begun."""

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """As in Choices."""
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
            if self._has_functions:
                delta = in_older_form(delta)
            has_ended = sequence.finish_reason is not None
            if delta or logprobs or has_ended:
                yield self._choice_with_delta(index, delta, logprobs)

    def _choice_with_delta(
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
            reason = "function_call" if self._has_functions else "tool_calls"
        return {
            "index": index,
            **content,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": reason,
        }

    def whole(self) -> list[JsonObject]:
        """As in Choices."""
        choices = []
        for index, sequence in enumerate(self._sequences):
            message = _message(sequence)
            if self._has_functions:
                message = in_older_form(message)
            choices.append(self._choice(index, {"message": message}, self._logprobs[index]))
        return choices


def _push(sequence: SequenceContent, text: str, finish_reason: str | None) -> JsonObject:
    """Push the next text of a sequence. Returns what it adds to the message."""
    delta: JsonObject = {}
    for event in sequence.push(text, finish_reason):
        if event.what != "delta":
            continue
        if event.block.kind == "call":
            entry = _entry_of_call(event)
            entry["index"] = len(sequence.calls()) - 1
            _add_entry(delta.setdefault("tool_calls", []), entry)
            continue
        for field in _MESSAGE_FIELDS[event.block.kind]:
            delta[field] = delta.get(field, "") + event.text
    return delta


def _entry_of_call(event: BlockEvent) -> JsonObject:
    """What a delta has of a call: all of it at first, and later more of its arguments."""
    is_first = len(event.block.pieces) == 1
    if is_first:
        return _tool_call(event.block)
    return {"function": {"arguments": event.text}}


def _add_entry(entries: list[JsonObject], entry: JsonObject) -> None:
    """Add what a delta has of a call. A delta has one entry for each call: in the first delta with
    calls, clients take every entry for a call of its own."""
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
            "bytes": list(bytes_of(candidate)),
        }
        entries.append(entry)
        if candidate["rank"] <= top:
            best.append(entry)
    return {**entries[0], "top_logprobs": best}
