"""What clients send, as records: OpenAI's names and, beside them, vLLM's.

A field that is not here is refused by name, as is one of a wrong type; ``ask`` honours all others.
Null stands for an absent field. Ranges are the model's to check: its error names the field too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from jitney.sampling_params import NAMES, SamplingParams
from msgspec import Meta
from msgspec.json import schema_components

from jitney_gateway.refusals import FieldError

MAX_BODY_BYTES = 8 << 20
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PROMPTS = 256
"""Of one request for completions."""
MAX_TEXTS = 2048
"""Of one request to embed, classify or rank."""
T = TypeVar("T", bound="WireRecord")
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Ids = list[_Id]
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class WireRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a client sends."""

    unseen: ClassVar[tuple[str, ...]] = ("prompt_logprobs",)
    """Sampling parameters that no answer could show: they are no fields."""


class ContentPart(WireRecord):
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
    arguments: str | None = None
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
    content: str | list[ContentPart] | None = None
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


class TextPart(WireRecord):
    """A part of a text, in other forms than a chat's. What else it has comes back with an answer,
    or marks what shall be cached, and changes nothing."""

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    citations: None = None
    cache_control: dict[str, Any] | None = None


class TextFormat(WireRecord):
    """A ``response_format`` in one piece."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def of_a_chat(self) -> ResponseFormat:
        """The same in two."""
        schema = JsonSchema(self.name or "output", self.schema, self.description, self.strict)
        return ResponseFormat(self.type, schema if self.type == "json_schema" else None)


class StructuredChoice(WireRecord):
    """vLLM's: exactly one is set."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(WireRecord):
    """What a stream has beside its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Generation(WireRecord, kw_only=True):
    """What chats and completions have in common."""

    model: str
    params: dict[str, Any] = {}
    """Not a field of the body: the fields of it that have a sampling parameter's name. They go to
    the model as they are, which checks types and ranges."""
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredChoice | None = None
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
        if "params" in type_.__struct_fields__:
            _gather_params(given, type_)
        return msgspec.convert(given, type_)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _field_error(str(error)) from None


def _gather_params(given: dict[str, Any], type_: type[WireRecord]) -> None:
    """Move what has a sampling parameter's name into ``params``; the fields of the record stay."""
    if "params" in given:
        raise FieldError("params", "params is unknown or not supported")
    params = {}
    for name in set(NAMES) - {*type_.__struct_fields__, *type_.unseen}:
        value = given.pop(name, None)
        if value is not None:
            params[name] = value
    given["params"] = params


def _field_error(text: str) -> FieldError:
    """Of msgspec's text: what is wrong, and where."""
    found = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", text, re.DOTALL)
    assert found is not None
    said = found[1]
    path = found[2] or ""
    named = re.fullmatch(r"(?s)Object (contains unknown|missing required) field `(.*)`", said)
    if named is None:
        return FieldError(path, f"{path or 'the body'}: {said}")
    fault = "is missing" if "missing" in named[1] else "is unknown or not supported"
    path = ".".join(name for name in (path, named[2]) if name)
    return FieldError(path, f"{path} {fault}")


def check_parts(at: str, record: Any, parts: Mapping[str, Sequence[str]]) -> None:
    """A record at ``at`` must have the fields that ``parts`` has for its type, may have those with
    a question mark, and none of those of other types. Raises FieldError."""
    own = parts.get(record.type)
    if own is None:
        raise FieldError(f"{at}.type", f"{at}.type is {record.type!r}: {' or '.join(parts)}")
    of_any_type = {name.rstrip("?") for names in parts.values() for name in names}
    for name in sorted(of_any_type):
        field = f"{at}.{name}"
        absent = getattr(record, name) is None
        if absent and name in own:
            raise FieldError(field, f"{field} is missing")
        if not absent and name not in own and f"{name}?" not in own:
            raise FieldError(field, f"{field} does not go with the type {record.type}")


def joined(content: str | Sequence[TextPart] | None) -> str:
    """A text that may come in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def body_schemas(
    types: Sequence[type[WireRecord]],
) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
    """JSON schemas of bodies, and the components that they refer to, for an OpenAPI document."""
    template = "#/components/schemas/{name}"
    (_, *schemas), components = schema_components([SamplingParams, *types], ref_template=template)
    params = components.pop("SamplingParams")["properties"]
    for type_ in types:
        if "params" in type_.__struct_fields__:
            component = components[type_.__name__]
            properties = params | component["properties"]
            for name in ("params", *type_.unseen):
                properties.pop(name, None)
            component["properties"] = properties
    return schemas, components
