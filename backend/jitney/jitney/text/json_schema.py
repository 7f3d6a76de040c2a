"""Refuses JSON schemas that cannot be enforced exactly, naming keyword and path, before they are
compiled.

Called by ``grammar``, in the process that checks grammars. A schema that passes is either enforced
by llguidance or refused by it. Keywords that JSON Schema does not know are annotations.
"""

from itertools import combinations
from typing import Any
from urllib.parse import quote

from jitney.errors import InvalidArgumentError, show
from jitney.text.schema_finiteness import leave_out_infinite
from jitney.text.schema_references import (
    DEFINITIONS,
    WITH_LIST,
    WITH_OBJECT,
    References,
    escaped,
    find_dialect,
    inner_schemas,
)

_NOT_ENFORCED = {
    "not": 4, "dependencies": 4, "uniqueItems": 4,
    "contains": 6, "propertyNames": 6,
    "if": 7, "then": 7, "else": 7,
    "dependentRequired": 2019, "dependentSchemas": 2019, "minContains": 2019, "maxContains": 2019,
    "unevaluatedItems": 2019, "unevaluatedProperties": 2019,
    "$recursiveRef": 2019, "$recursiveAnchor": 2019,
    "$dynamicRef": 2020, "$dynamicAnchor": 2020,
}  # fmt: skip
"""Keywords that a grammar cannot enforce -> the draft that they came with. In a schema of an older
draft they are unknown, and so annotations."""
ALLOWS_ALL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Keywords -> values with which they allow everything."""
_NEEDS_ONE_OF = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
"""Keywords -> others that they need. A keyword allows everything if none of these stands beside
it."""
_COUNTS = (
    "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
)  # fmt: skip
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LEAST_NUMBER = -(2**63)
_MOST_NUMBER = 2**64
"""The numbers of a schema must lie between these two. llguidance cannot read others, nor these."""
_MOST_EXACT = 2**53
"""llguidance compares numbers as doubles. They hold every integer up to this one."""
_FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_FORMATS_NOT_KEPT = (
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
"""The other formats that JSON Schema knows. Any further name is an annotation."""
_MAX_REFERENCES = 8
"""References in a row that are followed. They may form a circle."""
_IN_URI = "/#?:@!$&'()*+,;=~%"
"""What may stand in a reference as it is, besides letters and digits."""


def prepare_schema(schema: Any, field: str) -> None:
    """Raise InvalidArgumentError for what cannot be enforced, and for a schema without a finite
    instance. It names ``field``, which has the schema. Changes ``schema`` into one of the same
    meaning that llguidance can read: so a ``oneOf`` whose branches exclude each other becomes an
    ``anyOf``, and an optional property that nothing finite fits becomes ``false``."""
    references = References(schema)
    _Checker(field, references).check_all(schema)
    if not leave_out_infinite(schema, references):
        raise InvalidArgumentError(f"{field}: no finite JSON fits the schema")


class _Checker:
    """Checks one schema, and changes it. ``path`` is the JSON pointer of what is checked, for
    refusals."""

    def __init__(self, field: str, references: References) -> None:
        self._field = field
        self._references = references
        self._checked: set[int] = set()  # schemas by id(); the root keeps all of them alive
        self._targets: list[tuple[str, Any]] = []  # references, and what they point to

    def check_all(self, root: Any) -> None:
        """Check a schema, all schemas inside it, and what its references point to: a reference may
        point into the value of an unknown keyword, where no schema is looked for."""
        self._check(root, "#")
        while self._targets:
            reference, target = self._targets.pop()
            self._check(target, reference)

    def _check(self, schema: Any, path: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise self._refusal(path, "is no schema: it must be an object or a boolean")
        if id(schema) in self._checked:
            return
        self._checked.add(id(schema))
        draft = self._references.draft_of(schema)
        for keyword, value in list(schema.items()):
            at = f"{path}/{escaped(keyword)}"
            known_since = _NOT_ENFORCED.get(keyword)
            if known_since is not None and known_since <= draft:
                self._leave_out(schema, keyword, at)
            else:
                self._check_keyword(schema, keyword, value, at)
        for inner in inner_schemas(schema):
            if inner.keyword in DEFINITIONS:
                continue  # a definition counts where a reference points to it
            self._check(inner.schema, f"{path}/{inner.pointer}")
        self._settle_one_of(schema)

    def _leave_out(self, schema: dict[str, Any], keyword: str, at: str) -> None:
        """Take out a keyword that allows everything. Refuse it if it does not."""
        if keyword in _NEEDS_ONE_OF:
            allows_all = not any(name in schema for name in _NEEDS_ONE_OF[keyword])
        else:
            allows_all = schema[keyword] in ALLOWS_ALL.get(keyword, ())
        if not allows_all:
            raise self._refusal(at, "is not supported")
        del schema[keyword]

    def _check_keyword(self, schema: dict[str, Any], keyword: str, value: Any, at: str) -> None:
        """Check the value of a keyword, but not the schemas in it."""
        if keyword == "x-guidance":
            # It would change how llguidance reads the schema.
            raise self._refusal(at, "is not supported")
        if keyword in WITH_LIST and not isinstance(value, list):
            raise self._refusal(at, "must be a list")
        if keyword in WITH_OBJECT and not isinstance(value, dict):
            raise self._refusal(at, "must be an object")
        if keyword == "$schema":
            self._check_dialect(schema, value)
        elif keyword == "$ref":
            self._check_reference(schema, value, at)
        elif keyword == "format":
            self._check_format(schema, value, at)
        elif keyword in _NUMBERS:
            self._check_number(value, at)
        elif keyword in _COUNTS:
            self._check_number(value, at)
            if isinstance(value, float) and value.is_integer():
                schema[keyword] = int(value)  # 2.0 is an integer, but not for llguidance
        elif keyword in ("const", "enum"):
            self._check_constant(value, at)

    def _check_dialect(self, schema: dict[str, Any], value: Any) -> None:
        """Write the name of a draft as llguidance knows it. Take any other name out: llguidance
        would look for what it names."""
        dialect = find_dialect(value)
        if dialect is None:
            del schema["$schema"]
        else:
            schema["$schema"] = dialect.name

    def _check_reference(self, schema: dict[str, Any], reference: Any, at: str) -> None:
        if not isinstance(reference, str):
            raise self._refusal(at, "must be a string")
        target = self._references.find(schema, reference)
        if target is None:
            shown = repr(reference[:64])
            raise self._refusal(at, f"is {shown}, but must point into the schema: #/…")
        self._targets.append((reference, target))
        absolute = self._references.absolute(schema, reference)
        schema["$ref"] = quote(absolute, safe=_IN_URI)  # llguidance takes no letters but ASCII

    def _check_format(self, schema: dict[str, Any], value: Any, at: str) -> None:
        """Check a format. There are four kinds of it:

        - a format of something else than strings, such as ``int64``: it allows every number, and
          stays;
        - one that llguidance enforces: it stays;
        - one that JSON Schema knows, but llguidance does not enforce, or no text: refused;
        - any other name, such as ``password``, is an annotation: taken out.
        """
        allowed = schema.get("type", "string")
        types = allowed if isinstance(allowed, list) else [allowed]
        if value in _FORMATS or "string" not in types:
            return
        if value in _FORMATS_NOT_KEPT or not isinstance(value, str):
            raise self._refusal(at, f"is {value!r}, but must be one of {', '.join(_FORMATS)}")
        del schema["format"]

    def _check_number(self, value: Any, at: str) -> None:
        """Check a bound."""
        # True and False are integers for Python, and pass: in draft 4, "exclusiveMinimum" says
        # whether "minimum" is exclusive.
        if not isinstance(value, (int, float)):
            raise self._refusal(at, f"is {show(value)}, but must be a number")
        if not _LEAST_NUMBER < value < _MOST_NUMBER:
            raise self._refusal(at, f"is {show(value)}, but must lie between -2**63 and 2**64")

    def _check_constant(self, value: Any, at: str) -> None:
        """Check the numbers in a value that is allowed."""
        if isinstance(value, (int, float)) and not abs(value) <= _MOST_EXACT:
            reason = f"is {show(value)}, but numbers in constants may be at most 2**53"
            raise self._refusal(at, reason)
        if isinstance(value, dict):
            for name, part in value.items():
                self._check_constant(part, f"{at}/{escaped(name)}")
        if isinstance(value, list):
            for index, part in enumerate(value):
                self._check_constant(part, f"{at}/{index}")

    def _refusal(self, path: str, reason: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._field}: {path[:512]} {reason}")

    def _settle_one_of(self, schema: dict[str, Any]) -> None:
        """Replace ``oneOf`` by ``anyOf`` where that means the same: no instance fits two branches,
        because each two of them require a property with different values."""
        if "oneOf" not in schema or "anyOf" in schema:
            return
        branches = [self._listed_values(branch) for branch in schema["oneOf"]]
        if branches and all(_exclude_each_other(*pair) for pair in combinations(branches, 2)):
            schema["anyOf"] = schema.pop("oneOf")

    def _listed_values(self, schema: Any) -> dict[str, set[str]]:
        """Required property -> the values that the schema lists for it, if they are strings."""
        # A schema that is nothing but a reference stands for what that points to.
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or list(schema) != ["$ref"]:
                break
            schema = self._references.find(schema, schema["$ref"])
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return {}
        listed: dict[str, set[str]] = {}
        for name in schema.get("required", ()):
            values = _values_of(schema.get("properties", {}).get(name))
            if values and all(isinstance(value, str) for value in values):
                listed[name] = set(values)
        return listed


def _values_of(schema: Any) -> list[Any]:
    """The values that a schema lists; empty if it lists none."""
    if not isinstance(schema, dict):
        return []
    if "enum" in schema:
        return schema["enum"]
    if "const" in schema:
        return [schema["const"]]
    return []


def _exclude_each_other(one: dict[str, set[str]], other: dict[str, set[str]]) -> bool:
    """Whether a property that both require has no value in common."""
    return any(one[name].isdisjoint(other[name]) for name in one.keys() & other.keys())
