"""What the gateway sends to a model for a client's request: tensors and sampling parameters, as in
docs/contract.md.

``language.py`` calls ``request_of_chat``, ``requests_of_completions`` and
``request_of_token_ids``. If the model cannot do what a field asks for, the error names that field
of the client. Pure: no network, no tokenizer.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from jitney.errors import ConfigError, show
from jitney.sampling_params import Limits

from jitney_gateway.chat import Tensor, chat_input, encoded
from jitney_gateway.formats import REASONING_FORMATS, TOOL_FORMATS, detect, special_markers
from jitney_gateway.refusals import FieldError
from jitney_gateway.structured import Wanted, wanted_by
from jitney_gateway.tool_grammar import after_reasoning, schema_of
from jitney_gateway.wire import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    Generation,
    TokenizeRequest,
)

_PRIORITIES = {"auto": 0, "default": 0, "flex": 10, "priority": -10}
"""Service tier -> priority, of a model without tiers of its own; lower goes first."""
_NO_LIMITS = Limits()


class ModelDescription(msgspec.Struct):
    """What a model tells of itself: the task ``describe`` of docs/contract.md."""

    max_model_len: int
    max_n: int
    sampling_parameters: frozenset[str]
    chat_template: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    added_tokens: dict[str, int] = {}
    adapters: list[str] = []
    """What ``lora_name`` may be. Each is a model of the gateway."""
    tiers: list[str] = []
    """What ``tier`` may be, the most urgent first."""


class ServerRequest(msgspec.Struct, kw_only=True):
    """One request to a model."""

    model: str
    inputs: dict[str, Tensor]
    """By their names in the contract."""
    request_id: str = ""


class Formats(NamedTuple):
    """How the answers of a chat are written; None: they have no such thing."""

    tool: str | None
    """A key of TOOL_FORMATS. None: this answer calls no tool."""
    reasoning: str | None
    """One of REASONING_FORMATS."""


# ------------------------------------------------------------------------------- chats


def request_of_chat(
    body: ChatRequest, known: ModelDescription, request_id: str, limits: Limits = _NO_LIMITS
) -> ServerRequest:
    """The request of a chat, by a client of these limits. Raises FieldError."""
    params = _params_of_service_tier(body.service_tier, known.tiers, limits)
    params |= _chat_params(body)
    tools = None if body.tool_choice == "none" else body.tools
    prompt = chat_input(
        body.messages,
        tools,
        body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        reasoning_effort=body.reasoning_effort,
        verbosity=body.verbosity,
    )
    used = formats(body, known)
    if used.tool or used.reasoning:
        # A parser's markers may be special tokens, which the text must keep then.
        params.setdefault("skip_special_tokens", False)
    return _ask(
        body,
        known,
        inputs={"messages": prompt},
        params=params,
        request_id=_joined(request_id, body.user, body.safety_identifier),
        wanted=_wanted_of_chat(body, known, used),
    )


def _chat_params(body: ChatRequest) -> dict[str, Any]:
    """The sampling parameters that the body's fields stand for."""
    params = dict(body.params)
    if body.max_completion_tokens is not None:
        if params.get("max_tokens", body.max_completion_tokens) != body.max_completion_tokens:
            raise FieldError("max_tokens", "max_tokens and max_completion_tokens differ: give one")
        params["max_tokens"] = body.max_completion_tokens
    params.setdefault("max_tokens", -1)  # what the context holds, as OpenAI does
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise FieldError("top_logprobs", "top_logprobs goes with logprobs true")
    if body.prompt_cache_key is not None:
        params.setdefault("cache_salt", body.prompt_cache_key)
    return params


def _wanted_of_chat(body: ChatRequest, known: ModelDescription, used: Formats) -> Wanted | None:
    """What the answer must be: what the body says, or a call of a tool in the model's syntax."""
    wanted = wanted_by(body)
    token_ids = {}
    for marker in special_markers(used.tool, used.reasoning):
        if marker in known.added_tokens:
            token_ids[marker] = known.added_tokens[marker]
    if used.tool is not None:
        grammar = schema_of(
            tools=msgspec.to_builtins(body.tools),
            tool_choice=msgspec.to_builtins(body.tool_choice),
            parallel=body.parallel_tool_calls is not False,
            tool_format=used.tool,
            token_ids=token_ids,
        )
        if grammar is not None:
            if wanted is not None:
                said = f"tool_choice and {wanted.field} exclude one another"
                raise FieldError("tool_choice", said)
            wanted = Wanted("tool_choice", grammar)
    if wanted is None:
        return None
    constraint = after_reasoning(wanted.constraint, used.reasoning, token_ids)
    return Wanted(wanted.field, constraint)


def formats(body: ChatRequest, known: ModelDescription) -> Formats:
    """How the answer writes calls of tools, if there may be any, and reasoning: as the model's
    options say, else as its chat template tells.

    Raises FieldError if there may be calls and their format is not known, ConfigError for an option
    that no format has as its name.
    """
    _check_option("tool_format", known.tool_format, TOOL_FORMATS)
    _check_option("reasoning_format", known.reasoning_format, REASONING_FORMATS)
    kwargs = msgspec.json.encode(body.chat_template_kwargs or {})
    tool_format, reasoning_format = _detected(known.chat_template or "", kwargs)
    if known.tool_format is not None:
        tool_format = known.tool_format
    if known.reasoning_format is not None:
        reasoning_format = known.reasoning_format

    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", "tool_choice goes with tools")
        return Formats(None, reasoning_format)
    if tool_format is None:
        said = "its chat template tells no format of calls, nor does its option tool_format"
        raise FieldError("tools", f"tools cannot be used with model {body.model!r}: {said}")
    return Formats(tool_format, reasoning_format)


