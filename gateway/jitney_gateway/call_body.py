"""The body of a tool call: where it ends in a text that grows, and which functions it calls."""

import ast
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import regex

MALFORMED = (
    *(ValueError, TypeError, SyntaxError, RecursionError, MemoryError),
    AttributeError,  # of a client's schema that is none
)
"""What both methods of CallBody raise for a text that is none."""

_LAST_TAG = "</function>"
_PARAMETER = regex.compile(
    rf"(?s)\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|{_LAST_TAG}))"
)
_QUOTES = {"json": '"', "python": "\"'"}
_JSON_OUTSIDE_STRINGS = frozenset(":,.+-eEtrufalsn0123456789 \t\r\n")
_WORDS = {"true": True, "false": False, "null": None}
_JSON_OF_WORDS = {"True": "true", "False": "false", "None": "null"}


class CallBody:
    """A body that begins at ``start`` of a text."""

    def __init__(self, kind: str, start: int, name: str | None) -> None:
        """``kind``: as in ToolFormat. ``name``: of the function, if the head has it."""
        self.start = start
        self._kind = kind
        self._name = name
        self._at = start  # the text before has been looked at
        self._depth = 0
        self._quote = ""  # of an open string
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Where it ends, or None if that has not come. ``text`` only grows."""
        if self._kind == "xml":
            return self._end_of_tags(text)
        for character in text[self._at :]:
            self._at += 1
            if self._quote:
                if self._escaped or character == "\\":
                    self._escaped = not self._escaped
                elif character == self._quote:
                    self._quote = ""
            elif character in _QUOTES[self._kind]:
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if not self._depth:
                    return self._at
            elif self._kind == "json" and character not in _JSON_OUTSIDE_STRINGS:
                raise ValueError("text outside of strings")
        return None

    def _end_of_tags(self, text: str) -> int | None:
        """A parameter's text may hold what looks like a function's last tag."""
        while (found := text.find(_LAST_TAG, self._at)) >= 0:
            self._at = found + len(_LAST_TAG)
            before = text[self.start : found].rstrip()
            if not before or before.endswith("</parameter>"):
                return self._at
        self._at = max(self._at, len(text) - len(_LAST_TAG) + 1)
        return None

    def calls(self, text: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The functions' names, each with its arguments as JSON text, which any client can read.
        ``text``: the body alone. ``schemas``: of the arguments, by functions' names."""
        called = self._calls(text, schemas)
        for _, arguments in called:
            msgspec.json.decode(arguments, type=dict[str, Any])
        return called

    def _calls(self, text: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]]:
        if self._kind == "python":
            expression = ast.parse(text, mode="eval").body
            listed = expression.elts if isinstance(expression, ast.List) else [expression]
            return [_python_call(each) for each in listed]
        if self._kind == "xml":
            assert self._name
            return [(self._name, _tagged(text, schemas.get(self._name) or {}))]
        if self._name:
            return [_Named(self._name, msgspec.Raw(text.encode())).call()]
        named = msgspec.json.decode(text, type=list[_Named] | _Named)
        return [each.call() for each in (named if isinstance(named, list) else [named])]


class _Named(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw(b"{}")

    def call(self) -> tuple[str, str]:
        text = (bytes(self.arguments) or bytes(self.parameters)).decode()
        if text.startswith('"'):  # some models write the object as a string
            text = msgspec.json.decode(text, type=str)
        return self.name, text


class _Words(ast.NodeTransformer):
    """JSON's words in place of Python's: models mix them in."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _python_call(call: ast.expr) -> tuple[str, str]:
    """A call with keywords whose values are literals."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with keywords only")
    values = {each.arg: ast.literal_eval(_Words().visit(each.value)) for each in call.keywords}
    if None in values:
        raise ValueError("a mapping in place of keywords")
    # Read once more: characters in place of escapes. Half a character cannot be encoded.
    values = json.loads(json.dumps(values, allow_nan=False))
    arguments = json.dumps(values, ensure_ascii=False)
    arguments.encode()
    return ast.unparse(call.func), arguments


def _tagged(text: str, schema: Mapping[str, Any]) -> str:
    """Parameters between tags, each read as its schema says."""
    properties = schema.get("properties", {})
    arguments = {}
    at = 0
    while found := _PARAMETER.match(text, at):
        key, value = found.groups()
        arguments[key] = _typed(value, properties.get(key) or {})
        at = found.end()
    if text[at:].strip() != _LAST_TAG:
        raise ValueError("text between the parameters")
    return msgspec.json.encode(arguments).decode()


def _typed(text: str, schema: Mapping[str, Any]) -> str | msgspec.Raw:
    """JSON where the schema wants no string; text where it may be one, or where JSON fails."""
    types = types_of(schema)
    if schema in ({}, True) or "string" in types or text in schema.get("enum", ()):
        return msgspec.Raw(b"null") if text == "null" and "null" in types else text
    text = _JSON_OF_WORDS.get(text, text)
    try:
        msgspec.json.decode(text)
        return msgspec.Raw(text.encode())
    except msgspec.DecodeError:
        return text


def types_of(schema: Any) -> set[str]:
    """The types that a JSON schema and its alternatives name; empty if they name none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(named)
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return types.union(*map(types_of, alternatives))
