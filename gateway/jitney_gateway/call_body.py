"""The body of a tool call in a model's text: whether it certainly is a call, where it ends, and
which functions it calls. Pure.

The parser makes a ``CallBody`` when it has found the head of a call. As the text grows, it asks two
questions. Is the body certainly a call of a known tool? Then its arguments are read as they come
(``call_arguments.py``). If not: where does the body end? Then the whole of it is parsed.
"""

import ast
import json
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import msgspec
import regex

from jitney_gateway.gemma_notation import GEMMA_QUOTES
from jitney_gateway.schema_alternatives import schema_of_member
from jitney_gateway.tagged_value import typed_value

PARSE_ERRORS = (
    ValueError,  # msgspec.DecodeError is one
    TypeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    AttributeError,  # for a tool whose schema is not a JSON schema
)
"""What the parsers of JSON and of Python may raise for a text that is no body of a call."""

_LAST_TAG = "</function>"
_PARAMETER = regex.compile(
    rf"""(?sx)
    \s* <parameter= (?P<name>[^>\n]+) >
    \n? (?P<value>.*?) \n?
    </parameter>
    (?= \s* (?: <parameter= | {_LAST_TAG} ) )
    """
)
"""A parameter between its tags. The ends of lines around the value are not part of it. A value may
hold ``</parameter>``: the tag that ends it is followed by another parameter or the last tag."""
_GEMMA_MARK = regex.compile(r'<escape>|<\|"\|>|[\[\]{}]')
"""What opens a string or changes the depth, in Gemma's notation."""
_GEMMA_PART = regex.compile(
    r"""(?sx)
    (?P<quote> <escape> | <\|"\|> ) (?P<string> .*? ) (?P=quote)
    | (?P<name> [\w.$-]++ ) \s*+ (?= : )
    | [\w.$-]++
    | .
    """
)
"""A string, a name, a number or another word, or one other character."""
_QUOTES = {"json": '"', "python": "\"'"}
"""Kind of a body -> the characters that can begin a string in it."""
_JSON_OUTSIDE_STRINGS = frozenset(":,.+-eEtrufalsn0123456789 \t\r\n")
"""Besides quotes and brackets: punctuation, numbers, ``true``, ``false``, ``null`` and space."""
_VALUES_OF_JSON_NAMES = {"true": True, "false": False, "null": None}

# The expressions below have bounds, because they are matched anew with each piece of text, and a
# model may write space or text without end.
_SPACE = r"[ \t\r\n]{0,64}+"
_TEXT = r'[^"\\\x00-\x1f]{0,256}+'
"""The inside of a string without escapes."""
_TEXT_MEMBERS = rf'(?:"(?:type|id)"{_SPACE}:{_SPACE}"{_TEXT}"{_SPACE},{_SPACE}){{0,8}}'
"""Members that some models write before the name and the arguments of a call's object."""
# {"type": "function", "name": "find", "arguments":
_NAMED_OBJECT = (
    rf'\{{{_SPACE}{_TEXT_MEMBERS}"name"{_SPACE}:{_SPACE}"(?P<name>{_TEXT})"{_SPACE},'
    rf'{_SPACE}{_TEXT_MEMBERS}"(?:arguments|parameters)"{_SPACE}:{_SPACE}'
)
_OBJECT_FOLLOWS = rf'(?=\{{{_SPACE}["}}])'
# find(n=
_PYTHON_CALL = (
    rf"(?P<name>[A-Za-z_][\w.]{{0,256}}+){_SPACE}\("
    rf"(?={_SPACE}(?:\)|[A-Za-z_]\w{{0,256}}+{_SPACE}=[^=]))"
)
_CERTAIN = {
    "json": regex.compile(rf"(?P<list>\[{_SPACE})?{_NAMED_OBJECT}{_OBJECT_FOLLOWS}"),
    "python": regex.compile(rf"(?:(?P<list>\[){_SPACE})?{_PYTHON_CALL}"),
}
"""Kind of a body that has the function's name -> the beginning of such a body, if it certainly is a
call. The match ends before the arguments."""
_CERTAIN_ARGUMENTS = regex.compile(_OBJECT_FOLLOWS)
"""The beginning of a body that is the arguments alone, in JSON. The match is empty."""
_CERTAIN_IN_GEMMA = regex.compile(rf'(?=\{{{_SPACE}(?:[\w.$-]|\}}|<escape>|<\|"\|>))')
"""The beginning of a body that is the arguments alone, in Gemma's notation. The match is empty."""
_ALWAYS_CERTAIN = regex.compile("")
"""For bodies whose head is certain."""


class MalformedCallError(Exception):
    """A text is no body of a call."""


class ParsedCall(NamedTuple):
    """A call of one function."""

    name: str
    arguments: str
    """JSON of an object."""


class CertainCall(NamedTuple):
    """A body that is certainly a call of a known tool."""

    name: str
    start: int
    """Index of the arguments in the text."""
    in_object: bool
    """The arguments stand in a JSON object, which goes on behind them."""
    in_list: bool
    """The call stands in a list, which may have more of them."""


