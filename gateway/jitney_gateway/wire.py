"""What clients send, as records: OpenAI's names and, beside them, vLLM's.

A field that no record has is refused by its name, and so is a value of a wrong type. Null stands
for an absent field. The model checks ranges: its error names the field too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from jitney.sampling_params import NAMES, SamplingParams
from msgspec import Meta
from msgspec.json import schema_components

from jitney_gateway.refusals import FieldError

JsonObject = dict[str, Any]
"""A JSON object that the gateway sends or has received."""
MAX_BODY_BYTES = 8 << 20
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PROMPTS = 256
"""Most prompts in one request for completions."""
MAX_TEXTS = 2048
"""Most texts in one request to embed, classify or rank."""
FunctionName = Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}(?!\n)$")]
"""The lookahead is for Python, where ``$`` also matches before a newline at the end. It is not
``\\Z``, because the OpenAPI document shows the pattern, and JSON Schema has no ``\\Z``."""
T = TypeVar("T", bound="WireRecord")
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Ids = list[_Id]
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class WireRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a client sends: a body, or an object in one."""

    refused_params: ClassVar[tuple[str, ...]] = ("prompt_logprobs",)
    """Sampling parameters that a body with the field ``params`` refuses (see
    :attr:`Generation.params`): the answers of its API have no place for their results, or another
    field stands for them."""


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
    """One message of a chat. Some fields must be null: OpenAI's answers have them, and clients send
    a message back as they got it."""

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

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireRecord):
    """A tool, or the choice of one; functions are the only ones."""

    type: Literal["function"]
    function: Function


class JsonSchema(WireRecord):
    """The schema in a ``response_format``. The output keeps to it, whatever ``strict`` says."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(WireRecord):
    """What the output must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextPart(WireRecord):
    """A part of a text, as ``/v1/responses`` and ``/v1/messages`` have it. The fields besides the
    text change nothing: they come back from an earlier answer, or ask for caching."""

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    citations: None = None
    cache_control: dict[str, Any] | None = None


class TextFormat(WireRecord):
    """A ``response_format`` without an inner object: the schema's fields stand beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def as_response_format(self) -> ResponseFormat:
        """The same in the form of a chat, which has the schema in an inner object."""
        if self.type != "json_schema":
            return ResponseFormat(self.type)
        schema = JsonSchema(
            name=self.name or "output",
            schema=self.schema,
            description=self.description,
            strict=self.strict,
        )
        return ResponseFormat(self.type, schema)


class StructuredChoice(WireRecord):
    """vLLM's object for a constraint on the output. Exactly one field is set."""

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
    """The sampling parameters for which this record has no field of their own: name -> value. In
    the body they stand among the other fields, so clients send no ``params``. The model gets them
    as they are, and checks types and ranges."""
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
    thinking_token_budget: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Generation, kw_only=True):
    """The body of ``/v1/completions``."""

    refused_params: ClassVar[tuple[str, ...]] = ()
    prompt: str | list[str | _Id | _Ids]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Whether the client wants the prompt without a new token. A model makes one at least."""
        return bool(self.echo) and self.params.get("max_tokens") == 0


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
        fields = msgspec.json.decode(data, type=dict[str, Any])
        if "params" in type_.__struct_fields__:
            _gather_params(fields, type_)
        return msgspec.convert(fields, type_)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _field_error(str(error)) from None


def _gather_params(fields: dict[str, Any], type_: type[WireRecord]) -> None:
    """Move sampling parameters that are no fields of the record into the field ``params``."""
    if "params" in fields:
        raise FieldError("params", "params is unknown or not supported")
    params = {}
    for name in _names_of_params(type_):
        value = fields.pop(name, None)
        if value is not None:
            params[name] = value
    fields["params"] = params


def _names_of_params(type_: type[WireRecord]) -> set[str]:
    """The sampling parameters that the record takes in ``params``."""
    return set(NAMES) - {*type_.__struct_fields__, *type_.refused_params}


def _field_error(text: str) -> FieldError:
    """The error for what msgspec says about a body."""
    # Examples of its texts. Without a path at the end, the body itself is meant.
    #     Expected `int`, got `str` - at `$.messages[0].name`
    #     Object contains unknown field `x` - at `$.messages[0]`
    #     Object missing required field `model`
    match = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", text, re.DOTALL)
    assert match is not None
    fault = match[1]
    path = match[2] or ""
    named = re.fullmatch(r"(?s)Object (contains unknown|missing required) field `(.*)`", fault)
    if named is None:
        return FieldError(path, f"{path or 'the body'}: {fault}")
    what = "is missing" if named[1] == "missing required" else "is unknown or not supported"
    field = f"{path}.{named[2]}" if path else named[2]
    return FieldError(field, f"{field} {what}")


class FieldsOfType(NamedTuple):
    """The fields of a record that go with one value of its field ``type``."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def check_fields(path: str, record: Any, types: Mapping[str, FieldsOfType]) -> None:
    """Check that a record has the fields of its type and none of those of other types.

    ``path`` leads to the record in the body. A field that belongs to no type is always allowed.
    Raises FieldError.
    """
    own = types.get(record.type)
    if own is None:
        bound = " or ".join(types)
        raise FieldError(f"{path}.type", f"{path}.type is {record.type!r}, but must be {bound}")
    names_of_all_types = set[str]()
    for fields in types.values():
        names_of_all_types.update(fields.required, fields.optional)
    for name in sorted(names_of_all_types):
        field = f"{path}.{name}"
        is_given = getattr(record, name) is not None
        if name in own.required:
            if not is_given:
                raise FieldError(field, f"{field} is missing")
        elif is_given and name not in own.optional:
            raise FieldError(field, f"{field} does not go with the type {record.type}")


def joined_text(content: str | Sequence[TextPart] | None) -> str:
    """The text of a content that may come in parts; the parts become lines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


class BodySchemas(NamedTuple):
    """JSON schemas for an OpenAPI document."""

    of_type: dict[type[WireRecord], JsonObject]
    components: JsonObject
    """The schemas that the others refer to, by name."""


def body_schemas(types: Sequence[type[WireRecord]]) -> BodySchemas:
    """The schemas of bodies. Sampling parameters that a body takes in ``params`` stand among its
    properties, as clients send them."""
    # The schemas of sampling parameters come from the record that the engine checks them with.
    schemas, components = schema_components(
        [SamplingParams, *types], ref_template="#/components/schemas/{name}"
    )
    schemas_of_bodies = schemas[1:]  # the first is that of SamplingParams
    of_params = components.pop("SamplingParams")["properties"]
    for type_ in types:
        if "params" not in type_.__struct_fields__:
            continue
        component = components[type_.__name__]
        properties = of_params | component["properties"]
        for name in ("params", *type_.refused_params):
            properties.pop(name, None)
        component["properties"] = properties
    of_type = dict(zip(types, schemas_of_bodies, strict=True))
    return BodySchemas(of_type, components)
