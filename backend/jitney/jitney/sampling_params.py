"""Sampling parameters: vLLM's names, ranges and defaults, and every check on them.

Owns what a client may ask of one request. The server's front and the offline class both parse
with :func:`parse_sampling_params` and check with :func:`check_sampling_params`. The engine does not
check them again. At the end of the file stand the limits of an API key, which restrict what its
owner may ask for.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError, nearest
from jitney.field_types import describe_type, field_at_fault

MAX_JSON_BYTES = 1 << 20
"""Largest text of sampling parameters that is decoded."""
MAX_JSON_DEPTH = 128
"""Deepest nesting of lists and objects in it."""
LIMITS_HEADER = "jitney-limits"
"""The header in which the limits of an API key travel."""
_TIER_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""What the name of a tier in limits is made of. ``deploy/proxy/reload-keys`` has the same rule."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What form the output must have. Exactly one field is set; their names are vLLM's."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """The whole output matches it."""
    choice: tuple[str, ...] | None = None
    """The whole output is one of these."""
    grammar: str | None = None
    """Rules in Lark's notation; the output follows the rule ``start``."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample one request. Names, ranges and defaults are vLLM's unless marked ours."""

    n: int = 1
    max_tokens: int = 16
    """-1, ours: as many as the context and the cache can hold."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 switch it off."""
    min_p: float = 0.0
    seed: int | None = None
    """Drawn at submission if absent or -1, so that a request always has one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    lora_name: str | None = None
    """The model's adapter of that name. None: the model as it is."""
    priority: int = 0
    """Ours: lower first."""
    tier: str | None = None
    """Ours: one of the option ``tiers``. None: ``default_tier``."""
    deadline_ms: float | None = None
    """Ours: milliseconds from submission; then the request ends with the tokens that it has."""
    cache_salt: str | None = None
    """Ours: requests share cached prefixes only within one salt."""

    @property
    def greedy(self) -> bool:
        """Whether sampling is an argmax. A temperature below 1e-5 counts as 0."""
        return self.temperature < 1e-5


NAMES = tuple(field.encode_name for field in msgspec.structs.fields(SamplingParams))
_LISTS_OF_STRINGS = ("stop", "bad_words")
"""For these a single string stands for a list of one, as in vLLM."""


class _Range(NamedTuple):
    """The values that a parameter may have, from ``least`` to ``most``."""

    least: float
    most: float
    bound: str
    """The same in words, for the message about another value."""


_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_LARGEST_INT = (1 << 31) - 1

_RANGES: dict[str, _Range] = {
    "min_tokens": _Range(0, _LARGEST_INT, "at least 0"),
    "temperature": _Range(0.0, 1e6, "finite and at least 0"),
    "top_p": _Range(_ABOVE_ZERO, 1.0, "above 0 and at most 1"),
    "top_k": _Range(-1, _LARGEST_INT, "-1 or 0 (off), or at least 1"),
    "min_p": _Range(0.0, 1.0, "from 0 to 1"),
    "seed": _Range(-(1 << 63), (1 << 63) - 1, "a 64-bit integer"),
    "presence_penalty": _Range(-2.0, 2.0, "from -2 to 2"),
    "frequency_penalty": _Range(-2.0, 2.0, "from -2 to 2"),
    "repetition_penalty": _Range(_ABOVE_ZERO, 1e6, "finite and above 0"),
    "deadline_ms": _Range(_ABOVE_ZERO, 1e12, "finite and above 0"),
}
"""The ranges that depend on no option of the model."""