class CallBody:
    """A body that begins at the index ``start`` of a text."""

    def __init__(
        self,
        kind: str,
        start: int,
        name: str | None,
        *,
        is_list_item: bool = False,
        is_bare: bool = False,
    ) -> None:
        """``kind``: as ToolFormat has it. ``name``: the function's, if the head has it.
        ``is_list_item``: it is one call of a list, and the calls before it have been read.
        ``is_bare``: its head has no marker. It could also be an answer in JSON, so it counts as a
        call only if it has arguments, and the name of a known function."""
        self.start = start
        self.is_list_item = is_list_item
        self._kind = kind
        self._name = name
        self._is_bare = is_bare
        # The scanner's state: the text before `_scanned` has been looked at.
        self._scanned = start
        self._depth = 0
        self._open_quote = ""
        self._is_escaped = False

    def find_certain_call(self, text: str, names: Container[str]) -> CertainCall | None:
        """The call that the body certainly is, of one of the functions ``names``. None if it is not
        certain, or not certain yet. Each ``text`` must begin with the one before."""
        match = self._match_beginning(text)
        if match is None or match.partial:
            return None
        groups = match.groupdict()
        name = self._name or groups["name"]
        if name not in names:
            return None
        return CertainCall(
            name=name,
            start=match.end(),
            in_object=self._kind == "json" and self._name is None,
            in_list=self.is_list_item or groups.get("list") is not None,
        )

    def name_in_beginning(self, text: str, names: Container[str]) -> str | None:
        """The function that is called, if its name is there and one of ``names``; else None. This
        is for a ``text`` that ends in the middle of the body."""
        match = self._match_beginning(text)
        if match is None:
            return None
        name = self._name or match.groupdict()["name"]
        return name if name in names else None

    def _match_beginning(self, text: str) -> regex.Match[str] | None:
        if self._kind == "xml":
            return _ALWAYS_CERTAIN.match(text, self.start)  # the head ends before a tag
        if self._kind == "gemma":
            pattern = _CERTAIN_IN_GEMMA
        else:
            pattern = _CERTAIN_ARGUMENTS if self._name else _CERTAIN[self._kind]
        return pattern.match(text, self.start, partial=True)

    def find_end(self, text: str) -> int | None:
        """The index behind the body; None if ``text`` does not hold its end yet.

        Each ``text`` must begin with the one before. Raises MalformedCallError once it can be no
        body.
        """
        if self._kind == "xml":
            return self._find_end_of_tags(text)
        if self._kind == "gemma":
            return self._find_end_of_gemma(text)
        for character in text[self._scanned :]:
            self._scanned += 1
            if self._open_quote:
                self._scan_in_string(character)
            elif character in _QUOTES[self._kind]:
                self._open_quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return self._scanned
            elif self._kind == "json" and character not in _JSON_OUTSIDE_STRINGS:
                raise MalformedCallError("text outside of strings")
        return None

    def _scan_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._open_quote:
            self._open_quote = ""

    def _find_end_of_tags(self, text: str) -> int | None:
        """The index behind the function's last tag. A parameter's text may hold such a tag too: the
        real one follows a parameter, or there is no parameter."""
        while True:
            tag = text.find(_LAST_TAG, self._scanned)
            if tag < 0:
                break
            self._scanned = tag + len(_LAST_TAG)
            before = text[self.start : tag].rstrip()
            if not before or before.endswith("</parameter>"):
                return self._scanned
        # The next search begins here: a part of the tag may stand at the end of the text.
        longest_part = len(_LAST_TAG) - 1
        self._scanned = max(self._scanned, len(text) - longest_part)
        return None

    def _find_end_of_gemma(self, text: str) -> int | None:
        """The index behind the last bracket. Strings have no escapes: a marker ends them."""
        while self._skip_gemma_string(text):
            mark = _GEMMA_MARK.search(text, self._scanned, partial=True)
            if mark is None:
                self._scanned = len(text)
                return None
            if mark.partial:
                self._scanned = mark.start()
                return None
            self._scanned = mark.end()
            if mark[0] in GEMMA_QUOTES:
                self._open_quote = mark[0]
            elif mark[0] in "[{":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return self._scanned
        return None

    def _skip_gemma_string(self, text: str) -> bool:
        """Go behind the string that is open, if one is. Returns False if its end has not come."""
        if not self._open_quote:
            return True
        end = text.find(self._open_quote, self._scanned)
        if end < 0:
            # The next search begins here: a part of the marker may stand at the end.
            longest_part = len(self._open_quote) - 1
            self._scanned = max(self._scanned, len(text) - longest_part)
            return False
        self._scanned = end + len(self._open_quote)
        self._open_quote = ""
        return True

    def parse(self, text: str, schemas: Mapping[str, Any]) -> list[ParsedCall]:
        """The calls in ``text``, which is the body alone.

        ``schemas`` maps a function's name to the JSON schema of its arguments. Raises
        MalformedCallError.
        """
        try:
            calls = self._parse(text, schemas)
            for call in calls:
                if self._is_bare and call.name not in schemas:
                    raise MalformedCallError(f"no function has the name {call.name!r}")
                # A client must be able to read the arguments: this raises if it cannot.
                msgspec.json.decode(call.arguments, type=dict[str, Any])
        except PARSE_ERRORS as error:
            raise MalformedCallError(str(error)) from None
        return calls

    def _parse(self, text: str, schemas: Mapping[str, Any]) -> list[ParsedCall]:
        if self._kind == "python":
            # [find(n=1), find(n=2)]
            return _parse_python(text)
        if self._kind == "gemma":
            # {n:1,where:<escape>x<escape>}
            assert self._name
            return [ParsedCall(self._name, _GEMMA_PART.sub(_json_of_gemma, text))]
        if self._kind == "xml":
            # <parameter=n>1</parameter></function>
            assert self._name
            schema = schemas.get(self._name) or {}
            return [ParsedCall(self._name, _parse_tags(text, schema))]
        if self._name:
            # {"n": 1}
            arguments = msgspec.Raw(text.encode())
            return [_NamedArguments(name=self._name, arguments=arguments).call()]
        # {"name": "find", "arguments": {"n": 1}}, or a list of such objects
        named = msgspec.json.decode(text, type=list[_NamedArguments] | _NamedArguments)
        if isinstance(named, _NamedArguments):
            named = [named]
        calls = []
        for item in named:
            if self._is_bare and not item.has_arguments():
                raise MalformedCallError("no arguments")
            calls.append(item.call())
        return calls


