"""What clients send, as records: OpenAI's names and, beside them, vLLM's.

A value of a wrong type is refused by the field's name. ``field_rules.py`` says what happens to a
field that no record has. Null stands for an absent field. The model checks ranges: its error names
the field too.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from jitney.sampling_params import NAMES
from msgspec import Meta

from jitney_gateway.field_rules import (
    FieldRules,
    IgnoredFields,
    Refused,
    RuledRecord,
    allowed_texts,
    honoured_part,
)
from jitney_gateway.large_numbers import find_large_number
from jitney_gateway.refusals import FieldError

JsonObject = dict[str, Any]
"""A JSON object that the gateway sends or has received."""
MAX_BODY_BYTES = 8 << 20
MAX_MESSAGES = 4096
MAX_TOOLS = 4096
MAX_PROMPTS = 256
"""Most prompts in one request for completions."""
FunctionName = Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}(?!\n)$")]
"""In Python, ``$`` also matches before a newline at the end: so there is a lookahead. The pattern
stands in the OpenAPI document, too, and JSON Schema has no ``\\Z``."""
T = TypeVar("T", bound="WireRecord")
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Ids = list[TokenId]


_CONSTRAINT = Refused(unless=(False, {}, ""), because="structured_outputs stands for it")
CONSTRAINTS_OF_CHATS: Mapping[str, Refused] = {
    "guided_json": _CONSTRAINT,
    "guided_regex": _CONSTRAINT,
    "guided_choice": Refused(unless=([],), because=_CONSTRAINT.because),
    "guided_grammar": _CONSTRAINT,
}
"""Constraints on the answer that only chats and completions take. The other APIs refuse them."""
OTHER_CONSTRAINTS: Mapping[str, Refused] = {
    "ebnf": _CONSTRAINT,
    "grammar": _CONSTRAINT,
    "guided_decoding": _CONSTRAINT,
    "guided_json_object": _CONSTRAINT,
    "json_schema": _CONSTRAINT,
    "regex": _CONSTRAINT,
    "structural_tag": _CONSTRAINT,
}
"""Constraints on the answer in other servers' words. All APIs refuse them."""
REFUSED_OF_SAMPLING: Mapping[str, Refused] = {
    "use_beam_search": Refused(unless=(False,)),
    "logits_processors": Refused(unless=([],)),
    "max_new_tokens": Refused(because="max_tokens stands for it"),
    "truncate_prompt_tokens": Refused(),
    "nvext": Refused(unless=({},)),
    **OTHER_CONSTRAINTS,
}
"""Sampling parameters of other servers that would change the answer."""


class WireRecord(RuledRecord, forbid_unknown_fields=True, omit_defaults=True):
    """What a client sends: a body, or an object in one."""

    refused_params: ClassVar[tuple[str, ...]] = ("prompt_logprobs",)
    """Sampling parameters that a body with the field ``params`` (see :attr:`Generation.params`)
    refuses. The answers of its API have no place for what such a parameter asks for, or the body
    has another field for it."""


class ContentPart(WireRecord):
    """A part of a message's content. Only text is taken."""

    rules: ClassVar = FieldRules(
        silent=frozenset(["annotations", "thinking", "signature", "data"]), comes_back=True
    )
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class Called(WireRecord):
    """The function of a call."""

    rules: ClassVar = FieldRules(silent=frozenset(["parsed_arguments"]), comes_back=True)
    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON. Some clients have decoded it."""


class Call(WireRecord):
    """A call that the model made earlier."""

    rules: ClassVar = FieldRules(
        silent=frozenset(["index"]), types=frozenset(["function"]), comes_back=True
    )
    function: Called
    type: Literal["function"] | None = None
    id: str | None = None


class Message(WireRecord):
    """One message of a chat. Clients send a message back as they got it, with whatever their
    library has added."""

    rules: ClassVar = FieldRules(
        silent=frozenset(["parsed", "annotations", "audio"]),
        texts=frozenset(["reasoning", "reasoning_content"]),
        comes_back=True,
    )
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """``function`` is the older name of ``tool``."""
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    function_call: Called | None = None
    """A call in OpenAI's older form."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    """What the model said instead of an answer. It counts as the content, if there is none."""


class Function(WireRecord):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireRecord):
    """A tool, or the choice of one; functions are the only ones."""

    rules: ClassVar = FieldRules(types=frozenset(["function"]))
    type: Literal["function"]
    function: Function


class AllowedTools(WireRecord):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[Tool]


class ToolChoice(WireRecord):
    """The choice of a tool, or of several. The field that the type names must be set."""

    type: str
    function: Function | None = None
    allowed_tools: AllowedTools | None = None


class NamedFunction(WireRecord):
    """The choice of a function in OpenAI's older form."""

    name: str


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
    schema: dict[str, Any] | None = None
    """The schema of a ``json_object``, where llama.cpp and others have it."""


