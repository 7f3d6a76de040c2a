"""Strings that a JSON schema allows, as a regular expression of llguidance's Lark.

For formats that write a string without quotes: there JSON's own grammar cannot keep to the schema.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jitney.errors import InvalidArgumentError

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
"""Texts of each format; not always all of them."""
_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.S)
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "D": "^0-9", "W": "^A-Za-z0-9_"}
"""In a pattern of JSON Schema these are of ASCII."""


def with_known_formats(schema: Any) -> Any:
    """The schema without formats of strings that no grammar knows: they are annotations, as the
    standard says."""
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


def lark_of_string(alternative: Alternative, forbidden: str) -> str | None:
    """The strings that an alternative allows, as a terminal of Lark; None if it allows any string.

    None of those that a pattern, a format or a length describes has ``forbidden`` in it. Raises
    InvalidArgumentError for what no grammar keeps.
    """
    parts = []
    for rule in alternative.rules:
        parts += _parts_of_rule(rule)
    listed = alternative.values()
    if listed is not None:
        choices = [json.dumps(each, ensure_ascii=False) for each in listed if isinstance(each, str)]
        parts.append(f"({' | '.join(choices)})")
    elif parts:
        parts.append(lark_without(forbidden))
    return f"({' & '.join(parts)})" if parts else None


def lark_without(forbidden: str) -> str:
    """The texts in which ``forbidden`` does not stand, in a terminal of Lark."""
    # Without the first part it would be any bytes, those of special tokens included.
    return f"/{_ANY}/ & ~/{_ANY}{_in_lark(re.escape(forbidden))}{_ANY}/"


def _parts_of_rule(rule: Mapping[str, Any]) -> list[str]:
    """What a schema without references and branches says about a string: all must hold."""
    for keyword in _NOT_KEPT:
        if keyword in rule:
            raise InvalidArgumentError(f"{keyword!r} of a string is not supported")
    parts = []
    if "pattern" in rule:
        parts.append(f"/{_searched(rule['pattern'])}/")
    if rule.get("format") in _FORMATS:
        parts.append(f"/{_in_lark(_FORMATS[rule['format']])}/")
    least = int(rule.get("minLength", 0))
    most = rule.get("maxLength")
    if least or most is not None:
        bound = "" if most is None else str(int(most))
        parts.append(f"/(?s:.{{{least},{bound}}})/")
    return parts


def _searched(pattern: str) -> str:
    """An expression for the texts in which ``pattern`` is found. Lark's expressions match whole
    texts. Raises InvalidArgumentError for an anchor in the middle."""
    branches = []
    for branch in _branches_of(pattern):
        begin = end = _ANY
        if branch.startswith("^"):
            branch = branch[1:]
            begin = ""
        if _ends_with_anchor(branch):
            branch = branch[:-1]
            end = ""
        branches.append(f"{begin}(?:{_plain(branch, pattern)}){end}")
    return "|".join(branches)


def _ends_with_anchor(branch: str) -> bool:
    num_backslashes = len(branch[:-1]) - len(branch[:-1].rstrip("\\"))
    return branch.endswith("$") and num_backslashes % 2 == 0


def _branches_of(pattern: str) -> list[str]:
    """The pattern, divided where ``|`` stands outside of groups and classes."""
    branches = [""]
    depth = 0
    for token in _tokens_of(pattern):
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        if token == "|" and depth == 0:
            branches.append("")
        else:
            branches[-1] += token
    return branches


def _plain(branch: str, pattern: str) -> str:
    """A branch without its anchors, as Lark writes it."""
    parts = []
    for token in _tokens_of(branch):
        if token in ("^", "$"):
            shown = repr(pattern[:64])
            raise InvalidArgumentError(
                f"pattern {shown} has {token} inside, which is not supported"
            )
        if token.startswith("["):
            token = _class_of_ascii(token)
        elif token[0] == "\\" and token[1:] in _CLASSES:
            token = f"[{_CLASSES[token[1:]]}]"
        parts.append(_in_lark(token))
    return "".join(parts)


def _class_of_ascii(token: str) -> str:
    """A class, such as ``[\\d-]``."""
    inner = re.sub(r"\\([dw])", lambda match: _CLASSES[match[1]], token[1:-1])
    return "[" + re.sub(r"(?<!\\)\[", r"\\[", inner) + "]"  # else one class in another


def _tokens_of(pattern: str) -> list[str]:
    """A pattern's escapes, classes and other characters."""
    return _TOKEN.findall(pattern)


def _in_lark(expression: str) -> str:
    """As it stands between slashes in Lark."""
    expression = expression.replace("\n", "\\n")
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", expression)
