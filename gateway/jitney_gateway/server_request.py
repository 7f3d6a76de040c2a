"""What the gateway sends to a model for a client's request: tensors and sampling parameters, as in
docs/contract.md.

``language.py`` calls ``request_of_chat``, ``requests_of_completions`` and
``request_of_token_ids``. If the model cannot do what a field asks for, the error names that field
of the client. Pure: no network, no tokenizer.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from jitney.errors import show
from jitney.sampling_params import Limits

from jitney_gateway.answer_formats import formats_of_answer
from jitney_gateway.chat import chat_input, encoded
from jitney_gateway.chat_constraint import constraint_of_chat
from jitney_gateway.formats import find_reasoning
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.refusals import FieldError
from jitney_gateway.structured import OutputConstraint, constraint_of_body
from jitney_gateway.texts_or_ids import texts_or_ids
from jitney_gateway.wire import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    Generation,
    TokenizeRequest,
)

_PRIORITIES = {"auto": 0, "default": 0, "flex": 10, "priority": -10}
"""Service tier -> priority, for a model without tiers of its own. A lower priority goes first."""
_NO_LIMITS = Limits()

InputValue = bytes | list[int] | bool
"""The value of an input: text or JSON, token ids, or a flag."""


class ServerRequest(msgspec.Struct, kw_only=True):
    """One request to a model of the server."""

    model: str
    inputs: dict[str, InputValue]
    """Name of an input in the contract -> its value."""
    request_id: str = ""


# ------------------------------------------------------------------------------- chats


def request_of_chat(
    body: ChatRequest, model: ModelDescription, request_id: str, limits: Limits = _NO_LIMITS
) -> ServerRequest:
    """The request for a chat. ``limits`` are those of the client's key. Raises FieldError."""
    params = _params_of_service_tier(body.service_tier, model.tiers, limits)
    params |= _params_of_chat(body)  # a tier or priority that the client names itself wins
    formats = formats_of_answer(body, model)
    if formats.tool is not None or find_reasoning(formats.reasoning) is not None:
        # The parser must find the markers in the text, and they may be special tokens.
        params.setdefault("skip_special_tokens", False)
    return _complete_request(
        body,
        model,
        inputs=_inputs_of_chat(body),
        params=params,
        request_id=_joined_id(request_id, body.user, body.safety_identifier),
        constraint=constraint_of_chat(body, model, formats),
    )


def _inputs_of_chat(body: ChatRequest) -> dict[str, InputValue]:
    """The prompt: messages, or the token ids that the client has made of them."""
    if body.prompt_token_ids:
        if body.continue_final_message:
            raise FieldError(
                "continue_final_message", "continue_final_message goes without prompt_token_ids"
            )
        return {"input_ids": body.prompt_token_ids}
    if not body.messages:
        raise FieldError("messages", "messages: Expected `array` of length >= 1")
    tools = None if body.tool_choice == "none" else body.tools
    messages = chat_input(
        body.messages,
        tools,
        body.chat_template_kwargs,
        continues=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt,
        reasoning_effort=body.reasoning_effort,
        verbosity=body.verbosity,
    )
    return {"messages": messages}


def _params_of_chat(body: ChatRequest) -> dict[str, Any]:
    """The sampling parameters that the body's fields stand for."""
    params = dict(body.params)
    if body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens  # the newer name wins
    # As with OpenAI, an answer without a limit may fill the context.
    params.setdefault("max_tokens", -1)
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise FieldError("top_logprobs", "top_logprobs goes with logprobs true")
    if body.prompt_cache_key is not None:
        params.setdefault("cache_salt", body.prompt_cache_key)
    return params


# ------------------------------------------------------------------------------- completions


def requests_of_completions(
    body: CompletionRequest, model: ModelDescription, request_id: str, limits: Limits = _NO_LIMITS
) -> list[ServerRequest]:
    """A request for each prompt. ``limits`` are those of the client's key. Raises FieldError."""
    params = _params_of_service_tier(body.service_tier, model.tiers, limits)
    params |= body.params  # a tier or priority that the client names itself wins
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            params.setdefault("prompt_logprobs", body.logprobs)
    if body.is_echo_alone:
        params["max_tokens"] = 1
    constraint = constraint_of_body(body)
    requests = []
    for inputs in _inputs_of_prompts(body):
        request = _complete_request(
            body,
            model,
            inputs=inputs,
            params=params,
            request_id=_joined_id(request_id, body.user),
            constraint=constraint,
        )
        requests.append(request)
    return requests


def _inputs_of_prompts(body: CompletionRequest) -> list[dict[str, InputValue]]:
    """The inputs for each prompt, which is a text or a list of token ids."""
    prompts = texts_or_ids("prompt", body.prompt)
    if len(prompts) > MAX_PROMPTS:
        raise FieldError("prompt", f"prompt has {len(prompts)} prompts, but at most {MAX_PROMPTS}")
    if isinstance(prompts[0], str):
        return [{"text_input": encoded("prompt", text)} for text in prompts]
    return [{"input_ids": ids} for ids in prompts]


# ------------------------------------------------------------------------------- both


