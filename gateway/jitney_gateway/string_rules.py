"""Grammars of the strings that a JSON schema allows. ``lark.py`` says how grammars are written.

Some formats of calls write a string without JSON's quotes. There llguidance's own grammar of JSON
cannot be used.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jitney.errors import InvalidArgumentError

from jitney_gateway.lark import between_slashes, without_text
from jitney_gateway.schema_alternatives import Alternative

_ANY = "(?s:.*)"
_NOT_KEPT = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
"""Keywords that may say something about a string, and that no grammar keeps."""
_DATE = (
    r"[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_HOUR_AND_MINUTE = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HEX = r"[0-9A-Fa-f]"
_GROUPS = rf"(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{0,2}})?"
_IN_URL = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        r"P(?:[0-9]+W|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D"
        r"|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"
    ),
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL})*",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": rf"(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|{_GROUPS}::{_GROUPS}",
    "uuid": rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:"
        rf"(?://{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?(?:/{_IN_URL})?|[A-Za-z0-9]{_IN_URL})"
    ),
    "password": _ANY,
}
"""Format -> a regular expression for its strings. Rare spellings are left out, such as an IPv4
address at the end of an IPv6 address."""
_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.S)
"""An escape, a class such as ``[^a-z]``, or any other character."""
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "D": "^0-9", "W": "^A-Za-z0-9_"}
"""Escapes that in a pattern of JSON Schema stand for characters of ASCII only."""


def with_known_formats(schema: Any) -> Any:
    """The schema without the formats that no grammar knows. The standard says that an unknown
    format is an annotation."""
    if isinstance(schema, list):
        return [with_known_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if keyword in ("enum", "const"):
            kept[keyword] = value
        elif keyword != "format" or not isinstance(value, str):
            kept[keyword] = with_known_formats(value)
        elif re.fullmatch("uuid[1-8]", value):  # pydantic's names
            kept[keyword] = "uuid"
        elif value in _FORMATS:
            kept[keyword] = value
    return kept


def lark_of_string(
    alternative: Alternative, forbidden: str, ends_inside: Callable[[str], object]
) -> str | None:
    """The strings that an alternative allows, as the right side of a terminal; None if it allows
    any string.

    ``forbidden`` is what ends a string in the model's format. Strings that hold it are left out.
    Those that the schema lists are left out only if the parser takes a part of them for the end:
    ``ends_inside`` tells. Raises InvalidArgumentError for what no grammar keeps.
    """
    parts = []
    for rule in alternative.rules:
        parts += _parts_of_rule(rule)
    listed = alternative.values()
    if listed is not None:
        texts = [each for each in listed if isinstance(each, str) and not ends_inside(each)]
        if not texts:
            raise InvalidArgumentError(f"none of the listed strings may hold {forbidden!r}")
        choices = [json.dumps(each, ensure_ascii=False) for each in texts]
        parts.append(f"({' | '.join(choices)})")
    elif parts:
        parts.append(without_text(forbidden))
    if not parts:
        return None
    return f"({' & '.join(parts)})"


def _parts_of_rule(rule: Mapping[str, Any]) -> list[str]:
    """What a schema without references and branches says about a string: all must hold."""
    for keyword in _NOT_KEPT:
        if keyword in rule:
            raise InvalidArgumentError(f"{keyword!r} of a string is not supported")
    parts = []
    if "pattern" in rule:
        parts.append(_texts_with_pattern(rule["pattern"]))
    if rule.get("format") in _FORMATS:
        parts.append(between_slashes(_FORMATS[rule["format"]]))
    least = int(rule.get("minLength", 0))
    most = rule.get("maxLength")
    if most is not None:
        parts.append(f"/(?s:.{{{least},{int(most)}}})/")
    elif least > 0:
        parts.append(f"/(?s:.{{{least},}})/")
    return parts


# ------------------------------------------------------------------------------- patterns


def _texts_with_pattern(pattern: str) -> str:
    """The texts in which ``pattern`` is found. Raises InvalidArgumentError for a pattern with an
    anchor in the middle.

    An expression of Lark matches whole texts, and has no anchors. So ``^a`` becomes ``a(?s:.*)``.
    """
    branches = [_texts_with_branch(branch, pattern) for branch in _branches_of(pattern)]
    return between_slashes("|".join(branches))


def _texts_with_branch(branch: str, pattern: str) -> str:
    tokens = _TOKEN.findall(branch)
    before = _ANY
    behind = _ANY
    if tokens and tokens[0] == "^":
        before = ""
        tokens = tokens[1:]
    if tokens and tokens[-1] == "$":
        behind = ""
        tokens = tokens[:-1]
    if "^" in tokens or "$" in tokens:
        anchor = "^" if "^" in tokens else "$"
        shown = repr(pattern[:64])
        raise InvalidArgumentError(f"pattern {shown} has {anchor} inside, which is not supported")
    inside = "".join(map(_with_ascii_classes, tokens))
    return f"{before}(?:{inside}){behind}"


def _branches_of(pattern: str) -> list[str]:
    """The pattern, divided where ``|`` stands outside of groups and classes."""
    branches = [""]
    depth = 0
    for token in _TOKEN.findall(pattern):
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        if token == "|" and depth == 0:
            branches.append("")
        else:
            branches[-1] += token
    return branches


def _with_ascii_classes(token: str) -> str:
    """The same token with classes of ASCII, where llguidance would take those of Unicode."""
    if token.startswith("["):
        inner = re.sub(r"\\([dw])", lambda match: _CLASSES[match[1]], token[1:-1])
        # A bare bracket would begin a class in the class.
        escaped = re.sub(r"(?<!\\)\[", r"\\[", inner)
        return f"[{escaped}]"
    escape = token.removeprefix("\\")
    is_escape = escape != token
    if is_escape and escape in _CLASSES:
        return f"[{_CLASSES[escape]}]"
    return token
