"""Detects a model's formats by its chat template, for ``answer_formats.py``. Pure."""

from collections.abc import Mapping
from typing import Any

from jitney.errors import InvalidArgumentError
from jitney.text.chat_template import ChatTemplate

from jitney_gateway.formats import (
    MARKED_REASONING,
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
    name_if_open,
)


def detect(
    chat_template: str, template_parameters: Mapping[str, Any] | None = None
) -> AnswerFormats:
    """The formats of a model, by its chat template.

    ``template_parameters`` are the request's ``chat_template_kwargs``: they can decide whether the
    prompt ends with the begin marker of reasoning.
    """
    # Templates write the same hint with either quotes, and with escapes.
    plain = chat_template.replace("\\", "").replace("'", '"')
    reasoning = _detect_reasoning(plain)
    if reasoning in MARKED_REASONING:
        prompt = _render_prompt(chat_template, template_parameters or {})
        begin = prompt.rfind(MARKED_REASONING[reasoning].begin)
        end = prompt.rfind(MARKED_REASONING[reasoning].end)
        if begin > end:
            reasoning = name_if_open(reasoning)
    return AnswerFormats(_detect_tool(plain), reasoning)


def _detect_tool(template: str) -> str | None:
    for name, row in TOOL_FORMATS.items():
        if all(hint in template for hint in row.hints):
            return name
    return None


def _detect_reasoning(template: str) -> str | None:
    harmony = REASONING_FORMATS["harmony"]
    assert harmony is not None
    if harmony.begin in template:
        return "harmony"
    for name, reasoning in MARKED_REASONING.items():
        if reasoning.end in template:
            return name
    return None


def _render_prompt(chat_template: str, template_parameters: Mapping[str, Any]) -> str:
    """The prompt of a small chat; empty if the template refuses a chat as small as that."""
    chat = [{"role": "user", "content": "."}]
    try:
        return ChatTemplate(chat_template, {}).render(chat, template_parameters)
    except InvalidArgumentError:
        return ""