class TextPart(WireRecord):
    """A part of a text, as ``/v1/responses`` and ``/v1/messages`` have it."""

    rules: ClassVar = FieldRules(
        silent=frozenset(["annotations", "logprobs", "citations", "parsed"]), comes_back=True
    )
    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    """In place of ``text`` in a part of the type ``refusal``."""

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec tells with the path."""
        if self.text is None and self.refusal is None:
            raise ValueError("text is missing")


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
    """vLLM's object for a constraint on the output. Exactly one field must be set."""

    rules: ClassVar = FieldRules(refused={"structural_tag": Refused()})
    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(WireRecord):
    """What a stream has beside its deltas."""

    rules: ClassVar = FieldRules(only={"include_obfuscation": (False,)})
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(WireRecord, kw_only=True):
    """What chats and completions have in common."""

    model: str
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """The sampling parameters for which this record has no field of their own: name -> value. In
    the body they stand among the other fields, so clients send no ``params``. The model gets them
    as they are, and checks types and ranges."""
    n: Annotated[int, Meta(ge=1)] | None = None
    best_of: int | None = None
    """Sequences of which the best ``n`` would be taken. More than ``n`` is refused."""
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

    rules: ClassVar = FieldRules(
        refused={
            **REFUSED_OF_SAMPLING,
            "chat_template": Refused(because="the model's own is used"),
            "documents": Refused(unless=([],)),
            "add_special_tokens": Refused(unless=(False,)),
            "echo": Refused(unless=(False,)),
            "suffix": Refused(unless=("",)),
        },
        only={"store": (False,)},
    )
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]
    """At least one, unless there are ``prompt_token_ids``."""
    prompt_token_ids: Ids | None = None
    """The prompt in token ids, in place of the messages and the chat template; TensorRT-LLM's
    name."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    """Tools in OpenAI's older form; see ``older_functions.py``."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer continues the text of the last message, which is the assistant's."""
    reasoning_effort: str | None = None
    verbosity: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Generation, kw_only=True):
    """The body of ``/v1/completions``."""

    rules: ClassVar = FieldRules(
        refused={
            **REFUSED_OF_SAMPLING,
            "suffix": Refused(unless=("",)),
            "add_special_tokens": Refused(unless=(True,)),
            "prompt_embeds": Refused(unless=([],)),
        }
    )
    refused_params: ClassVar[tuple[str, ...]] = ()
    prompt: str | list[str | TokenId | Ids]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Whether the client wants the prompt, and no new token."""
        return bool(self.echo) and self.params.get("max_tokens") == 0


class TokenizeRequest(WireRecord):
    """The body of ``/tokenize``: a prompt, or a chat."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(WireRecord):
    """The body of ``/detokenize``."""

    model: str
    tokens: Ids


def decode(data: bytes, type_: type[T], ignored: IgnoredFields | None = None) -> T:
    """Read a body. What has no effect in it is added to ``ignored``. Raises FieldError."""
    if ignored is None:
        ignored = IgnoredFields()
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        params = None
        if "params" in type_.__struct_fields__:
            params = _take_params(fields, type_, ignored)
        fields = honoured_part(fields, type_, ignored)
        if params is not None:
            fields["params"] = params
        return msgspec.convert(fields, type_)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if "out of range" in str(error):
            large = find_large_number(data)
            if large is not None:
                reason = f"{large.path} is {large.text}, but must be a number up to 1.8e308"
                raise FieldError(large.path, reason) from None
        raise _field_error(str(error), type_) from None


def _take_params(
    fields: dict[str, Any], type_: type[WireRecord], ignored: IgnoredFields
) -> dict[str, Any]:
    """Take the sampling parameters out of a body, except for those for which the record has a field
    of its own. They become its ``params``."""
    if fields.pop("params", None) is not None:
        ignored.add("params")  # it is a name of ours: clients send the parameters themselves
    params = {}
    for name in _names_of_params(type_):
        value = fields.pop(name, None)
        if value is not None:
            params[name] = value
    return params


def _names_of_params(type_: type[WireRecord]) -> set[str]:
    """The sampling parameters that the record takes in ``params``."""
    return set(NAMES) - {*type_.__struct_fields__, *type_.refused_params}


def _field_error(text: str, type_: type[WireRecord]) -> FieldError:
    """The error for what msgspec says about a body of ``type_``."""
    # Examples of its texts. Without a path at the end, the body itself is meant.
    #     Expected `int`, got `str` - at `$.messages[0].name`
    #     Object contains unknown field `x` - at `$.messages[0]`
    #     Object missing required field `model`
    #     Invalid enum value 'x' - at `$.messages[0].role`
    match = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", text, re.DOTALL)
    assert match is not None
    fault = match[1]
    path = match[2] or ""
    _, is_enum, value = fault.partition("Invalid enum value ")
    if is_enum:
        bound = " or ".join(allowed_texts(type_, path))
        return FieldError(path, f"{path} is {value}, but must be {bound}")
    named = re.fullmatch(r"(?s)Object (contains unknown|missing required) field `(.*)`", fault)
    if named is None:
        return FieldError(path, f"{path or 'the body'}: {fault}")
    what = "is missing" if named[1] == "missing required" else "is unknown or not supported"
    field = f"{path}.{named[2]}" if path else named[2]
    return FieldError(field, f"{field} {what}")
