"""What clients send, as records: OpenAI's names and, beside them, vLLM's.

A field that is not here is refused by name, as is one of a wrong type; ``ask`` honours all others.
Null stands for an absent field. Ranges are the model's to check: its error names the field too.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.json import schema_components

from jitney.gateway.refusals import FieldError
from jitney.sampling_params import NAMES, SamplingParams

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PROMPTS = 256
"""Of one request for completions."""
MAX_TEXTS = 2048
"""Of one request to embed, classify or rank."""
T = TypeVar("T")
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Ids = list[_Id]
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class WireRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a client sends."""


class Part(WireRecord):
    """A part of a message's content. Only text is taken."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class Called(WireRecord):
    """The function of a call."""

    name: str
    arguments: str = "{}"
    """JSON."""


class Call(WireRecord):
    """A call that the model made earlier."""

    type: Literal["function"]
    function: Called
    id: str | None = None


class Message(WireRecord):
    """One message of a chat. Fields that must be null are those of OpenAI's answers, which clients
    send back as they got them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Function(WireRecord):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireRecord):
    """A tool, or the choice of one; functions are the only ones."""

    type: Literal["function"]
    function: Function


class JsonSchema(WireRecord):
    """Of ``response_format``. The output keeps to ``schema`` whatever ``strict`` says."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(WireRecord):
    """What the output must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(WireRecord):
    """vLLM's: exactly one is set."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(WireRecord):
    """What a stream has beside its deltas."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Asking(WireRecord, kw_only=True):
    """What all that ask a model to go on have in common."""

    unseen: ClassVar[tuple[str, ...]] = ("prompt_logprobs",)
    """Sampling parameters that are no fields: no answer could show them."""
    model: str
    params: dict[str, Any] = {}
    """Not a field of the body: the fields of it that have a sampling parameter's name. They go to
    the model as they are, which checks types and ranges."""
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None


class Generation(Asking, kw_only=True):
    """What chats and completions have in common."""

    n: Annotated[int, Meta(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatRequest(Generation, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Generation, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | _Id | _Ids]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeRequest(WireRecord):
    """The body of ``/tokenize``: a prompt, or a chat."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(WireRecord):
    """The body of ``/detokenize``."""

    model: str
    tokens: _Ids


class EmbeddingRequest(WireRecord):
    """The body of ``/v1/embeddings``."""

    model: str
    input: str | Texts
    encoding_format: Literal["float", "base64"] | None = None


class ClassifyRequest(WireRecord):
    """The body of ``/v1/classify``, in vLLM's form."""

    model: str
    input: str | Texts


class RerankRequest(WireRecord):
    """The body of ``/v1/rerank``, in Jina's form."""

    model: str
    query: str
    documents: Texts
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None


def decode(data: bytes, type_: type[T]) -> T:
    """Read a body. Raises FieldError."""
    try:
        given = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _fault(error, "") from None
    if issubclass(type_, Asking):
        names = set(NAMES) & given.keys() - {*type_.__struct_fields__, *type_.unseen}
        params = {name: given.pop(name) for name in names}
        if "params" in given:
            raise FieldError("params", "params is unknown or not supported")
        given["params"] = {name: each for name, each in params.items() if each is not None}
    return convert(given, type_)


def convert(given: Any, type_: Any, at: str = "") -> Any:
    """What JSON has at ``at``, as a record. Raises FieldError."""
    try:
        return msgspec.convert(given, type_)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _fault(error, at) from None


def _fault(error: Exception, at: str) -> FieldError:
    found = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", str(error), re.DOTALL)
    assert found is not None
    said, path = found[1], (at + (found[2] or "")).removeprefix(".")
    named = re.fullmatch(r"Object (contains unknown|missing required) field `(\w+)`", said)
    if named is None:
        return FieldError(path, f"{path or 'the body'}: {said}")
    fault = "is missing" if "missing" in named[1] else "is unknown or not supported"
    path = ".".join(filter(None, (path, named[2])))
    return FieldError(path, f"{path} {fault}")


def body_schemas(types: Sequence[type]) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
    """JSON schemas of bodies, and the components that they refer to, for an OpenAPI document."""
    template = "#/components/schemas/{name}"
    (_, *schemas), components = schema_components([SamplingParams, *types], ref_template=template)
    params = components.pop("SamplingParams")["properties"]
    for type_ in types:
        if issubclass(type_, Asking):
            own = components[type_.__name__]["properties"]
            unseen = ("params", *type_.unseen)
            both = (params | own).items()
            components[type_.__name__]["properties"] = {k: v for k, v in both if k not in unseen}
    return schemas, components
