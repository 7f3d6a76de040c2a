"""From a client's request to what the model is asked: the tensors and sampling parameters of
docs/contract.md. Pure: no network, no tokenizer. What the model cannot do is refused by name.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from jitney.errors import show
from jitney.sampling_params import Limits

from jitney_gateway.formats import detect, special_markers
from jitney_gateway.refusals import FieldError
from jitney_gateway.tool_grammar import after_reasoning, schema_of
from jitney_gateway.wire import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    Generation,
    Message,
    TokenizeRequest,
    Tool,
)

Tensor = bytes | list[int] | bool
"""Text or JSON, token ids, a flag."""
Structured = tuple[str, Mapping[str, Any]]
"""The field that asks for it, and the sampling parameter ``structured_outputs``."""
_TIERS = {"auto": 0, "default": 0, "flex": 10, "priority": -10}
"""Service tier -> priority, of a model without tiers of its own; lower goes first."""
_NO_LIMITS = Limits()


class Description(msgspec.Struct):
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


class Ask(msgspec.Struct, kw_only=True):
    """One request to a model."""

    model: str
    inputs: dict[str, Tensor]
    """By their names in the contract."""
    request_id: str = ""


def ask_chat(
    body: ChatRequest, known: Description, request_id: str, limits: Limits = _NO_LIMITS
) -> Ask:
    """The request of a chat, by a client of these limits. Raises FieldError."""
    params = dict(body.params)
    if body.max_completion_tokens is not None:
        if params.get("max_tokens", body.max_completion_tokens) != body.max_completion_tokens:
            raise FieldError("max_tokens", "max_tokens and max_completion_tokens differ: give one")
        params["max_tokens"] = body.max_completion_tokens
    params.setdefault("max_tokens", -1)
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise FieldError("top_logprobs", "top_logprobs goes with logprobs true")
    if body.prompt_cache_key is not None:
        params.setdefault("cache_salt", body.prompt_cache_key)
    params = _tier(body.service_tier, known.tiers, limits) | params
    prompt = chat_prompt(
        body.messages,
        None if body.tool_choice == "none" else body.tools,
        body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        reasoning_effort=body.reasoning_effort,
        verbosity=body.verbosity,
    )
    tool_format, reasoning_format = formats(body, known)
    if tool_format or reasoning_format:
        params.setdefault("skip_special_tokens", False)  # a parser's markers may be among them
    structured, added = _structured(body), known.added_tokens
    ids = {m: added[m] for m in special_markers(tool_format, reasoning_format) if m in added}
    if tool_format is not None:
        tools, choice = (msgspec.to_builtins(each) for each in (body.tools, body.tool_choice))
        forced = schema_of(tools, choice, body.parallel_tool_calls is not False, tool_format, ids)
        if forced and structured:
            raise FieldError("tool_choice", f"tool_choice and {structured[0]} exclude one another")
        structured = ("tool_choice", forced) if forced else structured
    if structured:
        structured = structured[0], after_reasoning(structured[1], reasoning_format, ids)
    request_id = " ".join(filter(None, (request_id, body.user, body.safety_identifier)))
    return _ask(body, {"messages": prompt}, params, known, request_id, structured)


def _tier(service: str | None, tiers: Sequence[str], limits: Limits) -> dict[str, Any]:
    """The parameter that a service tier stands for. Raises FieldError for one that is unknown.
    What the client may not ask for is refused by the model, but ``flex`` is the lowest tier that it
    may ask for."""
    if service is None or (service in ("auto", "default") and service not in tiers):
        return {}
    if service not in (*_TIERS, *tiers):
        known = ", ".join(dict.fromkeys((*_TIERS, *tiers)))
        said = f"service_tier is {show(service)}, but must be one of {known}"
        raise FieldError("service_tier", said)
    if not tiers:
        return {"priority": _TIERS[service]}
    allowed = [name for name in tiers if name in limits.tiers] or tiers
    return {"tier": {"flex": allowed[-1], "priority": tiers[0]}.get(service, service)}


def formats(body: ChatRequest, known: Description) -> tuple[str | None, str | None]:
    """How the answer writes calls of tools, if there may be any, and reasoning. Raises FieldError
    if there may be calls and their format is not known."""
    kwargs = msgspec.json.encode(body.chat_template_kwargs or {})
    tool_format, reasoning_format = _detected(known.chat_template or "", kwargs)
    tool_format = known.tool_format or tool_format
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", "tool_choice goes with tools")
        tool_format = None
    elif tool_format is None:
        said = "its chat template tells no format of calls, nor does its option tool_format"
        raise FieldError("tools", f"tools cannot be used with model {body.model!r}: {said}")
    return tool_format, known.reasoning_format or reasoning_format


@lru_cache(256)
def _detected(chat_template: str, kwargs: bytes) -> tuple[str | None, str | None]:
    return detect(chat_template, msgspec.json.decode(kwargs))


def ask_completions(
    body: CompletionRequest, known: Description, request_id: str, limits: Limits = _NO_LIMITS
) -> list[Ask]:
    """A request for each prompt, by a client of these limits. Raises FieldError."""
    params = _tier(body.service_tier, known.tiers, limits) | body.params
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            raise FieldError("echo", "echo with logprobs is not supported")
    request_id = " ".join(filter(None, (request_id, body.user)))
    structured = _structured(body)
    return [_ask(body, each, params, known, request_id, structured) for each in _prompts(body)]


def _ask(
    body: Generation,
    inputs: dict[str, Tensor],
    params: dict[str, Any],
    known: Description,
    request_id: str,
    structured: Structured | None,
) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "stream_options goes with stream true")
    if body.n is not None:
        if body.n > known.max_n:
            raise FieldError("n", f"n is {body.n}, but must be at most {known.max_n}")
        params["n"] = body.n
    if structured is not None:
        params["structured_outputs"] = structured[1]
    for name in params:
        if name not in known.sampling_parameters:
            field = structured[0] if structured and name == "structured_outputs" else name
            raise FieldError(field, f"{field} is not supported by model {body.model!r}")
    returns = ["finish_reason", "num_input_tokens", "num_output_tokens", "timing"]
    if "logprobs" in params:
        returns.append("logprobs")
    inputs |= {
        "sampling_parameters": msgspec.json.encode(params),
        "stream": bool(body.stream),
        "exclude_input_in_output": True,
        **{f"return_{name}": True for name in returns},
    }
    return Ask(model=body.model, inputs=inputs, request_id=request_id)


def _structured(body: Generation) -> Structured | None:
    """The field that asks for structured output, and the sampling parameter that it stands for."""
    found: dict[str, dict[str, Any]] = {}
    wanted = body.response_format
    if wanted is not None and (wanted.json_schema is None) == (wanted.type == "json_schema"):
        raise FieldError(
            "response_format.json_schema",
            "response_format.json_schema must be given with the type json_schema, and no other",
        )
    if wanted is not None and wanted.json_schema is not None:
        named = wanted.json_schema
        labels = {"title": named.name, "description": named.description}
        schema = {name: label for name, label in labels.items() if label is not None}
        found["response_format"] = {"json": schema | (named.schema or {})}
    elif wanted is not None and wanted.type == "json_object":
        found["response_format"] = {"json_object": True}
    if body.structured_outputs is not None:
        given = msgspec.structs.asdict(body.structured_outputs)
        set_ = {name: value for name, value in given.items() if value not in (None, False)}
        if len(set_) != 1:
            said = f"structured_outputs must have exactly one of {', '.join(given)}"
            raise FieldError("structured_outputs", said)
        found["structured_outputs"] = set_
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found[f"guided_{name}"] = {name: value}
    if len(found) > 1:
        raise FieldError(list(found)[1], f"{' and '.join(found)} exclude one another")
    return next(iter(found.items()), None)


def _prompts(body: CompletionRequest) -> list[dict[str, Tensor]]:
    given: Any = body.prompt
    if isinstance(given, str) or all(isinstance(each, int) for each in given):
        given = [given]
    kinds = {type(each) for each in given}
    if kinds not in ({str}, {list}) or given == [[]]:
        bound = "a text, a list of texts, token ids, or a list of lists of token ids"
        raise FieldError("prompt", f"prompt must be {bound}, and not empty")
    if len(given) > MAX_PROMPTS:
        raise FieldError("prompt", f"prompt has {len(given)} prompts, but at most {MAX_PROMPTS}")
    if kinds == {list}:
        return [{"input_ids": each} for each in given]
    return [{"text_input": encoded("prompt", each)} for each in given]


def ask_tokens(body: TokenizeRequest) -> Ask:
    """The request for a prompt's ids. Raises FieldError."""
    kwargs, generation = body.chat_template_kwargs, body.add_generation_prompt
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "either prompt or messages must be given")
    if body.messages is not None:
        chat = chat_prompt(body.messages, body.tools, kwargs, add_generation_prompt=generation)
        return Ask(model=body.model, inputs={"messages": chat, "task": b"tokenize"})
    if body.tools or kwargs or generation is not None:
        raise FieldError("prompt", "prompt goes without what belongs to messages")
    return Ask(
        model=body.model, inputs={"text_input": encoded("prompt", body.prompt), "task": b"tokenize"}
    )


