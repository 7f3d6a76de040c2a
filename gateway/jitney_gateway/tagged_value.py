"""The value of a parameter between tags, which has no quotes: its schema tells whether it is text.
Pure.

``call_body.py`` asks for a whole value, and ``tagged_arguments.py`` for one that is being written.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from jitney_gateway.schema_alternatives import alternatives_of, listed_texts

_JSON_OF_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def typed_value(text: str, schema: Any, whole: Mapping[str, Any]) -> str | msgspec.Raw:
    """The value of a parameter that is written as ``text``.

    It is text if its ``schema`` allows that string, or if it is no JSON. Else it is JSON. The
    ``schema`` is a part of ``whole``, to whose definitions it may refer.
    """
    if text == "null" and may_be_null(schema, whole):
        return msgspec.Raw(b"null")
    if _allows_text(text, schema, whole):
        return text
    text = _JSON_OF_PYTHON_NAMES.get(text, text)
    try:
        msgspec.json.decode(text)
        return msgspec.Raw(text.encode())
    except msgspec.DecodeError:
        return text


def is_surely_text(schema: Any, whole: Mapping[str, Any]) -> bool:
    """Whether every value of ``schema`` is read as text, except for ``null`` if it
    :func:`may_be_null`."""
    if lists_without_type(schema):
        return False
    alternatives = alternatives_of(schema, whole)
    if listed_texts(alternatives) is not None:
        return False
    return any(each.allows_string() for each in alternatives)


def lists_without_type(schema: Any) -> bool:
    """Whether ``schema`` lists its values, which may be strings and numbers."""
    return isinstance(schema, Mapping) and "type" not in schema and "enum" in schema


def _allows_text(text: str, schema: Any, whole: Mapping[str, Any]) -> bool:
    """Whether a value of ``schema`` may be the string ``text``."""
    if lists_without_type(schema):
        return text in schema["enum"]
    alternatives = alternatives_of(schema, whole)
    listed = listed_texts(alternatives)
    if listed is not None:
        return text in listed
    return any(each.allows_string() for each in alternatives)


def may_be_null(schema: Any, whole: Mapping[str, Any]) -> bool:
    """Whether ``schema``, a part of ``whole``, names ``null``."""
    return any(each.names_null() for each in alternatives_of(schema, whole))
