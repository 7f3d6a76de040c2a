"""Which JSON schemas can be kept exactly: what is refused, by keyword and path, before one is
compiled.

Called by ``grammar``, in the process that checks grammars. What this lets through, llguidance
either enforces or refuses itself.
"""

from typing import Any
from urllib.parse import unquote

from jitney.errors import InvalidArgumentError, nearest

_OF_ONE = ("items", "additionalProperties")
_OF_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_WITHOUT = (
    "$ref", "const", "enum", "type", "format", "minItems", "maxItems", "required",
    "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
_ANNOTATIONS = (
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "contentMediaType", "contentEncoding", "discriminator",
)  # fmt: skip
_KEYWORDS = (*_OF_ONE, *_OF_SEVERAL, *_OF_NAMES, *_WITHOUT, *_ANNOTATIONS)
_FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_TYPE_NAMES = {"list": "a list", "dict": "an object", "str": "a string"}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def check_schema(schema: Any) -> None:
    """Raise InvalidArgumentError for what cannot be enforced, and for a schema without a finite
    instance. A ``oneOf`` whose branches exclude each other becomes an ``anyOf``, in place."""
    checker = _Checker(schema)
    checker.check(schema, "#")
    if not checker.ends(schema, frozenset()):
        raise InvalidArgumentError("structured_outputs.json: no finite JSON fits the schema")


class _Checker:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._ending: set[int] = set()  # by identity: schemas that some finite instance fits

    def check(self, schema: Any, path: str) -> None:
        """Check a schema and all below it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _refusal(path, "is no schema: it must be an object or a boolean")
        for keyword, value in list(schema.items()):
            at = f"{path}/{_escaped(keyword)}"
            if keyword in _OF_ONE:
                self.check(value, at)
            elif keyword in _OF_SEVERAL:
                for index, each in enumerate(_typed(list, value, at)):
                    self.check(each, f"{at}/{index}")
            elif keyword in _OF_NAMES:
                for name, each in _typed(dict, value, at).items():
                    self.check(each, f"{at}/{_escaped(name)}")
            else:
                self._check_keyword(schema, keyword, value, at)
        self._settle_one_of(schema)

    def _check_keyword(self, schema: dict[str, Any], keyword: str, value: Any, at: str) -> None:
        at_root = at.count("/") == 1 and keyword in ("$schema", "$id")
        annotation = keyword.startswith("x-") and keyword != "x-guidance"
        if not (keyword in _KEYWORDS or annotation or at_root):
            raise _refusal(at, f"is not supported{nearest(keyword, _KEYWORDS)}")
        if keyword == "$ref":
            self._target(value, at)
        if keyword == "format" and value not in _FORMATS:
            raise _refusal(at, f"is {value!r}, but must be one of {', '.join(_FORMATS)}")
        if keyword == "minProperties" and value > max(1, len(schema.get("required", ()))):
            raise _refusal(at, "above 1 is not supported, unless as many names are required")

    def _target(self, reference: Any, at: str = "$ref") -> Any:
        """What a reference points to."""
        found = self._root
        for part in _typed(str, reference, at).split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = dict(enumerate(found)).get(int(part) if part.isdigit() else -1)
            else:
                found = found.get(part) if isinstance(found, dict) else None
        if reference.split("/")[0] != "#" or found is None:
            raise _refusal(at, f"is {reference[:64]!r}, but must point into the schema: #/…")
        return found

    def ends(self, schema: Any, following: frozenset[str]) -> bool:
        """Whether some finite instance may fit, as far as references go. ``following``: references
        on the way here, which lead nowhere if they come again."""
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) in self._ending:
            return True
        reference = schema.get("$ref")
        if reference is not None:
            further = following | {reference}
            if reference in following or not self.ends(self._target(reference), further):
                return False
        types = schema.get("type", _TYPES)
        ends = (
            all(self.ends(each, following) for each in schema.get("allOf", ()))
            and all(
                any(self.ends(each, following) for each in schema[name])
                for name in ("anyOf", "oneOf")
                if name in schema
            )
            and any(
                all(self.ends(part, following) for part in _needed(schema, kind))
                for kind in ([types] if isinstance(types, str) else types)
            )
        )
        if ends:
            self._ending.add(id(schema))
        return ends

    def _settle_one_of(self, schema: dict[str, Any]) -> None:
        """``oneOf`` means ``anyOf`` where each two branches require a property of other values."""
        branches = [self._properties(each) for each in schema.get("oneOf", ())]
        if (
            branches
            and "anyOf" not in schema
            and all(
                any(one[name].isdisjoint(other[name]) for name in one.keys() & other.keys())
                for index, one in enumerate(branches)
                for other in branches[:index]
            )
        ):
            schema["anyOf"] = schema.pop("oneOf")

    def _properties(self, schema: Any) -> dict[str, set[str]]:
        """The values of each required property for which the schema lists them, as JSON."""
        for _ in range(8):
            if isinstance(schema, dict) and list(schema) == ["$ref"]:
                schema = self._target(schema["$ref"])
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return {}
        found = {}
        for name in schema.get("required", ()):
            each = schema.get("properties", {}).get(name)
            if isinstance(each, dict) and ("const" in each or "enum" in each):
                values = each["enum"] if "enum" in each else [each["const"]]
                if all(isinstance(value, str) for value in values):
                    found[name] = set(values)
        return found


def _needed(schema: dict[str, Any], kind: str) -> list[Any]:
    """Schemas of the parts that every instance of type ``kind`` has."""
    if kind == "object":
        named = schema.get("properties", {})
        others = "patternProperties" in schema or schema.get("additionalProperties", True)
        return [named.get(name, others) for name in schema.get("required", ())]
    if kind == "array" and (least := schema.get("minItems", 0)):
        first = schema.get("prefixItems", [])[:least]
        return [*first, schema.get("items", True)] if least > len(first) else first
    return []


def _typed(kind: type, value: Any, at: str) -> Any:
    if not isinstance(value, kind):
        raise _refusal(at, f"must be {_TYPE_NAMES[kind.__name__]}")
    return value


def _escaped(name: str) -> str:
    return name[:64].replace("~", "~0").replace("/", "~1")


def _refusal(path: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"structured_outputs.json: {path[:512]} {reason}")