class _NamedArguments(msgspec.Struct):
    """A call as a JSON object. The arguments have one of two names, depending on the format."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()

    def has_arguments(self) -> bool:
        return bool(bytes(self.arguments) or bytes(self.parameters))

    def call(self) -> ParsedCall:
        arguments = bytes(self.arguments) or bytes(self.parameters) or b"{}"
        text = arguments.decode()
        if text.startswith('"'):  # some models write the object as a string
            text = msgspec.json.decode(text, type=str)
        return ParsedCall(self.name, text)


def _parse_python(text: str) -> list[ParsedCall]:
    """The calls in an expression of Python: a call, or a list of calls."""
    expression = ast.parse(text, mode="eval").body
    if isinstance(expression, ast.List):
        return [_parse_python_call(item) for item in expression.elts]
    return [_parse_python_call(expression)]


class _JsonNames(ast.NodeTransformer):
    """Puts values in place of JSON's ``true``, ``false`` and ``null``: models write them in Python,
    too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _VALUES_OF_JSON_NAMES:
            return ast.Constant(_VALUES_OF_JSON_NAMES[node.id])
        return node


def _parse_python_call(call: ast.expr) -> ParsedCall:
    """A call with keywords whose values are literals."""
    checked = _call_with_keywords(call)
    arguments = json.dumps(_values_of_keywords(checked), ensure_ascii=False)
    return ParsedCall(ast.unparse(checked.func), arguments)


def _call_with_keywords(expression: ast.expr) -> ast.Call:
    """The same expression. Raises ValueError if it is no call, or has arguments without names."""
    if not isinstance(expression, ast.Call) or expression.args:
        raise ValueError("no call with keywords only")
    return expression


def _values_of_keywords(call: ast.Call) -> dict[str, Any]:
    values = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("a mapping in place of keywords")
        values[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
    # A value may hold a surrogate pair as two code points. Written as JSON with escapes and read
    # again, they are one.
    values = json.loads(json.dumps(values, allow_nan=False))
    # A client must be able to read them: a surrogate without its pair, or a number that is too
    # large, raises here.
    msgspec.json.decode(json.dumps(values, ensure_ascii=False).encode())
    return values


def python_values(text: str) -> dict[str, Any]:
    """The values of the keywords of a call in Python. Raises one of PARSE_ERRORS."""
    expression = ast.parse(text.strip(), mode="eval").body
    return _values_of_keywords(_call_with_keywords(expression))


def _json_of_gemma(part: regex.Match[str]) -> str:
    """A part of a text in Gemma's notation, as JSON has it."""
    if part["quote"]:
        return json.dumps(part["string"], ensure_ascii=False)
    if part["name"]:
        return json.dumps(part["name"], ensure_ascii=False)
    return part[0]


def _parse_tags(text: str, schema: Mapping[str, Any]) -> str:
    """JSON of the parameters between tags, each read as its schema says."""
    arguments = {}
    index = 0
    while parameter := _PARAMETER.match(text, index):
        name = parameter["name"]
        arguments[name] = typed_value(parameter["value"], schema_of_member(name, schema), schema)
        index = parameter.end()
    if text[index:].strip() != _LAST_TAG:
        raise ValueError("text between the parameters")
    return msgspec.json.encode(arguments).decode()
