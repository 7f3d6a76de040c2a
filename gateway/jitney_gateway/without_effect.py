"""Leaves out of a body what has no effect on the model that it is for.

What has no effect on any model is gone by then: ``field_rules.py`` has left it out. ``language.py``
calls this module before it makes a request to the model. Pure.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from jitney.errors import show

from jitney_gateway.answer_formats import formats_of_answer, ids_of_markers
from jitney_gateway.chat import ARGUMENTS, OLDER_ARGUMENTS, has_whole_arguments
from jitney_gateway.chat_constraint import BUDGET, honours_budget
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.server_request import known_service_tiers
from jitney_gateway.strict_tools import why_not_kept
from jitney_gateway.wire import ChatRequest, CompletionRequest, Generation

NamesOfFields = Mapping[str, str]
"""Field of a chat -> its path in the client's body, from which the gateway made the chat. Other
fields have the same name in both."""

_GUIDING = ("reasoning_effort", "verbosity")
"""Fields of a chat that go to the chat template as parameters, and say how much to write."""


def leave_out_of_chat(
    body: ChatRequest,
    model: ModelDescription,
    ignored: IgnoredFields,
    names: NamesOfFields | None = None,
) -> None:
    """Leave out of a chat what has no effect on this model. Raises FieldError if the gateway is
    strict."""
    names = names or {}
    leave_out(body, model, ignored)
    _note_cut_calls(body, ignored, names)
    _leave_out_guides(body, model, ignored, names)
    body.chat_template_kwargs = known_kwargs(body.chat_template_kwargs, model, ignored)
    _leave_out_budget(body, model, ignored, names)
    _loosen_tools(body, model, ignored)
    _leave_out_older_limit(body, ignored)
    # Some clients always send this 0. It asks for nothing, so it needs no ``logprobs`` beside it.
    if body.top_logprobs == 0 and not body.logprobs:
        body.top_logprobs = None


def _note_cut_calls(body: ChatRequest, ignored: IgnoredFields, names: NamesOfFields) -> None:
    """Note the model's own calls that were cut: of their arguments, only the complete ones reach
    the model again (see ``chat.py``)."""
    for message in body.messages:
        for call in message.tool_calls or ():
            if not has_whole_arguments(call.function.arguments):
                ignored.add(names.get(ARGUMENTS, ARGUMENTS), even_if_strict=True)
        older_call = message.function_call
        if older_call is not None and not has_whole_arguments(older_call.arguments):
            ignored.add(OLDER_ARGUMENTS, even_if_strict=True)


def _leave_out_guides(
    body: ChatRequest, model: ModelDescription, ignored: IgnoredFields, names: NamesOfFields
) -> None:
    for name in _GUIDING:
        value = getattr(body, name)
        if value is None or _guides(model, name):
            continue
        ignored.add(names.get(name, name), fault=_unknown_to_template(value, model))
        setattr(body, name, None)


def _leave_out_budget(
    body: ChatRequest, model: ModelDescription, ignored: IgnoredFields, names: NamesOfFields
) -> None:
    budget = body.thinking_token_budget
    if budget is None or honours_budget(body, model):
        return
    reason = f"the reasoning of model {body.model!r} cannot be bounded"
    ignored.add(names.get(BUDGET, BUDGET), fault=f"is {budget}, but {reason}")
    body.thinking_token_budget = None


def _leave_out_older_limit(body: ChatRequest, ignored: IgnoredFields) -> None:
    """Leave out ``max_tokens`` beside its newer name."""
    limit = body.max_completion_tokens
    older_limit = body.params.get("max_tokens")
    if limit is None or older_limit is None:
        return
    del body.params["max_tokens"]
    if older_limit != limit:
        ignored.add("max_tokens", fault="differs from max_completion_tokens: give one")


def _loosen_tools(body: ChatRequest, model: ModelDescription, ignored: IgnoredFields) -> None:
    """Let a tool be strict only if a grammar can keep its schema. Tools are left as they are if one
    of them must be called: such a call follows the schema whether or not the tool is strict."""
    strict = [tool for tool in body.tools or () if tool.function.strict]
    if not strict or body.tool_choice not in (None, "auto"):
        return
    formats = formats_of_answer(body, model)
    if formats.tool is None:
        return
    token_ids = ids_of_markers(formats, model)
    for index, tool in enumerate(body.tools or ()):
        if not tool.function.strict:
            continue
        function = msgspec.to_builtins(tool.function)
        reason = why_not_kept(function, formats.tool, token_ids)
        if reason is not None:
            ignored.add(f"tools[{index}].strict", fault=f"is true, but {reason}")
            tool.function.strict = None


def leave_out(
    body: ChatRequest | CompletionRequest, model: ModelDescription, ignored: IgnoredFields
) -> None:
    """Leave out of a body what has no effect on this model. Raises FieldError if the gateway is
    strict."""
    _leave_out_service_tier(body, model, ignored)
    if body.stream_options is not None and not body.stream:
        ignored.add("stream_options", fault="goes with stream true")
        body.stream_options = None


def _leave_out_service_tier(
    body: Generation, model: ModelDescription, ignored: IgnoredFields
) -> None:
    known = known_service_tiers(model.tiers)
    if body.service_tier is None or body.service_tier in known:
        return
    fault = f"is {show(body.service_tier)}, but must be one of {', '.join(known)}"
    ignored.add("service_tier", fault=fault)
    body.service_tier = None


def takes_parameter(model: ModelDescription, name: str) -> bool:
    """Whether the model's option ``chat_template_parameters`` allows the parameter. Yes, if the
    model does not tell: then the model itself refuses what it does not take."""
    allowed = model.chat_template_parameters
    return allowed is None or name in allowed


def _guides(model: ModelDescription, name: str) -> bool:
    """Whether the parameter has an effect on the prompt, or may have one."""
    if model.chat_template_parameters is None:
        return True  # the model does not tell: it refuses the parameter itself, or takes it
    return takes_parameter(model, name) and _reads(model, name)


def _reads(model: ModelDescription, name: str) -> bool:
    """Whether a chat template of the model reads the parameter. Yes, if the model does not tell."""
    templates = [each for each in (model.chat_template, model.tool_template) if each is not None]
    if not templates:
        return True
    return any(re.search(rf"\b{re.escape(name)}\b", each) for each in templates)


def known_kwargs(
    kwargs: dict[str, Any] | None, model: ModelDescription, ignored: IgnoredFields
) -> dict[str, Any] | None:
    """``chat_template_kwargs`` without those that have no effect: the model does not take them, and
    its chat template does not read them.

    One that the template reads would change the prompt. So it is kept, even if the model will
    refuse it.
    """
    if kwargs is None:
        return None
    kept = {}
    for name, value in kwargs.items():
        is_surely_read = model.chat_template is not None and _reads(model, name)
        if is_surely_read or takes_parameter(model, name):
            kept[name] = value
        else:
            fault = _unknown_to_template(value, model)
            ignored.add(f"chat_template_kwargs.{name}", fault=fault)
    return kept


def _unknown_to_template(value: Any, model: ModelDescription) -> str:
    listed = ", ".join(sorted(model.chat_template_parameters or ())) or "none"
    return f"is {show(value)}, but the model's chat template takes only these: {listed}"
