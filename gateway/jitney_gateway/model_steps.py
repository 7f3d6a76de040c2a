"""A step: what one response of the server adds to an answer of a language model. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec


class Step(msgspec.Struct):
    """What one response adds to the ``n`` sequences of one prompt."""

    prompt: int
    """Index of the prompt in the client's request."""
    texts: list[str]
    finish_reasons: list[str | None]
    """For each sequence: None until it ends. Then the reason, in this step and each later one."""
    num_tokens: list[int]
    """New tokens of each sequence."""
    num_prompt_tokens: int
    logprobs: list[list[dict[str, dict[str, Any]]]] | None
    """For each sequence and new token, as in docs/contract.md."""
    timing: dict[str, Any]
    """Empty before the last step."""
    stop_strings: list[str | None] = []
    """The stop string that ended each sequence, if that was asked for."""
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    """For each token of the prompt, in its first step, if they were asked for. None for the first
    token, which nothing precedes."""
    output_ids: list[int] = []
    """New tokens of the one sequence, if they were asked for."""

    def logprobs_of(self, index: int) -> list[dict[str, dict[str, Any]]]:
        """Those of the new tokens of one sequence; empty if none were asked for."""
        return self.logprobs[index] if self.logprobs else []


def step_of_outputs(prompt: int, outputs: Mapping[str, Any]) -> Step:
    """The step of a response to the request for the prompt of that index. ``outputs``: name of an
    output in docs/contract.md -> its array."""
    reasons = [reason.decode() for reason in outputs["finish_reason"]]
    logprobs = outputs.get("logprobs")
    if logprobs is not None:
        logprobs = [msgspec.json.decode(text) for text in logprobs]
    prompt_logprobs = outputs.get("prompt_logprobs")
    if prompt_logprobs is not None:
        prompt_logprobs = msgspec.json.decode(prompt_logprobs[0])
    timing = outputs.get("timing")
    output_ids = outputs.get("output_ids")
    return Step(
        prompt=prompt,
        texts=[text.decode() for text in outputs["text_output"]],
        finish_reasons=[None if reason == "None" else reason for reason in reasons],
        num_tokens=outputs["num_output_tokens"].tolist(),
        num_prompt_tokens=int(outputs["num_input_tokens"][0]),
        logprobs=logprobs,
        timing={} if timing is None else msgspec.json.decode(timing[0]),
        stop_strings=[text.decode() or None for text in outputs.get("stop_string", ())],
        prompt_logprobs=prompt_logprobs,
        output_ids=[] if output_ids is None else output_ids.tolist(),
    )
