"""What the answers of all APIs of language models have in common. Pure.

An answer is fed every step, and makes the events of a stream of it. At the end it makes the whole
answer, which says the same as all events together. ``chat_answer.py``, ``completion_answer.py``,
``responses_answer.py`` and ``messages_answer.py`` have the answer of one API each. The first two
are choices in an object, which is made here.
"""

import time
from collections.abc import Iterator
from typing import ClassVar, Protocol

from jitney.errors import JitneyError

from jitney_gateway.model_steps import Step
from jitney_gateway.reasoning_tokens import ReasoningCounter
from jitney_gateway.refusals import describe
from jitney_gateway.wire import ChatRequest, CompletionRequest, JsonObject, StreamOptions

END_OF_STREAM = b"data: [DONE]\n\n"
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


def bytes_of(candidate: JsonObject) -> bytes:
    """The bytes of a token. The model tells them for one that is a part of a character."""
    if "bytes" in candidate:
        return bytes(candidate["bytes"])
    return candidate["decoded_token"].encode()


class Choices(Protocol):
    """The choices of an answer in OpenAI's older APIs: each has the text of one sequence."""

    usage: Usage

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step. Yields a choice for each sequence that it adds to, with what it adds."""

    def whole(self) -> list[JsonObject]:
        """All choices, once every step was fed."""


class ChoicesAnswer:
    """An answer in one of OpenAI's older APIs: an object around choices, which a stream sends in
    chunks."""

    extra_inputs: ClassVar[tuple[str, ...]] = ()
    end_of_stream: ClassVar[bytes] = END_OF_STREAM
    sign_of_life: ClassVar[bytes] = COMMENT

    def __init__(
        self,
        choices: Choices,
        body: ChatRequest | CompletionRequest,
        id_: str,
        *,
        chunk_object: str,
        whole_object: str,
    ) -> None:
        """``chunk_object``, ``whole_object``: the field ``object`` of a chunk and of the whole
        answer."""
        self.usage = choices.usage
        self._choices = choices
        self._head: JsonObject = {"id": id_, "created": int(time.time()), "model": body.model}
        if isinstance(body, ChatRequest) and body.service_tier is not None:
            self._head["service_tier"] = body.service_tier
        self._options = body.stream_options or StreamOptions()
        self._chunk_object = chunk_object
        self._whole_object = whole_object

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """Take a step. Yields a chunk for each choice that it adds to."""
        return map(self._chunk, self._choices.feed(step))

    def _chunk(self, choice: JsonObject) -> JsonObject:
        chunk = {**self._head, "object": self._chunk_object, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self.usage.as_json()
        return chunk

    def closing_events(self) -> list[JsonObject]:
        """A chunk with the usage alone, if the client asks for one."""
        if not self._options.include_usage:
            return []
        usage = self.usage.as_json()
        return [{**self._head, "object": self._chunk_object, "choices": [], "usage": usage}]

    def error_events(self, error: JitneyError) -> list[JsonObject]:
        """The last chunk of a stream that ends with an error."""
        return [describe(error).body]

    def as_json(self) -> JsonObject:
        """The whole answer, once every step was fed."""
        return {
            **self._head,
            "object": self._whole_object,
            "choices": self._choices.whole(),
            "usage": self.usage.as_json(),
        }
