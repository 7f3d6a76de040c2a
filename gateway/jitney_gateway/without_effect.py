"""What a body asks for in vain, because of the model that it is for, is left out of it.

``field_rules.py`` does the same before the model is known. ``language.py`` calls this module before
it makes a request to the model.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from jitney.errors import show

from jitney_gateway.answer_formats import formats_of_answer, ids_of_markers
from jitney_gateway.chat import ARGUMENTS, has_whole_arguments
from jitney_gateway.chat_constraint import BUDGET, honours_budget
from jitney_gateway.field_rules import IgnoredFields
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.server_request import known_service_tiers
from jitney_gateway.strict_tools import why_not_kept
from jitney_gateway.wire import ChatRequest, CompletionRequest, Generation

NamesOfFields = Mapping[str, str]
"""Field of a chat -> its path in the client's body, from which the gateway made the chat. A field
that is not there has the same name in both."""

_GUIDING = ("reasoning_effort", "verbosity")
"""Fields of a chat that are parameters of its template, and say how much to write."""


def leave_out_of_chat(
    body: ChatRequest,
    model: ModelDescription,
    ignored: IgnoredFields,
    names: NamesOfFields | None = None,
) -> None:
    """Leave out of a chat what has no effect on this model. Raises FieldError if the gateway is
    strict."""
    leave_out(body, model, ignored)
    for message in body.messages:
        for call in message.tool_calls or ():
            if not has_whole_arguments(call.function.arguments):
                # The model's own call, which was cut: what it lacks cannot be had any more.
                ignored.add((names or {}).get(ARGUMENTS, ARGUMENTS), always=True)
    for name in _GUIDING:
        value = getattr(body, name)
        if value is None or _guides(model, name):
            continue
        field = (names or {}).get(name, name)
        ignored.add(field, fault=_unknown_to_template(value, model))
        setattr(body, name, None)
    body.chat_template_kwargs = known_kwargs(body.chat_template_kwargs, model, ignored)
    budget = body.thinking_token_budget
    if budget is not None and not honours_budget(body, model):
        field = (names or {}).get(BUDGET, BUDGET)
        reason = f"the reasoning of model {body.model!r} cannot be bound"
        ignored.add(field, fault=f"is {budget}, but {reason}")
        body.thinking_token_budget = None
    _loosen_tools(body, model, ignored)
    limit = body.max_completion_tokens
    if limit is not None and body.params.pop("max_tokens", limit) != limit:
        ignored.add("max_tokens", fault="differs from max_completion_tokens: give one")
    if body.top_logprobs == 0 and not body.logprobs:
        body.top_logprobs = None


def _loosen_tools(body: ChatRequest, model: ModelDescription, ignored: IgnoredFields) -> None:
    """A tool is strict only as far as a grammar can keep its schema. One that must be called is not
    loosened: then its schema is all that there is."""
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
    model does not tell: then it answers itself."""
    allowed = model.chat_template_parameters
    return allowed is None or name in allowed


def _guides(model: ModelDescription, name: str) -> bool:
    """Whether the parameter has an effect on the prompt, or may have one."""
    if model.chat_template_parameters is None:
        return True
    return takes_parameter(model, name) and _reads(model, name)


def _reads(model: ModelDescription, name: str) -> bool:
    """Whether the model's chat template reads the parameter. Yes, if the model does not tell."""
    if model.chat_template is None:
        return True
    return re.search(rf"\b{re.escape(name)}\b", model.chat_template) is not None


def known_kwargs(
    kwargs: dict[str, Any] | None, model: ModelDescription, ignored: IgnoredFields
) -> dict[str, Any] | None:
    """``chat_template_kwargs`` without those that the chat template never reads. One that it reads
    is kept, though the model may refuse it: it would change the prompt."""
    if kwargs is None:
        return None
    kept = {}
    for name, value in kwargs.items():
        is_read = model.chat_template is not None and _reads(model, name)
        if is_read or takes_parameter(model, name):
            kept[name] = value
        else:
            fault = _unknown_to_template(value, model)
            ignored.add(f"chat_template_kwargs.{name}", fault=fault)
    return kept


def _unknown_to_template(value: Any, model: ModelDescription) -> str:
    listed = ", ".join(sorted(model.chat_template_parameters or ())) or "none"
    return f"is {show(value)}, but the model's chat template takes only these: {listed}"
