"""Refuses JSON schemas that cannot be enforced exactly, naming keyword and path, before they are
compiled.

Called by ``grammar``, in the process that checks grammars. A schema that passes is either enforced
by llguidance or refused by it.
"""

from itertools import combinations
from typing import Any
from urllib.parse import unquote

from jitney.errors import InvalidArgumentError, nearest

# Supported keywords, by what their value is: a schema, a list of schemas, an object of schemas, or
# none of these.
_WITH_SCHEMA = ("items", "additionalProperties")
_WITH_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_WITH_OBJECT = ("properties", "patternProperties", "$defs", "definitions")
_WITHOUT_SCHEMAS = (
    "$ref", "const", "enum", "type", "format", "minItems", "maxItems", "required",
    "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
_ANNOTATIONS = (
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "contentMediaType", "contentEncoding", "discriminator",
)  # fmt: skip
_KEYWORDS = (*_WITH_SCHEMA, *_WITH_LIST, *_WITH_OBJECT, *_WITHOUT_SCHEMAS, *_ANNOTATIONS)
_ROOT_KEYWORDS = ("$schema", "$id")
_FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_TYPE_NAMES = {"list": "a list", "dict": "an object", "str": "a string"}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAX_REFERENCES = 8
"""References in a row that are followed. They may form a circle."""


def prepare_schema(schema: Any, field: str) -> None:
    """Raise InvalidArgumentError for what cannot be enforced, and for a schema without a finite
    instance. It names ``field``, which has the schema. Changes ``schema``: a ``oneOf`` whose
    branches exclude each other becomes an ``anyOf``, which llguidance can enforce."""
    checker = _Checker(schema, field)
    checker.check(schema, "#")
    if not checker.is_finite(schema, frozenset()):
        raise InvalidArgumentError(f"{field}: no finite JSON fits the schema")


class _Checker:
    """Checks one schema, and changes it. ``path`` is the JSON pointer of what is checked, for
    refusals."""

    def __init__(self, root: Any, field: str) -> None:
        self._root = root
        self._field = field
        # Schemas that are known to be finite, by id(): they are dictionaries, which no set can
        # hold, and the root keeps all of them alive.
        self._finite: set[int] = set()

    def check(self, schema: Any, path: str) -> None:
        """Check a schema and all below it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise self._refusal(path, "is no schema: it must be an object or a boolean")
        for keyword, value in list(schema.items()):
            at = f"{path}/{_escaped(keyword)}"
            if keyword in _WITH_SCHEMA:
                self.check(value, at)
            elif keyword in _WITH_LIST:
                for index, each in enumerate(self._typed(list, value, at)):
                    self.check(each, f"{at}/{index}")
            elif keyword in _WITH_OBJECT:
                for name, each in self._typed(dict, value, at).items():
                    self.check(each, f"{at}/{_escaped(name)}")
            elif path == "#" and keyword in _ROOT_KEYWORDS:
                continue
            else:
                self._check_keyword(schema, keyword, value, at)
        self._settle_one_of(schema)

    def _check_keyword(self, schema: dict[str, Any], keyword: str, value: Any, at: str) -> None:
        """Check a keyword that has no schemas in its value."""
        # x-guidance would change how llguidance reads the schema.
        is_annotation = keyword.startswith("x-") and keyword != "x-guidance"
        if keyword not in _KEYWORDS and not is_annotation:
            raise self._refusal(at, f"is not supported{nearest(keyword, _KEYWORDS)}")
        if keyword == "$ref":
            self._target(value, at)
        if keyword == "format" and value not in _FORMATS:
            raise self._refusal(at, f"is {value!r}, but must be one of {', '.join(_FORMATS)}")
        if keyword == "minProperties":
            # A grammar cannot count properties. It knows which ones are required, and whether
            # there is at least one. So 1 is supported, and as many as are required.
            num_required = len(schema.get("required", ()))
            if value > max(1, num_required):
                raise self._refusal(
                    at, "above 1 is not supported unless as many names are required"
                )

    def _target(self, reference: Any, at: str = "$ref") -> Any:
        """What a reference points to. Raises InvalidArgumentError if that is nothing in here."""
        start, *parts = self._typed(str, reference, at).split("/")
        found = self._root
        for part in parts:
            found = _part_of(found, unquote(part).replace("~1", "/").replace("~0", "~"))
        if start != "#" or found is None:
            raise self._refusal(at, f"is {reference[:64]!r}, but must point into the schema: #/…")
        return found

    def _typed(self, kind: type, value: Any, at: str) -> Any:
        if not isinstance(value, kind):
            raise self._refusal(at, f"must be {_TYPE_NAMES[kind.__name__]}")
        return value

    def _refusal(self, path: str, reason: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._field}: {path[:512]} {reason}")

    def is_finite(self, schema: Any, references: frozenset[str]) -> bool:
        """Whether some finite instance may fit. False if references lead in circles, or to the
        schema ``false``; other reasons why nothing fits are not looked for.

        ``references`` are those that led from the root to here. One that comes again leads to no
        finite instance.
        """
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) in self._finite:
            return True
        finite = (
            self._reference_is_finite(schema, references)
            and self._branches_are_finite(schema, references)
            and self._some_type_is_finite(schema, references)
        )
        if finite:
            self._finite.add(id(schema))
        return finite

    def _reference_is_finite(self, schema: dict[str, Any], references: frozenset[str]) -> bool:
        reference = schema.get("$ref")
        if reference is None:
            return True
        if reference in references:
            return False
        return self.is_finite(self._target(reference), references | {reference})

    def _branches_are_finite(self, schema: dict[str, Any], references: frozenset[str]) -> bool:
        """Whether all branches of ``allOf`` are finite, and one of ``anyOf`` and of ``oneOf``."""
        if not all(self.is_finite(branch, references) for branch in schema.get("allOf", ())):
            return False
        for name in ("anyOf", "oneOf"):
            if name not in schema:
                continue
            if not any(self.is_finite(branch, references) for branch in schema[name]):
                return False
        return True

    def _some_type_is_finite(self, schema: dict[str, Any], references: frozenset[str]) -> bool:
        """Whether one of the schema's types has a finite instance."""
        types = schema.get("type", _TYPES)
        if isinstance(types, str):
            types = [types]
        for kind in types:
            if all(self.is_finite(part, references) for part in _needed_parts(schema, kind)):
                return True
        return False

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
        for _ in range(_MAX_REFERENCES):
            if isinstance(schema, dict) and list(schema) == ["$ref"]:
                schema = self._target(schema["$ref"])
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return {}
        listed: dict[str, set[str]] = {}
        for name in schema.get("required", ()):
            values = _values_of(schema.get("properties", {}).get(name))
            if values and all(isinstance(value, str) for value in values):
                listed[name] = set(values)
        return listed


def _part_of(value: Any, name: str) -> Any:
    """A value of an object by its name, or of a list by its index. None: there is none."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return None


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


def _needed_parts(schema: dict[str, Any], kind: str) -> list[Any]:
    """The schemas of the parts that every instance of type ``kind`` has."""
    if kind == "object":
        named = schema.get("properties", {})
        unnamed = _schema_of_unnamed(schema)
        return [named.get(name, unnamed) for name in schema.get("required", ())]
    if kind == "array":
        least = schema.get("minItems", 0)
        parts = schema.get("prefixItems", [])[:least]
        if least > len(parts):
            parts = [*parts, schema.get("items", True)]
        return parts
    return []


def _schema_of_unnamed(schema: dict[str, Any]) -> Any:
    """The schema of properties that ``properties`` does not name. The schema true allows all, and
    false allows nothing."""
    if "patternProperties" in schema:
        return True  # a pattern may allow it
    return schema.get("additionalProperties", True)


def _escaped(name: str) -> str:
    return name[:64].replace("~", "~0").replace("/", "~1")