def parse_sampling_params(raw: Mapping[str, object]) -> SamplingParams:
    """Make parameters from decoded JSON. Numbers and booleans may come as strings.

    Raises InvalidArgumentError for an unknown name (naming the nearest) or a wrong type.
    :func:`check_sampling_params` checks the ranges.
    """
    for name in raw:
        if name not in NAMES:
            shown = str(name)[:64]
            raise InvalidArgumentError(
                f"sampling parameter {shown!r} is unknown or not supported{nearest(shown, NAMES)}"
            )
    fields = {name: value for name, value in raw.items() if value is not None}
    for name in _LISTS_OF_STRINGS:
        if isinstance(fields.get(name), str):
            fields[name] = [fields[name]]
    structured = fields.pop("structured_outputs", None)
    try:
        params = msgspec.convert(fields, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        name = field_at_fault(error)
        bound = describe_type(SamplingParams, name)
        if name in _LISTS_OF_STRINGS:
            bound = f"a string or {bound}"
        raise InvalidArgumentError.of(name, fields[name], bound) from None
    if structured is None:
        return params
    return msgspec.structs.replace(params, structured_outputs=_parse_structured(structured))


def _parse_structured(raw: object) -> StructuredOutputs:
    """Raises InvalidArgumentError for an unknown name, a wrong type, or not exactly one name."""
    field = "structured_outputs"
    if isinstance(raw, StructuredOutputs):
        raw = msgspec.structs.asdict(raw)
    if not isinstance(raw, dict):
        raise InvalidArgumentError.of(field, raw, "an object")
    names = StructuredOutputs.__struct_fields__
    for name in raw:
        if name not in names:
            shown = str(name)[:64]
            raise InvalidArgumentError(f"{field}.{shown} is unknown{nearest(shown, names)}")
    given = {name: value for name, value in raw.items() if value is not None}
    if len(given) != 1:
        named = " and ".join(given) or "nothing"
        raise InvalidArgumentError(
            f"{field} has {named}, but must have exactly one of {', '.join(names)}"
        )
    ((name, value),) = given.items()
    try:
        structured = msgspec.convert(given, StructuredOutputs, strict=False)
    except msgspec.ValidationError:
        bound = "an object or a string"
        if name != "json":
            bound = describe_type(StructuredOutputs, name)
        raise InvalidArgumentError.of(f"{field}.{name}", value, bound) from None
    if structured.json_object is False:
        raise InvalidArgumentError.of(f"{field}.json_object", value, "true, or left out")
    choice = structured.choice
    if choice is not None and (not choice or "" in choice):
        raise InvalidArgumentError.of(f"{field}.choice", value, "a list of strings, none empty")
    return structured


def decode_sampling_json(text: str | bytes) -> dict[str, object]:
    """Decode a client's JSON object. Raises InvalidArgumentError if it is too large, too deep,
    not JSON or not an object."""
    # An unpaired surrogate passes here. The decoder refuses it below, with an error of ours.
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    field = "sampling_parameters"
    if len(data) > MAX_JSON_BYTES:
        raise InvalidArgumentError(
            f"{field} has {len(data):,} bytes, but at most {MAX_JSON_BYTES:,} are read"
        )
    too_deep = f"{field} is nested deeper than {MAX_JSON_DEPTH} levels"
    try:
        value = msgspec.json.decode(data)
    except RecursionError:  # deeper than the decoder itself can go
        raise InvalidArgumentError(too_deep) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{field} is not JSON: {error}") from None
    if _is_deeper(value, MAX_JSON_DEPTH):
        raise InvalidArgumentError(too_deep)
    if not isinstance(value, dict):
        raise InvalidArgumentError.of(field, value, "a JSON object")
    return value


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep."""
    parts: list[object]
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    else:
        return False
    if levels == 0:
        return True
    return any(_is_deeper(part, levels - 1) for part in parts)


def check_sampling_params(params: SamplingParams, config: EngineConfig, *, vocab_size: int) -> None:
    """Check ranges, caps and token ids. ``vocab_size`` is the model's, not the tokenizer's.

    Raises InvalidArgumentError that names the field, the value and the bound.
    """
    _check_numbers(params, config)
    _check_tier(params.tier, config)
    for name in _LISTS_OF_STRINGS:
        _check_strings(name, getattr(params, name), config)
    lists_of_ids = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": tuple(params.logit_bias or {}),  # its keys
    }
    for name, ids in lists_of_ids.items():
        _check_ids(name, ids, config, vocab_size)

    if params.allowed_token_ids == ():
        raise InvalidArgumentError("allowed_token_ids is empty, but must name at least one id")
    for token, bias in (params.logit_bias or {}).items():
        if not -100.0 <= bias <= 100.0:
            raise InvalidArgumentError.of(f"logit_bias[{token}]", bias, "from -100 to 100")
    if params.cache_salt is not None and not 1 <= len(params.cache_salt) <= 256:
        raise InvalidArgumentError.of("cache_salt", params.cache_salt, "1 to 256 characters long")


def _check_numbers(params: SamplingParams, config: EngineConfig) -> None:
    of_logprobs = _Range(0, config.max_logprobs, f"from 0 to {config.max_logprobs}")
    priority_bound = f"from {config.min_priority} to 1000"
    ranges = _RANGES | {
        "n": _Range(1, config.max_n, f"from 1 to {config.max_n}"),
        "logprobs": of_logprobs,
        "prompt_logprobs": of_logprobs,
        "priority": _Range(config.min_priority, 1000, priority_bound),
    }
    for name, (least, most, bound) in ranges.items():
        value = getattr(params, name)
        if value is not None and not least <= value <= most:  # NaN fails the comparison too
            raise InvalidArgumentError.of(name, value, bound)

    max_tokens = params.max_tokens
    if max_tokens == -1:
        return
    if not 1 <= max_tokens <= _LARGEST_INT:
        bound = "at least 1, or -1 for what the context can hold"
        raise InvalidArgumentError.of("max_tokens", max_tokens, bound)
    if params.min_tokens > max_tokens:
        bound = f"at most max_tokens ({max_tokens})"
        raise InvalidArgumentError.of("min_tokens", params.min_tokens, bound)


def _check_tier(name: str | None, config: EngineConfig) -> None:
    known = [tier.name for tier in config.tiers]
    if name is None or name in known:
        return
    bound = "left out: there are no tiers"
    if known:
        bound = "one of " + ", ".join(map(repr, known))
    raise InvalidArgumentError.of("tier", name, bound)


def _check_strings(field: str, strings: Sequence[str], config: EngineConfig) -> None:
    if len(strings) > config.max_stop_strings:
        most = f"at most {config.max_stop_strings} are taken"
        raise InvalidArgumentError(f"{field} has {len(strings):,} strings, but {most}")
    for string in strings:
        if not 1 <= len(string) <= config.max_stop_length:
            bound = f"of strings of 1 to {config.max_stop_length} characters"
            raise InvalidArgumentError.of(field, string, bound)


def _check_ids(field: str, ids: Sequence[int], config: EngineConfig, vocab_size: int) -> None:
    if len(ids) > config.max_list_ids:
        most = f"at most {config.max_list_ids:,} are taken"
        raise InvalidArgumentError(f"{field} has {len(ids):,} ids, but {most}")
    check_token_ids(field, ids, vocab_size)


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgumentError if an id lies outside ``[0, vocab_size)``."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError.of(
                field, token, f"from 0 to {vocab_size - 1} (the model's vocabulary)"
            )


# --------------------------------------------------------------------------- limits of an API key


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the owner of an API key may ask for: which tiers, and how urgent a priority.

    The proxy or the gateway finds the limits of the key that a client sent, and sends them to the
    server with the request, as text in a header. The front applies them to the parameters.
    """

    tiers: tuple[str, ...] = ()
    """The tiers that a request may name; empty: any. A request that names no tier gets the first of
    these that its model has."""
    min_priority: Annotated[int, msgspec.Meta(le=0)] = -1000
    """The most urgent ``priority`` that a request may ask for."""

    def apply(self, params: SamplingParams, config: EngineConfig) -> SamplingParams:
        """``params``, with a tier if the limits choose one. Raises InvalidArgumentError if they ask
        for more than is allowed."""
        if params.priority < self.min_priority:
            bound = f"at least {self.min_priority} for this API key"
            raise InvalidArgumentError.of("priority", params.priority, bound)
        if not self.tiers or not config.tiers:
            return params
        if params.tier is None:
            return msgspec.structs.replace(params, tier=self._default_tier(config))
        if params.tier not in self.tiers:
            bound = f"one of {self._names_of_tiers()} for this API key"
            raise InvalidArgumentError.of("tier", params.tier, bound)
        return params

    def _default_tier(self, config: EngineConfig) -> str:
        """The first of the allowed tiers that the model has."""
        known = {tier.name for tier in config.tiers}
        for name in self.tiers:
            if name in known:
                return name
        raise InvalidArgumentError(
            f"the model has no tier of {self._names_of_tiers()} for this API key"
        )

    def _names_of_tiers(self) -> str:
        return ", ".join(repr(name) for name in self.tiers)


def parse_limits(text: str) -> Limits:
    """Read ``tiers=NAME,NAME min_priority=NUMBER``. Either part may be left out. Raises
    InvalidArgumentError."""
    given: dict[str, str | list[str]] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name in given:
            raise _wrong_limits(text)
        given[name] = value
        if name == "tiers":
            given[name] = value.split(",")
    try:
        # Not strict: a number may be written as text. The struct refuses unknown names.
        limits = msgspec.convert(given, Limits, strict=False)
    except msgspec.ValidationError:
        raise _wrong_limits(text) from None
    for name in limits.tiers:
        if not _TIER_NAME.fullmatch(name):
            raise InvalidArgumentError.of("tiers", name, "of letters, digits and . _ -")
    return limits


def _wrong_limits(text: str) -> InvalidArgumentError:
    bound = "made of tiers=NAME,… and min_priority=NUMBER (0 or less), each at most once"
    return InvalidArgumentError.of("limits", text, bound)