def chat_prompt(
    messages: list[Message],
    tools: list[Tool] | None,
    parameters: Mapping[str, Any] | None,
    **named: object,
) -> bytes:
    """The input ``messages``: JSON. ``named`` are template parameters too, unless they are None;
    the model refuses those that are not on its list."""
    chat: dict[str, Any] = {"messages": [_message(i, each) for i, each in enumerate(messages)]}
    if tools:
        chat["tools"] = msgspec.to_builtins(tools)
    said = {name: value for name, value in named.items() if value is not None}
    if said or parameters:
        chat["chat_template_parameters"] = {**said, **(parameters or {})}
    return encoded("messages", chat)


def encoded(field: str, value: object) -> bytes:
    """UTF-8 of a text, JSON of anything else. Raises FieldError for an unpaired surrogate."""
    try:
        return value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise FieldError(field, f"{field} has an unpaired surrogate") from None


def _message(index: int, message: Message) -> dict[str, Any]:
    """As chat templates expect it: text, and the arguments of calls as objects."""
    made = msgspec.to_builtins(message)
    made.pop("annotations", None)
    if message.role == "developer":
        made["role"] = "system"
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                field = f"messages[{index}].content[{number}]"
                raise FieldError(
                    field, f"{field} is of type {part.type[:64]!r}: only text is taken"
                )
        made["content"] = "\n".join(str(part.text) for part in message.content)
    elif message.content is None and message.tool_calls:
        made["content"] = ""
    for number, call in enumerate(message.tool_calls or []):
        field = f"messages[{index}].tool_calls[{number}].function.arguments"
        arguments = arguments_of(field, call.function.arguments)
        made["tool_calls"][number]["function"]["arguments"] = arguments
    return made


def arguments_of(field: str, text: str | None) -> dict[str, Any]:
    """Those of a call. Raises FieldError."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise FieldError(field, f"{field} is not a JSON object") from None
