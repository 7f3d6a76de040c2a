"""The formats in which a model answers a chat. Its options name them, and its chat template tells
those that no option names. Pure."""

from collections.abc import Collection
from functools import lru_cache

import msgspec
from jitney.errors import ConfigError, show

from jitney_gateway.format_detection import detect
from jitney_gateway.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
    find_reasoning,
    special_markers,
)
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.refusals import FieldError
from jitney_gateway.wire import ChatRequest

_LARGEST_CACHED_KWARGS = 4096
"""Bytes of JSON. Larger ``chat_template_kwargs`` are not cached: the model has not checked them
yet, and a client could fill the memory with them."""


def formats_of_answer(body: ChatRequest, model: ModelDescription) -> AnswerFormats:
    """The format of reasoning in the answer, and that of calls, if the answer may call.

    Raises FieldError if the answer may call and the format of calls is not known. Raises
    ConfigError for an option that names no format.
    """
    _check_option("tool_format", model.tool_format, TOOL_FORMATS)
    _check_option("reasoning_format", model.reasoning_format, REASONING_FORMATS)
    kwargs = msgspec.json.encode(body.chat_template_kwargs or {})
    may_call = bool(body.tools) and body.tool_choice != "none"
    template = model.chat_template
    if may_call and model.tool_template is not None:
        template = model.tool_template
    detected = _detected_formats(template or "", kwargs)
    reasoning_format = model.reasoning_format or detected.reasoning
    tool_format = model.tool_format or detected.tool
    if body.continue_final_message:
        _check_continued(body.model, reasoning_format, tool_format)
        reasoning_format = None  # what is continued is the text behind the reasoning

    if not may_call:
        if body.tool_choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", "tool_choice goes with tools")
        return AnswerFormats(None, reasoning_format)
    if tool_format is None:
        reason = "its chat template tells no format of calls, nor does its option tool_format"
        raise FieldError("tools", f"tools cannot be used with model {body.model!r}: {reason}")
    return AnswerFormats(tool_format, reasoning_format)


def _check_continued(model: str, reasoning_format: str | None, tool_format: str | None) -> None:
    """Raises FieldError if an answer of the model cannot begin in the middle of a text."""
    reasoning = find_reasoning(reasoning_format)
    has_header = reasoning is not None and bool(reasoning.before_answer)
    if has_header or (tool_format and TOOL_FORMATS[tool_format].preamble):
        field = "continue_final_message"
        reason = f"in the format of model {model!r}, a text cannot be continued"
        raise FieldError(field, f"{field}: {reason}")


def ids_of_markers(formats: AnswerFormats, model: ModelDescription) -> dict[str, int]:
    """The markers of these formats that are single tokens of the model -> their ids."""
    ids = {}
    for marker in special_markers(formats):
        if marker in model.added_tokens:
            ids[marker] = model.added_tokens[marker]
    return ids


def _check_option(option: str, value: str | None, names: Collection[str]) -> None:
    """The engine takes any text for these options: only the gateway knows the formats."""
    if value is None or value in names:
        return
    listed = ", ".join(map(repr, sorted(names)))
    raise ConfigError(f"the model's option {option} is {show(value)}, but must be one of {listed}")


def _detected_formats(chat_template: str, kwargs: bytes) -> AnswerFormats:
    if len(kwargs) > _LARGEST_CACHED_KWARGS:
        return detect(chat_template, msgspec.json.decode(kwargs))
    return _cached_formats(chat_template, kwargs)


@lru_cache(256)
def _cached_formats(chat_template: str, kwargs: bytes) -> AnswerFormats:
    return detect(chat_template, msgspec.json.decode(kwargs))
