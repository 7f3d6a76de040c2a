"""The answer of ``/v1/completions`` from a model's steps. Pure."""

import codecs
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from jitney_gateway.answers import ChoicesAnswer, Usage, bytes_of
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.model_steps import Step
from jitney_gateway.wire import CompletionRequest, JsonObject


class PromptEcho(NamedTuple):
    """A prompt that comes before its texts in the answer."""

    text: str = ""
    first_token: str = ""
    """The text of its first token, if logprobs are asked for. The texts of the other tokens come
    with their logprobs."""


def completion_answer(
    body: CompletionRequest,
    id_: str,
    sequences: Sequence[SequenceContent],
    echoes: Sequence[PromptEcho] = (),
) -> ChoicesAnswer:
    """The answer of ``/v1/completions``, with a choice for each sequence.

    ``sequences``: ``n`` for each prompt, in the order of the prompts. ``echoes``: one for each
    prompt, if the client wants them; each sequence already has the text of its echo.
    """
    return ChoicesAnswer(
        CompletionChoices(body, sequences, echoes),
        body,
        f"cmpl-{id_}",
        chunk_object="text_completion",
        whole_object="text_completion",
    )


class CompletionChoices:
    """The choices of completions: each has a text."""

    def __init__(
        self,
        body: CompletionRequest,
        sequences: Sequence[SequenceContent],
        echoes: Sequence[PromptEcho],
    ) -> None:
        """As in :func:`completion_answer`."""
        self.usage = Usage()
        self._sequences = sequences
        self._echoes = echoes
        self._wants_logprobs = body.logprobs is not None
        self._has_output = not body.is_echo_alone
        self._wants_prompt_logprobs = "prompt_logprobs" in body.params
        self._prompt_logprobs: dict[int, list[JsonObject | None]] = {}
        """Index of a prompt -> those of its tokens."""
        self._n = body.n or 1
        self._logprobs = [_CompletionLogprobs(body.logprobs or 0) for _ in sequences]

    def feed(self, step: Step) -> Iterator[JsonObject]:
        """As in Choices."""
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
                has_prompt = step.prompt_logprobs is not None
                yield self._choice(index, added, logprobs, with_prompt=has_prompt)

    def _add_logprobs(self, index: int, step: Step, number: int) -> JsonObject | None:
        """Take the logprobs that a step has for the choice ``index``, which is sequence ``number``
        of its prompt. Returns their lists; None if there are none."""
        new = step.logprobs_of(number)
        if self._echoes and self._wants_logprobs and step.prompt_logprobs is not None:
            echo = self._echoes[step.prompt]
            return self._logprobs[index].add_prompt(echo, step.prompt_logprobs, new)
        return self._logprobs[index].add(new) if new else None

    def _choice(
        self, index: int, text: str, logprobs: JsonObject | None, *, with_prompt: bool = True
    ) -> JsonObject:
        """``with_prompt``: with the logprobs of the prompt, if the client wants them."""
        reason = self._sequences[index].finish_reason
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._wants_prompt_logprobs and with_prompt:
            choice["prompt_logprobs"] = self._prompt_logprobs.get(index // self._n)
        return choice

    def whole(self) -> list[JsonObject]:
        """As in Choices."""
        choices = []
        for index, sequence in enumerate(self._sequences):
            text = sequence.joined_text("text")
            choices.append(self._choice(index, text, self._logprobs[index].whole()))
        return choices


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
    """The logprobs of one sequence in the form of completions: four lists with an entry for each
    token."""

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
            self._next_offset += len(self._utf8.decode(bytes_of(chosen)))
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
