"""Parts of the grammars in which the gateway says what an answer must be. Pure.

They are values of the sampling parameter ``structured_outputs``, in llguidance's dialect of Lark:

- ``<[5]>`` is the token with the id 5;
- ``%json {…}`` is JSON that follows a schema, and ``%lark {…}`` a whole grammar inside another;
- a rule with ``[suffix="x"]`` is any text up to the first ``x``, with that ``x``;
- a rule with ``[lazy]`` that ends in ``"x"`` is the same;
- the lexer finds the longest text that any string, regular expression or terminal allows, whatever
  rule it is in.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jitney.errors import InvalidArgumentError
from jitney.text.schema_references import DEFINITIONS, References

ANY_TEXT: Mapping[str, str] = {"regex": "(?s:.*)"}
"""The constraint that allows any answer."""
ANY_TEXT_IN_LARK = "/(?s:.*)/"
"""Any text. Special tokens are no text."""
WRONG_SCHEMA = (ValueError, TypeError, AttributeError, RecursionError)
"""What reading a value that is no JSON schema may raise."""
Spell = Callable[[str], str]
"""Writes a fixed text in Lark."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Space only where chat templates write it: small models may go on with free space for ever."""
_IDENTIFIER = "urn:jitney:parameters"
"""The ``$id`` of a schema that has none of its own."""
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')


# ------------------------------------------------------------------------------- fixed texts


def spelt(text: str, token_ids: Mapping[str, int]) -> str:
    """A fixed text in Lark. ``token_ids``: text of a special token -> its id. Those tokens stand as
    tokens, and all else as strings."""
    if not token_ids:
        return json.dumps(text, ensure_ascii=False)
    markers = "|".join(map(re.escape, token_ids))
    parts = []
    for part in re.split(f"({markers})", text):
        if part in token_ids:
            parts.append(f"<[{token_ids[part]}]>")
        else:
            parts.append(json.dumps(part, ensure_ascii=False))
    return " ".join(parts)


def spelt_as_json(text: str) -> str:
    """A fixed text in Lark, divided into the same strings as ``%json`` divides JSON."""
    parts = re.findall(r'"[^"]*"|: |, |[{}]|[^"{}:, ]+|[ :,]', text)
    return " ".join(map(json.dumps, parts)) or '""'


# ------------------------------------------------------------------------------- expressions


def between_slashes(expression: str) -> str:
    """A regular expression in Lark, in one line. A slash in it must have a backslash before it."""

    def in_lark(match: re.Match[str]) -> str:
        if match[0] in ("\n", "\\\n"):
            return r"\n"
        return r"\/" if match[0] == "/" else match[0]

    escape_or_slash_or_newline = r"(?s)\\.|/|\n"
    return f"/{re.sub(escape_or_slash_or_newline, in_lark, expression)}/"


def without_text(forbidden: str) -> str:
    """The texts in which ``forbidden`` does not stand, as (a part of) a terminal of Lark."""
    with_it = between_slashes(f"(?s:.*){re.escape(forbidden)}(?s:.*)")
    # What is not `with_it` may be any bytes, those of special tokens included.
    return f"{ANY_TEXT_IN_LARK} & ~{with_it}"


# ------------------------------------------------------------------------------- JSON


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON that follows a whole schema."""
    return "%json " + json.dumps({"x-guidance": _SPACING, **schema})


def json_part(schema: Any, whole: Mapping[str, Any]) -> str:
    """JSON that follows ``schema``: a part of the schema ``whole``, or a schema that is made of
    such parts. It may refer to other parts."""
    own = dict(schema) if isinstance(schema, Mapping) else {}
    if "$schema" in whole:
        own = {"$schema": whole["$schema"], **own}  # it says what the keywords mean
    if not _REFERENCE.search(json.dumps(own)):
        return json_value(own)
    definitions = {key: whole[key] for key in DEFINITIONS if key in whole}
    references = _REFERENCE.findall(json.dumps([own, definitions]))
    refers_to_definitions_only = all(
        reference.startswith(("#/$defs/", "#/definitions/")) for reference in references
    )
    if refers_to_definitions_only:
        return json_value({**definitions, **own})
    # A reference such as "#/properties/other" starts at the root, which must remain ``whole``. So
    # ``whole`` becomes a definition with an id, and all references begin with that id.
    named = {"$id": _IDENTIFIER, **whole}
    part = _with_absolute_references(schema, References(named))
    if "$schema" in own:
        part["$schema"] = own["$schema"]
    return json_value({**part, "$defs": {"all": named}})


def _with_absolute_references(schema: Any, references: References) -> Any:
    """A copy of a part of a schema, in which no reference depends on where the part stands."""
    if isinstance(schema, list):
        return [_with_absolute_references(part, references) for part in schema]
    if not isinstance(schema, dict):
        return schema
    # What is no schema, such as the value of ``properties``, has names in place of keywords.
    is_schema = references.knows(schema)
    copied = {}
    for keyword, value in schema.items():
        if is_schema and keyword == "$ref" and isinstance(value, str):
            copied[keyword] = references.absolute(schema, value)
        elif is_schema and keyword in ("$id", "$anchor"):
            continue  # what they name is the original
        else:
            copied[keyword] = _with_absolute_references(value, references)
    return copied


# ------------------------------------------------------------------------------- whole constraints


def constrained_answer(constraint: Mapping[str, Any]) -> str:
    """A value of ``structured_outputs``, which has one key, in Lark. Raises
    InvalidArgumentError."""
    ((kind, value),) = constraint.items()
    if kind == "json":
        return _json_of_schema(value)
    if kind == "json_object":
        return _json_of_schema({"type": "object"})
    if kind == "regex":
        return between_slashes(value)
    if kind == "choice":
        return f"({' | '.join(map(json.dumps, value))})"
    assert kind == "grammar", kind
    return inside_another(value)


def inside_another(grammar: str) -> str:
    """A whole grammar as a part of another."""
    return f"%lark {{\n{grammar}\n}}"


def _json_of_schema(schema: Any) -> str:
    """JSON that follows a schema, which may itself be given as a text of JSON."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        bound = "a JSON schema that is an object"
        raise InvalidArgumentError.of("structured_outputs.json", schema, bound)
    return json_value(schema)