def _check_option(option: str, value: str | None, known: Collection[str]) -> None:
    """The engine takes any text: only the gateway knows the formats."""
    if value is not None and value not in known:
        names = ", ".join(map(repr, sorted(known)))
        said = f"the model's option {option} is {show(value)}, but must be one of {names}"
        raise ConfigError(said)


@lru_cache(256)
def _detected(chat_template: str, kwargs: bytes) -> tuple[str | None, str | None]:
    return detect(chat_template, msgspec.json.decode(kwargs))


# ------------------------------------------------------------------------------- completions


def requests_of_completions(
    body: CompletionRequest, known: ModelDescription, request_id: str, limits: Limits = _NO_LIMITS
) -> list[ServerRequest]:
    """A request for each prompt, by a client of these limits. Raises FieldError."""
    params = _params_of_service_tier(body.service_tier, known.tiers, limits)
    params |= body.params
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            raise FieldError("echo", "echo with logprobs is not supported")
    wanted = wanted_by(body)
    asks = []
    for prompt in _prompts(body):
        ask = _ask(
            body,
            known,
            inputs=prompt,
            params=params,
            request_id=_joined(request_id, body.user),
            wanted=wanted,
        )
        asks.append(ask)
    return asks


def _prompts(body: CompletionRequest) -> list[dict[str, Tensor]]:
    """The inputs of each prompt: texts, or lists of token ids."""
    given: Any = body.prompt
    if isinstance(given, str) or all(isinstance(each, int) for each in given):
        given = [given]  # a single prompt
    kinds = {type(each) for each in given}
    if kinds not in ({str}, {list}) or given == [[]]:
        bound = "a text, a list of texts, token ids, or a list of lists of token ids"
        raise FieldError("prompt", f"prompt must be {bound}, and not empty")
    if len(given) > MAX_PROMPTS:
        raise FieldError("prompt", f"prompt has {len(given)} prompts, but at most {MAX_PROMPTS}")
    if kinds == {list}:
        return [{"input_ids": ids} for ids in given]
    return [{"text_input": encoded("prompt", text)} for text in given]


# ------------------------------------------------------------------------------- both


def _params_of_service_tier(
    service: str | None, tiers: Sequence[str], limits: Limits
) -> dict[str, Any]:
    """The parameter that a service tier stands for. Raises FieldError for one that is unknown.

    What the client may not ask for is refused by the model; but ``flex`` is the lowest tier that
    the client may ask for.
    """
    if service is None:
        return {}
    if service in ("auto", "default") and service not in tiers:
        return {}  # the model's own default
    names = dict.fromkeys((*_PRIORITIES, *tiers))
    if service not in names:
        said = f"service_tier is {show(service)}, but must be one of {', '.join(names)}"
        raise FieldError("service_tier", said)
    if not tiers:
        return {"priority": _PRIORITIES[service]}
    if service == "priority":
        return {"tier": tiers[0]}
    if service == "flex":
        allowed = [name for name in tiers if name in limits.tiers]
        lowest = (allowed or tiers)[-1]
        return {"tier": lowest}
    return {"tier": service}


def _ask(
    body: Generation,
    known: ModelDescription,
    *,
    inputs: dict[str, Tensor],
    params: dict[str, Any],
    request_id: str,
    wanted: Wanted | None,
) -> ServerRequest:
    """The request with what chats and completions have in common. Raises FieldError."""
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "stream_options goes with stream true")
    params = dict(params)
    if body.n is not None:
        if body.n > known.max_n:
            raise FieldError("n", f"n is {body.n}, but must be at most {known.max_n}")
        params["n"] = body.n
    if wanted is not None:
        params["structured_outputs"] = wanted.constraint
    for name in params:
        if name not in known.sampling_parameters:
            asked_by = name
            if wanted is not None and name == "structured_outputs":
                asked_by = wanted.field
            said = f"{asked_by} is not supported by model {body.model!r}"
            raise FieldError(asked_by, said)

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


def _joined(*names: str | None) -> str:
    """A request's id for the server's log and traces: ours, and whom the client speaks of."""
    return " ".join(name for name in names if name)


# ------------------------------------------------------------------------------- token ids


def request_of_token_ids(body: TokenizeRequest) -> ServerRequest:
    """The request for a prompt's ids. Raises FieldError."""
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "either prompt or messages must be given")
    inputs: dict[str, Tensor] = {"task": b"tokenize"}
    if body.messages is not None:
        inputs["messages"] = chat_input(
            body.messages,
            body.tools,
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
        return ServerRequest(model=body.model, inputs=inputs)
    if body.tools or body.chat_template_kwargs or body.add_generation_prompt is not None:
        raise FieldError("prompt", "prompt goes without what belongs to messages")
    inputs["text_input"] = encoded("prompt", body.prompt)
    return ServerRequest(model=body.model, inputs=inputs)