def _params_of_service_tier(
    service_tier: str | None, tiers: Sequence[str], limits: Limits
) -> dict[str, Any]:
    """The parameter ``tier`` or ``priority`` for OpenAI's field ``service_tier``. ``tiers`` are the
    model's, which may have none:

    =====================  ================  =============================================
    service tier           no tiers          tiers
    =====================  ================  =============================================
    ``auto``, ``default``  the model's own   the tier of that name, or the model's default
    ``flex``               priority 10       the lowest tier that the key may ask for
    ``priority``           priority -10      the most urgent tier
    any other              FieldError        the tier of that name, or FieldError
    =====================  ================  =============================================
    """
    if service_tier is None:
        return {}
    if service_tier in ("auto", "default") and service_tier not in tiers:
        return {}
    names = known_service_tiers(tiers)
    if service_tier not in names:
        reason = f"service_tier is {show(service_tier)}, but must be one of {', '.join(names)}"
        raise FieldError("service_tier", reason)
    if tiers:
        return {"tier": _tier_of(service_tier, tiers, limits)}
    return {"priority": _PRIORITIES[service_tier]}


def known_service_tiers(tiers: Sequence[str]) -> list[str]:
    """The service tiers that a model with these ``tiers`` has."""
    return list(dict.fromkeys((*_PRIORITIES, *tiers)))


def _tier_of(service_tier: str, tiers: Sequence[str], limits: Limits) -> str:
    """The tier of a model that has tiers, for a service tier that is known."""
    if service_tier == "priority":
        return tiers[0]
    if service_tier == "flex":
        return _lowest_tier(tiers, limits)
    return service_tier


def _lowest_tier(tiers: Sequence[str], limits: Limits) -> str:
    """The lowest of the model's tiers that the key may ask for."""
    allowed = [name for name in tiers if name in limits.tiers]
    if allowed:
        return allowed[-1]
    # The key has no limits, or it may ask for none of these tiers. Then the model refuses this one.
    return tiers[-1]


def _complete_request(
    body: Generation,
    model: ModelDescription,
    *,
    inputs: dict[str, InputValue],
    params: dict[str, Any],
    request_id: str,
    constraint: OutputConstraint | None,
) -> ServerRequest:
    """The request, with what chats and completions have in common. Raises FieldError."""
    _check_common_fields(body, model)
    params = {**model.sampling_defaults, **params}
    if body.n is not None:
        params["n"] = body.n
    if constraint is not None:
        params["structured_outputs"] = constraint.structured_outputs
    for name in params:
        if name not in model.sampling_parameters:
            field = name
            if constraint is not None and name == "structured_outputs":
                field = constraint.field
            raise FieldError(field, f"{field} is not supported by model {body.model!r}")

    inputs = {
        **inputs,
        "sampling_parameters": msgspec.json.encode(params),
        "stream": bool(body.stream),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_timing": True,
    }
    if "logprobs" in params:
        inputs["return_logprobs"] = True
    return ServerRequest(model=body.model, inputs=inputs, request_id=request_id)


def _check_common_fields(body: Generation, model: ModelDescription) -> None:
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "stream_options goes with stream true")
    n = body.n or 1
    if n > model.max_n:
        raise FieldError("n", f"n is {n}, but must be at most {model.max_n}")
    if body.best_of is not None and body.best_of > n:
        reason = f"best_of is {body.best_of}, but must be at most n, which is {n}"
        raise FieldError("best_of", reason)


def _joined_id(*names: str | None) -> str:
    """The request's id in the server's log and traces: the gateway's, and the end user that the
    client names."""
    return " ".join(name for name in names if name)


# ------------------------------------------------------------------------------- token ids


def request_of_token_ids(body: TokenizeRequest) -> ServerRequest:
    """The request for the token ids of a prompt or of a chat. Raises FieldError."""
    has_prompt = body.prompt is not None
    has_messages = body.messages is not None
    if has_prompt == has_messages:  # both or neither
        raise FieldError("prompt", "either prompt or messages must be given")
    # A prompt gets the tokenizer's special tokens. Those of a chat are in its template.
    wanted = body.add_special_tokens
    if wanted is not None and wanted != has_prompt:
        what = "a prompt" if has_prompt else "messages"
        reason = f"is {show(wanted)}, but this is not supported with {what}"
        raise FieldError("add_special_tokens", f"add_special_tokens {reason}")
    inputs: dict[str, InputValue] = {"task": b"tokenize"}
    if body.messages is not None:
        inputs["messages"] = chat_input(
            body.messages,
            body.tools,
            body.chat_template_kwargs,
            continues=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
        )
        return ServerRequest(model=body.model, inputs=inputs)
    has_field_of_chats = body.add_generation_prompt is not None or body.continue_final_message
    if body.tools or body.chat_template_kwargs or has_field_of_chats:
        others = "tools, chat_template_kwargs, add_generation_prompt and continue_final_message"
        raise FieldError("prompt", f"prompt goes without {others}, which belong to messages")
    inputs["text_input"] = encoded("prompt", body.prompt)
    return ServerRequest(model=body.model, inputs=inputs)
